"""How long do steps take, and what does a save cost? Pure: time is an argument."""

from __future__ import annotations

import collections
import statistics

from tfdist_ext.checkpoint.save_policies import SaveProgress

# A snapshot shares memory with the variables: the steps that overwrite them first pay for copies.
STEPS_THAT_PAY = 5
_CHECK_SECONDS = 0.25
_MOST_STEPS_UNCHECKED = 1000


class Pace:
    """Measures a training loop from the times at which its steps ended.

    Args:
        now: Seconds, on a clock that never goes back.

    Attributes:
        blocking_seconds: What the last save cost the training thread, with the slower steps after it; None at first.
        persist_seconds: From the begin of the last save to its commit; None at first.
    """

    def __init__(self, now: float):
        self.blocking_seconds: float | None = None
        self.persist_seconds: float | None = None
        self._last_save = now
        self._last_step: int | None = None
        self._last_end: float | None = None
        self._last_saved_step: int | None = None
        self._durations: collections.deque[float] = collections.deque(maxlen=51)
        self._paying = 0
        self._cost = 0.0

    @property
    def seconds_per_step(self) -> float | None:
        """Median of recent steps; None while fewer than three are known."""
        return statistics.median(self._durations) if len(self._durations) >= 3 else None

    def step_ended(self, step: int, now: float) -> None:
        """Notes that `step` updates are applied."""
        if self._last_end is not None and self._last_step is not None and step > self._last_step:
            duration = (now - self._last_end) / (step - self._last_step)
            if self._paying:
                self._note_paid(duration)
            else:
                self._durations.append(duration)
        self._last_step, self._last_end = step, now

    def saved(self, step: int, started: float, now: float) -> None:
        """Notes a save, which held up the loop from `started` to `now`."""
        if self._paying:
            self.blocking_seconds = self._cost  # Saved again before all was paid: as far as is known.
        self._last_save, self._last_saved_step = started, step
        self._cost, self._paying = now - started, STEPS_THAT_PAY
        if self._last_end is not None:
            self._last_end = now

    def restored(self, step: int, now: float) -> None:
        """Notes that `step` is the newest checkpoint."""
        self._last_save, self._last_saved_step = now, step

    def interrupted(self) -> None:
        """Notes that what comes next, such as an evaluation, is no step."""
        self._last_end = None

    def progress(self, step: int, now: float) -> SaveProgress:
        """Returns what save policies look at."""
        return SaveProgress(
            step=step,
            last_saved_step=self._last_saved_step,
            seconds=now,
            last_saved_seconds=self._last_save,
            seconds_per_step=self.seconds_per_step,
            blocking_seconds=self.blocking_seconds,
            persist_seconds=self.persist_seconds,
        )

    def steps_between_checks(self) -> int:
        """Returns after how many steps workers should ask each other again: about four times a second."""
        seconds = self.seconds_per_step
        if seconds is None or seconds <= 0:
            return 1
        return max(1, min(_MOST_STEPS_UNCHECKED, round(_CHECK_SECONDS / seconds)))

    def _note_paid(self, duration: float) -> None:
        usual = self.seconds_per_step
        if usual is not None:
            self._cost += max(0.0, duration - usual)
        self._paying -= 1
        if not self._paying:
            self.blocking_seconds = self._cost
