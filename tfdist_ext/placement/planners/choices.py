"""Where may an operation go, given what is placed already? What all list planners share."""

from __future__ import annotations

from tfdist_ext.placement.machine import Machine
from tfdist_ext.placement.operations import OperationGraph
from tfdist_ext.placement.plans import infeasible
from tfdist_ext.placement.schedule import PartialSchedule


class Choices:
    """Keeps groups together, pins where they are, and devices within their memory.

    Args:
        graph: The operations.
        machine: The devices.

    Attributes:
        partial: The schedule so far.
    """

    def __init__(self, graph: OperationGraph, machine: Machine):
        self.partial = PartialSchedule(graph, machine)
        self._graph = graph
        self._names = [device.name for device in machine.devices]
        self._fixed: dict[str, str] = {}
        for group in graph.groups:
            pinned = graph.pinned_device_of(group)
            if pinned is not None:
                machine.device(pinned)
                self._fixed[group] = pinned

    def devices_for(self, name: str) -> list[str]:
        """Returns the devices an operation may go to now.

        Raises:
            InfeasiblePlacementError: There is none.
        """
        fixed = self._fixed.get(self._graph.group_of(name))
        fits = [
            device
            for device in ([fixed] if fixed is not None else self._names)
            if not self.partial.missing_bytes(name, device)
        ]
        if not fits:
            raise infeasible(name, self.partial)
        return fits

    def place(self, name: str, device: str, start: float | None = None) -> float:
        """Places an operation, and with it its group; returns when it ends."""
        self._fixed.setdefault(self._graph.group_of(name), device)
        return self.partial.place(name, device, start)
