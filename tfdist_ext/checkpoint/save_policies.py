"""When is the next checkpoint due?

Small frozen dataclasses that look at numbers and answer; whoever saves brings the numbers, the clock among them.
`EverySteps(500) | EverySeconds(600)` is due when any of the two is. Any object with `needs_clock` and `is_due` is
a policy.

References:
    J. W. Young, "A First Order Approximation to the Optimum Checkpoint Interval", Communications of the ACM, 1974.
    J. T. Daly, "A Higher Order Estimate of the Optimum Checkpoint Interval for Restart Dumps", Future Generation
    Computer Systems, 2006.
    J. Mohan, A. Phanishayee, V. Chidambaram, "CheckFreq: Frequent, Fine-Grained DNN Checkpointing", USENIX FAST,
    2021.
"""

from __future__ import annotations

import dataclasses
import math
import numbers
from typing import Protocol, runtime_checkable


@dataclasses.dataclass(frozen=True, kw_only=True)
class SaveProgress:
    """What a policy decides by.

    Attributes:
        step: Updates applied so far.
        last_saved_step: Step of the newest checkpoint, also of the one that was restored; None without one.
        seconds: Now, on a clock that never goes back.
        last_saved_seconds: When the newest checkpoint was begun, else when training was; on the same clock.
        seconds_per_step: Recent median; None while it is not known.
        blocking_seconds: What a save recently cost the training thread, with the slower steps after it; None while
            it is not known.
        persist_seconds: How long a save recently took from its begin to its commit; None while it is not known.
    """

    step: int
    last_saved_step: int | None = None
    seconds: float = 0.0
    last_saved_seconds: float = 0.0
    seconds_per_step: float | None = None
    blocking_seconds: float | None = None
    persist_seconds: float | None = None

    def __post_init__(self):
        for name in ("seconds_per_step", "blocking_seconds", "persist_seconds"):
            value = getattr(self, name)
            if value is not None and not 0.0 <= value < math.inf:
                raise ValueError(
                    f"Argument `{name}` must be None or a finite number of at least 0; received {value!r}. Try None."
                )

    @property
    def steps_since_save(self) -> int:
        """Steps that a crash now would lose. A save of a later step belongs to another run and does not count."""
        if self.last_saved_step is None or self.last_saved_step > self.step:
            return self.step
        return self.step - self.last_saved_step


@runtime_checkable
class SavePolicy(Protocol):
    """Says when the next checkpoint is due."""

    @property
    def needs_clock(self) -> bool:
        """Whether time enters. If not, every worker comes to the same decision alone; else the chief decides."""

    def is_due(self, progress: SaveProgress) -> str | None:
        """Decides after a step.

        Args:
            progress: How far training is.

        Returns:
            The reason to save now, as half a sentence for the log; None if there is none.
        """


class _Joinable:
    """Gives the policies here their `|`."""

    def __or__(self, other: SavePolicy) -> SaveUnion:
        if isinstance(other, type) or not isinstance(other, SavePolicy):
            return NotImplemented
        return SaveUnion((*_members(self), *_members(other)))


@dataclasses.dataclass(frozen=True)
class EverySteps(_Joinable):
    """Due at every multiple of some number of steps.

    Where several steps are run at once a multiple may be passed rather than met; then the step after it is due.

    Attributes:
        n: Steps from one checkpoint to the next.

    Example:
        >>> EverySteps(500).is_due(SaveProgress(step=1000, last_saved_step=500))
        'step 1000 is a multiple of 500'
    """

    n: int

    def __post_init__(self):
        _require_count("n", self.n, "EverySteps(500)")

    @property
    def needs_clock(self) -> bool:
        """False."""
        return False

    def is_due(self, progress: SaveProgress) -> str | None:
        """Due if a multiple of `n` was met since the newest checkpoint."""
        multiple = progress.step // self.n * self.n
        if multiple <= progress.step - progress.steps_since_save:
            return None
        if multiple == progress.step:
            return f"step {progress.step} is a multiple of {self.n}"
        return f"step {progress.step} passed {multiple}, a multiple of {self.n}"


@dataclasses.dataclass(frozen=True)
class EverySeconds(_Joinable):
    """Due when so much time has passed since the newest checkpoint was begun.

    Attributes:
        seconds: From one checkpoint to the next. `young_daly_seconds` computes a good value.

    Example:
        >>> EverySeconds(600).is_due(SaveProgress(step=70, seconds=612.0))
        '612.0 s have passed since the last save, at least 600'
    """

    seconds: float

    def __post_init__(self):
        _require_positive("seconds", self.seconds, "EverySeconds(600)")

    @property
    def needs_clock(self) -> bool:
        """True."""
        return True

    def is_due(self, progress: SaveProgress) -> str | None:
        """Due if the time is over and there is something new to save."""
        passed_seconds = progress.seconds - progress.last_saved_seconds
        if passed_seconds < self.seconds or not progress.steps_since_save:
            return None
        return f"{passed_seconds:.1f} s have passed since the last save, at least {self.seconds:g}"


