"""What does a set hold, and how do its tensors travel to the ps?

One compute makes one set: gradients, what layers and metrics assigned, and logs. Each tensor goes to the ps of its
variable; small ones are packed. On the ps the sets of a step become one sum.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import keras
import tensorflow as tf

from tfdist_ext.strategies import frame as frames
from tfdist_ext.strategies.parameter_server_variables import device_of_task
from tfdist_ext.training.packing import Packing
from tfdist_ext.training.pulled import Pulled, is_sharded, owner_of_rows, shards_of
from tfdist_ext.training.recorder import at_path

FIRST_PS = device_of_task(0)


@dataclasses.dataclass
class Application:
    """One call of an optimizer.

    Attributes:
        optimizer: The Keras optimizer.
        variables: Its variables that have gradients.
        gradients: Their gradients, while compute is traced.
    """

    optimizer: keras.Optimizer
    variables: list
    gradients: list


class SetRecorder:
    """Takes the place of optimizers while a worker's step is traced.

    Attributes:
        in_place: Always False: nothing is applied inside compute.
        applications: The recorded calls, in their order.
        results: Maps `id(tensor)` to `(metric, path)` for every metric result drawn while tracing.
    """

    in_place = False

    def __init__(self):
        self.applications: list[Application] = []
        self.results: dict = {}
        self._applied: dict[int, str] = {}
        self._kept: list = []

    def record_apply(self, frame, optimizer, gradients, variables) -> None:
        """Keeps the gradients of one optimizer's step."""
        variables = list(optimizer._trainable_variables if variables is None else variables)
        pairs = [(g, v) for g, v in zip(gradients, variables, strict=True) if g is not None]
        if not pairs:
            raise ValueError(
                "No gradient reaches any trainable variable. Check that the loss of `train_step` depends on the "
                "model's output."
            )
        if any(application.optimizer is optimizer for application in self.applications):
            raise ValueError(
                f"`train_step` applies gradients with `{optimizer.name}` twice. A worker's step is applied after it "
                "returned: sum the gradients and apply them once, or use one optimizer for each."
            )
        kept = Application(optimizer, [v for _, v in pairs], [g for g, _ in pairs])
        self.applications.append(kept)
        self._applied.update({id(v): v.path for v in [*kept.variables, *optimizer.variables]})

    def check_access(self, variable, assigns: bool) -> None:
        """Refuses what depends on the outcome of a step that is applied later, or changes what only it may change."""
        if id(variable) in self._applied:
            raise ValueError(
                f"`train_step` {'assigns' if assigns else 'reads'} `{variable.path}` after applying gradients to "
                f"it. On "
                "parameter servers gradients are applied after the step has returned. Compute what depends on the "
                "new value in a callback (on_train_batch_end), or before applying."
            )
        if assigns and variable.trainable:
            raise ValueError(
                f"A layer assigns the trainable variable `{variable.path}` in its forward pass. Workers cannot: only "
                "the optimizer changes what is trained. Keep it in a variable with trainable=False."
            )

    def note_result(self, metric, result) -> None:
        """Remembers which tensors of the logs are results of `metric`."""
        for path, leaf in _leaves(result):
            if tf.is_tensor(leaf):
                self.results[id(leaf)] = (metric, path)
                self._kept.append(leaf)


def _leaves(structure, path=()):
    if isinstance(structure, dict):
        for key, value in structure.items():
            yield from _leaves(value, (*path, key))
    elif isinstance(structure, (list, tuple)):
        for key, value in enumerate(structure):
            yield from _leaves(value, (*path, key))
    else:
        yield path, structure


@dataclasses.dataclass
class _DenseSlot:
    """A gradient of the whole variable: one tensor for each of its shards."""

    positions: list[int]


