"""How does a model get its variables before its first step, under a strategy and from specs alone?

Keras runs the model on a symbolic batch, which cannot be ragged or sparse. Where that fails the model is traced once on
the specs of its data, as one device would trace it. Metrics of a model without `call` are made in the step.
"""

from __future__ import annotations

import keras
import tensorflow as tf
from absl import logging

from tfdist_ext import errors
from tfdist_ext.data import batches
from tfdist_ext.strategies import frame as frames


def build(model, strategy, specs) -> None:
    """Makes the variables of a model, its metrics and its optimizer.

    Args:
        model: Keras model.
        strategy: Its strategy.
        specs: Structure of specs, or of tensors, of a batch.

    Raises:
        Exception: What Keras says of a model that cannot be built.
    """
    with strategy.scope():
        try:
            model._symbolic_build(data_batch=keras.tree.map_structure(_symbolic, specs))
        except Exception as error:
            if isinstance(error.__context__, errors.TfdistError):
                raise error.__context__ from None  # Keras wraps what stops a build.
            if not _traced(model, specs) and not _parts_are_built(model):
                raise
            if model.optimizer is not None and not model.optimizer.built:
                model.optimizer.build(model.trainable_variables)


def _symbolic(spec):
    return keras.KerasTensor(spec.shape, spec.dtype.name) if isinstance(spec, tf.TensorSpec) else spec


def _traced(model, specs) -> bool:
    """Traces the model, its loss and its metrics on the specs; returns False where that fails too."""

    def run(data):
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        outputs = model(x, training=False) if model._call_has_training_arg else model(x)
        if y is not None and model.compiled:
            model._compute_loss(x=x, y=y, y_pred=outputs, sample_weight=sample_weight, training=False)
            model.compute_metrics(x, y, outputs, sample_weight=sample_weight)

    try:
        _trace(run, keras.tree.map_structure(_spec, specs))
    except Exception as error:
        logging.debug("Model `%s` cannot be traced on the specs of its data: %s", model.name, error)
        return False
    return True


def _trace(function, specs) -> None:
    # Keras makes the variables when the scope ends, outside of the graph.
    with keras.StatelessScope():
        tf.function(function, autograph=False).get_concrete_function(specs)


def _spec(value):
    if value is None or isinstance(value, tf.TypeSpec):
        return value
    return batches.with_unknown_rows(tf.type_spec_from_value(keras.ops.convert_to_tensor(value)))


def build_layers(model, strategy, specs) -> None:
    """Makes the variables of the layers of a model that predicts before it was ever called.

    Args:
        model: Keras model.
        strategy: Its strategy.
        specs: Structure of specs of a batch.
    """
    if all(layer.built for layer in model._flatten_layers()):
        return

    def build():
        with strategy.scope():
            _trace(model.predict_step, specs)

    frames.outside_of_everything(build)


def _parts_are_built(model) -> bool:
    """Returns True for a model without `call` (a GAN, a distiller) whose parts are built: its train_step knows them."""
    return all(layer.built for layer in model._flatten_layers(include_self=False)) and bool(model.layers)


def add_variable(original):
    """Returns the `add_variable` that metrics get: what a step makes on its way is made once, outside of it.

    Args:
        original: The unbound method it replaces.
    """

    def add_variable_outside(self, *args, **kwargs):
        frame = frames.current_frame()
        if frame is None or frame.recorder is None or frame.pulled is not None:
            return original(self, *args, **kwargs)

        def make():
            with frame.strategy.scope():
                return original(self, *args, **kwargs)

        return frames.outside_of_everything(make)

    return add_variable_outside
