"""When is a whole group of tasks started again, how long after, and what is told about it? Pure.

Rules:

- a failure starts the group again, at most `max_restarts` times in total: progress gives nothing back, because
  the launcher knows nothing of what a script has done;
- the wait before it doubles with each restart, up to a minute;
- exit codes that say that the command itself is wrong start nothing, and neither does a job that was
  interrupted from outside;
- a task that was asked by SIGTERM to save and stop ends with 143. Came the signal to that task alone, then it
  was preempted: the job is not done, and the group starts again.
"""

from __future__ import annotations

import dataclasses
import datetime
import itertools
import signal

from tfdist_ext.launch.decisions import ending, exit_status

MAX_BACKOFF_SECONDS = 60.0
# An attempt that fails so soon has hardly begun to train.
CRASH_LOOP_SECONDS = 5.0
# What a shell gives for a wrong use of a program, one that cannot be run, and one that is not there.
_NOT_AGAIN = (2, 126, 127)
_PREEMPTED = 128 + signal.SIGTERM


@dataclasses.dataclass(frozen=True, kw_only=True)
class RestartRules:
    """What the user may choose.

    Attributes:
        max_restarts: How often the whole group may be started again, in total.
        backoff_seconds: Wait before the first restart; each further one waits twice as long, but no longer than
            60 s, or than this where it is longer.
    """

    max_restarts: int = 0
    backoff_seconds: float = 1.0

    def __post_init__(self):
        if self.max_restarts < 0 or not 0 <= self.backoff_seconds < float("inf"):
            raise ValueError(
                "Arguments `max_restarts` and `backoff_seconds` must not be negative or infinite; received "
                f"{self.max_restarts} and {self.backoff_seconds}."
            )

    def delay_seconds(self, restart: int) -> float:
        """Says how long to wait before a restart.

        Args:
            restart: Which one, counted from 1.

        Returns:
            Seconds.

        Example:
            >>> [RestartRules(backoff_seconds=10).delay_seconds(restart) for restart in (1, 2, 3, 4, 5)]
            [10.0, 20.0, 40.0, 60.0, 60.0]
        """
        # 2 to the 60th is longer than any cap, and is still a float.
        doubled = self.backoff_seconds * 2.0 ** min(restart - 1, 60)
        return min(doubled, max(MAX_BACKOFF_SECONDS, self.backoff_seconds))


@dataclasses.dataclass(frozen=True, kw_only=True)
class FailedAttempt:
    """How one attempt of the group failed.

    Attributes:
        name: The first task that failed.
        code: Its code as `subprocess` gives it: negative for a signal.
        failed_at: The wall clock when it ended.
        seconds: Time from the start of the attempt to then.
    """

    name: str
    code: int
    failed_at: datetime.datetime
    seconds: float


class GroupRestarts:
    """Decides after each attempt, and remembers the failures.

    Attributes:
        history: The attempts that failed, in order.
        num_attempts: The attempts that were begun.
    """

    def __init__(self, rules: RestartRules):
        self.history: list[FailedAttempt] = []
        self.num_attempts = 0
        self._rules = rules
        self._reason = ""

    def begin(self) -> int:
        """Counts an attempt that begins.

        Returns:
            How often the group was started before.
        """
        self.num_attempts += 1
        return self.num_attempts - 1

    def attempt_failed(self, failed: FailedAttempt, *, interrupted: bool) -> float | None:
        """Reacts to a failed attempt.

        Args:
            failed: The attempt.
            interrupted: Whether a signal from outside asked the job to stop.

        Returns:
            Seconds to wait before the group is started again; None ends the job.
        """
        self.history.append(failed)
        status = exit_status(failed.code)
        if self.num_attempts > self._rules.max_restarts:
            self._reason = self._crash_loop()
        elif interrupted:
            self._reason = "; a signal asked the job to stop, so it was not started again"
        elif status in _NOT_AGAIN:
            self._reason = (
                f"; exit code {status} says that the command itself is wrong, so it was not started again"
            )
        else:
            return self._rules.delay_seconds(self.num_attempts)
        return None

    def announcement(self, delay_seconds: float) -> str:
        """Announces a restart.

        Args:
            delay_seconds: What `attempt_failed` returned.

        Returns:
            A line.
        """
        times = f"restart {self.num_attempts} of {self._rules.max_restarts}"
        return f"starting all tasks again in {delay_seconds:g} s ({times})"

    def report(self, outcome: str) -> list[str]:
        """Tells the history at the end of the job.

        Args:
            outcome: How it ended: `"finished"`, `"failed"`, or `"stopped by SIGTERM"`.

        Returns:
            A heading and a line for each failed attempt; nothing if none failed, or if restarts are off.
        """
        if not self.history or not self._rules.max_restarts:
            return []
        num_restarts = self.num_attempts - 1
        plural = "" if num_restarts == 1 else "s"
        return [
            f"{outcome} after {num_restarts} restart{plural}{self._reason}:",
            *(f"  {_line(number, failed)}" for number, failed in enumerate(self.history, 1)),
        ]

    def _crash_loop(self) -> str:
        quick = len(list(itertools.takewhile(_was_quick, reversed(self.history))))
        # With one restart allowed, a single quick failure would be no loop.
        if quick < max(2, self._rules.max_restarts):
            return ""
        return (
            f"; crash loop: the last {quick} attempts each failed within {CRASH_LOOP_SECONDS:g} s of their start, "
            "so another restart is not likely to help"
        )


def _was_quick(failed: FailedAttempt) -> bool:
    return failed.seconds <= CRASH_LOOP_SECONDS


def _line(number: int, failed: FailedAttempt) -> str:
    preempted = " (preempted)" if exit_status(failed.code) == _PREEMPTED else ""
    return (
        f"attempt {number} failed at {failed.failed_at:%Y-%m-%d %H:%M:%S}, {failed.seconds:.1f} s after its "
        f"start: {failed.name} {ending(failed.code)}{preempted}"
    )
