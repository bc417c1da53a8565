"""What could be done better? Each suggestion is simulated, and its gain is the difference."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from tfdist_ext.placement.machine import Machine
from tfdist_ext.placement.operations import OperationGraph
from tfdist_ext.placement.plans import first_excess
from tfdist_ext.placement.report import Suggestion
from tfdist_ext.placement.schedule import Schedule, Transfer, list_order, simulate, transfers

_MOST_TRANSFERS = 20
_MOST_SUGGESTIONS = 8
_HALVES = {"float32": "bfloat16", "float64": "float32"}


def suggestions(
    traced, placement: Mapping[str, str], machine: Machine, schedule: Schedule
) -> list[Suggestion]:
    """Returns what makes the predicted step shorter, the largest gain first.

    Args:
        traced: `trace.Traced`.
        placement: Device of each operation.
        machine: The devices.
        schedule: The prediction for them.
    """
    graph = traced.graph
    crossing = sorted(transfers(graph, placement), key=lambda one: -one.num_bytes)[:_MOST_TRANSFERS]
    found = [
        *_moves(graph, placement, machine, schedule, crossing),
        *_casts(graph, placement, machine, schedule, crossing),
        *_sparse(traced, placement, machine, schedule),
        *_overlaps(graph, placement, machine, schedule, crossing),
    ]
    found = [one for one in found if one.gain_seconds > 1e-3 * schedule.seconds]
    return sorted(found, key=lambda one: -one.gain_seconds)[:_MOST_SUGGESTIONS]


def _moves(
    graph: OperationGraph, placement, machine, schedule, crossing: Sequence[Transfer]
) -> list[Suggestion]:
    """Bring the operation to the data, or the data's maker to the operation."""
    found: dict[tuple[str, str], Suggestion] = {}
    order = list_order(graph, machine)
    for transfer in crossing:
        moves = [(consumer, transfer.source) for consumer in transfer.consumers[:3]]
        for name, device in [*moves, (transfer.producer, transfer.destination)]:
            group = graph.group_of(name)
            # Variables stay where they are, and what goes into the function comes from where the caller has it.
            fixed = any(graph.operations[one].pinned for one in graph.groups[group])
            if (group, device) in found or fixed or placement[name] == device:
                continue
            moved = {**placement, **dict.fromkeys(graph.groups[group], device)}
            tried = simulate(graph, moved, machine, order)
            if first_excess(tried, machine) is None:
                first = graph.groups[group][0]
                text = f"move {first} from {placement[name]} to {device}, where its data are"
                found[group, device] = Suggestion(text=text, gain_seconds=schedule.seconds - tried.seconds)
    return list(found.values())


def _casts(graph: OperationGraph, placement, machine, schedule, crossing) -> list[Suggestion]:
    found = []
    for transfer in crossing:
        half = _HALVES.get(transfer.dtype)
        if half is None:
            continue
        edges = [
            dataclasses.replace(edge, num_bytes=edge.num_bytes // 2)
            if (edge.producer, edge.output) == (transfer.producer, transfer.output)
            else edge
            for edge in graph.edges
        ]
        tried = simulate(OperationGraph(graph.operations.values(), edges), placement, machine)
        text = f"send {transfer.producer}:{transfer.output} to {transfer.destination} as {half}"
        found.append(Suggestion(text=text, gain_seconds=schedule.seconds - tried.seconds))
    return found


def _sparse(traced, placement, machine, schedule) -> list[Suggestion]:
    """A gather's gradient that is made dense costs the whole table; sparse, the rows."""
    found = []
    for name in traced.densified:
        rows = sum(edge.num_bytes for edge in traced.graph.incoming(name))
        operations = {**traced.graph.operations}
        operations[name] = dataclasses.replace(operations[name], output_bytes=(rows,), flops=0.0)
        edges = [
            dataclasses.replace(edge, num_bytes=min(edge.num_bytes, rows)) if edge.producer == name else edge
            for edge in traced.graph.edges
        ]
        tried = simulate(OperationGraph(operations.values(), edges), placement, machine)
        text = (
            f"keep the gradient at {name} sparse (IndexedSlices): {rows:,} bytes in place of the whole table"
        )
        found.append(Suggestion(text=text, gain_seconds=schedule.seconds - tried.seconds))
    return found


def _overlaps(graph: OperationGraph, placement, machine, schedule, crossing) -> list[Suggestion]:
    """A tensor that is made late only because its device did other things first can be sent while those run."""
    found = []
    order = list_order(graph, machine)
    for transfer in crossing[:5]:
        before = _ancestors(graph, transfer.producer)
        early = [name for name in order if name in before] + [name for name in order if name not in before]
        tried = simulate(graph, placement, machine, early)
        text = (
            f"make {transfer.producer} first on {transfer.source}: sending it to {transfer.destination} then overlaps "
            "with the rest"
        )
        found.append(Suggestion(text=text, gain_seconds=schedule.seconds - tried.seconds))
    return found


def _ancestors(graph: OperationGraph, name: str) -> set[str]:
    found, pending = {name}, [name]
    while pending:
        for edge in graph.incoming(pending.pop()):
            if edge.producer not in found:
                found.add(edge.producer)
                pending.append(edge.producer)
    return found
