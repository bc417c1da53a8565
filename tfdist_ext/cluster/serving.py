"""What does a ps or worker task do, and when does it end?

It serves until the *process* of the chief ends: saving a model after `fit` still needs the ps. When to end, and
with which code, is decided in `ChiefWatch`, which knows no sockets and is told the time.
"""

from __future__ import annotations

import dataclasses
import enum
import os
import queue
import socket
import threading
import time
from typing import Any

from tfdist_ext.cluster import environment
from tfdist_ext.cluster.addresses import split_address, warn_that_servers_listen_everywhere
from tfdist_ext.cluster.control import TOKEN, Control, Goodbye
from tfdist_ext.cluster.reachability import QUIET_SECONDS, Listening, how_it_listens, to_standard_error
from tfdist_ext.cluster.specification import ClusterSpecification, Task
from tfdist_ext.cluster.stopping import StopNote
from tfdist_ext.errors import ClusterSpecError

_AGAIN_SECONDS = 30.0
_PROBE_SECONDS = 2.0
_BETWEEN_SECONDS = 2.0
# A chief that dies right after it connected must have been seen.
_BETWEEN_SECONDS_AT_FIRST = 0.25
_BETWEEN_SECONDS_AT_THE_END = 0.1
# The chief says goodbye a moment before its end; what it does in that moment may still need this task.
_LINGER_SECONDS = 10.0
_MIN_THREADS = 2


class ServingExit(enum.IntEnum):
    """The exit codes of a task that served.

    Attributes:
        CHIEF_ENDED: The chief said goodbye: its script came to its end, or called `sys.exit`.
        CHIEF_FAILED: The chief said that an uncaught exception ended its script.
        CHIEF_LOST: The chief was there and is gone without a goodbye: killed, crashed, or out of reach.
        CHIEF_NEVER_CAME: Nothing ever listened at the address of the chief.
        INTERRUPTED: SIGINT (Ctrl-C), as a shell would say it.
        STOPPED: SIGTERM at some task made the chief save and end, and this task with it. Where nobody saves, SIGTERM
            ends the process as it ends any other.
    """

    CHIEF_ENDED = 0
    CHIEF_FAILED = 81
    CHIEF_LOST = 82
    CHIEF_NEVER_CAME = 83
    INTERRUPTED = 130
    STOPPED = 143


@dataclasses.dataclass(frozen=True)
class Ending:
    """How serving ends.

    Attributes:
        code: The exit code.
        message: Why, in one sentence.
    """

    code: ServingExit
    message: str


