"""What does a replica hand over at the end of compute, and how do the sets of all replicas add up?

Every item is brought into a form in which a plain sum over replicas is right, so that one aggregation serves
all of them:

    gradient                        share * gradient (each loss is a mean over the replica's rows)
    metric total (SUM)              the change of the variable
    other float variable            rows * new value, in float64 (equal values stay what they are)
    integer or bool variable        the new value of the first replica with rows, 0 elsewhere
    variable of a user's own code   as the trial of the step found: see `step_trial`
    log that is a metric's result   not sent: drawn again from the summed variables
    other log, a float              share * value
    other log, an integer           the sum where it is computed from the batch (a count), else as a variable
"""

from __future__ import annotations

import dataclasses

import tensorflow as tf

from tfdist_ext.strategies import reach
from tfdist_ext.training.batch_functions import Kind
from tfdist_ext.training.recorder import at_path


@dataclasses.dataclass
class Plan:
    """The Python half of a set: what each tensor of it means. The same on every replica.

    Attributes:
        gradient_variables: Variable of each gradient.
        updates: `(keras.Variable, kind)` for each update; kind in "sum", "add", "mean", "first".
        logs: Structure of logs whose leaves are `("metric", metric, path)`, `("value", index)` or constants.
        log_dtypes: Dtype of each transported log value.
        method: The method of the optimizer that the step called.
        specs: Type of each tensor of the set: gradients, updates, logs, and `[rows, digest, 1]` of the replica.
    """

    gradient_variables: list
    updates: list
    logs: object
    log_dtypes: list
    method: str = "apply"
    specs: list = dataclasses.field(default_factory=list)

    @property
    def num_gradients(self) -> int:
        """Number of gradients; updates and logs follow them."""
        return len(self.gradient_variables)


def kind_of_update(variable, tensor, verdict=None) -> str:
    """Returns how the values that replicas assigned to a variable combine.

    Args:
        variable: Keras variable.
        tensor: New value.
        verdict: `step_trial.Verdict` on the step, or None.
    """
    way = None if verdict is None else verdict.updates.get(id(variable))
    if way in ("sum", "add"):
        return way
    if way in ("mean", "same"):
        return "mean" if tensor.dtype.is_floating else "first"
    if variable.aggregation == "sum":
        return "sum"
    if (
        not (tensor.dtype.is_floating or tensor.dtype.is_complex)
        or variable.aggregation == "only_first_replica"
    ):
        return "first"
    return "mean"


def pack(frame, is_first, recorder, scope, logs, digest, generators=()):
    """Turns what one replica computed into tensors to sum, and their plan.

    Args:
        frame: Frame of the replica.
        is_first: Scalar bool tensor or bool, whether this is the first slot that has rows.
        recorder: The replica's `Recorder`.
        scope: The replica's `RecordingScope`.
        logs: What the step returned.
        digest: Scalar int64 tensor, the digest of the global batch as this worker knows it.
        generators: `tf.random.Generator`s of the model. They move on by themselves, but not on a replica without
            rows: the first one's state is everybody's.

    Returns:
        Pair of the list of tensors and the `Plan`.
    """
    tensors = list(recorder.gradients)
    updates = []
    for variable in scope.assigned.values():
        new = tf.convert_to_tensor(scope.state_mapping[id(variable)])
        kind = kind_of_update(variable, new, frame.verdict)
        if kind == "sum":
            new = new - tf.convert_to_tensor(variable._value)
        updates.append((variable, kind))
        tensors.append(_rows_times(frame, new) if kind == "mean" else _summable(frame, is_first, kind, new))
    for generator in generators:
        updates.append((generator.state, "first"))
        tensors.append(_summable(frame, is_first, "first", tf.convert_to_tensor(generator.state)))
    plan = Plan(list(recorder.variables), updates, None, [], recorder.method)

    def plan_log(leaf):
        if not tf.is_tensor(leaf):
            return _Leaf(("constant", leaf))
        known = recorder.results.get(id(leaf))
        if known is not None:
            return _Leaf(("metric", *known))
        leaf = tf.convert_to_tensor(leaf)
        kind = _kind_of_log(frame, leaf, len(plan.log_dtypes))
        plan.log_dtypes.append(leaf.dtype)
        tensors.append(_summable(frame, is_first, kind, leaf))
        return _Leaf(("value", len(plan.log_dtypes) - 1))

    plan.logs = tf.nest.map_structure(plan_log, logs)
    # Summed with the rest, so that it costs no message, and so in a dtype that is there already.
    doubles = any(not isinstance(t, tf.IndexedSlices) and t.dtype == tf.float64 for t in tensors)
    rows_digest_replicas = tf.stack([frame.num_rows, digest, tf.ones([], tf.int64)])
    tensors.append(tf.cast(rows_digest_replicas, tf.float64 if doubles else tf.float32))
    tensors = [t if isinstance(t, tf.IndexedSlices) else frame.mask(t) for t in tensors]
    plan.specs = [tf.type_spec_from_value(tensor) for tensor in tensors]
    return tensors, plan


