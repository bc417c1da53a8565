"""How are variables spread over parameter servers: which are split, which lies where, by bytes or by traffic?"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import tensorflow as tf

from tfdist_ext.placement import trace
from tfdist_ext.placement.explanation import slots_of
from tfdist_ext.placement.variables import PlacementTable


class FairSharePartitioner(tf.distribute.experimental.partitioners.Partitioner):
    """Splits a variable that weighs more than a fair share of a parameter server, and no other.

    A fair share is total / num_tasks. A variable of weight w gets ceil(w / (share x slack)) shards along its first
    dimension, at most `num_tasks`, so that no task need hold more than `slack` fair shares of one variable: what
    largest-first needs to come close to balance. Small variables stay whole; each shard costs messages of its own.

    Usable as `variable_partitioner` of TensorFlow's and of this package's ParameterServerStrategy.

    Runs on: the chief.

    Args:
        total_weight: Of all variables together: bytes, or traffic in bytes a step.
        num_tasks: Number of ps.
        slack: Fair shares that a shard may weigh.
        weight: Function of `shape` (`tf.TensorShape`) and `dtype` that returns the weight of a variable; None means its
            bytes. By traffic an embedding table weighs the rows that a step touches, not all of it.

    Raises:
        ValueError: An argument is not positive.

    Example:
        >>> import tensorflow as tf
        >>> partitioner = FairSharePartitioner(total_weight=4000, num_tasks=4)
        >>> partitioner(tf.TensorShape([500, 1]), tf.float32), partitioner(tf.TensorShape([250, 1]), tf.float32)
        ([2, 1], [1, 1])
    """

    def __init__(
        self,
        total_weight: float,
        num_tasks: int,
        *,
        slack: float = 1.0,
        weight: Callable[[tf.TensorShape, tf.DType], float] | None = None,
    ):
        for name, value in (("total_weight", total_weight), ("num_tasks", num_tasks), ("slack", slack)):
            if not value > 0:
                raise ValueError(f"Argument `{name}` must be positive; received {value}.")
        self._largest = slack * total_weight / num_tasks
        self._num_tasks = num_tasks
        self._weight = weight or _num_bytes

    def __call__(self, shape, dtype, axis: int = 0) -> list[int]:
        """Returns the number of shards along each dimension.

        Args:
            shape: Of the variable.
            dtype: Of the variable.
            axis: Dimension to split.
        """
        shape, dtype = tf.TensorShape(shape), tf.as_dtype(dtype)
        shards = [1] * shape.rank
        if shape.rank:
            wanted = math.ceil(self._weight(shape, dtype) / self._largest)
            shards[axis] = max(1, min(wanted, self._num_tasks, shape[axis]))
        return shards


def variable_traffic(
    function, example_args: Sequence = (), *, assume_batch: int | None = None
) -> dict[str, int]:
    """Counts the bytes that a step takes from each variable and brings to it.

    Args:
        function: tf.function or Python function: a training step.
        example_args: Example arguments: tensors, arrays or specs.
        assume_batch: Size that an unknown first dimension counts as.

    Returns:
        Bytes a step by name of variable: what goes to operations on other variables or on none, and what comes from
        them, every tensor once; of a table the rows that are looked up and updated.

    Example:
        >>> import tensorflow as tf
        >>> table = tf.Variable(tf.zeros([1000, 4]), name="table")
        >>> variable_traffic(lambda ids: tf.gather(table, ids), [tf.constant([1, 2, 3])])
        {'table': 60}
    """
    traced = trace.graph_of(
        trace.concrete_function_of(function, tuple(example_args)), assume_batch=assume_batch
    )
    graph = traced.graph
    seen: dict[str, dict[tuple[str, int], int]] = {name: {} for name in traced.variables}
    for edge in graph.edges:
        groups = {graph.operations[name].group for name in (edge.producer, edge.consumer)}
        if edge.is_control or len(groups) == 1:
            continue
        for group in groups & set(seen):
            times = graph.operations[edge.producer].times
            seen[group][edge.producer, edge.output] = edge.num_bytes * times
    return {name.removeprefix("variable "): sum(tensors.values()) for name, tensors in seen.items()}


def placement_table(
    function,
    example_args: Sequence = (),
    *,
    num_tasks: int,
    weight: Mapping[str, int] | None = None,
    assume_batch: int | None = None,
) -> PlacementTable:
    """Places the variables of a step on parameter servers, the heaviest first, each with its slots beside it.

    Args:
        function: tf.function or Python function: a training step.
        example_args: Example arguments.
        num_tasks: Number of ps.
        weight: What to balance, by name of variable, such as what `variable_traffic` returned; None: bytes with slots.
        assume_batch: Size that an unknown first dimension counts as.

    Returns:
        The table of bytes; under a `weight` it is balanced by that, and its own imbalance is that of bytes.
    """
    traced = trace.graph_of(
        trace.concrete_function_of(function, tuple(example_args)), assume_batch=assume_batch
    )
    owner = slots_of(traced)
    sizes: dict[str, int] = {}
    slots: dict[str, int] = {}
    for name in traced.variables:
        size = traced.graph.operations[name].resident_bytes
        if name in owner:
            key = owner[name].removeprefix("variable ")
            slots[key] = slots.get(key, 0) + size
        else:
            sizes[name.removeprefix("variable ")] = size
    return PlacementTable.largest_first(sizes, num_tasks, slot_bytes=slots, weight=weight)


def _num_bytes(shape: tf.TensorShape, dtype: tf.DType) -> float:
    return float(shape.num_elements() * dtype.size)
