"""Which operations have to share a device? Pure: from pairs to groups."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from tfdist_ext.placement.operations import Operation


def grouped(operations: Mapping[str, Operation], ties: Sequence[tuple[str, str]]) -> list[Operation]:
    """Gives operations that have to share a device a group, named after the first of them, and all of it its pin.

    Args:
        operations: By name; those tied already stay so.
        ties: Pairs of names.

    Example:
        >>> a, b, c = (Operation(name=name) for name in "abc")
        >>> [one.group for one in grouped({"a": a, "b": b, "c": c}, [("b", "a")])]
        ['a', 'a', '']
    """
    head = {name: name for name in operations}

    def find(name: str) -> str:
        while head[name] != name:
            head[name] = name = head[head[name]]
        return name

    order = {name: index for index, name in enumerate(operations)}
    for pair in ties:
        first, second = sorted(map(find, pair), key=lambda name: order[name])
        head[second] = first
    tied = {find(name) for pair in ties for name in pair}
    pins: dict[str, str] = {}
    for name, operation in operations.items():
        if operation.pinned and find(name) in tied:
            pins.setdefault(find(name), operation.pinned)
    return [
        dataclasses.replace(one, group=find(name), pinned=one.pinned or pins.get(find(name)))
        if find(name) in tied
        else one
        for name, one in operations.items()
    ]
