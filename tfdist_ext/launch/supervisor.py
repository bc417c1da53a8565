"""Who starts the tasks, watches them, and carries out what was decided?"""

from __future__ import annotations

import dataclasses
import pathlib
import queue
import re
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from types import FrameType

from tfdist_ext.cluster import Task
from tfdist_ext.launch.children import Child, Guard
from tfdist_ext.launch.decisions import Action, Failure, Finish, JobDecisions, Restart, Rules, SendSignal
from tfdist_ext.launch.output import PrefixedPrinter

_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_OUTPUT_SECONDS = 2.0


@dataclasses.dataclass(frozen=True)
class _Exited:
    task: Task
    code: int


@dataclasses.dataclass(frozen=True)
class _Interrupted:
    signum: int


class Supervisor:
    """Runs one local job from its start to its end.

    Args:
        command: What every task runs.
        environments: The tasks, in the order of starting, with all their variables.
        rules: Grace and restarts.
        log_dir: Folder for a full copy of each task's output, or None.
        names: What to call a task in the output, where that is not its own name.
        hidden: Lines of standard error that begin like this are not shown.
    """

    def __init__(
        self,
        command: Sequence[str],
        environments: Mapping[Task, Mapping[str, str]],
        *,
        rules: Rules,
        log_dir: pathlib.Path | None = None,
        names: Mapping[Task, str] | None = None,
        hidden: re.Pattern[str] | None = None,
    ):
        self._command = list(command)
        self._environments = environments
        self._rules = rules
        self._log_dir = log_dir
        self._names = {task: (names or {}).get(task, str(task)) for task in environments}
        self._decisions = JobDecisions(list(environments), rules)
        # SimpleQueue, because its put may be called from a signal handler while get waits.
        self._events: queue.SimpleQueue[_Exited | _Interrupted] = queue.SimpleQueue()
        self._children: dict[Task, Child] = {}
        self._printers = (
            PrefixedPrinter(sys.stdout.buffer),
            PrefixedPrinter(sys.stderr.buffer, hidden=hidden),
        )

    def run(self) -> int:
        """Starts the tasks and stays until none runs.

        Runs on: the main thread, which alone may handle signals.

        Returns:
            The exit code of the job: 0, that of the first task to fail, or 128 + the signal that stopped it.

        Raises:
            OSError: The command cannot be started.
        """
        previous = {signum: signal.signal(signum, self._on_signal) for signum in _FORWARDED}
        self._guard = Guard()
        try:
            for task in self._environments:
                self._start(task)
            return self._loop()
        finally:
            for child in self._children.values():
                child.send_signal(signal.SIGKILL)
            self._guard.close()
            for signum, handler in previous.items():
                signal.signal(signum, handler)

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        del frame
        self._events.put(_Interrupted(signum))

    def _start(self, task: Task) -> None:
        environment = self._environments[task]
        self._children[task] = Child(
            self._names[task],
            self._command,
            environment,
            printers=self._printers,
            log_file=self._log_dir / f"{task.type}-{task.index}.log" if self._log_dir else None,
            guard=self._guard,
            on_exit=lambda code: self._events.put(_Exited(task, code)),
        )

    def _loop(self) -> int:
        while True:
            for action in self._next_actions():
                self._perform(action)
                if isinstance(action, Finish):
                    return action.code

    def _next_actions(self) -> list[Action]:
        """Waits for an event or for the deadline, and asks what to do."""
        deadline = self._decisions.deadline
        timeout = None if deadline is None else max(0.0, deadline - time.monotonic())
        try:
            event = self._events.get(timeout=timeout)
        except queue.Empty:
            return self._decisions.tick(time.monotonic())
        if isinstance(event, _Interrupted):
            self._say(f"received {signal.Signals(event.signum).name}; stopping all tasks")
            return self._decisions.interrupted(event.signum, time.monotonic())
        had_failed = self._decisions.first_failure is not None
        actions = self._decisions.task_exited(event.task, event.code, time.monotonic())
        if self._decisions.first_failure is not None and not had_failed:
            self._say(f"{self._names[event.task]} {ending(event.code)}; stopping the others")
        for action in actions:
            if isinstance(action, Restart):
                times = f"restart {action.attempt} of {self._rules.worker_restarts}"
                self._say(f"{self._names[event.task]} {ending(event.code)}; restarting it alone ({times})")
        return actions

    def _perform(self, action: Action) -> None:
        if isinstance(action, SendSignal):
            self._children[action.task].send_signal(action.signum)
        elif isinstance(action, Restart):
            self._children[action.task].join_output(_OUTPUT_SECONDS)
            self._start(action.task)
        else:
            for child in self._children.values():
                child.join_output(_OUTPUT_SECONDS)
            if action.first_failure is not None:
                self._tell_first_failure(action.first_failure)

    def _tell_first_failure(self, failure: Failure) -> None:
        name, lines = self._names[failure.task], self._children[failure.task].last_lines
        self._say(f"first failure: {name} {ending(failure.code)}")
        self._say(f"the last lines of {name}:" if lines else f"{name} wrote nothing")
        for line in lines:
            self._say(f"  {line}")

    def _say(self, text: str) -> None:
        self._printers[1].write("tfdist-ext", [text])


def ending(code: int) -> str:
    """Says how a process ended.

    Args:
        code: Its return code as `subprocess` gives it.

    Returns:
        A phrase.

    Example:
        >>> ending(3), ending(-9)
        ('ended with exit code 3', 'was ended by SIGKILL')
    """
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"was ended by signal {-code}"