@dataclasses.dataclass
class _SparseSlot:
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

    Attributes:
        tensors: The tensors to send, only while compute is traced.
        packing: How they travel.
    """

    def __init__(self, recorder, scope, pulled: Pulled, logs, weight, wire_dtype=None):
        self.tensors: list[tf.Tensor] = []
        self._devices: list[str] = []
        self.applications = [(a.optimizer, list(a.variables)) for a in recorder.applications]
        self._gradients = [
            [self._add_gradient(g, v) for g, v in zip(a.gradients, a.variables, strict=True)]
            for a in recorder.applications
        ]
        num_gradients = len(self.tensors)
        self.updates = [self._add_update(v, scope, pulled) for v in scope.assigned.values()]
        self.logs = self._plan_logs(recorder, logs)
        self._weight = self._add(weight, FIRST_PS)
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
        for (_, variables), gradients in zip(self.applications, self._gradients, strict=True):
            for variable, slot in zip(variables, gradients, strict=True):
                for values, indices in slot.positions if isinstance(slot, _SparseSlot) else ():
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
            return _SparseSlot(self._add_rows(gradient, variable, shards))
        gradient = tf.ensure_shape(gradient, variable.shape)
        parts = [gradient] if len(shards) == 1 else tf.split(gradient, [s.shape[0] for s in shards])
        return _DenseSlot([self._add(p, s.device) for p, s in zip(parts, shards, strict=True)])

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
        self.weight = tensors[layout._weight]

    def gradient(self, application: int, index: int) -> list:
        """Returns the gradient of a variable: for each shard a tensor or `tf.IndexedSlices` with local rows."""
        _, variables = self.layout.applications[application]
        slot = self.layout._gradients[application][index]
        if isinstance(slot, _DenseSlot):
            return [self.tensors[position] for position in slot.positions]
        shards = shards_of(variables[index])
        return [
            tf.IndexedSlices(
                self.tensors[values], self.tensors[rows], tf.constant(shard.shape.as_list(), tf.int64)
            )
            for (values, rows), shard in zip(slot.positions, shards, strict=True)
        ]

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


def sum_gradients(sets: Sequence[ReceivedSet], shares, application: int, index: int) -> list:
    """Returns the gradient of a variable over the sets of a step, summed in their order.

    Args:
        sets: The sets in slot order.
        shares: Function of a set's position and a dtype, its scalar share, or None for a single set.
        application: Which optimizer.
        index: Which of its variables.

    Returns:
        One tensor or `tf.IndexedSlices` for each shard.
    """
    per_set = [received.gradient(application, index) for received in sets]
    if shares is None:
        return per_set[0]
    return [_weighted_sum(parts, shares) for parts in zip(*per_set, strict=True)]


def _weighted_sum(parts, shares):
    if not isinstance(parts[0], tf.IndexedSlices):
        total = parts[0] * shares(0, parts[0].dtype)
        for position, part in enumerate(parts[1:], start=1):
            total = total + part * shares(position, part.dtype)
        return total
    values = tf.concat([p.values * shares(i, p.values.dtype) for i, p in enumerate(parts)], axis=0)
    rows = tf.concat([part.indices for part in parts], axis=0)
    unique, positions = tf.unique(rows, out_idx=tf.int64)
    summed = tf.math.unsorted_segment_sum(values, positions, tf.size(unique, out_type=tf.int64))
    return tf.IndexedSlices(tf.ensure_shape(summed, [None, *values.shape[1:]]), unique, parts[0].dense_shape)


def new_values(layout: SetLayout, sets: Sequence[ReceivedSet], shares, is_fresh: bool) -> list:
    """Returns `(variable, new value)` for everything that layers and metrics assigned.

    Totals (aggregation "sum", as in metrics) add up. Other floats of fresh sets become the mean of what the sets
    assigned, weighted by rows; a stale set did not see the present value, so that its change is added instead.
    Integers move on as one set moved them.

    Args:
        layout: The layout of the sets.
        sets: The sets of the step, in slot order.
        shares: As in `sum_gradients`.
        is_fresh: True when every set was computed on the present version.
    """
    results = []
    for index, (variable, _, change) in enumerate(layout.updates):
        with tf.device(shards_of(variable)[0].device):
            current = tf.convert_to_tensor(variable._value)
            if change is None:
                value = sets[0].new_value(index)
            elif variable.aggregation == "sum":
                value = current
                for received in sets:
                    value = value + received.change(index)
            else:
                value = _moved(
                    current, [(s.new_value(index), s.change(index)) for s in sets], shares, is_fresh
                )
            results.append((variable, tf.cast(value, variable._value.dtype)))
    return results


def _moved(current, pairs, shares, is_fresh: bool):
    averages = shares is not None and current.dtype.is_floating
    if not averages:
        new, change = pairs[0]
        return new if is_fresh else current + change
    picked = [new if is_fresh else change for new, change in pairs]
    mean = _weighted_sum(picked, shares)
    return mean if is_fresh else current + mean


def draw_logs(layout: SetLayout, sets: Sequence[ReceivedSet], shares, updated) -> object:
    """Returns the logs of a step: metric results after the update, other values averaged over the sets.

    Args:
        layout: The layout of the sets.
        sets: The sets of the step, in slot order.
        shares: As in `sum_gradients`.
        updated: `(variable, value)` pairs of the update.
    """
    results: dict = {}
    new = [(variable, value) for variable, value in updated if isinstance(variable, keras.Variable)]

    def draw(leaf):
        what, *rest = leaf.entry
        if what == "constant":
            return rest[0]
        if what == "value":
            return _log_of_sets([received.log(rest[0]) for received in sets], shares)
        metric, path = rest
        if id(metric) not in results:
            results[id(metric)] = metric.result()
        return at_path(results[id(metric)], path)

    with keras.StatelessScope(state_mapping=new, initialize_variables=False), frames.entered(None):
        return tf.nest.map_structure(draw, layout.logs)


def _log_of_sets(values, shares):
    if shares is None:
        return values[0]
    if values[0].dtype.is_floating:
        return _weighted_sum(values, shares)
    return tf.add_n(values) if values[0].dtype.is_integer else values[0]


def shares_of(sets: Sequence[ReceivedSet], fixed_share: float | None = None):
    """Returns the function of a set's position and a dtype that gives its part of the step; None for all of it.

    Args:
        sets: The sets in slot order.
        fixed_share: The share of every set, where losses are sums and were multiplied by its inverse.
    """
    if fixed_share is not None:
        return lambda position, dtype: tf.constant(fixed_share, dtype)
    if len(sets) == 1:
        return None
    with tf.device(FIRST_PS):
        weights = [received.weight for received in sets]
        total = tf.add_n(weights)
        shares = [tf.math.divide_no_nan(weight, total) for weight in weights]
    return lambda position, dtype: tf.cast(shares[position], dtype)


def sharded_whole(parts: Sequence[tf.Tensor]):
    """Returns the whole gradient of a variable whose shards' parts are given, sparse ones with global rows."""
    if len(parts) == 1:
        return parts[0]
    if not isinstance(parts[0], tf.IndexedSlices):
        return tf.concat(parts, axis=0)
    starts, start = [], tf.constant(0, parts[0].indices.dtype)
    for part in parts:
        starts.append(start)
        start = start + tf.cast(part.dense_shape[0], start.dtype)
    return tf.IndexedSlices(
        tf.concat([part.values for part in parts], axis=0),
        tf.concat([part.indices + begin for part, begin in zip(parts, starts, strict=True)], axis=0),
        tf.concat([[tf.cast(start, tf.int64)], parts[0].dense_shape[1:]], axis=0),
    )


