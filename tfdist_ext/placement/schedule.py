"""When does each operation run under a placement, what crosses, and what fits? Pure.

Each device runs one operation at a time, in list order. A tensor is sent once to each device that needs it, as soon as
it is made, and sending overlaps with everything. A tensor and its copies live until its last consumer has run.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from tfdist_ext.placement.machine import Machine
from tfdist_ext.placement.operations import OperationGraph


@dataclasses.dataclass(frozen=True, kw_only=True)
class Transfer:
    """A tensor that crosses from one device to another.

    Attributes:
        producer: Name of the operation.
        output: Which of its outputs.
        source: Device.
        destination: Device.
        num_bytes: Its size, times the runs of its producer.
        sparse: True for a part of `IndexedSlices`.
        dtype: TensorFlow's name.
        consumers: Operations there that take it.
    """

    producer: str
    output: int
    source: str
    destination: str
    num_bytes: int
    sparse: bool = False
    dtype: str = ""
    consumers: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Schedule:
    """What was predicted.

    Attributes:
        seconds: From the first operation to the end of the last.
        start: By operation.
        finish: By operation.
        critical_path: Operations that decide `seconds`, first to last.
        peak_bytes: By device: the most that lives at once, variables included.
    """

    seconds: float
    start: Mapping[str, float]
    finish: Mapping[str, float]
    critical_path: tuple[str, ...]
    peak_bytes: Mapping[str, int]


def upward_ranks(graph: OperationGraph, machine: Machine) -> dict[str, float]:
    """Returns for each operation the mean time from its start to the end of all, over the devices.

    References:
        Topcuoglu, Hariri and Wu, "Performance-Effective and Low-Complexity Task Scheduling for Heterogeneous
        Computing", IEEE TPDS, 2002: rank_u.
    """
    names = [device.name for device in machine.devices]
    pairs = [(a, b) for a in names for b in names]
    ranks: dict[str, float] = {}
    means: dict[int, float] = {}

    def mean_transfer(num_bytes: int) -> float:
        if num_bytes not in means:
            means[num_bytes] = sum(machine.transfer_seconds(a, b, num_bytes) for a, b in pairs) / len(pairs)
        return means[num_bytes]

    for name in reversed(graph.operations):
        operation = graph.operations[name]
        read = sum(edge.num_bytes for edge in graph.incoming(name))
        cost = sum(device.seconds(operation, read) for device in machine.devices) / len(names)
        behind = [
            (0.0 if edge.is_control else mean_transfer(edge.num_bytes * operation.times))
            + ranks[edge.consumer]
            for edge in graph.outgoing(name)
        ]
        ranks[name] = cost + max(behind, default=0.0)
    return ranks


def list_order(graph: OperationGraph, machine: Machine) -> list[str]:
    """Returns the operations by decreasing rank, never before what they wait for."""
    ranks = upward_ranks(graph, machine)
    position = {name: index for index, name in enumerate(graph.operations)}
    # Among equals the topological order: an operation that takes no time ranks as high as what it waits for.
    return sorted(graph.operations, key=lambda name: (-ranks[name], position[name]))


class PartialSchedule:
    """Operations placed one after another; each after all that it waits for.

    Args:
        graph: The operations.
        machine: The devices.

    Attributes:
        device_of: Placed operations.
        start: By operation.
        finish: By operation.
        free_at: When each device has run all that was placed on it.
        peak_bytes: By device, so far.
    """

    def __init__(self, graph: OperationGraph, machine: Machine):
        self.graph, self.machine = graph, machine
        self.device_of: dict[str, str] = {}
        self.start: dict[str, float] = {}
        self.finish: dict[str, float] = {}
        self.free_at = {device.name: 0.0 for device in machine.devices}
        self.peak_bytes = {device.name: 0 for device in machine.devices}
        self.cause: dict[str, str | None] = {}
        self._devices = {device.name: device for device in machine.devices}
        self._last_on: dict[str, str | None] = dict.fromkeys(self.free_at)
        self._live = {device.name: 0 for device in machine.devices}
        self._copies: dict[tuple[str, int, str], int] = {}
        self._left: dict[tuple[str, int], int] = {}
        for edge in graph.edges:
            if not edge.is_control:
                key = edge.producer, edge.output
                self._left[key] = self._left.get(key, 0) + 1

    def seconds_of(self, name: str, device: str) -> float:
        """Predicted time of an operation on a device."""
        read = sum(edge.num_bytes for edge in self.graph.incoming(name))
        return self._devices[device].seconds(self.graph.operations[name], read)

    def ready_at(self, name: str, device: str) -> tuple[float, str | None]:
        """When all that an operation waits for is on a device, and the producer that comes last."""
        latest, cause = 0.0, None
        for edge in self.graph.incoming(name):
            at = self.finish[edge.producer]
            if not edge.is_control:
                num_bytes = edge.num_bytes * self.graph.operations[edge.producer].times
                at += self.machine.transfer_seconds(self.device_of[edge.producer], device, num_bytes)
            if at > latest or cause is None:
                latest, cause = at, edge.producer
        return latest, cause

    def earliest_start(self, name: str, device: str) -> float:
        """When an operation could start on a device, behind all that is placed there."""
        return max(self.free_at[device], self.ready_at(name, device)[0])

    def missing_bytes(self, name: str, device: str) -> int:
        """By how much a device is too small for an operation now; 0 if it fits."""
        needed = self._live[device] + self._bytes_to_add(name, device)
        return int(max(0, needed - self._devices[device].memory_bytes))

    def place(self, name: str, device: str, start: float | None = None) -> float:
        """Places an operation and returns when it ends; `start` where it fills a gap."""
        ready, cause = self.ready_at(name, device)
        if start is None:
            start = max(self.free_at[device], ready)
        if self.free_at[device] > ready and self._last_on[device] is not None:
            cause = self._last_on[device]
        self.device_of[name], self.start[name], self.cause[name] = device, start, cause
        end = self.finish[name] = start + self.seconds_of(name, device)
        if end >= self.free_at[device]:
            self.free_at[device], self._last_on[device] = end, name
        self._remember_bytes(name, device)
        return end

    def result(self) -> Schedule:
        """Returns what was predicted once all operations are placed."""
        last = max(self.finish, key=lambda name: self.finish[name], default=None)
        path: list[str] = []
        while last is not None:
            path.append(last)
            last = self.cause[last]
        return Schedule(
            seconds=max(self.finish.values(), default=0.0), start=dict(self.start), finish=dict(self.finish),
            critical_path=tuple(reversed(path)), peak_bytes=dict(self.peak_bytes),
        )  # fmt: skip

    def _bytes_to_add(self, name: str, device: str) -> int:
        operation = self.graph.operations[name]
        copies = {
            (edge.producer, edge.output): edge.num_bytes
            for edge in self.graph.incoming(name)
            if not edge.is_control
            and self.device_of[edge.producer] != device
            and (edge.producer, edge.output, device) not in self._copies
        }
        return operation.resident_bytes + sum(operation.output_bytes) + sum(copies.values())

    def _remember_bytes(self, name: str, device: str) -> None:
        operation = self.graph.operations[name]
        self._live[device] += self._bytes_to_add(name, device)
        self.peak_bytes[device] = max(self.peak_bytes[device], self._live[device])
        for edge in self.graph.incoming(name):
            if edge.is_control:
                continue
            key = edge.producer, edge.output
            if self.device_of[edge.producer] != device:
                self._copies[(*key, device)] = edge.num_bytes
            self._left[key] -= 1
            if not self._left[key]:
                self._forget(key)
        for output, size in enumerate(operation.output_bytes):
            if (name, output) not in self._left:
                self._live[device] -= size  # Nobody takes it.

    def _forget(self, key: tuple[str, int]) -> None:
        producer, output = key
        sizes = self.graph.operations[producer].output_bytes
        if output < len(sizes):
            self._live[self.device_of[producer]] -= sizes[output]
        for device in self.free_at:
            self._live[device] -= self._copies.pop((producer, output, device), 0)


def simulate(
    graph: OperationGraph, placement: Mapping[str, str], machine: Machine, order: Sequence[str] | None = None
) -> Schedule:
    """Predicts a step under a placement.

    Args:
        graph: The operations.
        placement: Device of each.
        machine: The devices.
        order: List order; None for that of `list_order`.
    """
    partial = PartialSchedule(graph, machine)
    for name in list_order(graph, machine) if order is None else order:
        partial.place(name, placement[name])
    return partial.result()


def transfers(graph: OperationGraph, placement: Mapping[str, str]) -> list[Transfer]:
    """Returns every tensor that crosses, once for each destination, in the order of the graph."""
    consumers: dict[tuple[str, int, str], list] = {}
    for edge in graph.edges:
        if not edge.is_control and placement[edge.producer] != placement[edge.consumer]:
            consumers.setdefault((edge.producer, edge.output, placement[edge.consumer]), []).append(edge)
    return [
        Transfer(
            producer=producer, output=output, source=placement[producer], destination=destination,
            num_bytes=edges[0].num_bytes * graph.operations[producer].times, sparse=edges[0].sparse,
            dtype=edges[0].dtype, consumers=tuple(edge.consumer for edge in edges),
        )
        for (producer, output, destination), edges in consumers.items()
    ]  # fmt: skip
