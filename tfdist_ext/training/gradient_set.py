"""What does a set hold, and how do its tensors travel to the ps?

One compute makes one set: gradients, what layers and metrics assigned, and logs. Each tensor goes to the ps of its
variable; small ones are packed. On the ps the sets of a step become one sum.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import keras
import tensorflow as tf

from tfdist_ext.strategies import reach
from tfdist_ext.strategies.parameter_server_variables import device_of_task
from tfdist_ext.training.packing import Packing
from tfdist_ext.training.pulled import Pulled, is_sharded, owner_of_rows, shards_of

FIRST_PS = device_of_task(0)


@dataclasses.dataclass
class DenseParts:
    """A gradient of the whole variable: one tensor for each of its shards."""

    positions: list[int]


@dataclasses.dataclass
class SparseParts:
    """A gradient of some rows: values and local row numbers for each shard."""

    positions: list[tuple[int, int]]


class _Leaf:
    """A log, opaque to tf.nest."""

    def __init__(self, entry):
        self.entry = entry


class SetLayout:
    """What each tensor of a set means; the same for all workers.

    Args:
        recorder: The `SetRecorder` of the trace.
        scope: Its `PulledScope`.
        pulled: Its `Pulled`.
        logs: What the step returned.
        weight: Scalar float64 tensor, how much the set counts beside others of its round.
        wire_dtype: Dtype in which gradients travel, or None.
        ways: By id of a variable how what the sets of a round assign to it combines, where that is known: as in
            `step_trial.Verdict.updates` or `Frame.ways`.
        rows: Scalar float64 tensor, rows of the batch, where `ways` needs them and they are not the weight.

    Attributes:
        tensors: The tensors to send, only while compute is traced.
        calls: The recorded `Application`s, without their tensors.
        scale_positions: For each of them the position of the scale of its loss, or None.
        packing: How they travel.
    """

    def __init__(self, recorder, scope, pulled: Pulled, logs, weight, wire_dtype=None, ways=None, rows=None):
        self.tensors: list[tf.Tensor] = []
        self._devices: list[str] = []
        self.applications = [(a.optimizer, list(a.variables)) for a in recorder.applications]
        self.gradient_parts = [
            [self._add_gradient(g, v) for g, v in zip(a.gradients, a.variables, strict=True)]
            for a in recorder.applications
        ]
        num_gradients = len(self.tensors)
        self.calls = [a.without_tensors() for a in recorder.applications]
        self.scale_positions = [
            None if a.scale is None else self._add(a.scale, FIRST_PS) for a in recorder.applications
        ]
        self.counted: set[int] = set()  # Of integer variables that count rows.
        self.ways: dict[int, str] = ways or {}
        self.updates = [self._add_update(v, scope, pulled) for v in scope.assigned.values()]
        self.logs = self._plan_logs(recorder, logs)
        self.weight_position = self._add(weight, FIRST_PS)
        self.rows_position = self.weight_position if rows is None else self._add(rows, FIRST_PS)
        specs = [tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in self.tensors]
        # Gradients may be rounded on the way; counts and statistics are sums that must not be.
        shortened = [wire_dtype if index < num_gradients else None for index in range(len(specs))]
        self.packing = Packing(specs, self._devices, shortened)
        self._row_group = next(
            i for i, g in enumerate(self.packing.groups) if g.joined and g.device == FIRST_PS
        )

    @property
    def num_bytes(self) -> int:
        """Bytes of what has a fixed size."""
        return self.packing.num_bytes

    @property
    def row_widths(self) -> list[tuple[keras.Variable, int, int]]:
        """For each shard of a sparse gradient: its variable, its position among the wires, and the bytes of a row."""
        widths = []
        by_member = {g.members[0]: i for i, g in enumerate(self.packing.groups) if not g.joined}
        for (_, variables), gradients in zip(self.applications, self.gradient_parts, strict=True):
            for variable, slot in zip(variables, gradients, strict=True):
                for values, indices in slot.positions if isinstance(slot, SparseParts) else ():
                    spec = self.packing.specs[values]
                    row = spec.shape[1:].num_elements() * spec.dtype.size
                    widths.append((variable, by_member[values], row + self.packing.specs[indices].dtype.size))
        return widths

    def pack(self, num_rows: tf.Tensor) -> list[tf.Tensor]:
        """Returns the tensors to send, and forgets those of the trace.

        Args:
            num_rows: Scalar, rows of the batch. One message is that much longer than its content, so that the chief,
                which sees shapes only, knows the number without fetching it.
        """
        tensors, self.tensors = self.tensors, []
        wires = []
        for index, group in enumerate(self.packing.groups):
            tail = (
                [tf.zeros([tf.cast(num_rows, tf.int32)], group.carrier)] if index == self._row_group else []
            )
            wires.append(self.packing.pack_group(group, tensors, tail))
        return wires

    def num_rows(self, wires) -> int:
        """Returns the rows of the batch that a set was computed on."""
        return wires[self._row_group].shape[0] - self.packing.length(self.packing.groups[self._row_group])

    def unpack(self, wires: Sequence[tf.Tensor]) -> ReceivedSet:
        """Returns what arrived at the ps, each tensor on its variable's."""
        received: list = [None] * len(self.packing.specs)
        for group, wire in zip(self.packing.groups, wires, strict=True):
            with tf.device(group.device):
                for member, part in zip(group.members, self.packing.unpack_group(group, wire), strict=True):
                    received[member] = part
        return ReceivedSet(self, received)

    def unpack_here(self, wires: Sequence[tf.Tensor]) -> ReceivedSet:
        """Like `unpack`, on the device that runs it."""
        return ReceivedSet(self, self.packing.unpack(wires))

    def _add(self, tensor, device: str) -> int:
        self.tensors.append(tensor)
        self._devices.append(device)
        return len(self.tensors) - 1

    def _add_gradient(self, gradient, variable):
        shards = shards_of(variable)
        if isinstance(gradient, tf.IndexedSlices):
            return SparseParts(self._add_rows(gradient, variable, shards))
        gradient = tf.ensure_shape(gradient, variable.shape)
        parts = [gradient] if len(shards) == 1 else tf.split(gradient, [s.shape[0] for s in shards])
        return DenseParts([self._add(p, s.device) for p, s in zip(parts, shards, strict=True)])

    def _add_rows(self, gradient, variable, shards):
        indices = tf.reshape(gradient.indices, [-1])
        values = tf.reshape(gradient.values, tf.concat([[-1], variable.shape[1:]], axis=0))
        values = tf.ensure_shape(values, [None, *variable.shape[1:]])
        # Each row once: the sum of what the batch says about it.
        unique, positions = tf.unique(indices, out_idx=tf.int64)
        values = tf.math.unsorted_segment_sum(values, positions, tf.size(unique, out_type=tf.int64))
        values = tf.ensure_shape(values, [None, *variable.shape[1:]])
        if len(shards) == 1:
            return [(self._add(values, shards[0].device), self._add(unique, shards[0].device))]
        owner, local = owner_of_rows(shards, unique)
        parts = tf.dynamic_partition(values, owner, len(shards))
        rows = tf.dynamic_partition(local, owner, len(shards))
        return [
            (self._add(p, s.device), self._add(r, s.device))
            for p, r, s in zip(parts, rows, shards, strict=True)
        ]

    def _add_update(self, variable, scope, pulled):
        new = tf.convert_to_tensor(scope.state_mapping[id(variable)])
        device = shards_of(variable)[0].device
        if is_sharded(variable):
            raise ValueError(
                f"A layer assigns the variable `{variable.path}`, which is sharded; only optimizers may."
            )
        if new.dtype == tf.bool:
            return variable, self._add(new, device), None
        if new.dtype.is_integer and reach.is_computed_from_the_batch(new):
            self.counted.add(id(variable))
        change = new - pulled.value(variable)
        return variable, self._add(new, device), self._add(change, device)

    def _plan_logs(self, recorder, logs):
        def plan(leaf):
            if not tf.is_tensor(leaf):
                return _Leaf(("constant", leaf))
            known = recorder.results.get(id(leaf))
            if known is not None:
                return _Leaf(("metric", *known))
            return _Leaf(("value", self._add(tf.convert_to_tensor(leaf), FIRST_PS)))

        return tf.nest.map_structure(plan, logs)