class ChiefWatch:
    """When does a task stop serving? Pure.

    Args:
        chief: How to name the chief, with its address.
        startup_timeout_seconds: How long to wait for the chief to be there at all.
        chief_timeout_seconds: How long a chief that was there may be away, while its machine answers.
        silence_timeout_seconds: How long its machine, or the way to it, may give no answer at all. The chief waits as
            long for a ps.
        started: The time of the beginning, in seconds.
    """

    def __init__(
        self,
        chief: str,
        *,
        startup_timeout_seconds: float,
        chief_timeout_seconds: float,
        silence_timeout_seconds: float | None = None,
        started: float,
    ):
        self._chief = chief
        self._startup_timeout_seconds = startup_timeout_seconds
        self._chief_timeout_seconds = chief_timeout_seconds
        self._silence_timeout_seconds = (
            startup_timeout_seconds if silence_timeout_seconds is None else silence_timeout_seconds
        )
        self._started = started
        self._last_seen: float | None = None
        self._goodbye: Goodbye | None = None
        self._is_asked_to_stop = False
        self._linger_until = 0.0
        self._next_words = started + QUIET_SECONDS

    @property
    def pause_seconds(self) -> float:
        """How long to wait before the next probe."""
        if self._goodbye is not None or self._is_asked_to_stop:
            return _BETWEEN_SECONDS_AT_THE_END
        return _BETWEEN_SECONDS_AT_FIRST if self._last_seen is None else _BETWEEN_SECONDS

    def heard(self, goodbye: Goodbye | None, now: float) -> None:
        """Learns that the chief has sent a command.

        Args:
            goodbye: Its last word, if it was that; of two, the first counts.
            now: The time, in seconds.
        """
        self._last_seen = now
        if goodbye is not None and self._goodbye is None:
            self._goodbye = goodbye
            self._linger_until = now + _LINGER_SECONDS

    def asked_to_stop(self) -> None:
        """Learns that this task got SIGTERM, and that the chief knows or will."""
        self._is_asked_to_stop = True

    def probed(self, alive: bool, now: float, is_silent: bool = False) -> Ending | None:
        """Learns whether something listens at the address of the chief.

        Args:
            alive: Whether.
            now: The time, in seconds.
            is_silent: Whether there was no answer at all, so that nobody knows.

        Returns:
            How to end, or None to go on.
        """
        if alive:
            self._last_seen = now
        if self._goodbye is not None:
            return None if alive and now < self._linger_until else self._ending_after(self._goodbye)
        if self._is_asked_to_stop and not alive:
            return Ending(ServingExit.STOPPED, f"SIGTERM, and {self._chief} is not there")
        if self._last_seen is None:
            return self._ending_of_nobody(now - self._started)
        gone = now - self._last_seen
        if gone < (self._silence_timeout_seconds if is_silent else self._chief_timeout_seconds):
            return None
        why = (
            "its machine, or the way to it, does not answer (startup_timeout_seconds)"
            if is_silent
            else "it was killed, or this task cannot reach it any more"
        )
        return Ending(
            ServingExit.CHIEF_LOST, f"{self._chief} has been gone for {gone:.0f} s and said no goodbye: {why}"
        )

    def words(self, now: float) -> str | None:
        """Gives the sentence to announce.

        Args:
            now: The time, in seconds.

        Returns:
            Whom the task waits for: after 2 seconds and then every 30, until the chief is there; else None.
        """
        if self._last_seen is not None or now < self._next_words:
            return None
        self._next_words = now + _AGAIN_SECONDS
        return f"waiting for {self._chief} ({now - self._started:.0f} s)"

    def _ending_after(self, goodbye: Goodbye) -> Ending:
        if goodbye.stopped:
            return Ending(ServingExit.STOPPED, f"{self._chief} has saved and ended, because of SIGTERM")
        if not goodbye.failed:
            return Ending(ServingExit.CHIEF_ENDED, f"{self._chief} has ended")
        return Ending(ServingExit.CHIEF_FAILED, f"{self._chief} has failed: {goodbye.reason}")

    def _ending_of_nobody(self, waited: float) -> Ending | None:
        if waited < self._startup_timeout_seconds:
            return None
        return Ending(
            ServingExit.CHIEF_NEVER_CAME,
            f"{self._chief} did not come within {waited:.0f} s; start it, or correct its address in TF_CONFIG",
        )


_lock = threading.Lock()
_serves: Task | None = None
# TensorFlow stops a server, and forgets a function, that nobody holds.
_held: list[Any] = []


def serve_until_chief_ends(
    specification: ClusterSpecification,
    *,
    startup_timeout_seconds: float = 600.0,
    chief_timeout_seconds: float = 20.0,
) -> int:
    """Serves this task to the chief until the chief's process ends.

    Runs on: ps and workers, in the main thread. The server listens on all interfaces of the machine, and has
    neither passwords nor encryption: it belongs on a network that you trust.

    Args:
        specification: The cluster as this task sees it.
        startup_timeout_seconds: How long to wait for the chief to be there at all; whom the task waits for is
            written to standard error. Also how long the machine of a chief that was there may give no answer, as when
            the link between two hosts is down: the chief waits as long for a ps.
        chief_timeout_seconds: How long nothing may listen at the address of a chief that was there, whose machine
            answers.

    Returns:
        The exit code for `sys.exit`, one of `ServingExit`. Why it is not 0 is written to standard error.

    Raises:
        ClusterSpecError: This task is no ps or worker, or the cluster has no chief.
        OSError: The address of this task is in use.
        RuntimeError: This process serves already.

    Example:
        >>> import sys
        >>> from tfdist_ext.cluster import resolve, serve_until_chief_ends
        >>> specification = resolve()
        >>> if specification.task.type in ("ps", "worker"):  # doctest: +SKIP
        ...     sys.exit(serve_until_chief_ends(specification))
    """
    chief = _chief_of(specification)
    commands: queue.SimpleQueue[Goodbye | _Word | None] = queue.SimpleQueue()
    note = StopNote(specification.task, lambda: commands.put(_Word.ASKED_TO_STOP))

    def about_stop() -> bool:
        commands.put(_Word.HOLD)
        return note.is_asked

    _start_once(specification, Control(specification.task, commands.put, about_stop))
    watch = ChiefWatch(
        f"{chief} at {specification.address_of(chief)}",
        startup_timeout_seconds=startup_timeout_seconds,
        chief_timeout_seconds=chief_timeout_seconds,
        started=time.monotonic(),
    )
    try:
        ending = _follow(watch, specification.address_of(chief), commands, note)
    except KeyboardInterrupt:
        ending = Ending(ServingExit.INTERRUPTED, "interrupted")
    if ending.code is not ServingExit.CHIEF_ENDED:
        to_standard_error(f"{specification.task} ends with exit code {ending.code:d}: {ending.message}")
    return int(ending.code)


