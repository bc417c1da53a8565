"""What runs on a worker to predict?"""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from tfdist_ext import compat
from tfdist_ext.strategies import frame as frames
from tfdist_ext.training.pulled import Pulled, PulledScope, PullPlan
from tfdist_ext.training.set_computation import none_for_optional
from tfdist_ext.training.set_recorder import SetRecorder


class PredictProgram:
    """The traced `predict_step` of a model, run on a worker.

    Args:
        model: Keras model, built.
        batch_spec: Structure of specs of one batch.
        wire_dtype: Dtype in which variables travel, or None.
    """

    def __init__(self, model, batch_spec, wire_dtype=None):
        self._model, self._spec = model, batch_spec
        self.plan = PullPlan(model.variables, wire_dtype)
        self.structure = None
        self._from_iterator: Any = None
        self._from_batch: Any = None

    @property
    def compute_next(self):
        """`(iterator,) -> flat outputs`, traced at first use."""
        if self._from_iterator is None:
            self._from_iterator = tf.function(
                lambda iterator: self._compute(iterator.get_next()), autograph=False
            ).get_concrete_function(tf.data.IteratorSpec(self._spec))
        return self._from_iterator

    @property
    def compute_batch(self):
        """`(batch,) -> flat outputs`, traced at first use."""
        if self._from_batch is None:
            self._from_batch = tf.function(self._compute, autograph=False).get_concrete_function(self._spec)
        return self._from_batch

    def trace(self, fed_by_chief: bool) -> None:
        """Traces compute on this thread, before workers' threads call it: Keras traces on one thread only."""
        _ = self.compute_batch if fed_by_chief else self.compute_next

    def _compute(self, data):
        pulled = Pulled(self.plan, self.plan.read_on_ps(), tf.compat.v1.get_default_graph())
        recorder = SetRecorder()
        frame = frames.Frame(None, 0, 1, recorder=recorder, pulled=pulled)
        data = keras.tree.map_structure(none_for_optional, data)
        scope = PulledScope(pulled, recorder.check_access)
        with frames.entered(frame), scope, compat.tracing_inner_functions_anew():
            outputs = self._model.predict_step(data)
        self.structure = outputs
        return [tf.convert_to_tensor(leaf) for leaf in tf.nest.flatten(outputs)]
