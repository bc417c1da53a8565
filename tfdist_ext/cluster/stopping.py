"""How does the chief learn that a ps or a worker was asked to stop, in time to save?

TensorFlow's servers are called and never call. So the chief asks each task now and then, once somebody on the chief
wants to know; from then on SIGTERM does not end the task on the spot, but with the chief.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from tfdist_ext.cluster.control import Goodbye, ask_about_stop
from tfdist_ext.cluster.goodbye import say_at_exit
from tfdist_ext.cluster.in_process import runs_in_this_process
from tfdist_ext.cluster.reachability import to_standard_error
from tfdist_ext.cluster.specification import ClusterSpecification, Task

_BETWEEN_SECONDS = 0.5
# With many tasks the chief would do little else.
_BETWEEN_SECONDS_PER_TASK = 0.01
_AFTER_A_FAILURE_SECONDS = 2.0

_lock = threading.Lock()
_watch: StopWatch | None = None


class StopNote:
    """SIGTERM at a task that serves.

    Args:
        task: The task.
        wake: Called when the signal has come, in the main thread.

    Attributes:
        is_asked: True once it has come.
    """

    def __init__(self, task: Task, wake: Callable[[], None]):
        self.is_asked = False
        self._task, self._wake = task, wake
        self._previous: Any = None
        self._holds = False

    def hold(self) -> None:
        """Takes the signal over; the second one does what the first would have done.

        Runs on: the main thread; elsewhere Python forbids it, and nothing is done.
        """
        if self._holds or self.is_asked or threading.current_thread() is not threading.main_thread():
            return
        if signal.getsignal(signal.SIGTERM) is signal.SIG_IGN:
            return  # Whoever had it ignored wants the task to go on.
        self._previous = signal.signal(signal.SIGTERM, self._note)
        self._holds = True

    def _note(self, signum: int, frame: Any) -> None:
        self.is_asked = True
        signal.signal(signal.SIGTERM, self._previous or signal.SIG_DFL)
        to_standard_error(f"{self._task} was asked to stop by SIGTERM; it ends when the chief has saved")
        self._wake()


class StopWatch:
    """Asks tasks whether they were asked to stop; a thread for each, because one that hangs answers nobody.

    Args:
        tasks: Whom to ask.
        ask: Asks one; raises what the connection raises.
        pause: Waits.

    Attributes:
        task: The first task that was asked to stop, None before.
    """

    def __init__(
        self,
        tasks: list[Task],
        ask: Callable[[Task], Mapping[str, Any]],
        pause: Callable[[float], None] = time.sleep,
    ):
        self.task: Task | None = None
        self._ask, self._pause = ask, pause
        self._between_seconds = max(_BETWEEN_SECONDS, _BETWEEN_SECONDS_PER_TASK * len(tasks))
        self._threads = [
            threading.Thread(target=self._run, args=(task,), name=f"tfdist_ext-stop-{task}", daemon=True)
            for task in tasks
        ]

    def start(self) -> None:
        """Begins to ask."""
        for thread in self._threads:
            thread.start()

    def _run(self, task: Task) -> None:
        while self.task is None:
            try:
                if self._ask(task).get("asked_to_stop"):
                    self.task = self.task or task
                seconds = self._between_seconds
            except Exception:
                # It died, or comes back: others look after that.
                seconds = _AFTER_A_FAILURE_SECONDS
            self._pause(seconds)


def asked_to_stop(specification: ClusterSpecification) -> Task | None:
    """Returns a ps or worker that got SIGTERM, None where there is none.

    Runs on: chief, once it is connected. From the first call on the tasks note the signal and go on serving until the
    chief ends, which they expect to happen soon: they end at once if it is not there. Of a cluster inside this process
    nobody is asked.

    Args:
        specification: The cluster.
    """
    global _watch
    with _lock:
        if _watch is None:
            tasks = [task for task, _ in specification.members if task.type in ("ps", "worker")]
            _watch = StopWatch([] if runs_in_this_process(specification) else tasks, ask_about_stop)
            _watch.start()
    return _watch.task


def stop_all_at_exit() -> None:
    """Has the ps and workers end with the exit code of SIGTERM when this process ends.

    Runs on: chief.
    """
    say_at_exit(Goodbye(stopped=True))
