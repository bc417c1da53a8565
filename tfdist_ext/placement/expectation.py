"""Where will TensorFlow put each operation? The rules of its placer, as far as they decide anything here."""

from __future__ import annotations

from collections.abc import Collection

import tensorflow as tf

from tfdist_ext.placement import trace
from tfdist_ext.placement.devices import all_devices, default_device
from tfdist_ext.placement.operations import Operation

# Without a request they are where their input is: the placer says so of sizes, the executor of merged branches.
_BESIDE_INPUT = ("Shape", "ShapeN", "Size", "Rank", "If", "StatelessIf", "Case", "StatelessCase")


def expected_placement(traced: trace.Traced, there: Collection[str] = ()) -> dict[str, str]:
    """Returns where TensorFlow is expected to put each operation.

    Beside its variable; else as requested; else, for sizes of tensors and what conditionals return, where its input is
    made; for constants, where all that take them are; and else on the default device, also where a requested device of
    this process does not exist.

    Args:
        traced: The function.
        there: Devices that exist besides those of this process.

    Raises:
        ValueError: TensorFlow would refuse the function; the message names the operation and the device.
    """
    graph, default = traced.graph, default_device()
    known = {*all_devices(), *there}
    _refuse_parted_compilation(traced)
    requests = {name: one.pinned or _granted(one, known) for name, one in graph.operations.items()}
    tied = {
        group: next((requests[name] for name in members if requests[name]), None)
        for group, members in graph.groups.items()
        if len(members) > 1
    }
    expected: dict[str, str] = {}
    for name, one in graph.operations.items():
        made = [edge.producer for edge in graph.incoming(name) if not edge.is_control]
        follows = one.kind in _BESIDE_INPUT or (one.kind in ("Enter", "Exit") and made)
        device = requests[name] or tied.get(one.group)
        if device is None and one.kind in ("Enter", "Exit") and one.group in expected:
            device = expected[one.group]
        elif device is None and follows:
            device = expected[made[0]]
        expected[name] = device or default
    for name, one in graph.operations.items():
        if one.kind == "Const" and requests[name] is None and not one.group:
            places = {expected[edge.consumer] for edge in graph.outgoing(name) if not edge.is_control}
            if len(places) == 1:
                expected[name] = places.pop()
    return expected


def _granted(operation: Operation, known: Collection[str]) -> str | None:
    """Returns the device that a request gets; None where it asks for nothing, or in vain on this process."""
    requested = operation.requested
    if not requested or requested in known:
        return requested or None
    there = [name for name in sorted(known) if _task_of(name) == _task_of(requested)]
    if there and tf.config.get_soft_device_placement():
        # Moved, but not to another process.
        return next((name for name in there if "CPU" in name), there[0]) if _task_of(requested) else None
    raise ValueError(
        f"Operation {operation.name!r} is requested on {requested}, which does not exist, and TensorFlow refuses to "
        f"run it; there are {', '.join(sorted(known))}. Try one of these."
    )


def _task_of(device: str) -> str:
    """Returns the process that a device belongs to, "" for this one."""
    return device.partition("/device:")[0] if device.startswith("/") else ""


def _refuse_parted_compilation(traced: trace.Traced) -> None:
    for edge in traced.graph.edges:
        variable, operation = traced.graph.operations[edge.producer], traced.graph.operations[edge.consumer]
        is_parted = edge.producer in traced.variables and variable.pinned != operation.pinned
        if is_parted and edge.consumer in traced.compiled:
            raise ValueError(
                f"{edge.producer} is on {variable.pinned}, but the function that takes it is compiled "
                f"(`jit_compile=True`) for {operation.pinned}, and XLA refuses variables of other devices. Try to make "
                f"the variable on {operation.pinned}, or to leave the function uncompiled."
            )
