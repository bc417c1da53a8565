"""Where does a function run, what crosses, and what would be better? Answered before it runs."""

from __future__ import annotations

import statistics
import time
from collections.abc import Collection, Mapping
from typing import Any

import tensorflow as tf

from tfdist_ext.placement import advice, trace
from tfdist_ext.placement.assignment import assigned_devices
from tfdist_ext.placement.devices import all_devices, local_devices, short_device
from tfdist_ext.placement.expectation import expected_placement
from tfdist_ext.placement.machine import Device, Machine
from tfdist_ext.placement.report import DeviceRow, OperationRow, Report
from tfdist_ext.placement.schedule import Schedule, simulate, transfers

_NUM_RUNS = 5


def explain(
    function,
    *args: Any,
    machine: Machine | None = None,
    assigned: bool = False,
    measure: bool = False,
    assume_batch: int | None = None,
    **kwargs: Any,
) -> Report:
    """Says where the operations of a function run and what crosses between devices.

    Runs on: one process. Nothing of the function runs unless `assigned` or `measure` is set; then its effects happen.

    Args:
        function: tf.function, ConcreteFunction, or Python function, which is traced.
        *args: Example arguments: tensors, arrays or specs.
        machine: Devices with their speeds, and links; None: the local devices with rough figures.
        assigned: Whether to ask TensorFlow where it puts each operation: a fresh copy of the function is run once.
        measure: Whether to run the function a few times and take the median.
        assume_batch: Size that an unknown first dimension counts as.
        **kwargs: More example arguments.

    Returns:
        The report.

    Raises:
        TypeError: `function` cannot be traced.
        ValueError: TensorFlow would refuse to run it, because a device does not exist or a compiled function takes a
            variable of another one.

    Example:
        >>> import tensorflow as tf
        >>> report = explain(lambda x: tf.matmul(x, x), tf.ones([8, 8]))
        >>> report.device_of("MatMul"), report.cut_bytes
        ('CPU:0', 0)
    """
    concrete = trace.concrete_function_of(function, args, kwargs)
    traced = trace.graph_of(concrete, assume_batch=assume_batch)
    machine = machine or local_machine()
    placement = expected_placement(traced, [device.name for device in machine.devices])
    machine = _with_all_devices(machine, placement)
    schedule = simulate(traced.graph, placement, machine)
    where = assigned_devices(function, args, kwargs) if assigned else None
    known = {*all_devices(), *(device.name for device in machine.devices)}
    crossing = tuple(transfers(traced.graph, placement))
    return Report(
        function=getattr(function, "__name__", None) or concrete.name,
        devices=_device_rows(traced, placement, machine, schedule),
        operations=tuple(
            OperationRow(
                name=name, kind=operation.kind, requested=operation.requested, device=placement[name],
                assigned=None if where is None else where.get(name),
            )
            for name, operation in traced.graph.operations.items()
        ),
        transfers=crossing,
        schedule=schedule,
        measured_seconds=_measured(function, args, kwargs) if measure else None,
        unplaced=_unplaced(traced),
        apart=tuple(_apart(traced, placement)),
        soft_placement=tuple(_moved(traced, where, known)),
        not_honoured=tuple(_not_honoured(traced, placement, known)),
        colocations=tuple(_parted(traced, crossing)),
        suggestions=tuple(advice.suggestions(traced, placement, machine, schedule)),
        notes=tuple(_notes(traced)),
    )  # fmt: skip


def local_machine(memory_bytes: Mapping[str, float] | None = None, devices=None, links=None) -> Machine:
    """Returns this process' logical devices, or those named, with rough speeds.

    Args:
        memory_bytes: By device, such as {"CPU:0": 2e9}.
        devices: Names; None for all local CPUs and GPUs.
        links: `Link` by (from, to).
    """
    memory = {short_device(name): size for name, size in (memory_bytes or {}).items()}
    listed = []
    for name in map(short_device, devices or local_devices()):
        gpu = {"flops_per_second": 1e13, "bytes_per_second": 1e12} if "GPU" in name else {}
        limit = {"memory_bytes": memory[name]} if name in memory else {}
        listed.append(Device(name=name, **gpu, **limit))
    pairs = {(short_device(a), short_device(b)): link for (a, b), link in (links or {}).items()}
    return Machine(devices=listed, links=pairs)


def _with_all_devices(machine: Machine, placement: Mapping[str, str]) -> Machine:
    known = {device.name for device in machine.devices}
    more = [Device(name=name) for name in dict.fromkeys(placement.values()) if name not in known]
    return Machine(devices=[*machine.devices, *more], link=machine.link, links=machine.links)