class _Word(enum.Enum):
    """What the main thread hears besides the chief's commands."""

    HOLD = "note SIGTERM from now on"
    ASKED_TO_STOP = "SIGTERM has come"


def _follow(watch: ChiefWatch, address: str, commands: queue.SimpleQueue, note: StopNote) -> Ending:
    """Probes the chief and hears what it says until it is time to end."""
    while True:
        found = how_it_listens(address, _PROBE_SECONDS)
        alive, is_silent = found is Listening.ACCEPTED, found is Listening.SILENT
        if (ending := watch.probed(alive, time.monotonic(), is_silent)) is not None:
            return ending
        if (words := watch.words(time.monotonic())) is not None:
            to_standard_error(words)
        try:
            word = commands.get(timeout=watch.pause_seconds)
        except queue.Empty:
            continue
        if word is _Word.HOLD:
            note.hold()
        elif word is _Word.ASKED_TO_STOP:
            watch.asked_to_stop()
        else:
            watch.heard(word, time.monotonic())


def _chief_of(specification: ClusterSpecification) -> Task:
    task, jobs = specification.task, specification.jobs
    if task.type not in ("ps", "worker") or specification.address is None:
        raise ClusterSpecError(f"Only ps and workers of a cluster serve; this task is {task}.")
    if "chief" not in jobs:
        raise ClusterSpecError(
            f"Task {task} cannot know when training ends: the cluster has no chief. Add "
            '"chief": ["host:port"] to the cluster of every task.'
        )
    return Task("chief", 0)


def _start_once(specification: ClusterSpecification, control: Control) -> None:
    from tfdist_ext import compat

    global _serves
    task = specification.task
    with _lock:
        if _serves is not None:
            raise RuntimeError(f"This process serves already, as {_serves}; a process serves once.")
        _check_free(task, specification.address_of(task))
        # Before the server listens: who finds it can already call.
        compat.register_python_function(TOKEN, control)
        warn_that_servers_listen_everywhere()
        _held.extend([control, _start_server(specification)])
        _serves = task


def _check_free(task: Task, address: str) -> None:
    """Says in one sentence what TensorFlow would say in many."""
    _, port = split_address(address)
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as attempt:
        # As the server does: a port whose last connections are not quite over yet is free.
        attempt.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            attempt.bind(("", port))
        except OSError as error:
            raise OSError(
                error.errno,
                f"Task {task} cannot listen at {address} ({os.strerror(error.errno or 0)}). Is it running "
                "already? Else give it another port in the TF_CONFIG of every task",
            ) from None


def _start_server(specification: ClusterSpecification) -> Any:
    import tensorflow as tf

    jobs = {job: tasks for job, tasks in specification.jobs.items() if job != "evaluator"}
    return tf.distribute.Server(
        tf.train.ClusterSpec(jobs),
        job_name=specification.task.type,
        task_index=specification.task.index,
        protocol=specification.rpc_layer or "grpc",
        config=tf.compat.v1.ConfigProto(
            inter_op_parallelism_threads=_num_threads(
                tf.config.threading.get_inter_op_parallelism_threads(), "TF_NUM_INTEROP_THREADS"
            ),
            intra_op_parallelism_threads=_num_threads(
                tf.config.threading.get_intra_op_parallelism_threads(), "TF_NUM_INTRAOP_THREADS"
            ),
        ),
        start=True,
    )


def _num_threads(configured: int, variable: str) -> int:
    """Takes what was asked for, else one a core; with one thread a server that waits can do nothing else."""
    text = environment.variable(variable) or ""
    asked = configured or (int(text) if text.isdecimal() else 0)
    return max(_MIN_THREADS, asked or os.cpu_count() or 1)
