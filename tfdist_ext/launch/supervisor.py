"""Who starts the tasks, watches them, and carries out what was decided?"""

from __future__ import annotations

import dataclasses
import datetime
import pathlib
import queue
import re
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from types import FrameType

from tfdist_ext.cluster import Task
from tfdist_ext.launch.children import Child, Guard
from tfdist_ext.launch.decisions import (
    Action,
    Failure,
    Finish,
    JobDecisions,
    Restart,
    Rules,
    SendSignal,
    ending,
)
from tfdist_ext.launch.output import LogFile, PrefixedPrinter
from tfdist_ext.launch.restarts import FailedAttempt, GroupRestarts, RestartRules

_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_OUTPUT_SECONDS = 2.0
# Python notices a signal that comes in the moment before a wait only when the wait is over.
_LONGEST_WAIT_SECONDS = 0.5


@dataclasses.dataclass(frozen=True)
class _Exited:
    task: Task
    code: int


@dataclasses.dataclass(frozen=True)
class _Interrupted:
    signum: int


class Supervisor:
    """Runs one local job from its start to its end, its restarts included.

    Args:
        command: What every task runs.
        plan: Called before each attempt with the number of restarts so far; gives the tasks, in the order of
            starting, with all their variables. Each attempt has the same tasks.
        rules: Grace, and restarts of single workers.
        restart_rules: Restarts of the whole group; by default none.
        log_dir: Folder for a full copy of each task's output, or None.
        names: What to call a task in the output, where that is not its own name.
        hidden: Lines of standard error that begin like this are not shown.
    """

    def __init__(
        self,
        command: Sequence[str],
        plan: Callable[[int], Mapping[Task, Mapping[str, str]]],
        *,
        rules: Rules,
        restart_rules: RestartRules | None = None,
        log_dir: pathlib.Path | None = None,
        names: Mapping[Task, str] | None = None,
        hidden: re.Pattern[str] | None = None,
    ):
        self._command = list(command)
        self._plan = plan
        self._rules = rules
        self._restarts = GroupRestarts(restart_rules or RestartRules())
        self._log_dir = log_dir
        self._names = dict(names or {})
        # SimpleQueue, because its put may be called from a signal handler while get waits.
        self._events: queue.SimpleQueue[_Exited | _Interrupted] = queue.SimpleQueue()
        self._children: dict[Task, Child] = {}
        self._has_lost_logs = False
        self._printers = (
            PrefixedPrinter(sys.stdout.buffer, on_loss=self._say),
            PrefixedPrinter(sys.stderr.buffer, hidden=hidden),
        )

    def run(self) -> int:
        """Starts the tasks and stays until none runs and none is to be started again.

        Runs on: the main thread, which alone may handle signals.

        Returns:
            The exit code of the job: 0, that of the first task to fail in the last attempt, or 128 + the signal
            that stopped it.

        Raises:
            OSError: The command cannot be started.
        """
        # What was ignored at the start (`nohup`, a shell's `&`) stays ignored, here and in the tasks, which inherit it.
        previous = {
            signum: signal.signal(signum, self._on_signal)
            for signum in _FORWARDED
            if signal.getsignal(signum) is not signal.SIG_IGN
        }
        self._guard = Guard()
        try:
            while True:
                finish = self._run_attempt()
                delay_seconds = self._delay_seconds(finish)
                if delay_seconds is None:
                    return self._ended(finish)
                signum = self._interrupted_within(delay_seconds)
                if signum is not None:
                    return self._ended(Finish(128 + signum, None))
        finally:
            for child in self._children.values():
                child.send_signal(signal.SIGKILL)
            self._guard.close()
            for signum, handler in previous.items():
                signal.signal(signum, handler)

    def _run_attempt(self) -> Finish:
        """Starts all tasks and stays until none runs."""
        num_restarts = self._restarts.begin()
        self._environments = self._plan(num_restarts)
        self._decisions = JobDecisions(list(self._environments), self._rules)
        self._started_at = time.monotonic()
        for task in self._environments:
            if num_restarts:
                self._write_heading(task)
            self._start(task)
        while True:
            for action in self._next_actions():
                self._perform(action)
                if isinstance(action, Finish):
                    return action

    def _delay_seconds(self, finish: Finish) -> float | None:
        """Decides, and says, when to start the group again; None ends the job."""
        failure, failed_at = finish.first_failure, self._decisions.failed_at
        if failure is None or failed_at is None:
            return None
        seconds_ago = datetime.timedelta(seconds=time.monotonic() - failed_at)
        failed = FailedAttempt(
            name=self._name(failure.task),
            code=failure.code,
            failed_at=datetime.datetime.now() - seconds_ago,
            seconds=failed_at - self._started_at,
        )
        delay = self._restarts.attempt_failed(failed, interrupted=self._decisions.was_interrupted)
        if delay is not None:
            self._say(self._restarts.announcement(delay))
        return delay

    def _interrupted_within(self, seconds: float) -> int | None:
        """Waits between two attempts, when only a signal can come; returns which one, if any."""
        event = self._next_event(time.monotonic() + seconds)
        assert event is None or isinstance(event, _Interrupted)
        return None if event is None else event.signum

    def _ended(self, finish: Finish) -> int:
        """Tells how the job ended, the last failure last."""
        outcome = "failed" if finish.first_failure else "finished"
        if finish.code and not finish.first_failure:
            outcome = f"stopped by {signal.Signals(finish.code - 128).name}"
        for line in self._restarts.report(outcome):
            self._say(line)
        if finish.first_failure is not None:
            self._tell_first_failure(finish.first_failure)
        return finish.code

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        del frame
        self._events.put(_Interrupted(signum))

    def _start(self, task: Task) -> None:
        environment = self._environments[task]
        self._children[task] = Child(
            self._name(task),
            self._command,
            environment,
            printers=self._printers,
            log_file=self._log_file(task),
            guard=self._guard,
            on_exit=lambda code: self._events.put(_Exited(task, code)),
        )

    def _next_event(self, deadline: float | None) -> _Exited | _Interrupted | None:
        """Waits for an event; None if there was none before the deadline."""
        while True:
            rest = _LONGEST_WAIT_SECONDS if deadline is None else deadline - time.monotonic()
            try:
                return self._events.get(timeout=min(max(0.0, rest), _LONGEST_WAIT_SECONDS))
            except queue.Empty:
                if deadline is not None and time.monotonic() >= deadline:
                    return None

    def _next_actions(self) -> list[Action]:
        """Waits for an event or for the deadline, and asks what to do."""
        event = self._next_event(self._decisions.deadline)
        if event is None:
            return self._decisions.tick(time.monotonic())
        if isinstance(event, _Interrupted):
            self._say(f"received {signal.Signals(event.signum).name}; stopping all tasks")
            return self._decisions.interrupted(event.signum, time.monotonic())
        had_failed = self._decisions.first_failure is not None
        actions = self._decisions.task_exited(event.task, event.code, time.monotonic())
        if self._decisions.first_failure is not None and not had_failed:
            self._say(f"{self._name(event.task)} {ending(event.code)}; stopping the others")
        for action in actions:
            if isinstance(action, Restart):
                times = f"restart {action.attempt} of {self._rules.worker_restarts}"
                self._say(f"{self._name(event.task)} {ending(event.code)}; restarting it alone ({times})")
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

    def _tell_first_failure(self, failure: Failure) -> None:
        name, lines = self._name(failure.task), self._children[failure.task].last_lines
        self._say(f"first failure: {name} {ending(failure.code)}")
        self._say(f"the last lines of {name}:" if lines else f"{name} wrote nothing")
        for line in lines:
            self._say(f"  {line}")

    def _log_file(self, task: Task) -> LogFile | None:
        if self._log_dir is None:
            return None
        return LogFile(self._log_dir / f"{task.type}-{task.index}.log", self._tell_of_lost_logs)

    def _tell_of_lost_logs(self, text: str) -> None:
        """Says it once for all tasks, whose logs are on one disk."""
        if not self._has_lost_logs:
            self._has_lost_logs = True
            self._say(text)

    def _write_heading(self, task: Task) -> None:
        """Parts an attempt from those before it, which the file keeps."""
        log, now = self._log_file(task), datetime.datetime.now()
        if log is not None:
            heading = f"--- tfdist-ext: attempt {self._restarts.num_attempts}, {now:%Y-%m-%d %H:%M:%S} ---\n"
            log.write(heading.encode())
            log.close()

    def _name(self, task: Task) -> str:
        return self._names.get(task, str(task))

    def _say(self, text: str) -> None:
        self._printers[1].write("tfdist-ext", [text])
