"""How do I try parameter servers without starting processes?

In a notebook or a test the workers and ps of a small cluster can be servers inside the one process, which
itself is the chief. They share its memory and its interpreter: good for learning and testing, not for speed.
"""

from __future__ import annotations

import dataclasses
import os
import threading
from typing import TYPE_CHECKING, Any

from tfdist_ext.cluster.addresses import warn_that_servers_listen_everywhere
from tfdist_ext.cluster.ports import ReservedPorts
from tfdist_ext.cluster.specification import ClusterSpecification

if TYPE_CHECKING:
    import tensorflow as tf

_HOST = "127.0.0.1"


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Shape:
    num_workers: int
    num_ps: int
    num_threads: int

    def __str__(self) -> str:
        workers = f"{self.num_workers} worker{'s' if self.num_workers > 1 else ''}"
        return f"{workers} and {self.num_ps} ps ({self.num_threads} threads)"


@dataclasses.dataclass(frozen=True)
class _Running:
    shape: _Shape
    resolver: Any
    # TensorFlow stops a server that nobody holds.
    servers: tuple[Any, ...]


_lock = threading.Lock()
_running: _Running | None = None


def in_process(
    num_workers: int = 2,
    num_ps: int = 1,
    *,
    worker_threads: int | None = None,
    ps_threads: int | None = None,
) -> tf.distribute.cluster_resolver.ClusterResolver:
    """Starts the servers of a cluster inside this process, or finds those started before.

    Runs on: chief, which is the calling process. The servers listen until the process ends.

    A process has one such cluster: connecting to a second one would take the variables of the first one
    away.

    Args:
        num_workers: Number of workers, at least 1.
        num_ps: Number of ps, at least 1.
        worker_threads: Inter-op threads. TensorFlow makes them once for all servers of a process, so that the
            larger of this and `ps_threads` counts for all. At least one for each server: workers that wait for
            a ps hold a thread, and with fewer the job hangs. None takes one for each core, and at least one
            more than there are servers.
        ps_threads: As `worker_threads`.

    Returns:
        A resolver to make a `ParameterServerStrategy` with. Its cluster has `chief`, `worker` and `ps` on free
        ports of 127.0.0.1, and this process is the chief.

    Raises:
        ValueError: An argument is too small.
        RuntimeError: This process already has a cluster of another shape.

    Example:
        >>> import tfdist_ext
        >>> resolver = tfdist_ext.cluster.in_process(2, 1)  # doctest: +SKIP
        >>> sorted(resolver.cluster_spec().as_dict())  # doctest: +SKIP
        ['chief', 'ps', 'worker']
    """
    global _running
    shape = _shape(num_workers, num_ps, worker_threads, ps_threads)
    with _lock:
        if _running is None:
            _running = _start(shape)
        if _running.shape != shape:
            raise RuntimeError(
                f"This process already has a cluster of {_running.shape}, so it cannot have one of {shape}: a "
                "process has one cluster. Ask for the same shape, or restart the process (in a notebook, the "
                "kernel)."
            )
        return _running.resolver


def _shape(num_workers: int, num_ps: int, worker_threads: int | None, ps_threads: int | None) -> _Shape:
    """Checks the arguments and fills in the number of threads."""
    _check_at_least(1, num_workers=num_workers, num_ps=num_ps)
    num_servers = num_workers + num_ps
    asked = {"worker_threads": worker_threads, "ps_threads": ps_threads}
    given = {name: value for name, value in asked.items() if value is not None}
    _check_at_least(num_servers, **given)
    num_threads = max(given.values(), default=max(os.cpu_count() or 1, num_servers + 1))
    return _Shape(num_workers=num_workers, num_ps=num_ps, num_threads=num_threads)


def runs_in_this_process(specification: ClusterSpecification) -> bool:
    """Says whether a cluster is the one that `in_process` has started here.

    Args:
        specification: The cluster.

    Returns:
        True only where this process is that cluster's chief and all its servers.
    """
    return _running is not None and _running.resolver.cluster_spec().as_dict() == {
        job: list(tasks.values()) for job, tasks in specification.jobs.items()
    }


def _start(shape: _Shape) -> _Running:
    import tensorflow as tf

    counts = {"chief": 1, "worker": shape.num_workers, "ps": shape.num_ps}
    reserved = ReservedPorts(sum(counts.values()))
    ports = iter(reserved.ports)
    cluster = tf.train.ClusterSpec(
        {job: [f"{_HOST}:{next(ports)}" for _ in range(count)] for job, count in counts.items()}
    )
    warn_that_servers_listen_everywhere()
    # The port of the chief stays free until the strategy connects.
    reserved.release()
    servers = tuple(
        tf.distribute.Server(
            cluster,
            job_name=job,
            task_index=index,
            protocol="grpc",
            config=tf.compat.v1.ConfigProto(inter_op_parallelism_threads=shape.num_threads),
            start=True,
        )
        for job in ("worker", "ps")
        for index in range(counts[job])
    )
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        cluster, task_type="chief", task_id=0, rpc_layer="grpc"
    )
    return _Running(shape, resolver, servers)


def _check_at_least(least: int, **arguments: int) -> None:
    for name, value in arguments.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ValueError(f"Argument `{name}` must be a number from {least}; received {value!r}.")
