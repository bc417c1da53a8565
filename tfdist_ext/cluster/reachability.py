"""Do the tasks of the cluster listen at their addresses?

What to say and when to give up is decided in `RollCall`, which knows no sockets and is told the time.
"""

from __future__ import annotations

import concurrent.futures
import enum
import os
import socket
import stat
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from tfdist_ext.cluster.addresses import split_address
from tfdist_ext.cluster.specification import ClusterSpecification, Task
from tfdist_ext.errors import StartupTimeoutError

# Tasks that a job starts together come within moments of each other; nobody need hear about that.
QUIET_SECONDS = 2.0
_AGAIN_SECONDS = 30.0
_PROBE_SECONDS = 1.0
_BETWEEN_SECONDS = 0.2
_MAX_PROBES = 32
# What a client says first, with an empty SETTINGS frame; the server's first frame is its SETTINGS.
_HTTP2_SETTINGS = b"\x04"
_HTTP2_GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0" + _HTTP2_SETTINGS + b"\0\0\0\0\0"


class RollCall:
    """Which tasks have answered, whom to name, and when to give up; pure.

    Attributes:
        missing: The tasks that have not answered, with their addresses.

    Args:
        addresses: Who is expected, and where.
        timeout_seconds: How long from the beginning.
        started: The time of the beginning, in seconds.
    """

    def __init__(self, addresses: Mapping[Task, str], timeout_seconds: float, started: float):
        self.missing = dict(addresses)
        self._timeout_seconds = timeout_seconds
        self._started = started
        self._next_words = started + QUIET_SECONDS

    def answered(self, tasks: Iterable[Task]) -> None:
        """Strikes tasks off the list; one that answered once may be away again later.

        Args:
            tasks: Those that listen.
        """
        for task in tasks:
            self.missing.pop(task, None)

    def words(self, now: float) -> str | None:
        """Gives the sentence to announce.

        Args:
            now: The time, in seconds.

        Returns:
            Whom this task waits for: the first time after 2 seconds, then every 30; else None.
        """
        if not self.missing or now < self._next_words:
            return None
        self._next_words = now + _AGAIN_SECONDS
        return f"waiting for {', '.join(self.names())} ({self.waited_seconds(now):.0f} s)"

    def error(self, now: float) -> StartupTimeoutError | None:
        """Gives the error to raise.

        Args:
            now: The time, in seconds.

        Returns:
            None before the deadline, and when all have answered.
        """
        if not self.missing or self.waited_seconds(now) < self._timeout_seconds:
            return None
        nobody = ", ".join(self.names())
        return StartupTimeoutError(
            f"After {self.waited_seconds(now):.1f} s nothing listens at the address of {nobody}. Start "
            f"{'it' if len(self.missing) == 1 else 'them'}, see whether it failed at its start, or correct the "
            "addresses in TF_CONFIG.",
            missing=self.names(),
            waited_seconds=self.waited_seconds(now),
        )

    def names(self) -> tuple[str, ...]:
        """Lists the missing tasks.

        Returns:
            `("worker:1 at 127.0.0.1:2222", ...)`.
        """
        return tuple(f"{task} at {address}" for task, address in self.missing.items())

    def waited_seconds(self, now: float) -> float:
        """Says how long the call has lasted.

        Args:
            now: The time, in seconds.

        Returns:
            Seconds since the beginning.
        """
        return now - self._started


def listening(address: str, timeout_seconds: float = _PROBE_SECONDS) -> bool:
    """Says whether something accepts TCP connections at an address.

    Runs on: every task.

    Args:
        address: `"host:port"`.
        timeout_seconds: How long to wait for a machine that does not answer at all.

    Returns:
        False also where the name of the host is not known (yet). A stopped or stuck process counts as
        listening: its machine answers for it.
    """
    try:
        with socket.create_connection(split_address(address), timeout=timeout_seconds):
            return True
    except OSError:
        return False


class Listening(enum.Enum):
    """What a connection to an address comes to."""

    ACCEPTED = "something listens there"
    REFUSED = "the machine is there, and nothing listens"
    SILENT = "no answer: the machine or the way to it is down"


