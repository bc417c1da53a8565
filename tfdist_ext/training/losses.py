"""How does a replica's loss enter the loss of the global batch?

Keras divides a mean loss by the number of replicas, which is right only when all have the same rows. Inside a step of
ours every loss is kept as a mean over the replica's own rows, whoever computed it, and the total, or its gradients, is
weighted by the replica's share of the rows. What is no such mean is brought into that form here: a sum is divided by
the share, and a loss with a denominator of its own (a mask, the sum of sample weights) gets its part of the summed
denominator over the share.
"""

from __future__ import annotations

import functools

import keras
import tensorflow as tf

from tfdist_ext import compat
from tfdist_ext.strategies import frame as frames
from tfdist_ext.training import whole_batch
from tfdist_ext.training.batch_functions import Kind
from tfdist_ext.training.belonging import strategy_outside_of_replicas

_MEANS = ("sum_over_batch_size", "mean", "mean_with_sample_weight")


def install() -> None:
    """Replaces the functions of Keras and TensorFlow that know of replicas; elsewhere they do what they did."""
    module = compat.KerasLossModule
    scale, unscale = module.scale_loss_for_distribution, module.unscale_loss_for_distribution
    module.scale_loss_for_distribution = lambda value: frames.scale_loss(value, _within_replicas(scale))
    module.unscale_loss_for_distribution = lambda value: frames.unscale_loss(value, _within_replicas(unscale))
    _wrap(module, "reduce_weighted_values", _reduce_weighted_values)
    _wrap(keras.losses.Loss, "__call__", _loss_of_any_kind)
    _wrap(compat.KerasCompileLoss, "call", _compiled_loss)
    _wrap(compat.KerasBaseOptimizer, "scale_loss", _weigh_total)
    _wrap(keras.optimizers.LossScaleOptimizer, "scale_loss", _weigh_total)
    _wrap(tf.nn, "compute_average_loss", _compute_average_loss)
    _wrap(tf.nn, "scale_regularization_loss", _scale_regularization_loss)
    _wrap(keras.metrics.MeanMetricWrapper, "update_state", _update_mean_of_function)
    _wrap(keras.metrics.Mean, "update_state", _update_mean)
    _wrap(keras.metrics.Sum, "update_state", _update_sum)


def _within_replicas(scale):
    """Returns Keras' division by the number of replicas; outside of replicas a loss is whole already."""
    return lambda value: value if strategy_outside_of_replicas() is not None else scale(value)


def _wrap(owner, name: str, replacement) -> None:
    original = getattr(owner, name)

    @functools.wraps(original)
    def wrapped(*args, **kwargs):
        return replacement(original, *args, **kwargs)

    setattr(owner, name, wrapped)


def _reduce_weighted_values(
    original, values, sample_weight=None, mask=None, reduction="sum_over_batch_size", dtype=None
):
    frame = frames.current_frame()
    if frame is not None and frame.pulled is not None and frame.round is None:
        return _loss_of_a_set(frame, original, values, sample_weight, mask, reduction, dtype)
    frame = frames.distributed_frame()
    if frame is None or frame.is_whole:
        return original(values, sample_weight, mask, reduction, dtype)
    denominator = _own_denominator(values, sample_weight, mask, reduction, dtype)
    weight = None if denominator is None else frames.weight_of_denominator(denominator)
    frame.loss_weight = weight
    try:
        loss = original(values, sample_weight, mask, reduction, dtype)
    finally:
        frame.loss_weight = None
    if reduction not in (None, "none") and tuple(loss.shape) == (0,):
        # Keras returns the losses of a batch that is known to be empty unreduced: an array instead of a number.
        loss = tf.reduce_sum(loss)
    is_number = len(keras.ops.shape(values)) == 0
    if not frame.weighs_total:
        # Keras leaves a loss function's own mean as it is.
        return loss * tf.cast(frame.share, loss.dtype) if is_number and reduction in _MEANS else loss
    if weight is not None:
        return loss * tf.cast(tf.math.divide_no_nan(tf.cast(weight, tf.float64), frame.share), loss.dtype)
    summed_by_the_tape = reduction in (None, "none") and frame.in_compiled_loss
    if not is_number and (reduction == "sum" or summed_by_the_tape):
        return tf.math.divide_no_nan(loss, tf.cast(frame.share, loss.dtype))
    return loss


def _loss_of_any_kind(original, loss, y_true, y_pred, sample_weight=None):
    """Computes a loss that is neither a mean nor a sum over rows on the rows of all replicas."""
    frame = frames.current_frame()
    if frame is None or frame.is_whole or not _has_other_parts(frame):
        return original(loss, y_true, y_pred, sample_weight)
    kind = whole_batch.kind_of_loss(loss, y_true, y_pred, sample_weight)
    if frame.pulled is not None and frame.round is None:
        return _loss_of_any_kind_in_a_round(frame, kind, original, loss, y_true, y_pred, sample_weight)
    if kind is Kind.NEITHER:
        given = [y_true, y_pred] if sample_weight is None else [y_true, y_pred, sample_weight]
        return whole_batch.loss_on_all_rows(frame, loss.name, lambda *whole: original(loss, *whole), given)
    value = original(loss, y_true, y_pred, sample_weight)
    # A sum by the function itself, which Keras then takes for a mean. In a custom loop it got the share with that.
    return tf.math.divide_no_nan(value, tf.cast(frame.share, value.dtype)) if kind is Kind.SUM else value


