"""What happened to the work of each worker? The books of the ledger, as plain numbers."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any

_SETTLED = ("applied", "dropped", "lost", "ran_out", "rows_applied", "rows_dropped")


@dataclasses.dataclass
class WorkerStatistics:
    """Counts of sets, unless their names say otherwise.

    Attributes:
        dispatched: Sets it was given. Each is in flight, arrived, held, or one of the next four.
        applied: Sets that entered an update.
        dropped: Sets refused, or given up, by the policy.
        lost: Sets that died with the worker, were not back in time, or could not be pulled.
        ran_out: Sets whose batch turned out not to exist.
        held: Sets held now.
        rows_applied: Rows in the applied sets.
        rows_dropped: Rows in dropped sets, of those that arrived.
        waited_seconds: From the arrival of a set to the worker's next one, summed.
        num_joined: How often it joined.
        ages: Staleness in steps to number of applied sets.
    """

    dispatched: int = 0
    applied: int = 0
    dropped: int = 0
    lost: int = 0
    ran_out: int = 0
    held: int = 0
    rows_applied: int = 0
    rows_dropped: int = 0
    waited_seconds: float = 0.0
    num_joined: int = 0
    ages: collections.Counter[int] = dataclasses.field(default_factory=collections.Counter)

    @property
    def settled(self) -> int:
        """Sets whose fate is known."""
        return self.applied + self.dropped + self.lost + self.ran_out

    def as_dict(self) -> dict[str, Any]:
        """Plain data, with the ages' percentiles."""
        plain = dataclasses.asdict(self)
        plain["ages"] = dict(sorted(self.ages.items()))
        plain.update(age_percentiles(self.ages))
        return plain


class Statistics:
    """The books of all workers.

    Attributes:
        workers: Worker index to its statistics.
    """

    def __init__(self):
        self.workers: dict[int, WorkerStatistics] = {}

    def of(self, worker: int) -> WorkerStatistics:
        """The statistics of one worker."""
        return self.workers.setdefault(worker, WorkerStatistics())

    def total(self) -> WorkerStatistics:
        """The sums over all workers."""
        total = WorkerStatistics()
        for worker in self.workers.values():
            for field in dataclasses.fields(WorkerStatistics):
                value = getattr(worker, field.name)
                if isinstance(value, collections.Counter):
                    total.ages.update(value)
                else:
                    setattr(total, field.name, getattr(total, field.name) + value)
        return total

    def state_dict(self) -> dict[int, Any]:
        """Counts of what is settled, as plain data; what is in flight is counted when it is computed again.

        What was measured, and who joined, belongs to a process and is not among them.
        """
        workers: dict[int, Any] = {}
        for index in sorted(self.workers):
            counts = {name: getattr(self.workers[index], name) for name in _SETTLED}
            workers[index] = {**counts, "ages": dict(sorted(self.workers[index].ages.items()))}
        return workers

    def load_state_dict(self, state: dict[int, Any]) -> None:
        """Goes on from the counts of `state_dict`; nothing may be in flight."""
        for index in {*self.workers, *state}:
            worker, saved = self.of(index), dict(state.get(index, {}))
            for name in _SETTLED:
                setattr(worker, name, saved.get(name, 0))
            worker.ages = collections.Counter(saved.get("ages", {}))
            worker.dispatched = worker.settled

    def as_dict(self) -> dict[str, Any]:
        """Plain data: `{"workers": {index: ...}, "total": ...}`."""
        return {
            "workers": {index: self.workers[index].as_dict() for index in sorted(self.workers)},
            "total": self.total().as_dict(),
        }


def age_percentiles(ages: dict[int, int]) -> dict[str, int | None]:
    """Summarizes a histogram of ages.

    Args:
        ages: Age to count.

    Returns:
        `age_p50`, `age_p95` (nearest rank) and `age_max`; None each if nothing was counted.

    Example:
        >>> age_percentiles({0: 50, 3: 49, 9: 1})
        {'age_p50': 0, 'age_p95': 3, 'age_max': 9}
    """
    total = sum(ages.values())
    found: dict[str, int | None] = {"age_p50": None, "age_p95": None, "age_max": max(ages, default=None)}
    for name, percent in (("age_p50", 50), ("age_p95", 95)):
        count = 0
        for age in sorted(ages):
            count += ages[age]
            if total and count * 100 >= percent * total:
                found[name] = age
                break
    return found