def how_it_listens(address: str, timeout_seconds: float = _PROBE_SECONDS) -> Listening:
    """Says whether a process is gone, or nobody can say because its machine does not answer.

    Runs on: every task.

    Args:
        address: `"host:port"`.
        timeout_seconds: How long to wait for an answer.
    """
    try:
        with socket.create_connection(split_address(address), timeout=timeout_seconds):
            return Listening.ACCEPTED
    except (ConnectionRefusedError, ConnectionResetError):
        return Listening.REFUSED
    except OSError:
        return Listening.SILENT


def answers(address: str, timeout_seconds: float = _PROBE_SECONDS) -> bool:
    """Says whether a gRPC server greets at an address.

    Runs on: every task.

    Args:
        address: `"host:port"`.
        timeout_seconds: How long to wait for its greeting.

    Returns:
        False also for a stopped or stuck process, which `listening` takes for alive, and for another kind of server.
    """
    try:
        with socket.create_connection(split_address(address), timeout=timeout_seconds) as connection:
            connection.sendall(_HTTP2_GREETING)
            # A frame begins with the length of its content (3 bytes) and its type.
            return connection.recv(9, socket.MSG_WAITALL)[3:4] == _HTTP2_SETTINGS
    except OSError:
        return False


def hang_up(address: str) -> None:
    """Cuts this process' connections to an address, so that calls which wait for an answer from there fail.

    Runs on: every task with a /dev/fd; elsewhere it does nothing.

    Args:
        address: `"host:port"`.
    """
    host, port = split_address(address)
    try:
        places = {info[4][0] for info in socket.getaddrinfo(host, port)}
        numbers = [int(name) for name in os.listdir("/dev/fd")]
    except OSError:
        return
    for number in numbers:
        if not stat.S_ISSOCK(_mode_of(number)):
            continue
        try:
            # A number may be closed and used again meanwhile; the copy stays what it is.
            with socket.socket(fileno=os.dup(number)) as connection:
                if connection.family not in (socket.AF_INET, socket.AF_INET6):
                    continue
                peer = connection.getpeername()
                if peer[1] == port and peer[0].removeprefix("::ffff:") in places:
                    connection.shutdown(socket.SHUT_RDWR)
        except OSError:
            continue  # Closed meanwhile, or not connected.


def _mode_of(number: int) -> int:
    try:
        return os.fstat(number).st_mode
    except OSError:
        return 0


def wait_for_tasks(
    specification: ClusterSpecification,
    tasks: Sequence[Task] | None = None,
    timeout_seconds: float = 600.0,
    announce: Callable[[str], None] | None = None,
) -> None:
    """Waits until tasks listen at their addresses.

    Runs on: chief.

    Args:
        specification: The cluster.
        tasks: Whom to wait for; None means all ps and workers.
        timeout_seconds: How long at most.
        announce: Is given the sentence that says whom this task waits for, after 2 seconds and then every
            30; None writes it to standard error.

    Raises:
        StartupTimeoutError: Some did not listen in time; all of them are named.
        ClusterSpecError: One of `tasks` is not in the cluster.
    """
    if tasks is None:
        tasks = [task for task, _ in specification.members if task.type in ("ps", "worker")]
    addresses = {task: specification.address_of(task) for task in tasks}
    if not addresses:
        return
    announce = announce or to_standard_error
    started = time.monotonic()
    roll = RollCall(addresses, timeout_seconds, started)
    with concurrent.futures.ThreadPoolExecutor(min(_MAX_PROBES, len(addresses)), "tfdist_ext_probe") as pool:
        while True:
            probe_seconds = min(_PROBE_SECONDS, max(0.05, started + timeout_seconds - time.monotonic()))
            roll.answered(_listening_now(pool, roll.missing, probe_seconds))
            now = time.monotonic()
            if not roll.missing:
                return
            if (error := roll.error(now)) is not None:
                raise error
            if (words := roll.words(now)) is not None:
                announce(words)
            time.sleep(min(_BETWEEN_SECONDS, max(0.0, started + timeout_seconds - now)))


def _listening_now(
    pool: concurrent.futures.ThreadPoolExecutor, addresses: Mapping[Task, str], probe_seconds: float
) -> list[Task]:
    """Probes all addresses at the same time."""
    probes = {task: pool.submit(listening, address, probe_seconds) for task, address in addresses.items()}
    return [task for task, probe in probes.items() if probe.result()]


def to_standard_error(sentence: str) -> None:
    """Announces something to whoever watches the job.

    Args:
        sentence: What to say.
    """
    sys.stderr.write(f"[tfdist-ext] {sentence}\n")
    sys.stderr.flush()
