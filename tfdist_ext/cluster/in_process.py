"""How do I try parameter servers without starting processes?

In a notebook or a test the workers and ps of a small cluster can be servers inside the one process, which
itself is the chief. They share its memory and its interpreter: good for learning and testing, not for speed.
"""

from __future__ import annotations

import dataclasses
import os
import threading
from typing import TYPE_CHECKING, Any

from tfdist_ext.cluster.ports import ReservedPorts

if TYPE_CHECKING:
    import tensorflow as tf

_HOST = "127.0.0.1"
_MIN_THREADS = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Shape:
    num_workers: int
    num_ps: int
    worker_threads: int
    ps_threads: int

    def __str__(self) -> str:
        workers = f"{self.num_workers} worker{'s' if self.num_workers > 1 else ''}"
        threads = f"{self.worker_threads} and {self.ps_threads} threads"
        return f"{workers} and {self.num_ps} ps ({threads})"


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
    away. The threads of TensorFlow are made only once a process, so that what the first call says counts.

    Args:
        num_workers: Number of workers, at least 1.
        num_ps: Number of ps, at least 1.
        worker_threads: Inter-op threads of each worker, at least 2: with one, a worker that waits for a ps can
            do nothing else and the job hangs. None takes one for each core, and at least one for each server
            and one more.
        ps_threads: The same for each ps.

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
    """Checks the arguments and fills in the numbers of threads."""
    _check_at_least(1, num_workers=num_workers, num_ps=num_ps)
    default = max(_MIN_THREADS, os.cpu_count() or 1, num_workers + num_ps + 1)
    threads = {
        "worker_threads": default if worker_threads is None else worker_threads,
        "ps_threads": default if ps_threads is None else ps_threads,
    }
    _check_at_least(_MIN_THREADS, **threads)
    return _Shape(num_workers=num_workers, num_ps=num_ps, **threads)


def _start(shape: _Shape) -> _Running:
    import tensorflow as tf

    counts = {"chief": 1, "worker": shape.num_workers, "ps": shape.num_ps}
    reserved = ReservedPorts(sum(counts.values()))
    ports = iter(reserved.ports)
    cluster = tf.train.ClusterSpec(
        {job: [f"{_HOST}:{next(ports)}" for _ in range(count)] for job, count in counts.items()}
    )
    # The port of the chief stays free until the strategy connects.
    reserved.release()
    threads = {"worker": shape.worker_threads, "ps": shape.ps_threads}
    servers = tuple(
        tf.distribute.Server(
            cluster,
            job_name=job,
            task_index=index,
            protocol="grpc",
            config=tf.compat.v1.ConfigProto(inter_op_parallelism_threads=threads[job]),
            start=True,
        )
        for job in threads
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
