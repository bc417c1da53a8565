"""What does the code that runs on one replica have to know about its place in the global batch?

A *frame* is entered around every function that a strategy of this package runs on a replica. The seams of
Keras that depend on the replica (scaling a loss, drawing a seed, applying gradients) look it up here.
It is thread-local because TensorFlow traces each local replica in a thread of its own, and switches between
those threads in mid-trace at every `merge_call`.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import threading
from typing import Any

import tensorflow as tf

from tfdist_ext import compat
from tfdist_ext.strategies import reach


class ForwardCollective(Exception):
    """A replica tried to communicate inside a branch that an empty replica does not take."""


@dataclasses.dataclass
class Frame:
    """The place of one replica in the current step.

    Inside a Keras step (`recorder` is set) every loss is kept as if it were a mean over the replica's own rows. The
    total is weighted by `share` where it passes `optimizer.scale_loss`, as in Keras' own step, else its gradients are.
    In a custom loop each Keras loss is weighted, and gradients are left alone.

    Attributes:
        strategy: The strategy that runs the function.
        slot: Index of this replica's sub-batch in the global batch, 0 <= slot < num_slots.
        num_slots: Number of replicas over all workers.
        share: Scalar float64 tensor, rows of this replica / rows of the global batch; None when the function
            got no distributed batch.
        num_rows: Scalar int64 tensor, rows of this replica; None with `share`.
        has_rows: Scalar bool tensor; None when it is known to be True.
        recorder: Object with `record_apply(frame, optimizer, gradients, variables)` that takes the place of the
            optimizer inside a Keras step, or None.
        guarded: True inside a branch that replicas without rows skip: nothing there may communicate.
        loss_weight: Scalar tensor that replaces `share` for the loss that a custom loop reduces right now, or None.
        rows: int64 tensor `[num_slots]`, rows of every sub-batch; None with `share`.
        is_whole: True while a loss is computed on the rows of all replicas: nothing is weighted.
        weights: What `optimizer.scale_loss` multiplied losses of this step by; see `is_weighted`.
        in_compiled_loss: True while Keras computes what `compile(loss=...)` asked for.
        verdict: `step_trial.Verdict` on the step, or None: how its parts combine.
        trial: `step_trial.Trial` while the step is tried on random rows, or None.
        num_applications: How often gradients were applied so far in the step.
        num_scalars: How many numbers were fed to means and sums so far in the step.
        draw: Scalar int64 tensor in place of `slot` for random streams, where it is known only when the step runs.
        drew: True once a random stream asked for `draw`.
        pulled: The variables that a worker pulled from parameter servers, or None.
        round_size: Sets of a step under parameter servers, as far as it is known before they are there.
        reductions: There, how each loss was reduced: `("sum" | "mean" | "own" | "whole", denominator, name or None)`.
        other_metrics: There, names of metrics whose functions are no mean and no sum over the rows of a batch.
        feeds_sum: True while a metric is fed a sum over rows by its function.
        ways: There, by id of a metric's variable how its changes in the sets of a round combine, if not added:
            "averaged", or "of rows" where each is a sum over rows times the rows.
        round: There, what tells a set of the others of its round, with `rows_of_all` and `total_of_all`; or None.
    """

    strategy: Any
    slot: int
    num_slots: int
    share: tf.Tensor | None = None
    num_rows: tf.Tensor | None = None
    has_rows: tf.Tensor | None = None
    recorder: Any = None
    guarded: bool = False
    loss_weight: tf.Tensor | None = None
    rows: tf.Tensor | None = None
    is_whole: bool = False
    weights: list = dataclasses.field(default_factory=list)
    in_compiled_loss: bool = False
    verdict: Any = None
    trial: Any = None
    num_applications: int = 0
    num_scalars: int = 0
    draw: tf.Tensor | None = None
    drew: bool = False
    pulled: Any = None
    round_size: int = 1
    reductions: list = dataclasses.field(default_factory=list)
    other_metrics: list[str] = dataclasses.field(default_factory=list)
    feeds_sum: bool = False
    ways: dict[int, str] = dataclasses.field(default_factory=dict)
    round: Any = None

    @property
    def others(self):
        """What knows the other parts of the batch in place of collectives, or None."""
        return self.round if self.trial is None else self.trial

    @property
    def num_replicas(self) -> int:
        """How many replicas TensorFlow believes there are."""
        return 1 if self.pulled is not None else self.num_slots

    @property
    def weighs_total(self) -> bool:
        """True inside a Keras step: the total loss or its gradients are weighted, not each loss."""
        return self.recorder is not None

    def mask(self, value):
        """Returns `value`, or zeros of its shape when this replica has no rows."""
        if self.has_rows is None:
            return value
        if isinstance(value, tf.IndexedSlices):
            return tf.IndexedSlices(self.mask(value.values), value.indices, value.dense_shape)
        return tf.where(self.has_rows, value, tf.zeros_like(value))


class _Frames(threading.local):
    def __init__(self):
        self.stack: list[Frame | None] = []


_frames = _Frames()


def current_frame() -> Frame | None:
    """Returns the innermost frame of this thread, or None outside a replica function."""
    return _frames.stack[-1] if _frames.stack else None


@contextlib.contextmanager
def entered(frame: Frame | None):
    """Makes `frame` the current one; None hides the outer one (for the code that applies gradients)."""
    _frames.stack.append(frame)
    try:
        yield frame
    finally:
        _frames.stack.pop()


@contextlib.contextmanager
def outside_of_replica():
    """Hides the frame and the Keras stateless scope: what runs inside assigns variables for real."""
    scope = compat.current_stateless_scope()
    compat.set_stateless_scope(None)
    try:
        with entered(None):
            yield
    finally:
        compat.set_stateless_scope(scope)


def outside_of_everything(function):
    """Calls a function in a thread of its own: no graph, strategy, replica or Keras scope is in force there."""
    with concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="tfdist_ext-outside") as executor:
        return executor.submit(function).result()


def distributed_frame() -> Frame | None:
    """Returns the current frame where there is a share to weigh by, else None."""
    frame = current_frame()
    if frame is None or frame.num_slots == 1 or frame.share is None:
        return None
    return frame


def is_weighted(frame: Frame, gradient) -> bool:
    """Returns True where a gradient is that of a loss which `optimizer.scale_loss` has weighted already.

    A step may scale one of its losses and not the other, and apply the gradients of one loss with two optimizers.
    """
    if not frame.weights:
        return False
    tensor = gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient
    if not tf.is_symbolic_tensor(tensor):
        return True
    return any(
        weight.graph is not tensor.graph or reach.depends_on(tensor, weight) for weight in frame.weights
    )


def scale_loss(value, original):
    """Weights a mean loss of one replica, in a custom loop; a step weights the total instead."""
    frame = distributed_frame()
    if frame is None:
        return original(value)
    if frame.weighs_total or frame.is_whole:
        return value
    weight = frame.share if frame.loss_weight is None else frame.loss_weight
    return value * tf.cast(weight, value.dtype)


def unscale_loss(value, original):
    """Undoes `scale_loss` for the loss that is shown; an empty replica shows 0."""
    frame = distributed_frame()
    if frame is None:
        return original(value)
    if frame.weighs_total or frame.is_whole:
        return value
    return tf.math.divide_no_nan(value, tf.cast(frame.share, value.dtype))


def weighted_by_share(frame: Frame | None, gradient):
    """Returns a gradient of a step's loss in the form in which a plain sum over replicas is right."""
    if frame is None or not frame.weighs_total or frame.share is None or is_weighted(frame, gradient):
        return gradient
    return times(gradient, frame.share)