def _has_other_parts(frame) -> bool:
    return frames.distributed_frame() is not None or (frame.pulled is not None and frame.round_size > 1)


def _loss_of_any_kind_in_a_round(frame, kind, original, loss, y_true, y_pred, sample_weight):
    before = len(frame.reductions)
    value = original(loss, y_true, y_pred, sample_weight)
    if kind is Kind.NEITHER:
        frame.reductions[before:] = [("whole", loss.name)]
    if kind is not Kind.SUM:
        return value
    frame.reductions[before:] = [("sum", None)]
    return value * frame.round_size


def _loss_of_a_set(frame, original, values, sample_weight, mask, reduction, dtype):
    """Reduces a loss on a worker of parameter servers, and notes how sets of a round then add up.

    The sets of a round are averaged by rows. A sum over rows is multiplied by their number, so that it comes out whole.
    """
    loss = original(values, sample_weight, mask, reduction, dtype)
    if reduction == "sum" and len(keras.ops.shape(values)):
        frame.reductions.append(("sum", None))
        return loss * frame.round_size if frame.round_size > 1 else loss
    denominator = _own_denominator(values, sample_weight, mask, reduction, dtype)
    frame.reductions.append(("mean", None) if denominator is None else ("own", denominator))
    return loss


def are_all_sums(frame) -> bool:
    """Returns True where every loss of a set is a sum over its rows."""
    return {kind for kind, _ in frame.reductions} == {"sum"}


def has_own_weight(frame) -> bool:
    """Returns True where the one loss of a set has a denominator of its own, by which the set counts in its round."""
    return [kind for kind, _ in frame.reductions] == ["own"]


def that_need_other_sets(frame) -> str | None:
    """Names the losses that no weight of the sets of a round makes those of the whole batch; None if there are none."""
    kinds = [kind for kind, _ in frame.reductions]
    names = [f"`{of}`" for kind, of in frame.reductions if kind == "whole"]
    if not names and len(set(kinds)) == 1 and kinds.count("own") <= 1 or not kinds:
        return None
    return ", ".join(names) or "of the model"


def weight_of_set(frame, num_rows):
    """Returns how much a set counts beside the others of its round, as a scalar float64 tensor.

    Args:
        frame: Frame in which its losses were reduced.
        num_rows: Scalar, rows of its batch.
    """
    if has_own_weight(frame):
        return tf.cast(tf.stop_gradient(frame.reductions[0][1]), tf.float64)
    return tf.cast(num_rows, tf.float64)


def _own_denominator(values, sample_weight, mask, reduction, dtype):
    """Returns what this replica's loss is divided by, where that is not its number of rows."""
    dtype = dtype or keras.config.floatx()
    if reduction in ("sum_over_batch_size", "mean") and mask is not None:
        return tf.reduce_sum(tf.cast(mask, dtype))
    if reduction == "mean_with_sample_weight" and (sample_weight is not None or mask is not None):
        values = keras.ops.convert_to_tensor(values, dtype=dtype)
        weight = None if sample_weight is None else keras.ops.convert_to_tensor(sample_weight, dtype=dtype)
        mask = None if mask is None else keras.ops.convert_to_tensor(mask, dtype=dtype)
        weight = compat.KerasLossModule.apply_mask(weight, mask, dtype=values.dtype, reduction=reduction)
        return tf.reduce_sum(tf.cast(weight, values.dtype))
    return None


def _compiled_loss(original, *args, **kwargs):
    frame = frames.current_frame()
    if frame is None:
        return original(*args, **kwargs)
    frame.in_compiled_loss = True
    _wrap_own_calls(args[0])
    try:
        return original(*args, **kwargs)
    finally:
        frame.in_compiled_loss = False


def _wrap_own_calls(compiled) -> None:
    """Lets losses that override `__call__` be computed as the others are."""
    if not compiled.built:
        return
    compiled._flat_losses = [
        entry if _is_ours_to_call(entry.loss) else entry._replace(loss=_OwnCall(entry.loss))
        for entry in compiled._flat_losses
    ]


def _is_ours_to_call(loss) -> bool:
    return isinstance(loss, _OwnCall) or type(loss).__call__ is keras.losses.Loss.__call__


class _OwnCall:
    """A loss whose class has a `__call__` of its own."""

    def __init__(self, loss):
        self.loss, self.name = loss, loss.name

    def __call__(self, y_true, y_pred, sample_weight=None):
        return _loss_of_any_kind(type(self.loss).__call__, self.loss, y_true, y_pred, sample_weight)


def _weigh_total(original, optimizer, loss):
    """Weights the total before a loss scale can overflow it: float16 gradients are then those of one device."""
    frame = frames.distributed_frame()
    if frame is None or not frame.weighs_total:
        return original(optimizer, loss)
    weight = tf.identity(tf.cast(frame.share, loss.dtype), name="share_of_rows")
    frame.weights.append(weight)
    return original(optimizer, loss * weight)


