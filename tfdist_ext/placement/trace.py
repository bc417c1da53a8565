"""What does a traced function consist of? TensorFlow's graph, flattened into one that planners understand.

Nested functions are inlined, both branches of a conditional and the body of a loop too. An operation is named by its
path, such as `while/body/while/MatMul`. A loop passes each of its variables through two operations of its own, as
TensorFlow's executor does: `while/enter_2` hands it to every turn, `while/exit_2` takes it back after every turn. Both
are where the first value comes from, wherever the loop itself was requested.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfdist_ext import compat
from tfdist_ext.placement.devices import default_device, short_device
from tfdist_ext.placement.flops import flops_of
from tfdist_ext.placement.groups import grouped
from tfdist_ext.placement.loops import known_value, operations_in_order, turns_of
from tfdist_ext.placement.operations import Edge, Operation, OperationGraph
from tfdist_ext.placement.rows import densified_gradients, mark_rows, takes_rows
from tfdist_ext.placement.sizes import assumed, bytes_of

_CALLS = ("PartitionedCall", "StatefulPartitionedCall")
_LOOPS = ("While", "StatelessWhile")
_BRANCHES = {"If": ("then_branch", "else_branch"), "StatelessIf": ("then_branch", "else_branch")}


@dataclasses.dataclass(frozen=True)
class Traced:
    """A function as a graph of operations.

    Attributes:
        graph: The operations.
        variables: By name of their operation in the graph.
        unknown_sizes: Tensors whose size is not known before running, as `operation:output`.
        uncounted_loops: Loops whose number of turns is not known; they count as one turn.
        densified: Operations that turn the gradient of a gather into a dense one.
        origins: For each operation that TensorFlow has too, its FuncGraph and its name there.
        compiled: Operations inside functions that XLA compiles as a whole, on one device.
        ignored_requests: Devices that some of these ask for in vain, by operation.
    """

    graph: OperationGraph
    variables: Mapping[str, tf.Variable]
    unknown_sizes: tuple[str, ...]
    uncounted_loops: tuple[str, ...]
    densified: tuple[str, ...]
    origins: Mapping[str, tuple[Any, str]]
    compiled: frozenset[str] = frozenset()
    ignored_requests: Mapping[str, str] = dataclasses.field(default_factory=dict)


def concrete_function_of(function, args=(), kwargs=None):
    """Returns the ConcreteFunction of a function for example arguments.

    Args:
        function: tf.function, ConcreteFunction, or Python function.
        args: Example arguments: tensors, arrays or specs.
        kwargs: By name.
    """
    if hasattr(function, "get_concrete_function"):
        return function.get_concrete_function(*args, **(kwargs or {}))
    if hasattr(function, "structured_input_signature"):
        return function
    if not is_plain(function):
        raise TypeError(
            "Argument `function` must be a tf.function, a ConcreteFunction or a function; received "
            f"{type(function).__name__}."
        )
    return tf.function(function).get_concrete_function(*args, **(kwargs or {}))


def is_plain(function) -> bool:
    """Returns True for a Python function, as opposed to one that TensorFlow has made."""
    traced = hasattr(function, "get_concrete_function") or hasattr(function, "structured_input_signature")
    return callable(function) and not traced


def graph_of(concrete, *, assume_batch: int | None = None) -> Traced:
    """Flattens a ConcreteFunction.

    Args:
        concrete: `ConcreteFunction`, or a FuncGraph.
        assume_batch: Size that an unknown first dimension counts as; None leaves such tensors without a size.

    Returns:
        The graph and what could not be known.
    """
    flattening = _Flattening(assume_batch)
    is_compiled = compat.is_compiled_function(concrete)
    return flattening.run(getattr(concrete, "graph", concrete), _row_outputs(concrete), is_compiled)


def _row_outputs(concrete) -> set[int]:
    """Returns which outputs of a function are parts of `IndexedSlices`."""
    found: set[int] = set()
    number = 0
    for spec in tf.nest.flatten(getattr(concrete, "structured_outputs", None)):
        parts = tf.nest.flatten(spec, expand_composites=True)
        if isinstance(spec, tf.IndexedSlicesSpec):
            found.update(range(number, number + len(parts)))
        number += sum(part is not None for part in parts)
    return found


@dataclasses.dataclass(frozen=True)
class _Source:
    """Where a tensor comes from in the flattened graph, and its value where that is a known number."""

    producer: str
    output: int
    tensor: Any
    value: Any = None


@dataclasses.dataclass(frozen=True)
class _Place:
    """Where the operations of a FuncGraph go in the flattened graph."""

    prefix: str = ""
    times: int = 1
    device: str = ""

    def inside(self, name: str, device: str, times: int = 1) -> _Place:
        return _Place(f"{name}/", self.times * times, device or self.device)


class _Flattening:
    def __init__(self, assume_batch: int | None):
        self._assume_batch = assume_batch
        self._operations: dict[str, Operation] = {}
        self._names: list[str] = []
        self._edges: list[Edge] = []
        self._variables: dict[str, Any] = {}
        self._origins: dict[str, tuple[Any, str]] = {}
        self._ties: list[tuple[str, str]] = []
        self._unknown: list[str] = []
        self._uncounted: list[str] = []
        self._effects: set[str] = set()
        self._compiled: list[tuple[str, list[str]]] = []
        self._ignored: dict[str, str] = {}

    def run(self, graph, row_outputs: set[int], is_compiled: bool) -> Traced:
        handles = {id(variable.handle): variable for variable in graph.variables}
        outside = {internal.name: external for external, internal in graph.captures}
        sources: dict[str, _Source] = {}
        for tensor in graph.inputs:
            variable = handles.get(id(outside.get(tensor.name)))
            if variable is None:
                name = tensor.op.name
                device = short_device(getattr(outside.get(tensor.name), "device", "")) or default_device()
                self._add(tensor.op, name, _Place(), [], graph, pinned=device)
            else:
                name = self._add_variable(variable)
            sources[tensor.name] = _Source(name, 0, tensor)
        first = len(self._names)
        outputs = self._flatten(graph, _Place(), sources)
        if is_compiled:
            self._compiled.append(("", self._names[first:]))
        ends = {outputs[index].producer for index in row_outputs if index < len(outputs)}
        self._edges = [
            dataclasses.replace(edge, sparse=True) if edge.consumer in ends and edge.output >= 0 else edge
            for edge in self._edges
        ]
        edges = mark_rows(self._operations, self._edges)
        self._pin_compiled()
        return Traced(
            OperationGraph(grouped(self._operations, self._ties), edges), dict(self._variables),
            tuple(self._unknown), tuple(self._uncounted), densified_gradients(self._operations, edges),
            dict(self._origins), frozenset(name for _, names in self._compiled for name in names), dict(self._ignored),
        )  # fmt: skip

    def _pin_compiled(self) -> None:
        """A compiled function is one operation, as requested or on the default device; XLA knows no devices inside."""
        for device, names in self._compiled:
            for name in names:
                asked = self._operations[name].requested
                if asked and asked != (device or default_device()):
                    self._ignored.setdefault(name, asked)
                self._operations[name] = dataclasses.replace(
                    self._operations[name], requested=device, pinned=device or default_device()
                )
            self._ties += [(names[0], name) for name in names[1:]]

    def _add_variable(self, variable) -> str:
        base = name = f"variable {variable.name.split(':')[0]}"
        number = 1
        while self._variables.get(name, variable) is not variable:
            number += 1
            name = f"{base} ({number})"
        self._variables[name] = variable
        device = short_device(variable.device)
        self._operations[name] = Operation(
            name=name, kind="VarHandleOp", output_bytes=(0,), pinned=device or None, requested=device,
            resident_bytes=bytes_of(variable.shape, variable.dtype) or 0,
        )  # fmt: skip
        return name

    def _flatten(self, graph, place: _Place, sources: dict[str, _Source]) -> list[_Source]:
        """Adds the operations of a graph; `sources` says where its inputs come from."""
        inputs = {tensor.op.name for tensor in graph.inputs}
        ends: dict[str, list[str]] = {}
        for op in operations_in_order(graph):
            if op.name in inputs:
                continue
            name, first = f"{place.prefix}{op.name}", len(self._names)
            taken = [sources[tensor.name] for tensor in op.inputs]
            made = self._add_any(op, name, place, taken, graph)
            # A FuncGraph gets more outputs when a gradient wants them; who called it before has the first of them.
            for tensor, source in zip(op.outputs, made[: len(op.outputs)], strict=True):
                sources[tensor.name] = source
            added = self._names[first:]
            # What an operation with operations inside has to wait for holds back those that others can notice.
            waiting = added if len(added) == 1 else [one for one in added if one in self._effects]
            self._order([end for before in op.control_inputs for end in ends.get(before.name, ())], waiting)
            exits = [one for one in added if one.startswith(f"{name}/exit_")]
            ends[op.name] = exits or ([name] if name in self._operations else waiting)
        return [sources[tensor.name] for tensor in graph.outputs]

    def _add_any(self, op, name: str, place: _Place, taken: list[_Source], graph) -> list[_Source]:
        """Adds an operation and all that is inside; returns where its outputs come from."""
        if op.type in _CALLS:
            body = compat.function_graph(graph, op.get_attr("f").name)
            if body is not None:
                first = len(self._names)
                made = self._flatten_inside(body, place.inside(name, op.device), taken)
                if compat.is_compiled(op):
                    self._compiled.append((short_device(op.device or place.device), self._names[first:]))
                return made
        if op.type in _LOOPS:
            return self._add_loop(op, name, place, taken, graph)
        if op.type in (*_BRANCHES, "Case", "StatelessCase"):
            return self._add_branches(op, name, place, taken, graph)
        return self._add(op, name, place, taken, graph)

    def _flatten_inside(self, body, place: _Place, taken: Sequence[_Source]) -> list[_Source]:
        # The condition of a loop may have fewer inputs than the loop.
        inner = {tensor.name: source for tensor, source in zip(body.inputs, taken, strict=False)}
        return self._flatten(body, place, inner)

    def _add_loop(self, op, name: str, place: _Place, taken: list[_Source], graph) -> list[_Source]:
        condition, body = (compat.function_graph(graph, op.get_attr(part).name) for part in ("cond", "body"))
        counted = turns_of(condition, body, [source.value for source in taken])
        if counted is None:
            self._uncounted.append(name)
        turns, known = counted or (1, [None] * len(taken))
        times = place.times * turns
        entered = [
            source
            if source.tensor.dtype == tf.resource
            else self._pass(f"{name}/enter_{i}", "Enter", times, source)
            for i, source in enumerate(taken)
        ]
        inside = place.inside(name, op.device, turns)
        decision = self._flatten_inside(condition, inside.inside(f"{name}/cond", ""), entered)[0]
        self._put(name, op.type, place, op, graph, outputs=())
        self._order([decision.producer], [name])
        returned = self._flatten_inside(body, inside.inside(f"{name}/body", ""), entered)
        made = []
        for index, (source, enter, back) in enumerate(zip(taken, entered, returned, strict=False)):
            if enter is source:
                made.append(source)
                continue
            left = self._pass(f"{name}/exit_{index}", "Exit", place.times, back)
            self._ties += [(enter.producer, source.producer), (left.producer, enter.producer)]
            self._order([name], [left.producer])
            made.append(dataclasses.replace(left, tensor=op.outputs[index], value=known[index]))
        return made

    def _pass(self, name: str, kind: str, times: int, source: _Source) -> _Source:
        self._operations[name] = Operation(
            name=name, kind=kind, times=times, output_bytes=(self._size(name, 0, source.tensor),)
        )
        self._names.append(name)
        self._connect(source, name)
        return _Source(name, 0, source.tensor)

    def _add_branches(self, op, name: str, place: _Place, taken: list[_Source], graph) -> list[_Source]:
        if op.type in _BRANCHES:
            branches = [op.get_attr(attribute).name for attribute in _BRANCHES[op.type]]
        else:
            branches = [branch.name for branch in op.get_attr("branches")]
        ends = [
            self._flatten_inside(
                compat.function_graph(graph, branch),
                place.inside(f"{name}/branch_{number}", op.device),
                taken[1:],
            )
            for number, branch in enumerate(branches)
        ]
        made = self._put(name, op.type, place, op, graph)
        for source in {(one.producer, one.output): one for branch in ends for one in branch}.values():
            self._connect(source, name)
        self._order([taken[0].producer], [name])
        return made

    def _add(self, op, name: str, place: _Place, taken: list[_Source], graph, pinned=None) -> list[_Source]:
        inputs = [assumed(source.tensor.shape, self._assume_batch) for source in taken]
        outputs = [assumed(tensor.shape, self._assume_batch) for tensor in op.outputs]
        made = self._put(name, op.type, place, op, graph, flops_of(op, inputs, outputs), pinned)
        labels = [argument.name for argument in op.op_def.input_arg]
        for index, source in enumerate(taken):
            label = labels[index] if len(labels) == len(taken) else ""
            self._connect(source, name, takes_rows(op.type, label))
            if source.tensor.dtype == tf.resource:
                # It has to be where the variable, the table or the iterator is.
                self._ties.append((name, source.producer))
                self._effects.add(name)
        for group in op.colocation_groups():
            beside = f"{place.prefix}{group.decode().removeprefix('loc:@')}"
            if beside != name and beside in self._operations:
                self._ties.append((name, beside))
        known = {tensor.name: source.value for tensor, source in zip(op.inputs, taken, strict=True)}
        if len(made) == 1:
            made = [dataclasses.replace(made[0], value=known_value(op, known))]
        return made

    def _put(self, name: str, kind: str, place: _Place, op, graph, flops=0.0, pinned=None, outputs=None):
        made = op.outputs if outputs is None else outputs
        self._operations[name] = Operation(
            name=name, kind=kind, times=place.times, flops=flops, pinned=pinned,
            requested=short_device(op.device or place.device),
            output_bytes=tuple(self._size(name, i, tensor) for i, tensor in enumerate(made)),
        )  # fmt: skip
        self._origins[name] = (graph, op.name)
        self._names.append(name)
        return [_Source(name, index, tensor) for index, tensor in enumerate(made)]

    def _connect(self, source: _Source, consumer: str, sparse: bool = False) -> None:
        tensor = source.tensor
        shape = assumed(tensor.shape, self._assume_batch)
        self._edges.append(
            Edge(
                producer=source.producer,
                output=source.output,
                consumer=consumer,
                sparse=sparse,
                num_bytes=bytes_of(shape, tensor.dtype) or 0,
                dtype=tensor.dtype.name,
                shape=None if shape.rank is None else tuple(shape.as_list()),
            )  # fmt: skip
        )

    def _order(self, before: Iterable[str], after: Iterable[str]) -> None:
        behind = list(after)
        for producer in dict.fromkeys(before):
            self._edges += [Edge(producer=producer, consumer=one, output=-1) for one in behind]

    def _size(self, name: str, output: int, tensor) -> int:
        size = bytes_of(assumed(tensor.shape, self._assume_batch), tensor.dtype)
        if size is None:
            self._unknown.append(f"{name}:{output}")
        return size or 0
