"""How does a model predict on the rows of all replicas?"""

from __future__ import annotations

import tensorflow as tf

from tfdist_ext.data import batches
from tfdist_ext.strategies import frame as frames
from tfdist_ext.training import step_batches
from tfdist_ext.training.recorder import Recorder, RecordingScope


class PredictStep:
    """`model.predict_step` under a synchronous strategy; rows come back in the order of the input."""

    def __init__(self, model):
        self.model = model

    def __call__(self, data):
        """Predicts on one replica alone."""
        return self.python_step(data)

    def python_step(self, data):
        """The model's own `predict_step`."""
        return self.model.predict_step(data)

    def run_distributed(self, strategy, args):
        """Returns the outputs of the global batch, on every worker."""
        (data,) = args
        extended = strategy.extended
        if strategy.num_replicas_in_sync == 1:
            return extended.call_for_each_replica(self.python_step, args=(data,))
        data, rows, may_be_empty = step_batches.as_slots(strategy, data)
        structures: dict = {}
        per_replica = extended.call_for_each_replica(
            lambda batch: self._predict_on_replica(strategy, batch, rows, may_be_empty, structures),
            args=(data,),
        )
        num_local = len(extended.worker_devices)
        flat = [[value] if num_local == 1 else list(value.values) for value in per_replica]
        gathered = extended.gather_slots(flat)
        return tf.nest.pack_sequence_as(structures[0], gathered)

    def _predict_on_replica(self, strategy, data, rows, may_be_empty, structures):
        local = tf.distribute.get_replica_context()._replica_id
        frame = strategy.frame_of_this_replica(rows)
        specs: list = []

        def run(batch):
            scope = RecordingScope(Recorder(None, in_place=False), ())
            with frames.entered(frame), scope:
                outputs = self.python_step(batch)
            structures[local] = outputs
            flat = [tf.convert_to_tensor(leaf) for leaf in tf.nest.flatten(outputs)]
            specs[:] = [tf.type_spec_from_value(tensor) for tensor in flat]
            return flat

        if not may_be_empty:
            return step_batches.listed(run(data))
        if tf.executing_eagerly():
            flat = run(step_batches.rows_or_zeros(frame.has_rows, data))
            count = rows[frame.slot]
            return step_batches.listed([tensor[:count] for tensor in flat])
        empty = lambda: [batches.empty_batch(spec) for spec in specs]  # noqa: E731
        return step_batches.listed(
            tf.cond(frame.has_rows, step_batches.in_this_name_scope(lambda: run(data)), empty)
        )
