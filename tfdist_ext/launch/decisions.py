"""What does the supervisor do when a task ends, a signal comes, or time passes? Pure.

Time is an argument and actions are returned, so that every rule here is tested without a process:

- a failed task stops the job, and the first one to fail gives the job its name and its exit code;
- a failed `worker` of a job that has `ps` is restarted alone, a bounded number of times;
- once training is done (the chief of a job with ps, else everybody who trains, has ended well), the tasks
  that only serve get time to end by themselves, and are then stopped without blame;
- a first signal is passed on, a second one kills.
"""

from __future__ import annotations

import dataclasses
import enum
import signal
from collections.abc import Sequence

from tfdist_ext.cluster import Task


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rules:
    """What the user may choose.

    Attributes:
        grace_seconds: Time between asking tasks to stop and killing them; also what serving tasks get to end
            by themselves when training is done.
        worker_restarts: How often each worker of a job with ps may be restarted.
    """

    grace_seconds: float = 10.0
    worker_restarts: int = 3

    def __post_init__(self):
        if self.grace_seconds < 0 or self.worker_restarts < 0:
            raise ValueError(
                "Arguments `grace_seconds` and `worker_restarts` must not be negative; received "
                f"{self.grace_seconds} and {self.worker_restarts}."
            )


@dataclasses.dataclass(frozen=True)
class Failure:
    """The first task that failed, and its code as `subprocess` gives it: negative for a signal."""

    task: Task
    code: int


@dataclasses.dataclass(frozen=True)
class Restart:
    """Start this task again; it is its attempt-th restart."""

    task: Task
    attempt: int


@dataclasses.dataclass(frozen=True)
class SendSignal:
    """Send a signal to the process group of a task."""

    task: Task
    signum: int


@dataclasses.dataclass(frozen=True)
class Finish:
    """No task runs any more: the job ends with this exit code, and this failure is to be told."""

    code: int
    first_failure: Failure | None


Action = Restart | SendSignal | Finish


class Phase(enum.Enum):
    """Where a job is in its life."""

    TRAINING = "training"
    DRAINING = "training is done, the serving tasks may end by themselves"
    STOPPING = "the tasks were asked to stop"
    KILLING = "the tasks were killed"
    DONE = "no task runs"


def exit_status(code: int) -> int:
    """Turns a `subprocess` return code into a shell's exit code.

    Args:
        code: The return code; negative for a signal.

    Returns:
        128 + the signal's number for a signal.

    Example:
        >>> exit_status(3), exit_status(-9)
        (3, 137)
    """
    return 128 - code if code < 0 else code


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


class JobDecisions:
    """The state machine of one job; every method returns the actions to take, in order.

    Attributes:
        phase: Where the job is.
        running: The tasks that run, or are about to be restarted.
        deadline: When `tick` must be called, or None.
        first_failure: The first failure that was not mended by a restart.
        failed_at: The time of it.
        was_interrupted: Whether a signal came from outside.
    """

    def __init__(self, tasks: Sequence[Task], rules: Rules):
        self.phase = Phase.TRAINING
        self.running = list(tasks)
        self.deadline: float | None = None
        self.first_failure: Failure | None = None
        self.failed_at: float | None = None
        self.was_interrupted = False
        self._rules = rules
        self._has_ps = any(task.type == "ps" for task in tasks)
        self._leaders = _leaders(tasks)
        self._num_restarts = dict.fromkeys(tasks, 0)
        self._interrupted_by: int | None = None

    def task_exited(self, task: Task, code: int, time: float) -> list[Action]:
        """Reacts to the end of a task.

        Args:
            task: A running task.
            code: Its return code; negative for a signal.
            time: Now, in seconds.

        Returns:
            What to do.
        """
        self.running.remove(task)
        if code != 0 and self._may_restart(task):
            self.running.append(task)
            self._num_restarts[task] += 1
            return [Restart(task, self._num_restarts[task])]
        if code != 0 and self._is_failure(task):
            self.first_failure = Failure(task, code)
            self.failed_at = time
            return self._stop(signal.SIGTERM, time)
        if self.phase is Phase.TRAINING and not self._leaders & set(self.running):
            self.phase = Phase.DRAINING
            self.deadline = time + self._rules.grace_seconds
        return self._finish_if_empty()

    def interrupted(self, signum: int, time: float) -> list[Action]:
        """Reacts to a signal from outside.

        Args:
            signum: The signal.
            time: Now, in seconds.

        Returns:
            What to do: pass it on at first, kill when the tasks were asked to stop already.
        """
        if self.phase is Phase.DONE:
            return []
        self.was_interrupted = True
        if self.phase in (Phase.STOPPING, Phase.KILLING):
            return self._kill()
        self._interrupted_by = signum
        return self._stop(signum, time)

    def tick(self, time: float) -> list[Action]:
        """Reacts to the passing of time.

        Args:
            time: Now, in seconds.

        Returns:
            What to do; nothing before `deadline`.
        """
        if self.deadline is None or time < self.deadline:
            return []
        return self._stop(signal.SIGTERM, time) if self.phase is Phase.DRAINING else self._kill()

    def _may_restart(self, task: Task) -> bool:
        return (
            self.phase is Phase.TRAINING
            and self._has_ps
            and task.type == "worker"
            and self._num_restarts[task] < self._rules.worker_restarts
        )

    def _is_failure(self, task: Task) -> bool:
        """While draining, only an evaluator still has work of its own; the others have lost their chief."""
        return self.phase is Phase.TRAINING or (self.phase is Phase.DRAINING and task.type == "evaluator")

    def _stop(self, signum: int, time: float) -> list[Action]:
        self.phase = Phase.STOPPING
        self.deadline = time + self._rules.grace_seconds
        return [*(SendSignal(task, signum) for task in self.running), *self._finish_if_empty()]

    def _kill(self) -> list[Action]:
        self.phase = Phase.KILLING
        self.deadline = None
        return [SendSignal(task, signal.SIGKILL) for task in self.running]

    def _finish_if_empty(self) -> list[Action]:
        if self.running:
            return []
        self.phase = Phase.DONE
        self.deadline = None
        if self.first_failure is not None:
            return [Finish(exit_status(self.first_failure.code), self.first_failure)]
        return [Finish(0 if self._interrupted_by is None else 128 + self._interrupted_by, None)]


def _leaders(tasks: Sequence[Task]) -> frozenset[Task]:
    """Whose end is the end of training: the chief of a job with ps, else all who train."""
    chief = frozenset(task for task in tasks if task.type == "chief")
    if chief and any(task.type == "ps" for task in tasks):
        return chief
    return chief | frozenset(task for task in tasks if task.type == "worker")
