"""Local search: move one group after another while that helps."""

from __future__ import annotations

from collections.abc import Mapping

from tfdist_ext.placement.machine import Machine
from tfdist_ext.placement.operations import OperationGraph
from tfdist_ext.placement.plans import first_excess
from tfdist_ext.placement.schedule import Schedule, list_order, simulate

# Simulations times operations: about one second of Python.
_BUDGET = 100_000


def refine(
    graph: OperationGraph, machine: Machine, placement: Mapping[str, str]
) -> tuple[dict[str, str], Schedule]:
    """Moves single groups, those on the critical path first, as long as the prediction gets better.

    Args:
        graph: The operations.
        machine: The devices.
        placement: Where to begin; it fits.

    Returns:
        The placement and its schedule. Deterministic; the number of simulations is bounded.
    """
    order = list_order(graph, machine)
    devices = [device.name for device in machine.devices]
    current = dict(placement)
    schedule = simulate(graph, current, machine, order)
    left = max(1, _BUDGET // max(1, len(graph)))
    movable = [group for group in graph.groups if graph.pinned_device_of(group) is None]
    improved = len(devices) > 1
    while improved and left > 0:
        improved = False
        critical = set(schedule.critical_path)
        for group in sorted(movable, key=lambda group: not critical.intersection(graph.groups[group])):
            here = current[graph.groups[group][0]]
            for device in devices:
                if device == here or left <= 0:
                    continue
                left -= 1
                moved = {**current, **dict.fromkeys(graph.groups[group], device)}
                tried = simulate(graph, moved, machine, order)
                if tried.seconds < schedule.seconds * (1 - 1e-12) and first_excess(tried, machine) is None:
                    current, schedule, here, improved = moved, tried, device, True
    return current, schedule
