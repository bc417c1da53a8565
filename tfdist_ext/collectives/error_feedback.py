"""Which entries of a tensor are sent, what stays, and how do the pieces of all workers add up?"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import tensorflow as tf


@dataclasses.dataclass(frozen=True)
class Entries:
    """Some entries of a flattened tensor.

    Attributes:
        indices: `[k]` int32, each once.
        values: `[k]`, float32 or float64.
    """

    indices: tf.Tensor
    values: tf.Tensor


def largest(update, num_sent: int) -> Entries:
    """Selects the entries that are largest in magnitude; of equal ones, those with the lower index.

    Args:
        update: Dense tensor of any shape.
        num_sent: How many, at most the size of `update`.

    Returns:
        The entries. Those that are not finite come first, so that every worker learns of them.
    """
    flat = tf.reshape(update, [-1])
    if num_sent == flat.shape.num_elements():
        return Entries(tf.range(num_sent), flat)
    infinity = tf.constant(float("inf"), flat.dtype)
    magnitude = tf.where(tf.math.is_finite(flat), tf.abs(flat), infinity)
    _, indices = tf.math.top_k(magnitude, num_sent, sorted=False)
    return Entries(indices, tf.gather(flat, indices))


def without(update, entries: Entries):
    """Returns what is left of a tensor: zeros at the entries, and the same elsewhere.

    Args:
        update: Dense tensor.
        entries: Some of it.

    Returns:
        Tensor of the same shape; with `entries` it adds up to `update`, exactly.
    """
    flat = tf.reshape(update, [-1])
    zeros = tf.zeros_like(entries.values)
    return tf.reshape(tf.tensor_scatter_nd_update(flat, entries.indices[:, None], zeros), update.shape)


def total(parts: Sequence[Entries], shape):
    """Adds the entries of all workers, worker by worker.

    Args:
        parts: One for each worker, by rank. No part has an index twice, so the order of the additions is fixed, and
            all workers get the same bits.
        shape: Static shape of the result.

    Returns:
        Dense tensor.
    """
    shape = tf.TensorShape(shape)
    flat = tf.zeros([shape.num_elements()], parts[0].values.dtype)
    for part in parts:
        flat = tf.tensor_scatter_nd_add(flat, part.indices[:, None], part.values)
    return tf.reshape(flat, shape)


def pack(parts: Sequence[Entries]):
    """Lays the entries of many tensors into one message.

    Args:
        parts: One for each tensor.

    Returns:
        int32 vector; bits are kept.
    """
    words = []
    for part in parts:
        words += [part.indices, tf.reshape(tf.bitcast(part.values, tf.int32), [-1])]
    return tf.concat(words, axis=0)


def unpack(message, like: Sequence[tuple[int, tf.DType]]) -> list[Entries]:
    """Undoes `pack`.

    Args:
        message: int32 vector.
        like: Number of entries and dtype of the values of each tensor.

    Returns:
        The entries of each tensor.
    """
    sizes = []
    for num_sent, dtype in like:
        sizes += [num_sent, num_sent * dtype.size // 4]
    pieces = iter(tf.split(message, sizes))
    parts = []
    for _, dtype in like:
        indices, words = next(pieces), next(pieces)
        if dtype.size > 4:
            words = tf.reshape(words, [-1, dtype.size // 4])
        parts.append(Entries(indices, tf.bitcast(words, dtype)))
    return parts


def all_finite(tensors):
    """Says whether no tensor has an infinity or NaN.

    Args:
        tensors: Dense tensors or `tf.IndexedSlices`, floats or not.

    Returns:
        Scalar bool tensor.
    """
    dense = [value.values if isinstance(value, tf.IndexedSlices) else value for value in tensors]
    finite = [tf.reduce_all(tf.math.is_finite(value)) for value in dense if value.dtype.is_floating]
    return tf.reduce_all(tf.stack(finite)) if finite else tf.constant(True)
