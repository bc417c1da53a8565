"""How many bytes has a tensor? None where only running tells."""

from __future__ import annotations

import tensorflow as tf


def assumed(shape: tf.TensorShape, batch: int | None) -> tf.TensorShape:
    """Returns a shape with an unknown first dimension replaced, where `batch` is not None."""
    if batch is None or not shape.rank or shape[0] is not None:
        return shape
    return tf.TensorShape([batch, *shape[1:]])


def bytes_of(shape: tf.TensorShape, dtype: tf.DType) -> int | None:
    """Returns a tensor's size; None where it is not known, 0 for a handle."""
    if dtype in (tf.resource, tf.variant):
        return 0
    if dtype == tf.string or not shape.is_fully_defined():
        return None
    return int(shape.num_elements()) * dtype.size
