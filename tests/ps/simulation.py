"""An event simulator that drives the real ledger: workers are numbers, time is a heap."""

from __future__ import annotations

import dataclasses
import heapq
import math
import random
from collections.abc import Callable

from tfdist_ext.ps import Dispatch, Leases, Ledger


@dataclasses.dataclass
class Step:
    """One applied update: when, and of which sets."""

    time: float
    apply: object


class Simulation:
    """Runs one epoch after the other; applying and dispatching take no time.

    Args:
        policy: The policy.
        num_workers: Number of workers; all join at the start.
        seconds: Gives the duration of a dispatch; infinity for a worker that never comes back.
        lengths: True lengths of the shards; None: without end.
        timeout_seconds: When the engine calls a set lost.
        known: Whether the leases are told the lengths.
        options: Of the ledger.
    """

    def __init__(
        self,
        policy,
        num_workers: int,
        seconds: Callable[[Dispatch], float],
        lengths=None,
        *,
        timeout_seconds: float = math.inf,
        known: bool = False,
        checked: bool = True,
        **options,
    ):
        self.now = 0.0
        self.ledger = Ledger(policy, num_workers, clock=lambda: self.now, **options)
        self.leases = Leases(len(lengths) if lengths else num_workers, lengths if known else None)
        self.steps: list[Step] = []
        self.dispatched: list[Dispatch] = []
        self.verdicts: dict[int, str] = {}
        self._seconds = seconds
        self._lengths = lengths
        self._timeout_seconds = timeout_seconds
        self._checked = checked
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._num_events = 0
        for worker in range(num_workers):
            self.ledger.joined(worker)

    def at(self, time: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time, self._num_events, action))
        self._num_events += 1

    def run(self, max_steps: int | None = None, max_events: int = 10**7) -> Simulation:
        """Runs one epoch to its end, or until nothing happens any more."""
        self.ledger.begin_epoch(self.leases, max_steps)
        while max_events > 0 and not self.ledger.epoch_finished:
            max_events -= 1
            self._go_on()
            if self.ledger.epoch_finished or not self._events:
                break
            self.now, _, action = heapq.heappop(self._events)
            action()
            self.check()
        return self

    def close(self) -> None:
        self.ledger.close_epoch()
        self.check()

    def check(self) -> None:
        if self._checked:
            self.ledger.check()

    def batches(self) -> list[tuple[int, int]]:
        """The applied batches in order."""
        return [tuple(batch) for step in self.steps for one in step.apply.sets for batch in one.batches]

    def _go_on(self) -> None:
        while True:
            self._apply()
            # May also give a set up, so that another can be applied.
            started = self.ledger.dispatches()
            self.check()
            for dispatch in started:
                self._start(dispatch)
            if not started and not self._apply():
                return

    def _apply(self) -> bool:
        before = len(self.steps)
        while (apply := self.ledger.next_apply()) is not None:
            self.ledger.applied(apply)
            self.steps.append(Step(self.now, apply))
            self.check()
        return len(self.steps) > before

    def _start(self, dispatch: Dispatch) -> None:
        self.dispatched.append(dispatch)
        seconds = self._seconds(dispatch)
        if seconds < math.inf:
            self.at(self.now + seconds, lambda: self._finish(dispatch))
        if self._timeout_seconds < math.inf:
            self.at(self.now + self._timeout_seconds, self._time_out)

    def _time_out(self) -> None:
        for set_id in self.ledger.overdue(self.now, self._timeout_seconds):
            self.ledger.lost_set(set_id)

    def _finish(self, dispatch: Dispatch) -> None:
        rows = 0
        for batch in dispatch.batches:
            if self._lengths is not None and batch.position >= self._lengths[batch.shard]:
                self.ledger.ran_out(dispatch.set_id, batch)
                break
            rows += 1
        if rows:
            self.verdicts[dispatch.set_id] = self.ledger.arrived(dispatch.set_id, rows).outcome


def exponential(seed: int, slow: dict[int, float] | None = None) -> Callable[[Dispatch], float]:
    """0.5 + Exp(1) seconds, times a factor for slow workers."""
    source = random.Random(seed)
    return lambda dispatch: (slow or {}).get(dispatch.worker, 1.0) * (0.5 + source.expovariate(1.0))
