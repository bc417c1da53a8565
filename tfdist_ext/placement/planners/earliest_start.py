"""m-ETF and m-SCT: of all ready operations and devices with room, the pair that can start first.

m-SCT gives each operation at most one favourite among those that follow it, which then runs on its device: worth it
where sending takes no longer than computing.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping

from tfdist_ext.placement.machine import Machine
from tfdist_ext.placement.operations import OperationGraph
from tfdist_ext.placement.planners.choices import Choices
from tfdist_ext.placement.schedule import upward_ranks


def place(
    graph: OperationGraph, machine: Machine, favourite_parent: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Returns the device of each operation.

    Args:
        graph: The operations.
        machine: The devices.
        favourite_parent: For m-SCT, the operation whose favourite each one is; None for m-ETF.

    Raises:
        InfeasiblePlacementError: An operation fits nowhere.

    References:
        Jeon et al., "Baechi: Fast Device Placement of Machine Learning Graphs", SoCC 2020; Hwang et al., "Scheduling
        Precedence Graphs in Systems with Interprocessor Communication Times", SIAM J. Computing, 1989 (ETF); Hanen and
        Munier, "An Approximation Algorithm for Scheduling Dependent Tasks on m Processors with Small Communication
        Delays", 1995 (SCT).
    """
    choices = Choices(graph, machine)
    queue = _ReadyQueue(graph, machine, choices, favourite_parent or {})
    waiting = {name: len(graph.incoming(name)) for name in graph.operations}
    for name in graph.operations:
        if not waiting[name]:
            queue.add(name)
    while len(choices.partial.device_of) < len(graph):
        name, device = queue.pop()
        choices.place(name, device)
        for edge in graph.outgoing(name):
            waiting[edge.consumer] -= 1
            if not waiting[edge.consumer]:
                queue.add(edge.consumer)
    return choices.partial.device_of


class _ReadyQueue:
    """Ready operations, for each device by when their inputs are there."""

    def __init__(self, graph, machine, choices: Choices, favourite_parent: Mapping[str, str]):
        self._graph, self._choices, self._favourite_parent = graph, choices, favourite_parent
        self._ranks = upward_ranks(graph, machine)
        self._position = {name: index for index, name in enumerate(graph.operations)}
        # Inputs on their way, by arrival; and those that only wait for the device, by rank.
        self._coming: dict[str, list] = {device.name: [] for device in machine.devices}
        self._there: dict[str, list] = {device.name: [] for device in machine.devices}

    def add(self, name: str) -> None:
        """Takes an operation all of whose inputs are made."""
        for device in self._coming:
            at = self._choices.partial.ready_at(name, device)[0]
            heapq.heappush(self._coming[device], (at, self._key(name), name))

    def pop(self) -> tuple[str, str]:
        """Returns the operation and the device that can begin first."""
        partial = self._choices.partial
        best = None
        for index, device in enumerate(self._coming):
            candidate = self._first(device, partial.free_at[device])
            if candidate is not None:
                start, name = candidate
                key = (start, not self._is_favourite(name, device), self._key(name), index)
                if best is None or key < best[0]:
                    best = key, name, device
        assert best is not None  # The graph has no cycle, so that something is ready.
        _, name, device = best
        allowed = self._choices.devices_for(name)
        if device not in allowed:
            # No room there, or its group is elsewhere.
            device = min(allowed, key=lambda one: partial.earliest_start(name, one))
        return name, device

    def _key(self, name: str) -> tuple[float, int]:
        return -self._ranks[name], self._position[name]

    def _is_favourite(self, name: str, device: str) -> bool:
        parent = self._favourite_parent.get(name)
        return parent is not None and self._choices.partial.device_of.get(parent) == device

    def _first(self, device: str, free_at: float) -> tuple[float, str] | None:
        coming, there = self._coming[device], self._there[device]
        placed = self._choices.partial.device_of
        while coming and (coming[0][2] in placed or coming[0][0] <= free_at):
            _, key, name = heapq.heappop(coming)
            if name not in placed:
                heapq.heappush(there, (not self._is_favourite(name, device), key, name))
        while there and there[0][2] in placed:
            heapq.heappop(there)
        if there:
            return free_at, there[0][2]
        return (coming[0][0], coming[0][2]) if coming else None
