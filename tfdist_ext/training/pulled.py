"""Where does a worker's compute find the variables?

They live on the ps. Small ones are pulled packed, large ones one by one and only when the model reads them, and of an
embedding table only the rows that the batch touches. Layers read all of them through a `keras.StatelessScope`, and
gradient tapes are told that what was pulled is the variable.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import keras
import tensorflow as tf

from tfdist_ext import compat
from tfdist_ext.training.packing import Packing

_ROWS_ABOVE_BYTES = 256 << 10


def shards_of(variable) -> list:
    """Returns the `tf.Variable`s that hold a Keras variable: one, or its shards."""
    value = variable._value
    return list(value.variables) if isinstance(value, compat.ShardedVariable) else [value]


def is_sharded(variable) -> bool:
    """Returns True for a Keras variable that lies on several ps."""
    return isinstance(variable._value, compat.ShardedVariable)


def is_large(variable) -> bool:
    """Returns True for a variable that travels by itself, and as an embedding table by rows."""
    return (
        is_sharded(variable)
        or variable.shape.num_elements() * variable._value.dtype.size >= _ROWS_ABOVE_BYTES
    )


@dataclasses.dataclass
class TouchedRows:
    """The rows of one table that a batch looked up.

    Attributes:
        variable: The Keras variable.
        row_bytes: Bytes of one row.
        id_bytes: Bytes of one row number.
        count: Tensor of shape [rows, 0], whose shape tells the chief how many rows were pulled.
    """

    variable: keras.Variable
    row_bytes: int
    id_bytes: int
    count: tf.Tensor


class PullPlan:
    """Which variables of a model are pulled packed: the small ones.

    Args:
        variables: Keras variables that compute may read.
        wire_dtype: Dtype in which floats travel, or None.
    """

    def __init__(self, variables, wire_dtype: tf.DType | None = None):
        unique = {id(variable): variable for variable in variables}
        self.variables = [v for v in unique.values() if not is_large(v) and v._value.dtype != tf.string]
        self.large = [v for v in unique.values() if is_large(v)]
        self.wire_dtype = wire_dtype
        self.packing = Packing(
            [tf.TensorSpec(v._value.shape, v._value.dtype) for v in self.variables],
            [v._value.device for v in self.variables],
            [wire_dtype] * len(self.variables),
        )

    def read_on_ps(self) -> list[tf.Tensor]:
        """Reads and packs the small variables, each group on its ps."""
        values: list = []
        for variable in self.variables:
            with tf.device(variable._value.device):
                values.append(variable._value.read_value())
        wires = []
        for group in self.packing.groups:
            with tf.device(group.device):
                wires.append(self.packing.pack_group(group, values))
        return wires


class Pulled:
    """The variables of one trace of compute.

    Args:
        plan: What is pulled packed.
        wires: What `plan.read_on_ps` returned, or tensors of those types that were fetched before.
        graph: Graph of the trace, in which everything is read, wherever the model asks for it.
    """

    def __init__(self, plan: PullPlan, wires, graph):
        self._plan = plan
        self._graph = graph
        values = plan.packing.unpack([tf.identity(wire) for wire in wires])
        self._values = {id(v): value for v, value in zip(plan.variables, values, strict=True)}
        self.large_read: list = []
        self.touched: list[TouchedRows] = []

    @property
    def reads_here(self) -> bool:
        """True in the graph of compute itself, False in that of a loop, a branch or a function inside."""
        return tf.compat.v1.get_default_graph() is self._graph

    def value(self, variable) -> tf.Tensor:
        """Returns the pulled value, unknown to gradient tapes."""
        value = self._values.get(id(variable))
        if value is None:
            with self._graph.as_default(), tf.control_dependencies(None), compat.no_recording():
                value = self._read_alone(variable)
            self._values[id(variable)] = value
            self.large_read.append(variable)
        return value

    def watched_value(self, variable) -> tf.Tensor:
        """Returns the pulled value so that the gradient of what is computed from it is the variable's."""
        value = self.value(variable)
        if not variable.trainable:
            return value
        # In the graph of compute, also where a loop or a branch asks: a gradient leaves an inner graph only by what it
        # has captured from outside.
        with self._graph.as_default():
            with tf.control_dependencies(None), compat.no_recording():
                value = tf.identity(value)
            compat.record_read(variable._value, value)
        return value

    def _read_alone(self, variable) -> tf.Tensor:
        parts = []
        for shard in shards_of(variable):
            with tf.device(shard.device):
                parts.append(self._shortened(shard.read_value()))
        parts = [tf.cast(tf.identity(part), variable._value.dtype) for part in parts]
        return parts[0] if len(parts) == 1 else tf.concat(parts, axis=0)

    def _shortened(self, value):
        wire = self._plan.wire_dtype
        return tf.cast(value, wire) if wire is not None and value.dtype.is_floating else value

    def rows(self, variable, ids: tf.Tensor) -> tf.Tensor:
        """Looks up rows of a table; only those travel, each once, and so do their gradients.

        Args:
            variable: Keras variable of shape [rows, ...] that is large or sharded.
            ids: Integer tensor of row numbers; negative ones count from the end, as in Keras.

        Returns:
            Tensor of shape `ids.shape + variable.shape[1:]`.
        """
        total = variable.shape[0]
        ids = tf.where(ids < 0, ids + tf.cast(total, ids.dtype), ids)
        with compat.no_recording():
            unique, positions = tf.unique(tf.reshape(ids, [-1]), out_idx=tf.int64)
            rows = self._gather(variable, unique)
        if variable.trainable:
            shape = tf.constant(variable.shape.as_list(), unique.dtype)
            compat.record_row_read(
                variable._value, rows, lambda gradient: tf.IndexedSlices(gradient, unique, shape)
            )
        count = tf.zeros([tf.shape(unique)[0], 0], tf.bool)
        width = variable.shape[1:].num_elements() * variable._value.dtype.size
        self.touched.append(TouchedRows(variable, width, unique.dtype.size, count))
        looked_up = tf.gather(rows, positions)
        return tf.reshape(looked_up, tf.concat([tf.shape(ids), variable.shape[1:]], axis=0))

    def _gather(self, variable, unique):
        shards = shards_of(variable)
        if len(shards) == 1:
            return self._gather_shard(shards[0], unique)
        owner, local = owner_of_rows(shards, unique)
        order = tf.dynamic_partition(tf.range(tf.size(unique)), owner, len(shards))
        wanted = tf.dynamic_partition(local, owner, len(shards))
        parts = [self._gather_shard(shard, some) for shard, some in zip(shards, wanted, strict=True)]
        rows = tf.dynamic_stitch(order, parts)
        return tf.ensure_shape(rows, [None, *variable.shape[1:]])

    def _gather_shard(self, shard, ids):
        with tf.device(shard.device):
            rows = self._shortened(shard.sparse_read(ids))
        return tf.cast(tf.identity(rows), shard.dtype)