class ReceivedSet:
    """The tensors of one set on the ps.

    Args:
        layout: What they mean.
        tensors: The tensors.
    """

    def __init__(self, layout: SetLayout, tensors):
        self.layout = layout
        self.tensors = list(tensors)
        self.weight = tensors[layout.weight_position]
        self.rows = tensors[layout.rows_position]

    def gradient(self, application: int, index: int) -> list:
        """Returns the gradient of a variable: for each shard a tensor or `tf.IndexedSlices` with local rows."""
        _, variables = self.layout.applications[application]
        slot = self.layout.gradient_parts[application][index]
        if isinstance(slot, DenseParts):
            return [self.tensors[position] for position in slot.positions]
        shards = shards_of(variables[index])
        return [
            tf.IndexedSlices(
                self.tensors[values], self.tensors[rows], tf.constant(shard.shape.as_list(), tf.int64)
            )
            for (values, rows), shard in zip(slot.positions, shards, strict=True)
        ]

    def scale(self, application: int):
        """Returns the scale that the loss was multiplied with, or None where that is constant."""
        position = self.layout.scale_positions[application]
        return None if position is None else self.tensors[position]

    def new_value(self, index: int):
        """Returns what the set assigned to a variable."""
        return self.tensors[self.layout.updates[index][1]]

    def change(self, index: int):
        """Returns by how much the set changed a variable, or None for a bool."""
        position = self.layout.updates[index][2]
        return None if position is None else self.tensors[position]

    def log(self, position: int):
        """Returns a log that is no metric's result."""
        return self.tensors[position]