def _device_rows(traced, placement, machine: Machine, schedule: Schedule) -> tuple[DeviceRow, ...]:
    slots = slots_of(traced)
    rows = []
    for device in machine.devices:
        names = [name for name, other in placement.items() if other == device.name]
        operations = [traced.graph.operations[name] for name in names]
        rows.append(
            DeviceRow(
                device=device.name, num_operations=len(names),
                flops=sum(operation.flops * operation.times for operation in operations),
                variable_bytes=sum(one.resident_bytes for one in operations if one.name not in slots),
                slot_bytes=sum(one.resident_bytes for one in operations if one.name in slots),
                peak_bytes=schedule.peak_bytes[device.name],
                busy_seconds=sum(schedule.finish[name] - schedule.start[name] for name in names),
            )
        )  # fmt: skip
    return tuple(rows)


def slots_of(traced: trace.Traced) -> dict[str, str]:
    """Returns, for each variable that is an optimizer's slot, the variable it belongs to.

    Keras names a slot after its variable: `adam/dense_kernel_momentum` is one of `dense/kernel`.
    """
    plain = {name.removeprefix("variable ").replace("/", "_"): name for name in traced.variables}
    found: dict[str, str] = {}
    for name in traced.variables:
        _, _, own = name.removeprefix("variable ").partition("/")
        owner = max((key for key in plain if own.startswith(f"{key}_")), key=len, default=None)
        if owner is not None and plain[owner] != name:
            found[name] = plain[owner]
    return found


def _unplaced(traced) -> tuple[str, ...]:
    return tuple(
        name
        for name, operation in traced.graph.operations.items()
        if not operation.requested
        and not operation.pinned
        and operation.kind not in ("Const", "NoOp", "Placeholder", "Enter", "Exit")
    )


def _apart(traced, placement) -> list[str]:
    """Finds operations without a request that take a variable from elsewhere: building a layer there is not enough."""
    found: dict[tuple[str, str], str] = {}
    for edge in traced.graph.edges:
        operation, group = (
            traced.graph.operations[edge.consumer],
            traced.graph.operations[edge.producer].group,
        )
        here, there = placement[edge.consumer], placement[edge.producer]
        if group in traced.variables and here != there and not operation.requested and not edge.is_control:
            sentence = f"{group} is on {there}; {edge.consumer} takes it, is unplaced, and runs on {here}"
            found.setdefault((group, edge.consumer), sentence)
    return list(found.values())


def _moved(traced, where: Mapping[str, str] | None, known: Collection[str]) -> list[str]:
    return [
        f"{name} was requested on {one.requested} and is on {where[name]}"
        for name, one in traced.graph.operations.items()
        if where is not None and one.requested in known and where.get(name, one.requested) != one.requested
    ]


def _not_honoured(traced, placement, known: Collection[str]) -> list[str]:
    missing: dict[str, list[str]] = {}
    for name, one in traced.graph.operations.items():
        if one.requested and one.requested not in known and not one.pinned:
            missing.setdefault(one.requested, []).append(name)
    return [
        f"{name} is requested on {device}, which is not there, and runs on {placement[name]}; there are "
        f"{', '.join(sorted(known))}"
        for device, names in missing.items()
        for name in names
    ] + [
        f"{name} is requested on {device}, but is inside a compiled function: XLA knows no devices there, and runs all "
        f"of it on {placement[name]}"
        for name, device in traced.ignored_requests.items()
    ]


def _parted(traced, crossing) -> list[str]:
    """Finds requests that part an operation from its variable, and moves that would."""
    graph, variables = traced.graph, traced.variables
    found = [
        f"{name} is requested on {one.requested}, but uses {one.group} and must be on {one.pinned}"
        for name, one in graph.operations.items()
        if one.group in variables and one.requested and one.requested != one.pinned
    ]
    moves = {}
    for transfer in crossing:
        pairs = [
            (transfer.producer, transfer.destination),
            *((one, transfer.source) for one in transfer.consumers),
        ]
        for name, device in pairs:
            group = graph.operations[name].group
            if group in variables:
                moves[name, device] = f"moving {name} to {device} would part it from {group}"
    return found + list(moves.values())


def _notes(traced) -> list[str]:
    notes = [f"the turns of {name} are not known; it counts as one" for name in traced.uncounted_loops]
    if traced.unknown_sizes:
        notes.append(
            f"{len(traced.unknown_sizes)} tensors have no known size and count as 0 bytes, such as "
            f"{traced.unknown_sizes[0]}; pass assume_batch= or example arguments of full shape"
        )
    return notes


def _measured(function, args, kwargs) -> float:
    if any(isinstance(one, tf.TypeSpec) for one in tf.nest.flatten((args, kwargs))):
        raise ValueError(
            "Argument `measure` needs example arguments with values; received specs. Try tensors."
        )
    durations = []
    for _ in range(_NUM_RUNS + 1):
        started = time.perf_counter()
        outputs = function(*args, **kwargs)
        for tensor in tf.nest.flatten(outputs, expand_composites=True):
            if tf.is_tensor(tensor):
                tensor.numpy()
        durations.append(time.perf_counter() - started)
    return statistics.median(durations[1:])  # The first one may trace.
