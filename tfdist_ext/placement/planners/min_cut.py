"""Min-cut: as few bytes as possible between devices, each with its share of the work."""

from __future__ import annotations

import heapq
from collections.abc import Mapping

from tfdist_ext.placement.machine import Machine
from tfdist_ext.placement.operations import OperationGraph
from tfdist_ext.placement.schedule import list_order


def place(
    graph: OperationGraph, machine: Machine, start: Mapping[str, str] | None = None, imbalance: float = 0.25
) -> dict[str, str]:
    """Returns the device of each operation.

    Args:
        graph: The operations.
        machine: The devices.
        start: Where to begin; None for consecutive parts of the list order.
        imbalance: By how much a device's computation may exceed its share, and by the largest group.

    References:
        Fiduccia and Mattheyses, "A Linear-Time Heuristic for Improving Network Partitions", DAC 1982; Dean et al.,
        "Large Scale Distributed Deep Networks", NIPS 2012 (a tensor is sent once to each partition).
    """
    parts = _Parts(graph, machine, start, imbalance)
    while parts.improve():
        pass
    return dict(parts.device_of)


class _Parts:
    def __init__(self, graph, machine, start, imbalance: float):
        self._graph, self._devices = graph, [device.name for device in machine.devices]
        seconds = {
            name: machine.devices[0].seconds(operation, sum(edge.num_bytes for edge in graph.incoming(name)))
            for name, operation in graph.operations.items()
        }
        self._seconds = {group: sum(seconds[name] for name in names) for group, names in graph.groups.items()}
        self._resident = {
            group: sum(graph.operations[name].resident_bytes for name in names)
            for group, names in graph.groups.items()
        }
        self._memory = {device.name: device.memory_bytes for device in machine.devices}
        total = sum(self._seconds.values())
        self._limit = max(
            (1 + imbalance) * total / len(self._devices),
            total / len(self._devices) + max(self._seconds.values(), default=0.0),
        )
        self._movable = [group for group in graph.groups if graph.pinned_device_of(group) is None]
        self.device_of = dict(start) if start is not None else self._consecutive(machine, total)
        self._loads = dict.fromkeys(self._devices, 0.0)
        self._held = dict.fromkeys(self._devices, 0)
        for group, names in graph.groups.items():
            self._loads[self.device_of[names[0]]] += self._seconds[group]
            self._held[self.device_of[names[0]]] += self._resident[group]

    def _consecutive(self, machine, total: float) -> dict[str, str]:
        """Cuts the list order into parts of equal work that hold what they can."""
        placed: dict[str, str] = {}
        held = dict.fromkeys(self._devices, 0)
        done = 0.0
        for name in list_order(self._graph, machine):
            if name in placed:
                continue
            group = self._graph.group_of(name)
            share = min(len(self._devices) - 1, int(done / total * len(self._devices))) if total else 0
            device = self._graph.pinned_device_of(group) or self._devices[share]
            if held[device] + self._resident[group] > self._memory[device]:
                device = max(self._devices, key=lambda one: self._memory[one] - held[one])
            held[device] += self._resident[group]
            placed.update(dict.fromkeys(self._graph.groups[group], device))
            done += self._seconds[group]
        return placed

    def improve(self) -> bool:
        """Moves each group at most once, best first, then takes back what did not pay; False if nothing did."""
        heap = [entry for group in self._movable for entry in self._entries(group)]
        heapq.heapify(heap)
        moved: list[tuple[str, str]] = []
        locked: set[str] = set()
        gained = best = 0
        num_kept = 0
        while heap:
            loss, _, group, device = heapq.heappop(heap)
            here = self.device_of[self._graph.groups[group][0]]
            if group in locked or device == here or not self._may_move(group, device):
                continue
            gain = self._gain(group, device)
            if -loss != gain:
                heapq.heappush(heap, (-gain, self._position(group), group, device))
                continue
            if gain < 0 and len(moved) - num_kept > 50:
                break
            moved.append((group, here))
            self._move(group, device)
            locked.add(group)
            gained += gain
            if gained > best:
                best, num_kept = gained, len(moved)
            for neighbour in self._neighbours(group):
                if neighbour not in locked and neighbour in self._seconds:
                    heap_entries = self._entries(neighbour)
                    for entry in heap_entries:
                        heapq.heappush(heap, entry)
        for group, device in reversed(moved[num_kept:]):
            self._move(group, device)
        return best > 0

    def _entries(self, group: str) -> list[tuple]:
        if self._graph.pinned_device_of(group) is not None:
            return []
        here = self.device_of[self._graph.groups[group][0]]
        position = self._position(group)
        return [
            (-self._gain(group, device), position, group, device)
            for device in self._devices
            if device != here
        ]

    def _position(self, group: str) -> int:
        if not hasattr(self, "_positions"):
            self._positions = {name: index for index, name in enumerate(self._movable)}
        return self._positions[group]

    def _may_move(self, group: str, device: str) -> bool:
        return (
            self._loads[device] + self._seconds[group] <= self._limit
            and self._held[device] + self._resident[group] <= self._memory[device]
        )

    def _move(self, group: str, device: str) -> None:
        here = self.device_of[self._graph.groups[group][0]]
        self._loads[here] -= self._seconds[group]
        self._loads[device] += self._seconds[group]
        self._held[here] -= self._resident[group]
        self._held[device] += self._resident[group]
        self.device_of.update(dict.fromkeys(self._graph.groups[group], device))

    def _neighbours(self, group: str) -> set[str]:
        found = set()
        for tensor in self._tensors(group):
            producer, _ = tensor
            found.add(self._graph.group_of(producer))
            found.update(self._graph.group_of(edge.consumer) for edge in self._graph.outgoing(producer))
        return found - {group}

    def _tensors(self, group: str) -> set[tuple[str, int]]:
        return {
            (edge.producer, edge.output)
            for name in self._graph.groups[group]
            for edge in [*self._graph.incoming(name), *self._graph.outgoing(name)]
            if not edge.is_control
        }

    def _gain(self, group: str, device: str) -> int:
        """Bytes that cross now, less those that cross when the group is on `device`."""
        members = self._graph.groups[group]
        here = self.device_of[members[0]]
        tensors = self._tensors(group)
        before = sum(map(self._crossing, tensors))
        self.device_of.update(dict.fromkeys(members, device))
        after = sum(map(self._crossing, tensors))
        self.device_of.update(dict.fromkeys(members, here))
        return before - after

    def _crossing(self, tensor: tuple[str, int]) -> int:
        producer, output = tensor
        source = self.device_of[producer]
        size, destinations = 0, set()
        for edge in self._graph.outgoing(producer):
            if edge.output == output:
                size = edge.num_bytes
                destinations.add(self.device_of[edge.consumer])
        return size * self._graph.operations[producer].times * len(destinations - {source})
