"""How is a replica's loss weighted so that a plain sum over replicas is the loss of the global batch?

Keras divides a mean loss by the number of replicas, which is right only when all have the same rows. Here the
weight is the replica's part of the denominator: its rows, or, for masks and for the reduction
`"mean_with_sample_weight"`, its part of the sum that the loss is divided by.
"""

from __future__ import annotations

import functools

import keras
import tensorflow as tf

from tfdist_ext import compat
from tfdist_ext.strategies import frame as frames
from tfdist_ext.training import loss_ancestry


def install() -> None:
    """Replaces Keras' three functions; outside a step of ours they do what they did."""
    module = compat.KerasLossModule
    scale, unscale = module.scale_loss_for_distribution, module.unscale_loss_for_distribution
    reduce = module.reduce_weighted_values
    module.scale_loss_for_distribution = lambda value: frames.scale_loss(value, scale)
    module.unscale_loss_for_distribution = lambda value: frames.unscale_loss(value, unscale)

    def reduced(values, sample_weight, mask, reduction, dtype):
        loss = reduce(values, sample_weight, mask, reduction, dtype)
        # Keras returns the losses of a batch that is known to be empty unreduced: an array instead of a number.
        known_empty = reduction not in (None, "none") and tuple(loss.shape) == (0,)
        return tf.reduce_sum(loss) if known_empty else loss

    def reduce_weighted_values(
        values, sample_weight=None, mask=None, reduction="sum_over_batch_size", dtype=None
    ):
        frame = frames.current_frame()
        if frame is None or frame.num_slots == 1 or frame.share is None:
            return reduce(values, sample_weight, mask, reduction, dtype)
        # Also a summed loss, which carries no weight, is one whose gradients may be added as they are.
        frame.loss_was_scaled = True
        denominator = _own_denominator(values, sample_weight, mask, reduction, dtype)
        if denominator is None:
            return reduced(values, sample_weight, mask, reduction, dtype)
        frame.loss_weight = frames.weight_of_denominator(denominator)
        try:
            return reduced(values, sample_weight, mask, reduction, dtype)
        finally:
            frame.loss_weight = None

    module.reduce_weighted_values = reduce_weighted_values
    _install_mean_of_batches()


def _install_mean_of_batches() -> None:
    """Lets a `Mean` that is fed one number a batch count the replicas of a batch as that one batch."""
    original = keras.metrics.Mean.update_state

    @functools.wraps(original)
    def update_state(self, values, sample_weight=None):
        frame = frames.current_frame()
        if frame is None or frame.num_slots == 1 or frame.share is None or sample_weight is not None:
            return original(self, values, sample_weight)
        values = keras.ops.convert_to_tensor(values)
        if values.shape.rank != 0:
            return original(self, values, sample_weight)
        if loss_ancestry.carries_weight(values, frame.scaled, frame.unscaled):
            values = tf.math.divide_no_nan(values, tf.cast(frame.share, values.dtype))
        return original(self, values, tf.cast(frame.share, self.dtype))

    keras.metrics.Mean.update_state = update_state


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
