"""Which tensors are rows of a table rather than the whole of it? Pure: found from what takes them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from tfdist_ext.placement.operations import Edge, Operation

_SPARSE_UPDATES = ("ResourceScatter", "ResourceSparseApply")
# Their inputs that are rows or numbers of rows, as TensorFlow names them.
_ROW_INPUTS = ("indices", "updates", "grad")
_SAME_ROWS = ("Identity", "Reshape", "Cast", "Neg", "StopGradient", "Unique")
_GATHERS = ("ResourceGather", "Gather", "GatherV2")


def takes_rows(kind: str, input_name: str) -> bool:
    """Returns True for an input of a sparse update that is a part of `IndexedSlices`.

    Args:
        kind: Type of the operation.
        input_name: Name of the input in its definition.

    Example:
        >>> takes_rows("ResourceScatterSub", "updates"), takes_rows("ResourceSparseApplyAdagrad", "lr")
        (True, False)
    """
    return kind.startswith(_SPARSE_UPDATES) and input_name in _ROW_INPUTS


def mark_rows(operations: Mapping[str, Operation], edges: Sequence[Edge]) -> list[Edge]:
    """Marks what becomes rows on its way, too: what goes into operations that hand rows on.

    Args:
        operations: By name, each behind what it waits for.
        edges: Those into sparse updates are marked already.
    """
    marked = list(edges)
    incoming: dict[str, list[int]] = {}
    outgoing: dict[str, list[int]] = {}
    for index, edge in enumerate(marked):
        if not edge.is_control:
            incoming.setdefault(edge.consumer, []).append(index)
            outgoing.setdefault(edge.producer, []).append(index)
    for name in reversed(list(operations)):
        out, into = outgoing.get(name, []), incoming.get(name, [])
        if out and into and all(marked[index].sparse for index in out):
            for index in _rows_into(operations[name].kind, into, marked):
                marked[index] = dataclasses.replace(marked[index], sparse=True)
    return marked


def _rows_into(kind: str, into: Sequence[int], edges: Sequence[Edge]) -> list[int]:
    if kind in _SAME_ROWS:
        return [into[0]]
    if kind == "UnsortedSegmentSum":
        return list(into[:2])
    if kind in ("Mul", "RealDiv", "AddN", "AddV2"):
        return [index for index in into if edges[index].shape != ()]
    return []


def densified_gradients(operations: Mapping[str, Operation], edges: Iterable[Edge]) -> tuple[str, ...]:
    """Returns the operations that add the rows of a gather's gradient up into a tensor as large as the table."""
    into: dict[str, list[Edge]] = {}
    for edge in edges:
        if not edge.is_control:
            into.setdefault(edge.consumer, []).append(edge)
    tables: dict[tuple[str, int], set[int]] = {}
    for name, operation in operations.items():
        if operation.kind in _GATHERS and len(into.get(name, ())) >= 2:
            table, rows = into[name][:2]
            size = table.num_bytes or operations[table.producer].resident_bytes
            tables.setdefault(_origin(rows, operations, into), set()).add(size)
    found = []
    for name, operation in operations.items():
        if operation.kind == "UnsortedSegmentSum" and operation.output_bytes[0]:
            rows = into[name][1]
            if operation.output_bytes[0] in tables.get(_origin(rows, operations, into), ()):
                found.append(name)
    return tuple(found)


def _origin(edge: Edge, operations, into) -> tuple[str, int]:
    """Returns where numbers of rows come from, before they were reshaped."""
    while operations[edge.producer].kind in _SAME_ROWS and edge.producer in into:
        edge = into[edge.producer][0]
    return edge.producer, edge.output
