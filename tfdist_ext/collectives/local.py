"""How do the replicas of one process add up? In the order of the replicas, always the same."""

from __future__ import annotations

import tensorflow as tf


def sum_replicas(values):
    """Sums one value over the local replicas.

    Args:
        values: One value for each local replica, all dense tensors or all `tf.IndexedSlices`.

    Returns:
        The sum; for `IndexedSlices` the rows of all replicas, replica by replica (duplicates not yet summed).
    """
    if isinstance(values[0], tf.IndexedSlices):
        return tf.IndexedSlices(
            tf.concat([value.values for value in values], axis=0),
            tf.concat([value.indices for value in values], axis=0),
            values[0].dense_shape,
        )
    total = values[0]
    for value in values[1:]:
        # One by one: the order of the additions is then the order of the replicas.
        total = total + value
    return total


def sum_duplicate_rows(value: tf.IndexedSlices) -> tf.IndexedSlices:
    """Returns the same gradient with every row index once.

    Args:
        value: Sparse gradient, rows `[n, ...]`, any number of repeated indices.

    Returns:
        Sparse gradient with unique indices in order of their first appearance.
    """
    unique, positions = tf.unique(value.indices)
    rows = tf.math.unsorted_segment_sum(value.values, positions, tf.shape(unique)[0])
    return tf.IndexedSlices(rows, unique, value.dense_shape)
