"""How does a function come to run where a plan says? It is traced again, and every operation is told its device."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfdist_ext import compat
from tfdist_ext.placement import trace
from tfdist_ext.placement.assignment import call_prefix
from tfdist_ext.placement.devices import long_device, require_device
from tfdist_ext.placement.explanation import local_machine
from tfdist_ext.placement.groups import grouped
from tfdist_ext.placement.machine import Link, Machine
from tfdist_ext.placement.operations import Operation, OperationGraph
from tfdist_ext.placement.planners import plan_graph
from tfdist_ext.placement.plans import Plan


def plan(
    function,
    example_args: Sequence[Any] = (),
    *,
    devices: Sequence[str] | None = None,
    memory_bytes: Mapping[str, float] | None = None,
    links: Mapping[tuple[str, str], Link] | None = None,
    machine: Machine | None = None,
    method: str = "auto",
    assume_batch: int | None = None,
) -> Plan:
    """Plans where the operations of a function should run.

    Variables that exist stay where they are, with all that uses them directly, and so does what a function captures.
    Arguments are expected on the default device, or on the first of `devices` where that is not among them.

    Runs on: one process; the function is traced and does not run.

    Args:
        function: tf.function, ConcreteFunction, or Python function.
        example_args: Example arguments: tensors, arrays or specs.
        devices: Names such as "CPU:1"; None for all local ones.
        memory_bytes: What fits on a device, by name; those left out have no limit.
        links: `Link` by (from, to); those left out have 10 microseconds and 10 GB/s.
        machine: Devices and links with their speeds, in place of the three above.
        method: One of `METHODS`.
        assume_batch: Size that an unknown first dimension counts as.

    Returns:
        The plan, for `apply_plan`.

    Raises:
        InfeasiblePlacementError: No placement that was tried fits into memory.
        ValueError: A variable is on none of the devices, or an argument is wrong.

    Example:
        >>> import tensorflow as tf
        >>> step = tf.function(lambda x: tf.matmul(x, x))
        >>> plan(step, [tf.ones([8, 8])], devices=["CPU:0"]).devices["MatMul"]
        'CPU:0'
    """
    if machine is None:
        for name in devices or ():
            require_device(name)
        machine = local_machine(memory_bytes, devices, links)
    elif any(argument is not None for argument in (devices, memory_bytes, links)):
        raise ValueError(
            "Argument `machine` must not be given together with `devices`, `memory_bytes` or `links`."
        )
    traced = trace.graph_of(
        trace.concrete_function_of(function, tuple(example_args)), assume_batch=assume_batch
    )
    return plan_graph(_plannable(traced, machine), machine, method)


def _plannable(traced: trace.Traced, machine: Machine) -> OperationGraph:
    """Returns the graph with what is fixed on devices of the machine, and constants tied to what takes them."""
    names = [device.name for device in machine.devices]
    operations: dict[str, Operation] = {}
    for name, one in traced.graph.operations.items():
        if one.pinned and one.pinned not in names:
            if one.group in traced.variables:
                raise ValueError(
                    f"{one.group} is on {one.pinned}, which is not among the devices {names}. Variables that exist "
                    "stay where they are: try to add the device, or to make the variable on one of these."
                )
            one = Operation(**{**vars(one), "pinned": names[0]})
        operations[name] = one
    ties = [(name, one.group) for name, one in operations.items() if one.group]
    for name, one in operations.items():
        consumers = {edge.consumer for edge in traced.graph.outgoing(name) if not edge.is_control}
        if one.kind == "Const" and not one.group and len(consumers) == 1:
            ties.append((name, consumers.pop()))
    return OperationGraph(grouped(operations, ties), traced.graph.edges)


def apply_plan(function, plan: Plan):
    """Makes a function whose every operation runs where a plan says.

    It is the function, traced again, with the same variables and captures; gradients flow through it. It computes the
    same bits, but for one optimization of TensorFlow: Grappler turns sums of sums on one device into one sum, added in
    another order. With `tf.config.optimizer.set_experimental_options({"arithmetic_optimization": False})` it does not.
    Python code of the function runs three times while it is traced.

    Args:
        function: tf.function or Python function, as planned.
        plan: What `plan` returned, for arguments of the same structure; their shapes may differ.

    Returns:
        A tf.function. When it is traced, each operation is checked.

    Raises:
        ValueError: A device of the plan does not exist; when traced: an operation is not in the plan, or is not
            where the plan says.
        TypeError: `function` cannot be traced again.

    Example:
        >>> import tensorflow as tf
        >>> step = tf.function(lambda x: tf.matmul(x, x))
        >>> placed = apply_plan(step, plan(step, [tf.ones([2, 2])]))
        >>> placed(tf.ones([2, 2])).numpy().tolist()
        [[2.0, 2.0], [2.0, 2.0]]
    """
    for device in dict.fromkeys(plan.devices.values()):
        require_device(device)
    if not trace.is_plain(function) and not hasattr(function, "python_function"):
        raise TypeError(
            "Argument `function` must be a tf.function or a Python function, which can be traced again; received "
            f"{type(function).__name__}."
        )
    called = tf.function(function) if trace.is_plain(function) else function

    @functools.wraps(called.python_function)
    def placed(*args, **kwargs):
        if not tf.inside_function():
            return called(*args, **kwargs)
        return _traced_as_planned(called, plan, args, kwargs)

    return tf.function(placed, input_signature=called.input_signature, autograph=False)


class _Numbered:
    """Numbers the graphs of a function in the order in which they get their first operation: the same each time."""

    def __init__(self):
        self._graphs: list[Any] = []  # Kept alive, so that no two have the same id.
        self._numbers: dict[int, int] = {}

    def number_of(self, graph) -> int:
        if id(graph) not in self._numbers:
            self._numbers[id(graph)] = len(self._graphs)
            self._graphs.append(graph)
        return self._numbers[id(graph)]


def _traced_as_planned(called, plan: Plan, args, kwargs):
    """Traces a function twice: to learn which operation has which path, and to give each its device."""
    seen = _Numbered()

    def look(op) -> None:
        seen.number_of(op.graph)

    def looked_at(args, kwargs):
        with compat.devices_of_new_operations(look):
            return called(*args, **kwargs)

    # Not in tf.init_scope, which keeps tapes inside the function from recording.
    args_specs, kwargs_specs = tf.nest.map_structure(_spec_of, (args, kwargs))
    # A function that has made its variables is traced once for each call from here on.
    called.get_concrete_function(*args_specs, **kwargs_specs)
    concrete = tf.function(looked_at, autograph=False).get_concrete_function(args_specs, kwargs_specs)
    devices = _devices_by_origin(concrete, plan, seen)
    numbered = _Numbered()

    def put(op) -> str | None:
        return devices.get((numbered.number_of(op.graph), op.name))

    with compat.devices_of_new_operations(put):
        outputs = called(*args, **kwargs)
    _check(tf.compat.v1.get_default_graph(), plan)
    return outputs


def _spec_of(value):
    if isinstance(value, tf.Variable) or not tf.is_tensor(value):
        return value
    return tf.type_spec_from_value(value)


def _devices_by_origin(concrete, plan: Plan, seen: _Numbered) -> dict[tuple[int, str], str]:
    prefix = call_prefix(concrete.graph)
    found = {}
    for path, (graph, name) in trace.graph_of(concrete).origins.items():
        if path.startswith(prefix) and prefix:
            path = path.removeprefix(prefix)
            if path not in plan.devices:
                raise ValueError(
                    f"Argument `plan` must be a plan of this function; it has nothing for the operation {path!r}. "
                    "Try to make it again, with example arguments of this structure."
                )
            found[seen.number_of(graph), name] = long_device(plan.devices[path])
    return found


def _check(graph, plan: Plan) -> None:
    """Raises an error for the first operation that is not where the plan says."""
    prefix = call_prefix(graph)
    for path, one in trace.graph_of(graph).graph.operations.items():
        planned = plan.devices.get(path.removeprefix(prefix))
        device = one.requested or one.pinned
        if path.startswith(prefix) and device != planned and one.kind not in ("Enter", "Exit"):
            raise ValueError(
                f"Operation {path.removeprefix(prefix)!r} is to be on {planned}, but is on {device or 'no device'}. "
                "Try to make the plan again: the function may have changed."
            )
