"""Brute force: every placement of a small graph, the best of all in list order."""

from __future__ import annotations

import itertools

from tfdist_ext.placement.machine import Machine
from tfdist_ext.placement.operations import OperationGraph
from tfdist_ext.placement.plans import InfeasiblePlacementError, first_excess
from tfdist_ext.placement.schedule import list_order, simulate

_MOST_PLACEMENTS = 300_000


def place(graph: OperationGraph, machine: Machine) -> dict[str, str]:
    """Returns the placement of the shortest prediction; of equals, the first.

    Raises:
        ValueError: There are too many placements to try.
        InfeasiblePlacementError: None fits.
    """
    devices = [device.name for device in machine.devices]
    choices = [[graph.pinned_device_of(group) or None] for group in graph.groups]
    options = [[one] if one is not None else devices for (one,) in choices]
    number = 1
    for option in options:
        number *= len(option)
    if number > _MOST_PLACEMENTS:
        raise ValueError(f'{number:,} placements are too many for method="brute-force". Try method="auto".')
    order = list_order(graph, machine)
    best: tuple[float, dict[str, str]] | None = None
    closest: tuple[int, str] | None = None
    for devices_of_groups in itertools.product(*options):
        placement = {
            name: device
            for names, device in zip(graph.groups.values(), devices_of_groups, strict=True)
            for name in names
        }
        schedule = simulate(graph, placement, machine, order)
        excess = first_excess(schedule, machine)
        if excess is not None:
            closest = min(closest or (excess[1], excess[0]), (excess[1], excess[0]))
        elif best is None or schedule.seconds < best[0]:
            best = schedule.seconds, placement
    if best is None:
        missing, device = closest or (0, devices[0])
        raise InfeasiblePlacementError(
            f"No placement fits: in the closest one {device} is {missing:,} bytes too small. Give it more memory "
            "(`memory_bytes`), add a device, or make the model smaller.",
            device=device,
            missing_bytes=missing,
        )
    return best[1]