@dataclasses.dataclass(frozen=True)
class OverheadBudget(_Joinable):
    """Saves as often as a share of the training time pays for; the rule of CheckFreq.

    k steps lie between two checkpoints, the smallest k with `blocking_seconds / (k * seconds_per_step) <= fraction`
    and `k * seconds_per_step >= persist_seconds`: a save does not begin before the one before it is committed. k is
    computed anew from each measurement.

    Attributes:
        fraction: Of the training time, that saving may cost.
        steps_before_measured: Interval while a measurement is missing, and so the step of the first save. By 20
            steps the first ones, which trace and warm up, no longer carry the median, and little can be lost yet.

    Example:
        >>> measured = SaveProgress(step=130, last_saved_step=30, seconds_per_step=0.1, blocking_seconds=0.3)
        >>> OverheadBudget(fraction=0.03).is_due(measured)
        '100 steps keep the cost of saving, 0.300 s, within 3 % of the training time'
    """

    fraction: float = 0.03
    steps_before_measured: int = 20

    def __post_init__(self):
        _require_positive("fraction", self.fraction, "OverheadBudget(fraction=0.03)")
        _require_count("steps_before_measured", self.steps_before_measured, "OverheadBudget()")

    @property
    def needs_clock(self) -> bool:
        """True, because what is measured differs from task to task."""
        return True

    def interval_steps(self, progress: SaveProgress) -> int:
        """Computes k.

        Args:
            progress: The measurements.

        Returns:
            Steps from one checkpoint to the next; `steps_before_measured` while k cannot be known.
        """
        if progress.blocking_seconds is None or not progress.seconds_per_step:
            return self.steps_before_measured
        affordable = progress.blocking_seconds / (self.fraction * progress.seconds_per_step)
        committed = (progress.persist_seconds or 0.0) / progress.seconds_per_step
        return max(1, math.ceil(affordable), math.ceil(committed))

    def is_due(self, progress: SaveProgress) -> str | None:
        """Due if k steps were made, and the time to commit a save has passed, since the newest checkpoint."""
        interval = self.interval_steps(progress)
        passed_seconds = progress.seconds - progress.last_saved_seconds
        if progress.steps_since_save < interval:
            return None
        if progress.blocking_seconds is None or not progress.seconds_per_step:
            return f"after {interval} steps the cost of a save is measured"
        if passed_seconds < (progress.persist_seconds or 0.0):
            return None  # The steps became faster than their median says.
        return (
            f"{interval} steps keep the cost of saving, {progress.blocking_seconds:.3f} s, within "
            f"{100 * self.fraction:g} % of the training time"
        )


@dataclasses.dataclass(frozen=True)
class SaveUnion(_Joinable):
    """Due when any of several policies is; what `|` makes.

    Attributes:
        policies: The policies; the first that is due gives the reason.

    Example:
        >>> EverySteps(500) | EverySeconds(600)
        SaveUnion(policies=(EverySteps(n=500), EverySeconds(seconds=600)))
    """

    policies: tuple[SavePolicy, ...]

    @property
    def needs_clock(self) -> bool:
        """True if any of the policies needs one."""
        return any(policy.needs_clock for policy in self.policies)

    def is_due(self, progress: SaveProgress) -> str | None:
        """The reason of the first policy that has one."""
        reasons = (policy.is_due(progress) for policy in self.policies)
        return next((reason for reason in reasons if reason is not None), None)


def young_daly_seconds(blocking_seconds: float, mean_time_between_failures_seconds: float) -> float:
    """Computes the interval at which the time spent on saving and the time lost to failures together are least.

    With an interval T, saving costs C / T of the time, and a failure, one in M seconds, loses T / 2 on average. The sum
    C / T + T / (2 M) is least at T = sqrt(2 C M) (Young 1974; Daly 2006 has the higher orders, which matter only
    when C is not small beside M).

    Args:
        blocking_seconds: C, what one save costs the training thread.
        mean_time_between_failures_seconds: M, of the whole job: a machine's divided by the number of machines.

    Returns:
        T in seconds, for instance for `EverySeconds`.

    Raises:
        ValueError: If an argument is not a positive, finite number.

    Example:
        >>> young_daly_seconds(2.0, 86400.0)  # Two seconds a save, a failure a day: save every ten minutes.
        587.877...
    """
    _require_positive("blocking_seconds", blocking_seconds, "young_daly_seconds(2.0, 86400.0)")
    _require_positive(
        "mean_time_between_failures_seconds",
        mean_time_between_failures_seconds,
        "young_daly_seconds(2.0, 86400.0)",
    )
    return math.sqrt(2.0 * blocking_seconds * mean_time_between_failures_seconds)


def _members(policy: object) -> tuple:
    """A union of unions is one flat union."""
    return policy.policies if isinstance(policy, SaveUnion) else (policy,)


def _require_positive(name: str, value: float, example: str) -> None:
    if not 0.0 < value < math.inf:
        raise ValueError(
            f"Argument `{name}` must be a finite number above 0; received {value!r}. Try `{example}`."
        )


def _require_count(name: str, value: int, example: str) -> None:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < 1:
        raise ValueError(
            f"Argument `{name}` must be a whole number of at least 1; received {value!r}. Try `{example}`."
        )
