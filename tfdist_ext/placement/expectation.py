"""Where will TensorFlow put each operation? The rules of its placer, as far as they decide anything here."""

from __future__ import annotations

from collections.abc import Collection

from tfdist_ext.placement import trace
from tfdist_ext.placement.devices import all_devices, default_device

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
    """
    graph, default = traced.graph, default_device()
    known = {*all_devices(), *there}
    requests = {
        name: one.pinned
        or (one.requested if one.requested in known or one.requested.startswith("/") else None)
        for name, one in graph.operations.items()
    }
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