def split_whole(variable, gradient) -> list:
    """Returns one gradient for each shard of a variable, out of the gradient of the whole of it."""
    shards = shards_of(variable)
    if len(shards) == 1:
        return [gradient]
    if not isinstance(gradient, tf.IndexedSlices):
        return tf.split(gradient, [shard.shape[0] for shard in shards])
    owner, local = owner_of_rows(shards, gradient.indices)
    values = tf.dynamic_partition(gradient.values, owner, len(shards))
    rows = tf.dynamic_partition(local, owner, len(shards))
    shapes = [tf.constant(shard.shape.as_list(), tf.int64) for shard in shards]
    return [tf.IndexedSlices(v, r, s) for v, r, s in zip(values, rows, shapes, strict=True)]


def joined(first: ReceivedSet, second: ReceivedSet) -> list[tf.Tensor]:
    """Returns the tensors of one set that says what two sets of one worker and one base version say.

    Gradients are summed (Downpour's accrued gradient), changes of variables add up, and logs are averaged by rows.

    Args:
        first: The earlier set.
        second: The later one.
    """
    layout = first.layout
    tensors = list(first.tensors)
    for gradients in layout._gradients:
        for slot in gradients:
            if isinstance(slot, _DenseSlot):
                for position in slot.positions:
                    tensors[position] = first.tensors[position] + second.tensors[position]
                continue
            for values, rows in slot.positions:
                tensors[values], tensors[rows] = _sum_rows(first, second, values, rows)
    for _, new, change in layout.updates:
        if change is None:
            tensors[new] = second.tensors[new]
        else:
            tensors[new] = first.tensors[new] + second.tensors[change]
            tensors[change] = first.tensors[change] + second.tensors[change]
    for leaf in tf.nest.flatten(layout.logs):
        if leaf.entry[0] == "value":
            position = leaf.entry[1]
            tensors[position] = _mean_log(first, second, position)
    tensors[layout._weight] = first.weight + second.weight
    return tensors


def _sum_rows(first, second, values, rows):
    indices = tf.concat([first.tensors[rows], second.tensors[rows]], axis=0)
    both = tf.concat([first.tensors[values], second.tensors[values]], axis=0)
    unique, positions = tf.unique(indices, out_idx=tf.int64)
    summed = tf.math.unsorted_segment_sum(both, positions, tf.size(unique, out_type=tf.int64))
    return tf.ensure_shape(summed, [None, *both.shape[1:]]), unique


def _mean_log(first, second, position):
    one, other = first.tensors[position], second.tensors[position]
    if not one.dtype.is_floating:
        return one + other if one.dtype.is_integer else other
    total = first.weight + second.weight
    return one * tf.cast(first.weight / total, one.dtype) + other * tf.cast(second.weight / total, one.dtype)
