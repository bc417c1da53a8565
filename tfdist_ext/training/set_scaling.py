"""What becomes of a loss scale, when sets are applied later than they were computed?

A set is unscaled where it was computed, by the scale that its loss was multiplied with, which travels along. What is
summed, compensated and applied is not scaled. As on one device a step that is not finite is left out, and each finite
one counts for the growth of the scale. A set that overflows says that its own scale is too large: the present one
becomes half of that, unless it is smaller already.
"""

from __future__ import annotations

import contextlib

import keras
import tensorflow as tf


def scale_at_compute(optimizer):
    """Returns what the optimizer multiplies the loss with; None for nothing.

    Args:
        optimizer: Keras optimizer.

    Returns:
        Scalar tensor where the scale changes, else a number.
    """
    if not isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return optimizer.loss_scale_factor
    scale = optimizer.dynamic_scale if optimizer.built else optimizer.initial_scale
    return keras.ops.convert_to_tensor(scale, "float32")


def unscaled(gradient, variable, scale):
    """Returns a gradient of a loss that was multiplied with `scale` as one of the loss itself."""
    if scale is None or getattr(variable, "overwrite_with_gradient", False):
        return gradient
    if isinstance(gradient, tf.IndexedSlices):
        values = gradient.values / tf.cast(scale, gradient.values.dtype)
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    return gradient / tf.cast(scale, gradient.dtype)


def apply_unscaled(call, gradients, variables, scale) -> None:
    """Has an optimizer take one step on gradients that are not scaled any more.

    Args:
        call: The `Application` that a worker recorded.
        gradients: One for each variable, summed over the sets of the step.
        variables: The variables that have a gradient.
        scale: The largest scale with which a set of the step was computed; None where it is constant.
    """
    optimizer = call.optimizer
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        _apply_if_finite(optimizer, gradients, variables, scale)
        return
    with _not_unscaling(optimizer):
        if not call.is_overridden:
            optimizer.apply(gradients, variables)
            return
        # What overrides Keras' methods gets what it would have got on one device, the missing gradients too.
        of = {id(v): g for g, v in zip(gradients, variables, strict=True)}
        if call.method == "apply_gradients":
            optimizer.apply_gradients([(of.get(id(v)), v) for v in call.all_variables])
        else:
            optimizer.apply([of.get(id(v)) for v in call.all_variables], list(call.all_variables))


@contextlib.contextmanager
def _not_unscaling(optimizer):
    factor = optimizer.loss_scale_factor
    if factor is None:
        yield
        return
    optimizer.loss_scale_factor = None
    try:
        yield
    finally:
        optimizer.loss_scale_factor = factor


def _apply_if_finite(optimizer, gradients, variables, scale) -> None:
    counter, present = optimizer.step_counter, optimizer.dynamic_scale

    def apply():
        optimizer.inner_optimizer.apply(gradients, variables)
        grows = keras.ops.equal(counter, optimizer.dynamic_growth_steps - 1)
        keras.ops.cond(grows, grow, lambda: counter.assign_add(1))

    def grow():
        present.assign(keras.ops.multiply(present, 2.0))
        return counter.assign(0)

    def leave_out():
        half = scale * 0.5
        is_news = tf.less(half, present)
        counter.assign(tf.where(is_news, tf.zeros([], counter.dtype), counter.value))
        present.assign(tf.minimum(half, present.value))

    keras.ops.cond(optimizer.check_finite(gradients), apply, leave_out)