def owner_of_rows(shards, ids: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns, for rows of a sharded table, the shard that holds each and its row number there.

    Args:
        shards: The shards, in the order of their rows.
        ids: Vector of row numbers of the whole table.

    Returns:
        Pair of an int32 and an integer vector of the dtype of `ids`.
    """
    ends, end = [], 0
    for shard in shards:
        end += shard.shape[0]
        ends.append(end)
    owner = tf.searchsorted(tf.constant(ends, ids.dtype), ids, side="right")
    starts = tf.constant([0, *ends[:-1]], ids.dtype)
    return owner, ids - tf.gather(starts, owner)


class PulledScope(keras.StatelessScope):
    """Gives layers the pulled variables and keeps what they assign.

    Args:
        pulled: The variables.
        check_access: Called with each variable that is read or assigned, and `assigns`; raises where it may not be.
    """

    def __init__(self, pulled: Pulled, check_access: Callable):
        super().__init__(collect_losses=True, initialize_variables=False)
        self._pulled = pulled
        self._check_access = check_access
        self.assigned: dict[int, keras.Variable] = {}

    def add_update(self, update):
        """See `keras.StatelessScope`."""
        variable, value = update
        self._check_access(variable, assigns=True)
        if not self._pulled.reads_here:
            raise NotImplementedError(
                f"A layer assigns the variable `{variable.path}` inside a loop, a branch or a tf.function of its own. "
                "A worker hands over what is assigned, which cannot leave such a graph: return the value from it, and "
                "assign it outside. A seed of `keras.random` is drawn outside and passed in as a number."
            )
        self.assigned[id(variable)] = variable
        # What is read from a variable after an assignment has no gradient to what was assigned.
        super().add_update((variable, tf.stop_gradient(value)))

    def get_current_value(self, variable):
        """See `keras.StatelessScope`."""
        self._check_access(variable, assigns=False)
        value = super().get_current_value(variable)
        return self._pulled.watched_value(variable) if value is None else value
