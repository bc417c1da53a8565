"""What has to run, and what flows between? Pure: a graph of operations as planners see it.

A traced function becomes one with nested functions and the bodies of conditionals and loops flattened into it; by hand
it is made from a few lines.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Iterable, Mapping


@dataclasses.dataclass(frozen=True, kw_only=True)
class Operation:
    """One operation.

    Attributes:
        name: Unique in the graph.
        kind: TensorFlow's type, such as "MatMul".
        flops: Floating-point operations of one run.
        output_bytes: Size of each output; 0 where it is unknown.
        resident_bytes: Bytes that stay on its device from one step to the next: a variable with its slots.
        group: Operations of one group must share a device; "" for none.
        pinned: The device it must be on, or None.
        requested: The device the graph asks for; "" for none.
        times: How often it runs in a step: more than once in a loop.
        seconds: Measured seconds by device name, in place of a cost model's.
    """

    name: str
    kind: str = ""
    flops: float = 0.0
    output_bytes: tuple[int, ...] = ()
    resident_bytes: int = 0
    group: str = ""
    pinned: str | None = None
    requested: str = ""
    times: int = 1
    seconds: Mapping[str, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Edge:
    """One tensor on its way to one operation, or the mere order of two.

    Attributes:
        producer: Name of the operation that makes it.
        output: Which of its outputs; -1 for mere order.
        consumer: Name of the operation that takes it.
        num_bytes: Its size; 0 for mere order.
        dtype: TensorFlow's name, such as "float32".
        shape: Its shape, None for unknown sizes; None where not even the rank is known.
        sparse: True for a part of `IndexedSlices` or of a SparseTensor.
    """

    producer: str
    consumer: str
    output: int = 0
    num_bytes: int = 0
    dtype: str = ""
    shape: tuple[int | None, ...] | None = None
    sparse: bool = False

    @property
    def is_control(self) -> bool:
        """True for mere order."""
        return self.output < 0


class OperationGraph:
    """Operations and edges without a cycle.

    Args:
        operations: In any order.
        edges: Between them.

    Raises:
        ValueError: A name is there twice or unknown, or the edges make a cycle.

    Attributes:
        operations: By name, in a topological order: the order they were given in, as far as possible.

    Example:
        >>> graph = OperationGraph([Operation(name="a"), Operation(name="b")], [Edge(producer="a", consumer="b")])
        >>> list(graph.operations), [edge.consumer for edge in graph.outgoing("a")]
        (['a', 'b'], ['b'])
    """

    def __init__(self, operations: Iterable[Operation], edges: Iterable[Edge]):
        listed = list(operations)
        by_name = {operation.name: operation for operation in listed}
        if len(by_name) != len(listed):
            raise ValueError("Argument `operations` must have distinct names.")
        self._incoming: dict[str, list[Edge]] = {name: [] for name in by_name}
        self._outgoing: dict[str, list[Edge]] = {name: [] for name in by_name}
        for edge in edges:
            for name in (edge.producer, edge.consumer):
                if name not in by_name:
                    raise ValueError(f"Argument `edges` must connect known operations; {name!r} is none.")
            self._incoming[edge.consumer].append(edge)
            self._outgoing[edge.producer].append(edge)
        self.operations = {name: by_name[name] for name in self._topological(list(by_name))}
        self.groups: dict[str, list[str]] = {}
        for name, operation in self.operations.items():
            self.groups.setdefault(operation.group or f"operation {name}", []).append(name)

    def __len__(self) -> int:
        return len(self.operations)

    @property
    def edges(self) -> list[Edge]:
        """All edges, by producer."""
        return [edge for name in self.operations for edge in self._outgoing[name]]

    def incoming(self, name: str) -> list[Edge]:
        """Edges that an operation waits for."""
        return self._incoming[name]

    def outgoing(self, name: str) -> list[Edge]:
        """Edges that an operation feeds."""
        return self._outgoing[name]

    def group_of(self, name: str) -> str:
        """Key of `groups`; an operation without a group is one of its own."""
        return self.operations[name].group or f"operation {name}"

    def pinned_device_of(self, group: str) -> str | None:
        """The device that members of a group must be on, or None.

        Raises:
            ValueError: Two members must be on different ones.
        """
        devices = {self.operations[name].pinned for name in self.groups[group]} - {None}
        if len(devices) > 1:
            raise ValueError(
                f"Operations of group {group!r} must share a device, but are pinned to {sorted(map(str, devices))}."
            )
        return next(iter(devices), None)

    def _topological(self, names: list[str]) -> list[str]:
        position = {name: index for index, name in enumerate(names)}
        waiting = {name: len(self._incoming[name]) for name in names}
        ready = [position[name] for name in names if not waiting[name]]
        heapq.heapify(ready)
        ordered = []
        while ready:
            name = names[heapq.heappop(ready)]
            ordered.append(name)
            for edge in self._outgoing[name]:
                waiting[edge.consumer] -= 1
                if not waiting[edge.consumer]:
                    heapq.heappush(ready, position[edge.consumer])
        if len(ordered) != len(names):
            stuck = sorted(name for name in names if waiting[name] > 0)
            raise ValueError(f"Argument `edges` must have no cycle; there is one through {stuck[:5]}.")
        return ordered