def _kind_of_log(frame, value, index: int) -> str:
    known = None if frame.verdict is None else frame.verdict.kind_of_log(index)
    if known is Kind.SUM:
        return "add"
    if value.dtype.is_floating:
        return "mean"
    # An integer that is computed from the batch is a count: its parts on the replicas add up.
    counts = known is None and (tf.executing_eagerly() or reach.is_computed_from_the_batch(value))
    return "add" if counts else "first"


def _rows_times(frame, value):
    """Returns what sums to rows * value where all replicas agree on it: the mean is then exactly that value."""
    wide = value.dtype if value.dtype.is_complex else tf.float64
    rows = 1 if frame.num_rows is None else frame.num_rows
    return tf.cast(value, wide) * tf.cast(rows, wide)


class _Leaf:
    """Opaque to tf.nest."""

    def __init__(self, entry):
        self.entry = entry


def _summable(frame, is_first, kind, value):
    if kind in ("sum", "add") or frame.num_slots == 1:
        return value
    if kind == "mean":
        share = frame.share if frame.share is not None else 1.0 / frame.num_slots
        return value * tf.cast(share, value.dtype)
    if value.dtype not in (tf.int32, tf.int64) and not value.dtype.is_floating:
        # Collectives sum these two kinds of integers; the variable's own dtype comes back when it is assigned.
        value = tf.cast(value, tf.int64)
    return tf.where(is_first, value, tf.zeros_like(value))


def zeros_of(plan: Plan):
    """Returns the set of a replica without rows: zeros, and sparse gradients of no row.

    Raises:
        ValueError: A tensor of the set has a shape that is only known when the model runs.
    """

    def zero(spec):
        if isinstance(spec, tf.IndexedSlicesSpec):
            values, indices, shape = (
                tf.zeros([0, *spec._shape[1:]], spec._values_dtype),
                tf.zeros([0], spec._indices_dtype),
                None,
            )
            if spec._dense_shape_dtype is not None:
                shape = tf.constant(spec._shape.as_list(), spec._dense_shape_dtype)
            return tf.IndexedSlices(values, indices, shape)
        if not spec.shape.is_fully_defined():
            raise ValueError(f"shape {spec.shape} is not known before the step runs")
        return tf.zeros(spec.shape, spec.dtype)

    return [zero(spec) for spec in plan.specs]


def check_rows(counted, expected, digest) -> list:
    """Fails the step when the rows that the replicas computed are not those of the global batch.

    Args:
        counted: `[rows, digests, replicas]`, float, the sums over all replicas that have rows; exact below 2**24.
        expected: Scalar int64, the rows of the global batch as this worker knows it.
        digest: Scalar int64, the digest of the global batch as this worker knows it.

    Returns:
        The checks, for nothing to be applied before; none when executing eagerly.
    """
    counted = tf.cast(counted, tf.int64)
    same_batch = tf.debugging.assert_equal(
        counted[1],
        counted[2] * digest,
        message="The workers read different rows where they should read the same, each to compute its part. A source "
        "shuffles by itself, or each worker lists its files in another order: seed it alike on all tasks, use "
        "Dataset.shuffle, or set the dataset's auto_shard_policy to OFF to feed each worker its own.",
    )
    all_rows = tf.debugging.assert_equal(
        counted[0],
        expected,
        message="The workers cut this batch out of global batches of different sizes. Give every worker the same "
        "dataset, or set its auto_shard_policy to OFF to feed each worker its own.",
    )
    return [] if tf.executing_eagerly() else [same_batch, all_rows]


def new_values(plan: Plan, summed_updates, num_rows):
    """Returns `(variable, new value)` for each update of a summed set.

    Args:
        plan: The set's plan.
        summed_updates: The summed tensors of its updates.
        num_rows: Scalar float, rows of the global batch.

    Returns:
        List of pairs.
    """
    values = []
    for (variable, kind), total in zip(plan.updates, summed_updates, strict=True):
        if kind == "sum":
            total = tf.convert_to_tensor(variable._value) + total
        if kind == "mean":
            total = total / tf.cast(num_rows, total.dtype)
        values.append((variable, tf.cast(total, variable.dtype)))
    return values


def draw_logs(plan: Plan, summed_logs, metric_result):
    """Returns the logs of the global batch.

    Args:
        plan: The set's plan.
        summed_logs: The summed tensors of its transported logs.
        metric_result: Function of a metric that returns its result after the update.

    Returns:
        The structure that the step returned.
    """
    cache: dict = {}

    def draw(leaf):
        what, *rest = leaf.entry
        if what == "constant":
            return rest[0]
        if what == "value":
            return tf.cast(summed_logs[rest[0]], plan.log_dtypes[rest[0]])
        metric, path = rest
        if id(metric) not in cache:
            cache[id(metric)] = metric_result(metric)
        return at_path(cache[id(metric)], path)

    return tf.nest.map_structure(draw, plan.logs)
