"""The public face of the collectives."""

from __future__ import annotations

import os
import secrets
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from tfdist_ext import errors
from tfdist_ext.collectives import arithmetic
from tfdist_ext.collectives.direct import DirectAllReduce
from tfdist_ext.collectives.exchange import AllGather, Barrier, Broadcast
from tfdist_ext.collectives.future import Future
from tfdist_ext.collectives.message import Collective
from tfdist_ext.collectives.operation import Operation
from tfdist_ext.collectives.ring import RingAllReduce
from tfdist_ext.collectives.streams import StreamTable
from tfdist_ext.transport import MAX_PAYLOAD_BYTES, Identity, Mesh

# What a task keeps that came before it had entered the operation; more is an error of whoever sent it.
_EARLY_LIMIT_BYTES = 4 << 30
# What a task sends to each peer at most before it knows that the peer has entered; see outbox.py.
_AHEAD_LIMIT_BYTES = 64 << 20


class ProcessGroup:
    """The tasks that agree on values, seen from one of them. Made by `connect`.

    Runs on: every worker.

    Operations of one `stream` are matched across tasks by counting them, so every task must enter the same
    ones in the same order; operations of different streams may be in any order to each other. A `submit_*`
    method never blocks; the method of the same name without it waits for the result.

    After a task has died, every pending and later operation raises `PeerLostError`; form a new group to go
    on.

    Attributes:
        rank: Position of this task in the group.
        size: Number of tasks.
        task_names: Names of all tasks, by rank.
        hellos: What each task said about itself at the start, by rank.
        step: Training step for error messages, counted since this start; set by whoever counts steps, or None.

    Example:
        >>> group = ProcessGroup.connect(["127.0.0.1:2222"], 0, task_names=["worker:0"])
        >>> group.all_reduce(np.array([1.0, 2.0]), name="loss")
        array([1., 2.])
        >>> group.close()
    """

    def __init__(
        self, mesh: Mesh | _Alone, table: StreamTable, identity: Identity, options: Mapping[str, Any]
    ):
        self.rank = identity.rank
        self.size = len(identity.task_names)
        self.task_names = identity.task_names
        self.hellos: list[dict[str, Any]] = []
        self.step: int | None = None
        self._mesh = mesh
        self._table = table
        self._timeout_seconds: float = options["collective_timeout_seconds"]
        self._chunk_bytes: int = options["ring_chunk_bytes"]
        self._direct_threshold_bytes: int = options["direct_threshold_bytes"]
        # Also at the end of the process: peers must be able to tell a program that ended from one that died.
        self._close = weakref.finalize(self, _close, mesh, os.getpid())

    @classmethod
    def connect(
        cls,
        addresses: Sequence[str],
        rank: int,
        *,
        task_names: Sequence[str],
        hello: Mapping[str, Any] | None = None,
        secret: str | None = None,
        insecure: bool = False,
        group_name: str = "replicas",
        start_timeout_seconds: float = 120.0,
        first_notice_seconds: float = 5.0,
        peer_timeout_seconds: float = 5.0,
        collective_timeout_seconds: float = 600.0,
        ring_chunk_bytes: int = 2 * 1024 * 1024,
        direct_threshold_bytes: int = 1024 * 1024,
    ) -> ProcessGroup:
        """Forms the group; returns when every task is there.

        Args:
            addresses: `host:port` of every task, by rank; `[ipv6]:port` for IPv6 literals.
            rank: Position of this task.
            task_names: Names of all tasks by rank, for messages, such as "worker:1".
            hello: JSON fields about this task that all others get to see.
            secret: Cluster secret, the same on all tasks. Needed as soon as an address is not on loopback;
                turns on encryption and authentication of all links.
            insecure: Allows links beyond this machine without a secret.
            group_name: Tells apart several groups of the same tasks.
            start_timeout_seconds: How long to wait for the others.
            first_notice_seconds: After how long to log whom this task waits for; then every 10 s.
            peer_timeout_seconds: Silence after which a task counts as lost. One whose connection closes
                counts as lost at once; one that is merely busy answers, since answering needs no Python.
            collective_timeout_seconds: Deadline of every operation.
            ring_chunk_bytes: Size of one message of the ring, of a gather and of a broadcast.
            direct_threshold_bytes: A reduction whose buffer times (size - 1) is at most this is exchanged
                directly; a larger one goes around the ring.

        Raises:
            StartupTimeoutError: If a task did not answer in time.
            ConfigurationMismatchError: If a task believes the group to be another.
            AuthenticationError: If the links leave this machine without a secret.
            ClusterSpecError: If an address is malformed, or in use.
        """
        _check_members(addresses, rank, task_names)
        options = {
            "ring_chunk_bytes": ring_chunk_bytes,
            "direct_threshold_bytes": direct_threshold_bytes,
            "collective_timeout_seconds": collective_timeout_seconds,
        }
        identity = Identity(
            group_name=group_name,
            rank=rank,
            task_names=tuple(task_names),
            incarnation=secrets.randbits(64),
            settings={name: options[name] for name in ("ring_chunk_bytes", "direct_threshold_bytes")},
            hello=dict(hello or {}),
        )
        table = StreamTable(
            rank,
            identity.task_names,
            early_limit_bytes=_EARLY_LIMIT_BYTES,
            # So that all peers together stay below the limit of the task that they are ahead of.
            ahead_limit_bytes=min(_AHEAD_LIMIT_BYTES, _EARLY_LIMIT_BYTES // max(1, len(addresses) - 1)),
        )
        if len(addresses) == 1:
            group = cls(_Alone(table), table, identity, options)
            group.hellos = [dict(identity.hello)]
            return group
        mesh = Mesh(
            addresses,
            identity,
            table,
            secret=secret,
            insecure=insecure,
            peer_timeout_seconds=peer_timeout_seconds,
        )
        table.attach(mesh)
        group = cls(mesh, table, identity, options)
        try:
            group.hellos = mesh.start(start_timeout_seconds, first_notice_seconds=first_notice_seconds)
        except BaseException:
            group.close()
            raise
        return group

    @property
    def last_failure(self) -> errors.CollectiveError | None:
        """The latest typed error, in case the exception itself was lost on its way through a graph."""
        return self._table.last_failure

    def submit_all_reduce(
        self, buffer: np.ndarray, *, name: str, stream: str = "step", reduction: str = "sum"
    ) -> Future:
        """Sums a buffer over all tasks, in place.

        Args:
            buffer: `[length]`, contiguous, writable; float16, bfloat16, float32, float64, int32 or int64. It
                belongs to the group until the result is there.
            name: Name of the operation, the same on all tasks.
            stream: Stream it belongs to.
            reduction: "sum", or "mean" (sum divided by the number of tasks).

        Returns:
            Future of `buffer`; it holds the same bits on all tasks, and in every run.
        """
        if buffer.ndim != 1 or not buffer.flags.c_contiguous or not buffer.flags.writeable:
            raise ValueError(
                f"Argument `buffer` must be a contiguous, writable array of one dimension; received shape "
                f"{buffer.shape} "
                f"with {buffer.flags.c_contiguous=} and {buffer.flags.writeable=}. Try `all_reduce`, which "
                f"copies."
            )
        return self._submit_all_reduce(buffer, buffer.shape, name, stream, reduction)

    def all_reduce(
        self, array: Any, *, name: str, stream: str = "step", reduction: str = "sum"
    ) -> np.ndarray:
        """Sums an array of any shape over all tasks; the argument is left as it is."""
        array = np.asarray(array)
        buffer = np.array(array, order="C").reshape(-1)
        return (
            self._submit_all_reduce(buffer, array.shape, name, stream, reduction)
            .result()
            .reshape(array.shape)
        )

    def submit_all_gather(self, array: Any, *, name: str, stream: str = "step") -> Future:
        """Collects the arrays of all tasks.

        Args:
            array: `[rows, ...]`; it is copied. The number of rows may differ between tasks, nothing else may.
            name: Name of the operation.
            stream: Stream it belongs to.

        Returns:
            Future of the list of arrays, by rank.
        """
        array = np.array(array, order="C")
        if array.ndim == 0 or array.dtype.hasobject:
            raise ValueError(
                f"Argument `array` must have a first dimension and no objects; received {array!r}."
            )
        details = f"{array.dtype.name}[{','.join(['?', *map(str, array.shape[1:])])}]"
        machine = AllGather(self.rank, self.size, array, chunk_bytes=self._chunk_bytes)
        return self._submit("all_gather", name, stream, details, machine, array.nbytes)

    def all_gather(self, array: Any, *, name: str, stream: str = "step") -> list[np.ndarray]:
        """Collects the arrays of all tasks; see `submit_all_gather`."""
        return self.submit_all_gather(array, name=name, stream=stream).result()

    def submit_all_gather_bytes(self, payload: bytes, *, name: str, stream: str = "step") -> Future:
        """Collects a byte string of every task; returns the future of their list, by rank."""
        machine = _AllGatherBytes(
            self.rank, self.size, np.frombuffer(payload, np.uint8), chunk_bytes=self._chunk_bytes
        )
        return self._submit("all_gather_bytes", name, stream, "", machine, len(payload))

    def all_gather_bytes(self, payload: bytes, *, name: str, stream: str = "step") -> list[bytes]:
        """Collects a byte string of every task; see `submit_all_gather_bytes`."""
        return self.submit_all_gather_bytes(payload, name=name, stream=stream).result()

    def submit_broadcast(self, array: Any, *, root: int = 0, name: str, stream: str = "step") -> Future:
        """Gives the root's array to all tasks.

        Args:
            array: The value on the root; elsewhere an array of the same dtype and shape. It is copied.
            root: Rank whose value counts.
            name: Name of the operation.
            stream: Stream it belongs to.

        Returns:
            Future of the root's value.
        """
        if not 0 <= root < self.size:
            raise ValueError(f"Argument `root` must be a rank from 0 to {self.size - 1}; received {root}.")
        array = np.array(array, order="C")
        if array.dtype.hasobject:
            raise ValueError(f"Argument `array` must hold numbers, not objects; received {array.dtype}.")
        machine = Broadcast(self.rank, self.size, array, root=root, chunk_bytes=self._chunk_bytes)
        return self._submit("broadcast", name, stream, f"{_describe(array)} from {root}", machine)

    def broadcast(self, array: Any, *, root: int = 0, name: str, stream: str = "step") -> np.ndarray:
        """Gives the root's array to all tasks; see `submit_broadcast`."""
        return self.submit_broadcast(array, root=root, name=name, stream=stream).result()

    def submit_barrier(self, name: str, stream: str = "step", timeout_seconds: float | None = None) -> Future:
        """Finishes once all tasks have entered it, or fails at its deadline."""
        return self._submit("barrier", name, stream, "", Barrier(self.rank, self.size), 0, timeout_seconds)

    def barrier(self, name: str, stream: str = "step", timeout_seconds: float | None = None) -> None:
        """Waits until all tasks have entered it; see `submit_barrier`."""
        self.submit_barrier(name, stream, timeout_seconds).result()

    def abandon(self, stream: str) -> None:
        """Takes no more part in a stream.

        Its pending operations raise `StreamAbandoned` at once, here and on the tasks that need this one for
        them; messages still to come for it are ignored. Its name cannot be used again in this group.
        """
        self._mesh.call(lambda: self._table.abandon(stream))

    def abandon_all(self, prefix: str, reason: str) -> None:
        """Takes no more part in any stream whose name begins with `prefix`, and tells the others why."""
        self._mesh.call(lambda: self._table.abandon_all(prefix, reason))

    def close(self) -> None:
        """Says goodbye, after what was sent has arrived; waits a bounded time. May be called twice."""
        self._close()

    def _submit_all_reduce(
        self, buffer: np.ndarray, shape: tuple[int, ...], name: str, stream: str, reduction: str
    ) -> Future:
        arithmetic.check_reduction(buffer.dtype, reduction)
        machine: Collective
        # An empty buffer sends nothing around a ring, so nobody would notice that a task did not join.
        if buffer.nbytes * (self.size - 1) <= self._direct_threshold_bytes or buffer.size == 0:
            machine = DirectAllReduce(self.rank, self.size, buffer, reduction=reduction)
        else:
            machine = RingAllReduce(
                self.rank, self.size, buffer, reduction=reduction, chunk_bytes=self._chunk_bytes
            )
        details = f"{buffer.dtype.name}{list(shape)} {reduction}"
        return self._submit("all_reduce", name, stream, details, machine, 0)

    def _submit(
        self,
        kind: str,
        name: str,
        stream: str,
        details: str,
        machine: Collective,
        message_bytes: int = 0,
        timeout_seconds: float | None = None,
    ) -> Future:
        if message_bytes > MAX_PAYLOAD_BYTES:
            raise ValueError(
                f"{kind} {name!r}: {message_bytes} bytes exceed the limit of {MAX_PAYLOAD_BYTES} bytes."
            )
        operation = Operation(
            kind=kind,
            name=name,
            stream=stream,
            details=details,
            machine=machine,
            step=self.step,
            timeout_seconds=self._timeout_seconds if timeout_seconds is None else timeout_seconds,
            task_names=self.task_names,
            rank=self.rank,
            outbox=self._table.new_outbox(),
        )
        table = self._table
        self._mesh.call(lambda: table.submit(operation))
        return operation.future


class _AllGatherBytes(AllGather):
    """A gather whose arrays are byte strings outside."""

    def result(self) -> Any:
        return [array.tobytes() for array in super().result()]


class _Alone:
    """Stands in for the mesh of a group of one, which needs no sockets and no thread."""

    def __init__(self, table: StreamTable):
        self._lock = threading.RLock()
        self._table = table

    def call(self, function: Callable[[], None]) -> None:
        with self._lock:
            function()

    def close(self) -> None:
        self.call(lambda: self._table.closed(None))


def _close(mesh: Mesh | _Alone, process_id: int) -> None:
    # A forked child inherits this finalizer, but neither the engine thread nor the right to say goodbye.
    if os.getpid() == process_id:
        mesh.close()


def _describe(array: np.ndarray) -> str:
    return f"{array.dtype.name}{list(array.shape)}"


def _check_members(addresses: Sequence[str], rank: int, task_names: Sequence[str]) -> None:
    if not addresses or len(addresses) != len(task_names):
        raise ValueError(
            f"Arguments `addresses` and `task_names` must have one entry a task; received {len(addresses)} "
            f"and "
            f"{len(task_names)}."
        )
    if len(set(task_names)) != len(task_names) or len(set(addresses)) != len(addresses):
        raise ValueError(
            f"Every task must have its own name and address; received {task_names} at {addresses}."
        )
    if not 0 <= rank < len(addresses):
        raise ValueError(f"Argument `rank` must be from 0 to {len(addresses) - 1}; received {rank}.")
