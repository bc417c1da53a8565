"""Which tensors of a graph depend on which?"""

from __future__ import annotations

import weakref
from typing import Any

import tensorflow as tf

# The operations below a tensor, and how many the graph had when they were counted.
_below: weakref.WeakKeyDictionary[Any, dict] = weakref.WeakKeyDictionary()


def depends_on(tensor, source) -> bool:
    """Returns True where the value of `tensor` is computed from that of `source`, both of one graph."""
    known = _below.setdefault(source.graph, {})
    num_operations, names = known.get(source.name, (-1, set()))
    current = len(source.graph.get_operations()) if tensor.op.name not in names else num_operations
    if current != num_operations:
        names = _operations_below(source)
        known[source.name] = (current, names)
    return tensor.op.name in names


def _operations_below(source) -> set[str]:
    found: set[str] = set()
    pending = list(source.consumers())
    while pending:
        operation = pending.pop()
        if operation.name in found:
            continue
        found.add(operation.name)
        for output in operation.outputs:
            pending.extend(output.consumers())
    return found


def sources(tensor, stops=()) -> list[tf.Operation]:
    """Returns the operations from which a tensor is computed, itself included.

    Args:
        tensor: Tensor of a graph.
        stops: Names of operations whose own inputs are not looked at.
    """
    found: dict[str, tf.Operation] = {}
    pending = [tensor.op]
    while pending:
        operation = pending.pop()
        if operation.name in found:
            continue
        found[operation.name] = operation
        if operation.name not in stops:
            pending.extend(value.op for value in operation.inputs)
    return list(found.values())


def is_computed_from_the_batch(tensor) -> bool:
    """Returns True where a tensor of a step's graph is computed from the rows of the batch."""
    return any(
        operation.type in ("Placeholder", "IteratorGetNext") and operation.outputs[0].dtype != tf.resource
        for operation in sources(tensor)
    )
