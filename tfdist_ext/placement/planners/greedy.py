"""Greedy: put each operation, as it becomes ready, where it ends first."""

from __future__ import annotations

import heapq

from tfdist_ext.placement.machine import Machine
from tfdist_ext.placement.operations import OperationGraph
from tfdist_ext.placement.planners.choices import Choices


def place(graph: OperationGraph, machine: Machine) -> dict[str, str]:
    """Returns the device of each operation.

    Raises:
        InfeasiblePlacementError: An operation fits nowhere.

    References:
        Abadi et al., "TensorFlow: Large-Scale Machine Learning on Heterogeneous Distributed Systems", 2015, section
        3.2.1.
    """
    choices = Choices(graph, machine)
    position = {name: index for index, name in enumerate(graph.operations)}
    waiting = {name: len(graph.incoming(name)) for name in graph.operations}
    ready = [(0.0, position[name], name) for name in graph.operations if not waiting[name]]
    heapq.heapify(ready)
    while ready:
        _, _, name = heapq.heappop(ready)
        partial = choices.partial
        device = min(
            choices.devices_for(name),
            key=lambda one: partial.earliest_start(name, one) + partial.seconds_of(name, one),
        )
        choices.place(name, device)
        for edge in graph.outgoing(name):
            waiting[edge.consumer] -= 1
            if not waiting[edge.consumer]:
                at = max(partial.finish[e.producer] for e in graph.incoming(edge.consumer))
                heapq.heappush(ready, (at, position[edge.consumer], edge.consumer))
    return choices.partial.device_of
