"""How do the ps and workers learn that the chief has ended well, or failed?"""

from __future__ import annotations

import atexit
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType

from tfdist_ext.cluster.control import Goodbye, call, goodbye_text
from tfdist_ext.cluster.in_process import runs_in_this_process
from tfdist_ext.cluster.reachability import listening, to_standard_error
from tfdist_ext.cluster.specification import ClusterSpecification, Task

DEADLINE_SECONDS = 5.0
_MAX_THREADS = 32
_PROBE_SECONDS = 1.0
_BETWEEN_SECONDS = 0.1

_lock = threading.Lock()
_farewell: Farewell | None = None


def say_goodbye_at_exit(specification: ClusterSpecification, tasks: Sequence[Task] | None = None) -> None:
    """Lets the ps and workers know when this process ends, and whether an uncaught exception ends it.

    Runs on: chief, once it is connected. A second call only adds tasks; of a cluster inside this process nobody
    need be told. A task that cannot be told within 5
    seconds is left alone: it finds out by itself, see `serve_until_chief_ends`.

    Args:
        specification: The cluster.
        tasks: Whom to tell; None means all ps and workers.

    Raises:
        ClusterSpecError: One of `tasks` is not in the cluster.
    """
    global _farewell
    if runs_in_this_process(specification):
        return
    if tasks is None:
        tasks = [task for task, _ in specification.members if task.type in ("ps", "worker")]
    addresses = {task: specification.address_of(task) for task in tasks}
    with _lock:
        if _farewell is None:
            _farewell = Farewell(_tell)
            sys.excepthook = _farewell.chained(sys.excepthook)
            atexit.register(_farewell.say)
        _farewell.add(addresses)


def say_at_exit(goodbye: Goodbye) -> None:
    """Chooses what the ps and workers are told when this process ends, unless an uncaught exception ends it.

    Runs on: chief. Does nothing where nobody is to be told.

    Args:
        goodbye: The last word.
    """
    if _farewell is not None:
        _farewell.goodbye = goodbye


class Farewell:
    """Tells tasks goodbye, all at the same time and in bounded time.

    The threads are started before they are needed, because Python starts none at its exit; they are daemons,
    because one that talks to a task that hangs must not keep the process.

    Args:
        tell: Tells one task at its address, before a time on the monotonic clock; returns whether it worked.

    Attributes:
        goodbye: What they are told.
    """

    def __init__(self, tell: Callable[[Task, str, Goodbye, float], bool]):
        self._tell = tell
        self.goodbye = Goodbye()
        self._addresses: dict[Task, str] = {}
        self._work: queue.SimpleQueue[tuple[Task, float]] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[tuple[Task, bool]] = queue.SimpleQueue()
        self._num_threads = 0
        self._pid = os.getpid()

    def add(self, addresses: dict[Task, str]) -> None:
        """Adds tasks to tell.

        Args:
            addresses: The tasks and where they are.
        """
        self._addresses.update(addresses)
        while self._num_threads < min(_MAX_THREADS, len(self._addresses)):
            self._num_threads += 1
            threading.Thread(target=self._serve, name="tfdist_ext_goodbye", daemon=True).start()

    def chained(self, hook: Callable) -> Callable:
        """Makes an exception hook that takes note of an exception and goes on with another hook.

        Args:
            hook: The other hook.

        Returns:
            A function for `sys.excepthook`.
        """

        def note(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
            # At a prompt an exception ends nothing.
            if not hasattr(sys, "ps1"):
                self.goodbye = Goodbye(failed=True, reason=f"{kind.__name__}: {error}")
            hook(kind, error, traceback)

        return note

    def say(self, deadline_seconds: float = DEADLINE_SECONDS) -> None:
        """Tells all tasks.

        Args:
            deadline_seconds: How long at most.
        """
        # A forked child that ends is not the chief that ends.
        if os.getpid() != self._pid:
            return
        deadline = time.monotonic() + deadline_seconds
        untold = dict(self._addresses)
        for task in untold:
            self._work.put((task, deadline))
        for _ in range(len(untold)):
            try:
                task, told = self._done.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                break
            if told:
                del untold[task]
        if untold:
            names = ", ".join(map(str, untold))
            to_standard_error(f"no goodbye reached {names}; what still runs there ends by itself")

    def _serve(self) -> None:
        while True:
            task, deadline = self._work.get()
            self._done.put((task, self._tell(task, self._addresses[task], self.goodbye, deadline)))


def _tell(task: Task, address: str, goodbye: Goodbye, deadline: float) -> bool:
    """Tells one task; a dead one costs nothing, one that hangs its thread."""
    import tensorflow as tf

    text = goodbye_text(goodbye)
    while time.monotonic() < deadline and listening(address, _PROBE_SECONDS):
        try:
            call(task, text)
            return True
        except tf.errors.InvalidArgumentError:
            # It knows neither the function nor this chief: another kind of server, or one that was started again
            # and never connected to.
            return False
        except (tf.errors.OpError, ValueError):
            # Its answer may have been lost on the way; to hear it twice does no harm.
            time.sleep(_BETWEEN_SECONDS)
    return False
