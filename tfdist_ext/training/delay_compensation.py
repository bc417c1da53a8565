"""How is a gradient brought up to date that was computed on old variables?

The gradient g was computed at w_old, and is applied at w. To first order the gradient at w is g + H (w - w_old), and
the outer product of the gradient stands in for the Hessian H: its diagonal is g * g.
"""

from __future__ import annotations

import dataclasses

import tensorflow as tf

from tfdist_ext.training.pulled import is_large


@dataclasses.dataclass(frozen=True)
class DelayCompensation:
    """DC-ASGD: adds `strength * g * g * (w - w_old)` to each dense gradient of a small variable.

    The parameter servers keep the variables that a worker pulled until its set is applied: one more copy of the
    model for each set on its way. Fresh sets are applied as they are. Sparse gradients, and variables that do not
    travel packed (of 256 KiB and more), are left alone.

    Attributes:
        strength: λ, 0.04 in the paper for the constant form and 2 for the adaptive one.
        adaptive: True divides λ, element by element, by the root of a moving mean of g * g, so that its effect does
            not depend on the scale of the loss. The means lie beside their variables.
        decay: Decay of the moving mean.
        epsilon: Added under the root.

    Example:
        >>> DelayCompensation(0.04)
        DelayCompensation(strength=0.04, adaptive=False, decay=0.95, epsilon=1e-07)

    References:
        Zheng et al., "Asynchronous Stochastic Gradient Descent with Delay Compensation", 2017, eq. 10.
    """

    strength: float = 0.04
    adaptive: bool = False
    decay: float = 0.95
    epsilon: float = 1e-7

    def __post_init__(self):
        if self.strength < 0:
            raise ValueError(f"Argument `strength` must be at least 0; received {self.strength}. Try 0.04.")

    def compensate(self, gradients, variables, plan, kept, means: dict) -> list:
        """Returns the gradients as they would be at the present variables, to first order.

        Args:
            gradients: Gradient of each variable, summed over the sets of the step.
            variables: Keras variables.
            plan: The `PullPlan` by which they were pulled.
            kept: For each set of the step the packed variables it was computed on; those of the first one count.
            means: Moving means by `id` of the variable; missing ones are made.
        """
        pulled = plan.packing.unpack(kept[0])
        old = {id(v): value for v, value in zip(plan.variables, pulled, strict=True)}
        results = []
        for gradient, variable in zip(gradients, variables, strict=True):
            if isinstance(gradient, tf.IndexedSlices) or is_large(variable) or id(variable) not in old:
                results.append(gradient)
                continue
            with tf.device(variable._value.device):
                strength = tf.cast(self.strength, gradient.dtype)
                if self.adaptive:
                    strength = strength * self._inverse_root(gradient, self._mean_of(variable, means))
                results.append(corrected(gradient, variable._value.read_value(), old[id(variable)], strength))
        return results

    def _mean_of(self, variable, means: dict) -> tf.Variable:
        if id(variable) not in means:
            with tf.init_scope(), tf.device(variable._value.device):
                means[id(variable)] = tf.Variable(
                    tf.zeros(variable._value.shape, variable._value.dtype), trainable=False
                )
        return means[id(variable)]

    def _inverse_root(self, gradient, mean: tf.Variable):
        decay = tf.cast(self.decay, gradient.dtype)
        moved = decay * mean + (1 - decay) * tf.square(gradient)
        # A step that is not finite is left out, and must leave no trace here.
        moved = mean.assign(tf.where(tf.reduce_all(tf.math.is_finite(moved)), moved, mean))
        return tf.math.rsqrt(moved + tf.cast(self.epsilon, gradient.dtype))


def corrected(gradient, present, old, strength):
    """Returns `gradient`, computed at `old`, as it would be at `present`, to first order."""
    return gradient + strength * gradient * gradient * (present - old)
