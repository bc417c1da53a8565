"""HEFT: the operation with the longest way to the end first, where it ends first, in gaps too."""

from __future__ import annotations

import bisect

from tfdist_ext.placement.machine import Machine
from tfdist_ext.placement.operations import OperationGraph
from tfdist_ext.placement.planners.choices import Choices
from tfdist_ext.placement.schedule import list_order


def place(graph: OperationGraph, machine: Machine) -> dict[str, str]:
    """Returns the device of each operation.

    Raises:
        InfeasiblePlacementError: An operation fits nowhere.

    References:
        Topcuoglu, Hariri and Wu, "Performance-Effective and Low-Complexity Task Scheduling for Heterogeneous
        Computing", IEEE TPDS, 2002.
    """
    choices = Choices(graph, machine)
    partial = choices.partial
    busy: dict[str, list[tuple[float, float]]] = {device.name: [] for device in machine.devices}
    for name in list_order(graph, machine):
        best = None
        for device in choices.devices_for(name):
            seconds = partial.seconds_of(name, device)
            start = _first_gap(busy[device], partial.ready_at(name, device)[0], seconds)
            if best is None or start + seconds < best[0]:
                best = start + seconds, start, device
        assert best is not None  # `devices_for` returns at least one.
        end, start, device = best
        choices.place(name, device, start)
        if end > start:
            bisect.insort(busy[device], (start, end))
    return partial.device_of


def _first_gap(busy: list[tuple[float, float]], ready: float, seconds: float) -> float:
    """Returns the earliest start at or after `ready` between the intervals of a device."""
    index = bisect.bisect_right(busy, (ready, float("inf")))
    start = ready if index == 0 else max(ready, busy[index - 1][1])
    while index < len(busy) and busy[index][0] < start + seconds:
        start = max(start, busy[index][1])
        index += 1
    return start
