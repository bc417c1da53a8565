"""On which ps does a variable live?

Each new variable goes to the ps that holds the fewest bytes, its slots beside it. Variables are made one at a time,
so that this is not yet largest-first: `place_largest_first` moves those of a model once all of them are known.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import weakref

import tensorflow as tf

from tfdist_ext import compat
from tfdist_ext.placement import PlacementRow, PlacementTable, largest_first


@dataclasses.dataclass(eq=False)
class _Placed:
    name: str
    num_bytes: int
    task: int
    variable: weakref.ref
    slots: list[weakref.ref] = dataclasses.field(default_factory=list)

    @property
    def slot_bytes(self) -> int:
        return sum(_num_bytes(slot) for slot in (ref() for ref in self.slots) if slot is not None)


def _num_bytes(variable) -> int:
    return variable.shape.num_elements() * variable.dtype.size


def mark_lazy(variable) -> None:
    """Lets every optimizer update only the touched rows of a table: for Adam and momentum another algorithm."""
    variable._tfdist_lazy_rows = True


def is_lazy(variable) -> bool:
    """Returns True for a table that `mark_lazy` was called on."""
    return getattr(variable, "_tfdist_lazy_rows", False)


def device_of_task(task: int) -> str:
    """Returns the device that holds the variables of a ps."""
    return f"/job:ps/replica:0/task:{task}/device:CPU:0"


def task_of_device(device: str) -> int:
    """Returns the index of the ps of a device name."""
    return int(tf.DeviceSpec.from_string(device).task or 0)


class VariablePlacer:
    """Chooses a ps for each new variable, and keeps the table.

    Args:
        num_ps: Number of ps.
        partitioner: Function of `shape` and `dtype` that returns the number of shards along each dimension, or None.
    """

    def __init__(self, num_ps: int, partitioner=None):
        self._num_ps = num_ps
        self._partitioner = partitioner
        self._placed: dict[str, _Placed] = {}
        self._task: int | None = None

    def create(self, next_creator, kwargs: dict):
        """Creates a variable, or the shards of one.

        Args:
            next_creator: TensorFlow's function that creates a variable from keyword arguments.
            kwargs: Its keyword arguments.

        Returns:
            A `tf.Variable` on a ps, or a `ShardedVariable`.
        """
        beside = kwargs.pop("colocate_with", None)
        if (
            beside is not None
            and not hasattr(beside, "device")
            and not isinstance(beside, compat.ShardedVariable)
        ):
            beside = None
        initial, dtype = kwargs.get("initial_value"), kwargs.get("dtype")
        first = self._least_loaded() if self._task is None else self._task
        # Where it will live, so that a large table does not pass through the chief.
        with tf.device(device_of_task(first)):
            initial = tf.convert_to_tensor(initial() if callable(initial) else initial, dtype=dtype)
        kwargs.update(initial_value=initial, dtype=initial.dtype)
        if initial.shape.num_elements() == 1 and self._task is None:
            first = 0  # Metrics and counters together: the first ps draws the logs from them.
        if isinstance(beside, compat.ShardedVariable):
            if initial.shape == beside.shape:
                sizes = [shard.shape[0] for shard in beside.variables]
                return self._create_shards(next_creator, kwargs, sizes, list(beside.variables))
            beside = beside.variables[0]
        if beside is not None:
            return self._create_one(next_creator, kwargs, task_of_device(beside.device), beside)
        sizes = self._shard_sizes(initial.shape, initial.dtype)
        if len(sizes) == 1:
            return self._create_one(next_creator, kwargs, first)
        return self._create_shards(next_creator, kwargs, sizes, None)

    @contextlib.contextmanager
    def splitting_by(self, partitioner):
        """Splits the variables that are made meanwhile by another partitioner; None leaves the strategy's."""
        before = self._partitioner
        self._partitioner = partitioner or before
        try:
            yield
        finally:
            self._partitioner = before

    def _shard_sizes(self, shape: tf.TensorShape, dtype: tf.DType) -> list[int]:
        if self._partitioner is None or self._task is not None or not shape.rank:
            return [shape[0] if shape.rank else 1]
        wanted = list(self._partitioner(shape=shape, dtype=dtype))
        if not wanted or wanted[0] < 1 or any(number != 1 for number in wanted[1:]):
            raise ValueError(
                "Argument `variable_partitioner` must return a number of shards for the first dimension and 1 for all "
                f"others; it returned {wanted} for shape {shape}."
            )
        # As tf.distribute does it: shards differ by one row at most, the longer ones first.
        number = min(wanted[0], shape[0])
        return [shape[0] // number + (index < shape[0] % number) for index in range(number)]

    def _create_shards(self, next_creator, kwargs, sizes, beside):
        initial, name = kwargs["initial_value"], kwargs.get("name") or "Variable"
        shards, start = [], 0
        for index, size in enumerate(sizes):
            part = {**kwargs, "name": f"{name}/part_{index}"}
            task = self._least_loaded() if beside is None else task_of_device(beside[index].device)
            with tf.device(initial.device):
                part["initial_value"] = initial[start : start + size]
            part.pop("shape", None)
            neighbour = None if beside is None else beside[index]
            shards.append(self._create_one(next_creator, part, task, neighbour))
            start += size
        return compat.ShardedVariable(shards, name=name)

    def _create_one(self, next_creator, kwargs, task: int, beside=None):
        with tf.device(device_of_task(task)):
            variable = next_creator(**kwargs)
        owner = None if beside is None else self._placed.get(beside._unique_id)
        if owner is not None:
            owner.slots.append(weakref.ref(variable))
        else:
            name = variable.name.split(":")[0]
            self._placed[variable._unique_id] = _Placed(
                name, _num_bytes(variable), task, weakref.ref(variable)
            )
        return variable

    def name(self, variable, name: str) -> None:
        """Gives a variable the name it has in its model, for the table."""
        placed = self._placed.get(variable._unique_id)
        if placed is not None:
            placed.name = name

    def place_largest_first(self, variables) -> dict:
        """Moves variables to where largest-first puts them; their values stay what they are.

        Args:
            variables: `tf.Variable`s of a model, whole ones, without slots yet.

        Returns:
            Maps each variable that had to move to the new one, keyed by its `_unique_id`.
        """
        keys = [v._unique_id for v in variables if self._may_move(v)]
        by_key = {variable._unique_id: variable for variable in variables if variable._unique_id in keys}
        occupied = [0] * self._num_ps
        for key, placed in self._living().items():
            if key not in by_key:
                occupied[placed.task] += placed.num_bytes + placed.slot_bytes
        sizes = {key: self._placed[key].num_bytes for key in keys}
        tasks = largest_first(sizes, self._num_ps, occupied)
        if max(self._loads_after(tasks, sizes, occupied)) >= max(self._loads()):
            return {}
        return {
            key: self._move(by_key[key], task)
            for key, task in tasks.items()
            if self._placed[key].task != task
        }

    def _may_move(self, variable) -> bool:
        placed = self._placed.get(variable._unique_id)
        return placed is not None and placed.variable() is variable and not placed.slot_bytes

    def _loads_after(self, tasks, sizes, occupied) -> list[int]:
        loads = list(occupied)
        for key, task in tasks.items():
            loads[task] += sizes[key]
        return loads

    def _move(self, variable, task: int):
        placed = self._placed.pop(variable._unique_id)
        self._task = task
        try:
            with tf.device(device_of_task(task)):
                moved = tf.Variable(
                    variable.read_value(), trainable=variable.trainable, name=variable.name.split(":")[0],
                    aggregation=variable.aggregation, synchronization=variable.synchronization,
                )  # fmt: skip
        finally:
            self._task = None
        self._placed.pop(moved._unique_id, None)
        # Optimizers that know it already find its slots by this.
        moved._unique_id = variable._unique_id
        self._placed[moved._unique_id] = dataclasses.replace(
            placed, task=task, variable=weakref.ref(moved), slots=[]
        )
        return moved

    def _living(self) -> dict[str, _Placed]:
        for key in [key for key, placed in self._placed.items() if placed.variable() is None]:
            del self._placed[key]
        return self._placed

    def _loads(self) -> list[int]:
        loads = [0] * self._num_ps
        for placed in self._living().values():
            loads[placed.task] += placed.num_bytes + placed.slot_bytes
        return loads

    def _least_loaded(self) -> int:
        loads = self._loads()
        return loads.index(min(loads))

    def table(self) -> PlacementTable:
        """Returns which ps holds what."""
        seen: collections.Counter = collections.Counter()
        rows = []
        for placed in self._living().values():
            seen[placed.name] += 1
            name = placed.name if seen[placed.name] == 1 else f"{placed.name} ({seen[placed.name]})"
            variable = placed.variable()
            task = placed.task if variable is None else task_of_device(variable.device)
            rows.append(
                PlacementRow(
                    variable=name, num_bytes=placed.num_bytes, slot_bytes=placed.slot_bytes, task=task
                )
            )
        return PlacementTable(tuple(rows), self._num_ps)