def _compute_average_loss(original, per_example_loss, sample_weight=None, global_batch_size=None):
    loss = original(per_example_loss, sample_weight, global_batch_size)
    frame = frames.distributed_frame()
    if frame is None:
        return loss
    share = tf.cast(frame.share, loss.dtype)
    if global_batch_size is not None:
        # A sum over rows, divided by a number that is the same everywhere.
        return tf.math.divide_no_nan(loss, share) if frame.weighs_total else loss
    mean = loss * frame.num_replicas
    return mean if frame.weighs_total else mean * share


def _scale_regularization_loss(original, regularization_loss):
    loss = original(regularization_loss)
    frame = frames.distributed_frame()
    if frame is None:
        return loss
    whole = loss * frame.num_replicas
    return whole if frame.weighs_total else whole * tf.cast(frame.share, loss.dtype)


def _update_mean_of_function(original, metric, y_true, y_pred, sample_weight=None):
    """Feeds a metric whose function is neither a mean nor a sum over rows the rows of all replicas."""
    frame = frames.current_frame()
    if frame is None or not frame.weighs_total or frame.is_whole or not _has_other_parts(frame):
        return original(metric, y_true, y_pred, sample_weight)
    function = functools.partial(metric._fn, **metric._fn_kwargs)
    kind = whole_batch.kind_of_function(metric, function, y_true, y_pred)
    if frames.distributed_frame() is None:
        return _update_in_a_round(frame, kind, original, metric, y_true, y_pred, sample_weight)
    if kind is Kind.SUM and sample_weight is None:
        value = keras.ops.convert_to_tensor(function(y_true, y_pred))
        return keras.metrics.Mean.update_state(
            metric, tf.math.divide_no_nan(value, tf.cast(frame.share, value.dtype))
        )
    if kind is not Kind.NEITHER:
        return original(metric, y_true, y_pred, sample_weight)
    values = keras.ops.convert_to_tensor(
        whole_batch.on_all_rows(frame, metric.name, function, [y_true, y_pred])
    )
    if len(values.shape):
        values = whole_batch.rows_of_this_replica(frame, values)
    if sample_weight is not None:
        sample_weight = keras.ops.convert_to_tensor(sample_weight)[: frame.num_rows]
    return keras.metrics.Mean.update_state(metric, values, sample_weight)


def _update_in_a_round(frame, kind, original, metric, y_true, y_pred, sample_weight):
    if kind is Kind.NEITHER:
        frame.other_metrics.append(metric.name)
    frame.feeds_sum = kind is Kind.SUM
    try:
        return original(metric, y_true, y_pred, sample_weight)
    finally:
        frame.feeds_sum = False


def _update_mean(original, metric, values, sample_weight=None):
    """Lets a mean that is fed one number a batch count the replicas of a batch as that one batch."""
    frame = frames.distributed_frame()
    values = keras.ops.convert_to_tensor(values)
    if frame is None or not frame.weighs_total or len(values.shape):
        if not len(values.shape):
            _note_number_of_a_set(sample_weight, metric.total, metric.count)
        return original(metric, values, sample_weight)
    values = _of_whole_batch(frame, values)
    if sample_weight is not None:
        return original(metric, values, sample_weight)
    return original(metric, values, tf.cast(frame.share, metric.dtype))


def _update_sum(original, metric, values, sample_weight=None):
    """Lets a sum that is fed one mean a batch add the mean of the global batch."""
    frame = frames.distributed_frame()
    values = keras.ops.convert_to_tensor(values)
    if frame is None and not len(values.shape):
        _note_number_of_a_set(sample_weight, metric.total)
    if frame is not None and frame.weighs_total and not len(values.shape):
        values = frames.times(_of_whole_batch(frame, values), frame.share)
    return original(metric, values, sample_weight)


def _note_number_of_a_set(sample_weight, total, *counts) -> None:
    """Notes that a metric is fed one number for a set of a round, which on one device is one for all of them."""
    frame = frames.current_frame()
    if frame is None or frame.pulled is None or frame.round_size == 1:
        return
    index, frame.num_scalars = frame.num_scalars, frame.num_scalars + 1
    if sample_weight is not None:
        if are_all_sums(frame) or has_own_weight(frame):  # Keras weights its losses by rows.
            frame.ways[id(total)] = "of rows"
        return
    is_sum = frame.feeds_sum or (frame.verdict is not None and frame.verdict.is_sum_in_metric(index))
    averaged = counts if is_sum else (total, *counts)
    frame.ways.update((id(variable), "averaged") for variable in averaged)


def _of_whole_batch(frame, value):
    """Returns a number that a metric is fed so that the mean over replicas, weighted by rows, is that of the batch."""
    index, frame.num_scalars = frame.num_scalars, frame.num_scalars + 1
    if frame.trial is not None:
        frame.trial.scalars.append(value.numpy())
    if frame.verdict is not None and frame.verdict.is_sum_in_metric(index):
        return tf.math.divide_no_nan(value, tf.cast(frame.share, value.dtype))
    return value