def gradients_of_application(frame: Frame | None, gradients) -> list:
    """Returns the gradients that a step applies now, each in the form in which a plain sum over replicas is right."""
    if frame is None:
        return list(gradients)
    index, frame.num_applications = frame.num_applications, frame.num_applications + 1
    if frame.verdict is not None and frame.verdict.is_sum(index):
        return [over_share(frame, gradient) for gradient in gradients]
    return [weighted_by_share(frame, gradient) for gradient in gradients]


def over_share(frame: Frame, gradient):
    """Returns a gradient as it was before its loss was weighted."""
    if not is_weighted(frame, gradient):
        return gradient
    return times(gradient, tf.math.divide_no_nan(tf.ones([], tf.float64), frame.share))


def times(value, factor):
    """Returns a tensor or `tf.IndexedSlices` times a scalar of any float type."""
    if isinstance(value, tf.IndexedSlices):
        return tf.IndexedSlices(times(value.values, factor), value.indices, value.dense_shape)
    return value * tf.cast(factor, value.dtype)


def weight_of_denominator(denominator):
    """Returns this replica's part of a denominator summed over all replicas (masks, sample weights).

    Args:
        denominator: Scalar float tensor, what this replica's loss was divided by.

    Returns:
        Scalar tensor `denominator / sum over replicas`, or None outside a distributed step.
    """
    frame = distributed_frame()
    if frame is None:
        return None
    if frame.others is not None:
        total = frame.others.total_of_all(denominator)
    else:
        total = tf.distribute.get_replica_context().all_reduce(
            tf.distribute.ReduceOp.SUM, frame.mask(tf.stop_gradient(denominator))
        )
    return tf.math.divide_no_nan(tf.stop_gradient(denominator), tf.stop_gradient(total))
