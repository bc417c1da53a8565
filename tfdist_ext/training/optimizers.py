"""How does the real optimizer take one step on gradients that are summed already?"""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist_ext import compat
from tfdist_ext.strategies import frame as frames
from tfdist_ext.training import replica_collectives
from tfdist_ext.training.belonging import strategy_outside_of_replicas
from tfdist_ext.training.missing_gradients import warn_once


def apply(optimizer, gradients, variables, method: str = "apply") -> None:
    """Applies summed gradients to the replica whose components are being updated.

    Runs on: every worker, inside `update_each_local_replica`. Loss scaling, clipping, accumulation, weight decay
    and moving averages see the sum, as on one device.

    Args:
        optimizer: Keras optimizer, built.
        gradients: One gradient for each variable, dense or `tf.IndexedSlices`.
        variables: Keras variables.
        method: The method of the optimizer that the step called.
    """
    with after(gradients):
        apply_at_once(optimizer, gradients, variables, method)


def apply_at_once(optimizer, gradients, variables, method: str = "apply") -> None:
    """Like `apply`, for gradients that are there in any case: nothing waits for all of them."""
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        compat.apply_loss_scaled(optimizer, gradients, variables)
    elif method == "apply_gradients":
        optimizer.apply_gradients(list(zip(gradients, variables, strict=True)))
    else:
        optimizer.apply(gradients, variables)


def loss_scale_of(optimizer):
    """Returns by how much the gradients of a step are too large, as `optimizer.scale_loss` makes them.

    Args:
        optimizer: Keras optimizer.

    Returns:
        Scalar tensor or number; None where the loss is not scaled.
    """
    if not isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return optimizer.loss_scale_factor
    if not optimizer.built:
        return optimizer.initial_scale
    with frames.outside_of_replica():
        return tf.convert_to_tensor(optimizer.dynamic_scale)


def after(gradients):
    """Returns a context in which nothing runs before the gradients are there.

    `iterations` does not depend on them: without this it would count a step whose batch turned out to be the end of
    the data, as it does in Keras.
    """
    tensors = [g.values if isinstance(g, tf.IndexedSlices) else g for g in gradients if g is not None]
    return tf.control_dependencies([] if tf.executing_eagerly() else tensors)


@contextlib.contextmanager
def counting_atomically(optimizer):
    """Lets workers that apply at the same time count every step, under TensorFlow's own coordinator.

    A Keras variable reads, adds and writes back; between the two another worker may have counted too.
    """
    iterations: Any = getattr(optimizer, "_iterations", None)
    strategy = tf.distribute.get_strategy()
    shares_counter = isinstance(strategy, tf.distribute.ParameterServerStrategy) and iterations is not None
    if not shares_counter or "assign_add" in vars(iterations):
        yield
        return
    object.__setattr__(iterations, "assign_add", lambda value: iterations._value.assign_add(value))
    try:
        yield
    finally:
        object.__delattr__(iterations, "assign_add")


def build_if_needed(optimizer, variables) -> None:
    """Creates the optimizer's variables outside of the graph being traced."""
    if not optimizer.built:
        # A single local replica is traced on this thread, inside its stateless scope.
        with frames.outside_of_replica(), tf.init_scope():
            optimizer.build(list(variables))


def apply_in_place(frame, optimizer, gradients, variables, method: str = "apply") -> None:
    """Sums the gradients of all replicas and applies the sum, from within a replica function.

    Args:
        frame: Frame of the replica.
        optimizer: Keras optimizer.
        gradients: Gradients of this replica; None where there is none.
        variables: Their variables, or None for the optimizer's own.
        method: The method of the optimizer that was called.

    Raises:
        RuntimeError: Called inside `tf.cond` or a nested `tf.function` while several local replicas are traced.
    """
    variables = list(optimizer._trainable_variables if variables is None else variables)
    pairs = [(g, v) for g, v in zip(gradients, variables, strict=True) if g is not None]
    if not pairs:
        raise ValueError("No gradients provided for any variable.")
    warn_once(optimizer, [v for g, v in zip(gradients, variables, strict=True) if g is None])
    given, variables = variables, [variable for _, variable in pairs]
    own = [frame.mask(g) for g in frames.gradients_of_application(frame, [gradient for gradient, _ in pairs])]

    def merge(strategy, *distributed):
        extended = strategy.extended
        num_local = len(extended.worker_devices)
        per_replica = [[value] if num_local == 1 else list(value.values) for value in distributed]
        loss_scale = functools.partial(loss_scale_of, optimizer)
        summed = extended.sum_step(per_replica, "gradients", variables, loss_scale)
        build_if_needed(optimizer, given)
        extended.update_each_local_replica(
            lambda local: apply(optimizer, [values[local] for values in summed], variables, method)
        )

    with _naming_the_mistake():
        replica_collectives.merge(merge, *own)


