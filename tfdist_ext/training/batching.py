"""Is the dataset that a model is to be trained on batched?"""

from __future__ import annotations

import keras
import tensorflow as tf


def check_batched(model, specs) -> None:
    """Refuses a dataset whose elements are single rows of what the model takes.

    Keras would say that shapes differ; that a whole row was taken for a batch, it does not know.

    Args:
        model: The model; only one that knows the shapes of its inputs is checked.
        specs: Structure of specs of an element of the dataset.

    Raises:
        ValueError: An element is a row and not a batch.
    """
    inputs = getattr(model, "inputs", None) or []
    flat = tf.nest.flatten(specs[0] if isinstance(specs, tuple) and specs else specs)
    for spec, wanted in zip(flat, inputs, strict=False):
        shape = getattr(spec, "shape", None)
        if shape is None or shape.rank is None or wanted.shape[-1] == 1:
            continue  # Keras takes a batch of numbers for one of rows of one number.
        if shape.as_list() == list(wanted.shape[1:]):
            raise ValueError(
                f"The dataset is not batched: an element has the shape {tuple(shape)}, and model `{model.name}` takes "
                f"batches of the shape {tuple(wanted.shape)}. Call `dataset.batch(batch_size)`."
            )


def symbolic_rows(spec):
    """Returns what stands for a leaf of a batch while a model is built: nothing is computed."""
    if isinstance(spec, tf.OptionalSpec):
        return None
    return keras.KerasTensor(spec.shape, spec.dtype.name) if isinstance(spec, tf.TensorSpec) else spec
