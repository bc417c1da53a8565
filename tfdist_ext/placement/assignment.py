"""Where did TensorFlow put each operation? Read off the graphs that it cut for the devices."""

from __future__ import annotations

import re

import tensorflow as tf

from tfdist_ext import compat
from tfdist_ext.placement import trace
from tfdist_ext.placement.devices import short_device

# How the executor names what was inside loops, conditionals and calls, and how paths do.
_RENAMED = (
    (re.compile(r"/(cond|body)/_\d+/"), r"/\1/"),
    (re.compile(r"/then/_\d+/"), "/branch_0/"),
    (re.compile(r"/else/_\d+/"), "/branch_1/"),
    (re.compile(r"/branch_?(\d+)/_\d+/"), r"/branch_\1/"),
)


def assigned_devices(function, args=(), kwargs=None) -> dict[str, str]:
    """Runs a fresh copy of a function once and reads where its operations ran.

    Graphs of partitions exist only when a function runs for the first time, so that the copy is a new one; its
    effects on variables happen.

    Args:
        function: tf.function, ConcreteFunction, or Python function.
        args: Example arguments with values.
        kwargs: By name.

    Returns:
        Device by path of operation. Operations that TensorFlow removed are not there.
    """
    if any(isinstance(one, tf.TypeSpec) for one in tf.nest.flatten((args, kwargs))):
        raise ValueError(
            "Argument `assigned` needs example arguments with values; received specs. Try tensors."
        )
    called = tf.function(function) if trace.is_plain(function) else function
    copy = tf.function(lambda args, kwargs: called(*args, **kwargs), autograph=False)
    concrete = copy.get_concrete_function(args, kwargs or {})
    prefix = call_prefix(concrete.graph)
    paths = {
        name.removeprefix(prefix) for name in trace.graph_of(concrete).origins if name.startswith(prefix)
    }
    with compat.collected_graphs() as collected:
        copy(args, kwargs or {})
    best: dict[str, str] = {}
    for nodes in collected:
        found = {}
        for node in nodes:
            path = _path_of(node.name).removeprefix(prefix)
            if path in paths and node.op not in ("_Send", "_Recv", "_HostSend", "_HostRecv"):
                found[path] = short_device(node.device)
        best = max(best, found, key=len)
    return best


def call_prefix(graph) -> str:
    """Returns how the paths of operations begin in a graph that only calls one function."""
    return next((f"{op.name}/" for op in graph.get_operations() if "PartitionedCall" in op.type), "")


def _path_of(name: str) -> str:
    for pattern, path in _RENAMED:
        name = pattern.sub(path, name)
    return name