def apply_everywhere(strategy, optimizer, gradients, variables, method: str = "apply") -> None:
    """Applies gradients to every replica, from outside of replicas: they are those of the whole batch.

    Runs on: every worker, in cross-replica context; nothing is communicated.

    Args:
        strategy: The strategy.
        optimizer: Keras optimizer.
        gradients: Gradients, the same on every worker; None where there is none.
        variables: Their variables, or None for the optimizer's own.
        method: The method of the optimizer that was called.
    """
    variables = list(optimizer._trainable_variables if variables is None else variables)
    gradients = list(gradients)
    with_gradients = [v for g, v in zip(gradients, variables, strict=True) if g is not None]
    if not with_gradients:
        raise ValueError("No gradients provided for any variable.")
    warn_once(optimizer, [v for g, v in zip(gradients, variables, strict=True) if g is None])
    build_if_needed(optimizer, variables)
    given = [
        tf.convert_to_tensor(g) if isinstance(g, (np.ndarray, list)) else g
        for g in gradients
        if g is not None
    ]
    strategy.extended.update_each_local_replica(lambda local: apply(optimizer, given, with_gradients, method))


class _naming_the_mistake:  # noqa: N801 - reads as a statement
    def __enter__(self):
        return self

    def __exit__(self, kind, error, traceback):
        if kind is RuntimeError and "merge_call" in str(error):
            raise RuntimeError(
                "`optimizer.apply_gradients` was called inside tf.cond, tf.while_loop or a nested tf.function of a "
                "function that runs on several local replicas; replicas cannot meet there. Call it in the step "
                "function itself, or pass the tf.function to strategy.run."
            ) from error
        return False


def install() -> None:
    """Replaces `apply` and `apply_gradients` of every optimizer class that has one of its own, now and later.

    What a subclass makes of gradients before it hands them on is for their sum: the outermost call is recorded.
    """
    base = compat.KerasBaseOptimizer
    _replace_methods(base)
    inherited = base.__init_subclass__

    def replace_in_subclass(cls, **kwargs):
        inherited(**kwargs)
        _replace_methods(cls)

    base.__init_subclass__ = classmethod(replace_in_subclass)


def _replace_methods(cls) -> None:
    own = {"apply": dispatch, "apply_gradients": dispatch_pairs}
    if cls is compat.KerasBaseOptimizer:
        own = {"apply": dispatch}  # Its `apply_gradients` calls the `apply` of the instance.
    for name, make in own.items():
        if name in vars(cls):
            setattr(cls, name, functools.wraps(vars(cls)[name])(make(vars(cls)[name])))
    for subclass in cls.__subclasses__():
        _replace_methods(subclass)


def dispatch_pairs(original):
    """Returns the `apply_gradients` that optimizer classes with one of their own get.

    Args:
        original: The unbound method it replaces.
    """

    def apply_or_record_pairs(self, grads_and_vars, **kwargs):
        frame = frames.current_frame()
        strategy = strategy_outside_of_replicas()
        if strategy is not None:
            gradients, variables = zip(*grads_and_vars, strict=True)
            return apply_everywhere(strategy, self, gradients, variables, method="apply_gradients")
        if frame is None or (frame.num_slots == 1 and frame.recorder is None):
            return original(self, grads_and_vars, **kwargs)
        gradients, variables = zip(*grads_and_vars, strict=True)
        if frame.recorder is not None and not frame.recorder.in_place:
            return frame.recorder.record_apply(frame, self, gradients, variables, method="apply_gradients")
        return apply_in_place(frame, self, gradients, variables, method="apply_gradients")

    return apply_or_record_pairs


def dispatch(original):
    """Returns the `apply` that Keras optimizers get: recorded, in place, or the original.

    Args:
        original: The unbound method it replaces.

    Returns:
        A function with the same signature.
    """

    def apply_or_record(self, grads, trainable_variables=None):
        frame = frames.current_frame()
        strategy = strategy_outside_of_replicas()
        if strategy is not None:
            return apply_everywhere(strategy, self, grads, trainable_variables)
        if frame is None:
            with counting_atomically(self):
                return original(self, grads, trainable_variables)
        recorder = frame.recorder
        if frame.num_slots == 1 and recorder is None:
            with after(grads):
                return original(self, grads, trainable_variables)
        if recorder is not None and not recorder.in_place:
            return recorder.record_apply(frame, self, grads, trainable_variables)
        return apply_in_place(frame, self, grads, trainable_variables)

    apply_or_record.__doc__ = original.__doc__
    return apply_or_record
