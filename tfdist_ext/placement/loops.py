"""How often does a loop turn? Found out by running its counters, without its tensors."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

# A loop that turns more often than this counts as unknown: finding out would take seconds.
_MOST_TURNS = 100_000
_MOST_OPERATIONS = 30

_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "Less": operator.lt, "LessEqual": operator.le, "Greater": operator.gt, "GreaterEqual": operator.ge,
    "Equal": operator.eq, "NotEqual": operator.ne, "Add": operator.add, "AddV2": operator.add, "Sub": operator.sub,
    "Mul": operator.mul, "FloorDiv": operator.floordiv, "FloorMod": operator.mod, "Minimum": min, "Maximum": max,
    "LogicalNot": operator.not_, "Neg": operator.neg, "Identity": lambda value: value,
}  # fmt: skip
_REDUCTIONS: dict[str, Callable[..., Any]] = {"Max": np.max, "Min": np.min, "Prod": np.prod}


def turns_of(condition, body, initial: Sequence[Any]) -> tuple[int, list[Any]] | None:
    """Runs the counters of a loop.

    Args:
        condition: FuncGraph with one output.
        body: FuncGraph.
        initial: What is known of the loop variables at first: a number, or None.

    Returns:
        Number of turns, and what is known of the loop variables at the end; None where the number depends on data.
    """
    counters = _counters(condition, body)
    # What else can be followed cheaply: the loop of a gradient turns as often as the counter of this one says.
    counters |= {
        index
        for index, value in enumerate(initial)
        if value is not None and len(_operations_behind(body, [body.outputs[index]])) <= _MOST_OPERATIONS
    }
    decide = _Numbers(condition, [condition.outputs[0]])
    advance = _Numbers(body, [body.outputs[index] for index in sorted(counters)])
    values: list[Any] = [value if index in counters else None for index, value in enumerate(initial)]
    for turn in range(_MOST_TURNS):
        go_on = decide(values)[0]
        if go_on is None:
            return None
        if not go_on:
            return turn, values
        after = dict(zip(sorted(counters), advance(values), strict=True))
        values = [after.get(index) for index in range(len(values))]
    return None


def operations_in_order(graph) -> list:
    """Returns the operations of a graph, each behind what it waits for.

    They are in the order in which they were made, but gradients add inputs to loops that are there already.

    Args:
        graph: FuncGraph.
    """
    ordered: dict[str, Any] = {}
    for op in graph.get_operations():
        pending = [op]
        while pending:
            last = pending[-1]
            missing = [
                one
                for one in (*(tensor.op for tensor in last.inputs), *last.control_inputs)
                if one.name not in ordered
            ]
            pending += missing
            if not missing:
                ordered.setdefault(pending.pop().name, last)
    return list(ordered.values())


def known_value(op, known: Mapping[str, Any]) -> Any:
    """Returns the number that an operation makes of numbers, or None.

    Args:
        op: `tf.Operation`.
        known: By name of tensor.
    """
    if op.type == "Const":
        tensor = op.outputs[0]
        if tensor.shape.rank != 0 or not (
            tensor.dtype.is_integer or tensor.dtype.is_bool or tensor.dtype.is_floating
        ):
            return None
        value = tf.get_static_value(tensor)
        return None if value is None else value.item()
    inputs = [known.get(tensor.name) for tensor in op.inputs]
    if op.type in ("LogicalAnd", "LogicalOr"):
        # One side may decide what the other, which is unknown, cannot change.
        decided = op.type == "LogicalOr"
        if any(value is not None and bool(value) == decided for value in inputs):
            return decided
        return None if None in inputs else not decided
    if op.type in _REDUCTIONS and op.outputs[0].shape.rank == 0:
        reduced = tf.get_static_value(op.inputs[0])
        return None if reduced is None else _REDUCTIONS[op.type](reduced).item()
    if op.type == "Cast" and inputs[0] is not None and op.outputs[0].dtype.is_integer:
        return int(inputs[0])
    if op.type not in _FUNCTIONS or None in inputs:
        return None
    try:
        return _FUNCTIONS[op.type](*inputs)
    except (ArithmeticError, TypeError):
        return None


def _counters(condition, body) -> set[int]:
    """Returns the loop variables that decide whether a loop goes on, directly or through each other."""
    found: set[int] = set()
    pending = [(condition, condition.outputs[0])]
    while pending:
        graph, tensor = pending.pop()
        behind = _operations_behind(graph, [tensor])
        new = {i for i, one in enumerate(graph.inputs) if one.op.name in behind} - found
        found |= new
        pending += [(body, body.outputs[index]) for index in new]
    return found


def _operations_behind(graph, tensors) -> set[str]:
    inputs = {tensor.op.name for tensor in graph.inputs}
    seen: set[str] = set()
    pending = [tensor.op for tensor in tensors]
    while pending:
        op = pending.pop()
        if op.name not in seen:
            seen.add(op.name)
            if op.name not in inputs:
                pending += [tensor.op for tensor in op.inputs]
    return seen


class _Numbers:
    """Computes a few numbers of a graph from those that go into it; None where that takes more than numbers."""

    def __init__(self, graph, wanted):
        behind = _operations_behind(graph, wanted)
        inputs = {tensor.op.name for tensor in graph.inputs}
        self._inputs = [tensor.name for tensor in graph.inputs]
        self._operations = [
            op for op in operations_in_order(graph) if op.name in behind and op.name not in inputs
        ]
        self._wanted = [tensor.name for tensor in wanted]

    def __call__(self, values: Sequence[Any]) -> list[Any]:
        known = dict(zip(self._inputs, values, strict=False))
        for op in self._operations:
            known[op.outputs[0].name] = known_value(op, known)
        return [known.get(name) for name in self._wanted]
