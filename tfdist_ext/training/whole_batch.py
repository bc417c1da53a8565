"""How is a loss right that is no mean and no sum over the rows of a batch?

Dice, Tversky, in-batch negatives, a ratio of two sums: the parts' values do not make the value of the whole. Every
replica then gathers targets, predictions and weights of the whole batch, computes the loss on all of it, and lets the
gradient flow through its own rows, so that the sum of the gradients is that of one device whatever the function is.
"""

from __future__ import annotations

import dataclasses
import weakref
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from absl import logging

from tfdist_ext import compat
from tfdist_ext.strategies import frame as frames
from tfdist_ext.training import replica_collectives
from tfdist_ext.training.batch_functions import Kind, classify

_kinds: weakref.WeakKeyDictionary[Any, dict] = weakref.WeakKeyDictionary()


def kind_of_loss(loss, y_true, y_pred, sample_weight=None) -> Kind:
    """Returns how a Keras loss depends on the rows of its batch, found out at its first use with such shapes.

    Args:
        loss: `keras.losses.Loss`.
        y_true: Targets, tensors in any structure.
        y_pred: Predictions.
        sample_weight: Weights, or None.
    """
    calls_itself = type(loss).__call__ is not keras.losses.Loss.__call__
    weighted = sample_weight is not None or any(
        compat.keras_mask(leaf) is not None for leaf in keras.tree.flatten(y_pred)
    )
    structures = [y_true, y_pred, *([sample_weight] if calls_itself and sample_weight is not None else [])]
    function = loss if calls_itself else loss.call
    kind = _kind_of(loss, function, structures)
    if weighted and not calls_itself and kind in (Kind.MEAN, Kind.SUM):
        # Weights of rows meet a number that has lost them.
        return Kind.NEITHER
    return kind


def kind_of_function(owner, function, y_true, y_pred) -> Kind:
    """Like `kind_of_loss`, for a function of targets and predictions that belongs to `owner`."""
    return _kind_of(owner, function, [y_true, y_pred])


def _kind_of(owner, function, structures) -> Kind:
    flat = keras.tree.flatten(structures)
    if not all(isinstance(leaf, (tf.Tensor, tf.Variable, np.ndarray)) and len(leaf.shape) for leaf in flat):
        return Kind.ROWS  # Ragged and sparse rows, and numbers, cannot be tried.
    key = tuple((tuple(leaf.shape[1:]), keras.backend.standardize_dtype(leaf.dtype)) for leaf in flat)
    known = _kinds.setdefault(owner, {})
    if key not in known:

        def on_arrays(*arrays):
            tensors = keras.tree.pack_sequence_as(structures, [tf.constant(array) for array in arrays])
            return keras.ops.convert_to_numpy(function(*tensors))

        def tried():
            with tf.device("CPU:0"), keras.StatelessScope():  # What the function assigns is dropped.
                return classify(on_arrays, [((None, *shape), dtype) for shape, dtype in key])

        known[key] = frames.outside_of_everything(tried)
    return known[key]


def on_all_rows(frame, name: str, function, structures):
    """Returns a function's value on the rows of all replicas; its gradient reaches this replica's rows.

    Args:
        frame: Frame of the replica.
        name: Name for messages.
        function: Takes structures like `structures`, returns a tensor.
        structures: Structures of dense tensors with the rows of the replica's batch.

    Returns:
        The value, the same on every replica.
    """
    logging.log_first_n(
        logging.INFO,
        "`%s` is no mean and no sum over rows: every replica gathers the whole batch for it.",
        1,
        name,
    )
    leaves = [tf.convert_to_tensor(leaf) for leaf in keras.tree.flatten(structures)]
    masks = [compat.keras_mask(leaf) for leaf in keras.tree.flatten(structures)]
    gathered = _gathered(frame, [*leaves, *(mask for mask in masks if mask is not None)])
    whole = gathered[: len(leaves)]
    gathered_masks = iter(gathered[len(leaves) :])
    for leaf, mask in zip(whole, masks, strict=True):
        if mask is not None:
            compat.set_keras_mask(leaf, next(gathered_masks))
    outer = dataclasses.replace(frame, is_whole=True, has_rows=None, reductions=[])
    with frames.entered(outer):
        return function(*keras.tree.pack_sequence_as(structures, whole))


def rows_of_this_replica(frame, values):
    """Returns this replica's rows of a tensor that has those of all replicas."""
    start = tf.reduce_sum(frame.rows[: frame.slot])
    return values[start : start + frame.num_rows]


def loss_on_all_rows(frame, name: str, function, structures):
    """Like `on_all_rows`, for a loss.

    Returns:
        The loss of the whole batch. The sum over replicas of its gradients, weighted as those of any loss of the
        replica are, is that of the whole batch.

    Raises:
        NotImplementedError: The loss is not reduced to a number.
    """
    value = on_all_rows(frame, name, function, structures)
    if len(value.shape):
        raise NotImplementedError(
            f"`{name}` returns a value for each row that depends on other rows, and is not reduced. Give it "
            '`reduction="sum"` or `"sum_over_batch_size"`.'
        )
    return _undoing_weights(frame, value)


def _gathered(frame, tensors) -> list:
    """Returns the tensors of all rows, in one collective for each dtype; this replica's rows keep their gradient."""
    results: list = [None] * len(tensors)
    flat = [tf.cast(t, tf.int32) if t.dtype == tf.bool else t for t in tensors]
    for dtype in dict.fromkeys(tensor.dtype for tensor in flat):
        indices = [i for i, tensor in enumerate(flat) if tensor.dtype == dtype]
        rows = tf.shape(flat[indices[0]])[0]
        widths = [tf.reduce_prod(tf.shape(flat[i])[1:]) for i in indices]
        packed = tf.concat(
            [tf.reshape(flat[i], [rows, w]) for i, w in zip(indices, widths, strict=True)], axis=1
        )
        if frame.others is not None:
            everything = frame.others.rows_of_all(packed)
        else:
            everything = replica_collectives.gather_constant_rows(frame, packed)
        parts = tf.split(everything, widths, axis=1, num=len(indices))
        for index, part in zip(indices, parts, strict=True):
            shape = tf.concat([tf.shape(part)[:1], tf.shape(flat[index])[1:]], axis=0)
            whole = tf.ensure_shape(tf.reshape(part, shape), [None, *flat[index].shape[1:]])
            results[index] = _with_own_rows(frame, whole, flat[index])
    return [tf.cast(r, t.dtype) for r, t in zip(results, tensors, strict=True)]


def _with_own_rows(frame, whole, own):
    if not own.dtype.is_floating:
        return whole
    if frame.trial is not None and frame.trial.others is None:
        return own
    start = tf.reduce_sum(frame.rows[: frame.slot])
    return tf.concat([whole[:start], own[: frame.num_rows], whole[start + frame.num_rows :]], axis=0)


def _undoing_weights(frame, value):
    """Returns `value` with a gradient that stays whole, though the replica's gradients are weighted by its share."""
    share = tf.cast(frame.share, value.dtype)

    @tf.custom_gradient
    def shown(total):
        if frame.weighs_total:
            return tf.identity(total), lambda upstream: tf.math.divide_no_nan(upstream, share)
        # In a custom loop the losses of the replicas are summed, and gradients are left alone.
        return total * share, tf.identity

    return shown(value)
