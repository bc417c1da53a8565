"""Which planner? Each by name, or the best of all."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

from tfdist_ext.placement.machine import Machine
from tfdist_ext.placement.operations import OperationGraph
from tfdist_ext.placement.planners import (
    brute_force,
    earliest_start,
    favourites,
    greedy,
    heft,
    min_cut,
    refinement,
)
from tfdist_ext.placement.plans import (
    InfeasiblePlacementError,
    Plan,
    evaluated,
    first_excess,
    plan_of_schedule,
)
from tfdist_ext.placement.schedule import list_order, simulate

_LARGEST_FOR_SCT = 1500


def _m_sct(graph: OperationGraph, machine: Machine) -> dict[str, str]:
    return earliest_start.place(graph, machine, favourites.favourite_parents(graph, machine))


_PLANNERS: dict[str, Callable[[OperationGraph, Machine], dict[str, str]]] = {
    "greedy": greedy.place,
    "heft": heft.place,
    "m-etf": earliest_start.place,
    "m-sct": _m_sct,
    "min-cut": min_cut.place,
    "brute-force": brute_force.place,
}
METHODS = ("auto", *_PLANNERS)


def plan_graph(graph: OperationGraph, machine: Machine, method: str = "auto") -> Plan:
    """Plans a graph.

    Args:
        graph: The operations.
        machine: The devices, with memory and links.
        method: "greedy", "heft", "m-etf", "m-sct", "min-cut", "brute-force", or "auto": the shortest prediction of the
            planners and of each single device, made better by moving single groups. The list planners by themselves
            are no worse than the best single device either.

    Returns:
        The plan. The same arguments give the same plan.

    Raises:
        InfeasiblePlacementError: No placement that was tried fits into memory; it names the device and what is missing.
        ValueError: `method` is unknown.
    """
    if method not in METHODS:
        raise ValueError(f"Argument `method` must be one of {', '.join(METHODS)}; received {method!r}.")
    if method in ("brute-force", "min-cut"):
        plan = evaluated(graph, _PLANNERS[method](graph, machine), machine, method)
        _require_memory(plan, machine)
        return plan
    names = ["greedy", "heft", "m-etf", "m-sct", "min-cut"] if method == "auto" else [method]
    if method == "auto" and (len(graph) > _LARGEST_FOR_SCT or importlib.util.find_spec("scipy") is None):
        names.remove("m-sct")
    candidates, failures = _candidates(graph, machine, names)
    if not candidates:
        raise min(failures, key=lambda failure: failure.missing_bytes)
    candidates.sort(key=lambda plan: plan.predicted_seconds)
    if method != "auto":
        return candidates[0]
    refined = [refinement.refine(graph, machine, plan.devices) for plan in _distinct(candidates)[:3]]
    placement, schedule = min(refined, key=lambda one: one[1].seconds)
    return plan_of_schedule(graph, placement, schedule, "auto")


def _candidates(
    graph: OperationGraph, machine: Machine, names: list[str]
) -> tuple[list[Plan], list[InfeasiblePlacementError]]:
    """Returns the plans of planners and of single devices that fit, and why others do not."""
    candidates: list[Plan] = []
    failures: list[InfeasiblePlacementError] = []
    order = list_order(graph, machine)
    for name in names:
        try:
            plan = evaluated(graph, _PLANNERS[name](graph, machine), machine, name, order)
            _require_memory(plan, machine)
            candidates.append(plan)
        except InfeasiblePlacementError as error:
            failures.append(error)
    for device in machine.devices:
        placement = {
            name: graph.pinned_device_of(group) or device.name
            for group, members in graph.groups.items()
            for name in members
        }
        schedule = simulate(graph, placement, machine, order)
        if first_excess(schedule, machine) is None:
            candidates.append(plan_of_schedule(graph, placement, schedule, names[0]))
    return candidates, failures


def _distinct(plans: list[Plan]) -> list[Plan]:
    seen: list[Plan] = []
    for plan in plans:
        if all(plan.devices != other.devices for other in seen):
            seen.append(plan)
    return seen


def _require_memory(plan: Plan, machine: Machine) -> None:
    for device in machine.devices:
        missing = plan.peak_bytes[device.name] - device.memory_bytes
        if missing > 0:
            raise InfeasiblePlacementError(
                f"The placement by {plan.method} does not fit: {device.name} is {int(missing):,} bytes too small at "
                "its peak. Give it more memory (`memory_bytes`), add a device, or make the model smaller.",
                device=device.name,
                missing_bytes=int(missing),
            )
