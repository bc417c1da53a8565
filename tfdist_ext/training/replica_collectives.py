"""What do collectives mean that a replica function calls, when replicas have unequal rows or none?

The forward pass counts each row once. The backward pass sums what the losses of all replicas say about a value: where
those are not weighted yet they are on their way through here, and this replica's own weight, which its gradients get
later, is taken out.
"""

from __future__ import annotations

import threading

import tensorflow as tf

from tfdist_ext.strategies import frame as frames


class _Ours(threading.local):
    """Whether TensorFlow's own collectives call `merge_call` right now."""

    depth = 0


_ours = _Ours()


def _in_step(frame) -> bool:
    """True where a Keras step of several replicas runs, whose replicas may have no rows."""
    if frame is None or frame.pulled is not None:
        return False
    return frame.weighs_total and frame.share is not None and frame.num_slots > 1


def _check_trial(frame) -> None:
    if frame is not None and frame.trial is not None:
        frame.trial.refuse("it calls a collective of the replica context")


def _calling(original, *args):
    _ours.depth += 1
    try:
        return original(*args)
    finally:
        _ours.depth -= 1


def _all_reduce(original):
    def all_reduce(self, reduce_op, value, options=None):
        frame = frames.current_frame()
        if frame is None:
            return original(self, reduce_op, value, options)
        _check_trial(frame)
        if frame.has_rows is not None:
            value = tf.nest.map_structure(frame.mask, value)
        if not _in_step(frame):
            return _calling(original, self, reduce_op, value, options)
        if _is_mean(reduce_op):
            # The mean over rows: what replicas that have the same rows would give, and one device.
            value = tf.nest.map_structure(lambda x: frames.times(x, frame.share), value)
            reduce_op = tf.distribute.ReduceOp.SUM
        value = tf.nest.map_structure(lambda x: _with_gradient(x, lambda dx: _over_share(dx, frame)), value)
        reduced = _calling(original, self, reduce_op, value, options)
        return tf.nest.map_structure(
            lambda y: _with_gradient(y, lambda dy: frames.weighted_by_share(frame, dy)), reduced
        )

    return all_reduce


def _is_mean(reduce_op) -> bool:
    return reduce_op == tf.distribute.ReduceOp.MEAN or str(reduce_op).upper() == "MEAN"


def _all_gather(original):
    def all_gather(self, value, axis, options=None):
        frame = frames.current_frame()
        _check_trial(frame)
        if not _in_step(frame):
            return _calling(original, self, value, axis, options)
        return tf.nest.map_structure(
            lambda tensor: gathered(frame, tf.convert_to_tensor(tensor), axis), value
        )

    return all_gather


def _merge_call(original):
    def merge_call(self, merge_fn, args=(), kwargs=None):
        frame = frames.current_frame()
        _check_trial(frame)
        if not _ours.depth and _in_step(frame):
            raise NotImplementedError(
                "`merge_call` was called in the step of a Keras model. What it computes has no gradient there, and "
                "replicas without rows would take part. Use `all_reduce` or `all_gather` of the replica context."
            )
        return original(self, merge_fn, args, kwargs)

    return merge_call


def merge(merge_fn, *args):
    """Calls `merge_fn(strategy, *per_replica_args)` once for all local replicas, for this package's own use."""
    return _calling(tf.distribute.get_replica_context().merge_call, merge_fn, args)


def gathered(frame, value, axis: int):
    """Concatenates the tensors of all replicas, slot by slot; exact in both passes.

    Args:
        frame: Frame of the replica.
        value: Tensor of rank >= 1.
        axis: Dimension to concatenate along. A replica without rows brings nothing.

    Returns:
        The same tensor on every replica.
    """
    axis = axis % value.shape.rank if axis < 0 else axis
    order = [axis, *(i for i in range(value.shape.rank) if i != axis)]
    back = [order.index(i) for i in range(value.shape.rank)]

    @tf.custom_gradient
    def gather(own):
        own = own if frame.has_rows is None else own[: tf.where(frame.has_rows, tf.shape(own)[0], 0)]
        sizes = _gather_rows(frame, tf.shape(own)[:1])

        def gradient(upstream):
            total = _sum(frames.weighted_by_share(frame, upstream))
            start = tf.reduce_sum(sizes[: frame.slot])
            part = total[start : start + sizes[frame.slot]]
            # A replica without rows gets a gradient of the row of zeros it ran on.
            part = tf.concat([part, tf.zeros_like(value_rows[tf.shape(part)[0] :])], axis=0)
            return _over_share(tf.ensure_shape(part, value_rows.shape), frame)

        return _gather_rows(frame, own), gradient

    value_rows = tf.transpose(value, order)
    return tf.transpose(gather(value_rows), back)


def _gather_rows(frame, value):
    """Returns the rows of all slots on every replica, without a gradient."""
    if frame.guarded:
        raise frames.ForwardCollective()

    def on_all(strategy, values):
        extended = strategy.extended
        per_replica = [values] if len(extended.worker_devices) == 1 else list(values.values)
        return extended.gather_slots([per_replica])[0]

    return tf.ensure_shape(merge(on_all, tf.stop_gradient(value)), [None, *value.shape[1:]])


def gather_constant_rows(frame, value):
    """Returns the rows of all slots, in the order of the global batch, without a gradient.

    Args:
        frame: Frame of the replica.
        value: Tensor whose rows are those of the replica's batch.
    """
    own = value if frame.has_rows is None else value[: frame.num_rows]
    return _gather_rows(frame, own)


def _sum(value):
    def on_all(strategy, values):
        return strategy.extended.reduce_to(tf.distribute.ReduceOp.SUM, values, destinations=values)

    return merge(on_all, value)


def _with_gradient(value, change):
    if isinstance(value, tf.IndexedSlices):
        return value

    @tf.custom_gradient
    def unchanged(tensor):
        return tf.identity(tensor), change

    return unchanged(value)


def _over_share(gradient, frame):
    if frames.is_weighted(frame, gradient):
        return gradient
    return tf.math.divide_no_nan(gradient, tf.cast(frame.share, gradient.dtype))


REPLACEMENTS = {"all_reduce": _all_reduce, "all_gather": _all_gather, "merge_call": _merge_call}
