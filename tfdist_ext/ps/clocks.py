"""Which worker may start? The rules of `Asynchronous`, and of bounded staleness on the workers' own clocks.

Both apply every set on its own, in the order of arrival.

References:
    Q. Ho, J. Cipar, H. Cui, J. K. Kim, S. Lee, P. B. Gibbons, G. A. Gibson, G. R. Ganger, E. P. Xing, "More
    Effective Distributed ML via a Stale Synchronous Parallel Parameter Server", NeurIPS 2013.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from tfdist_ext.ps.leases import Batch
from tfdist_ext.ps.rule import Choice, Drop
from tfdist_ext.ps.sentences import name_batches, name_workers, nobody_computes
from tfdist_ext.ps.state import SetRecord, State, Status


class FreeRule:
    """A worker takes its next batch when its set has been applied; nobody waits for anybody."""

    needs_fresh_variables = False

    def begin_epoch(self, state: State) -> None:
        """Nothing to reset."""

    def num_needed(self, state: State) -> int:
        """One worker is enough."""
        return 1

    def choices(self, state: State) -> Iterator[Choice]:
        """Every idle worker starts, in the order of the dataset."""
        while candidates := self._candidates(state):
            for _, worker, batch in sorted(candidates):
                if not state.has_room():
                    return
                if state.leases.peek(worker) != batch:
                    # The one before took it.
                    break
                self._starts(state, worker)
                yield Choice(worker, batch, refresh=state.base_for(worker)[1])
            else:
                return

    def settle(self, state: State) -> list[Drop]:
        """Admits what has arrived."""
        for record in state.with_status(Status.ARRIVED):
            state.mark(record, Status.ADMITTED)
        return []

    def next_apply(self, state: State) -> list[SetRecord]:
        """The set that arrived first."""
        admitted = state.with_status(Status.ADMITTED)
        return [min(admitted, key=lambda record: record.order)] if admitted else []

    def on_applied(self, state: State, records: list[SetRecord]) -> None:
        """Nothing to count."""

    def give_up(self, state: State) -> list[Drop]:
        """None: nobody waits."""
        return []

    def waiting_for(self, state: State) -> str:
        """Names who computes."""
        flying = state.with_status(Status.IN_FLIGHT)
        if not flying:
            return nobody_computes(state)
        names = ", ".join(f"worker {record.worker} ({name_batches(record)})" for record in flying)
        return f"Step {state.version} waits for {names}."

    def _candidates(self, state: State) -> list[tuple[int, int, Batch]]:
        """Who may start, as (global index, worker, batch)."""
        found = [(worker, state.leases.peek(worker)) for worker in self._may_start(state)]
        return [(state.leases.index(batch), worker, batch) for worker, batch in found if batch is not None]

    def _may_start(self, state: State) -> list[int]:
        return state.idle()

    def _starts(self, state: State, worker: int) -> None:
        pass


class ClockRule(FreeRule):
    """Stale synchronous parallel: nobody is more than s batches ahead of the slowest.

    A worker's clock counts its sets that were applied. It may start its next one iff every active worker with
    data has a clock of at least its own - s. A worker that joins, comes back or gets data again enters at the
    lowest clock of those; one that is dead, was not back in time, or has no data is not waited for.

    Args:
        max_staleness: s; infinity for no bound.
    """

    def __init__(self, max_staleness: float):
        self._max_staleness = max_staleness
        self._clocks: dict[int, int] = {}
        self._counted: set[int] = set()

    def begin_epoch(self, state: State) -> None:
        """All clocks start at 0."""
        self._clocks.clear()
        self._counted.clear()

    def state_dict(self, state: State) -> dict[str, Any]:
        """The clocks, as plain data."""
        return {"clocks": dict(sorted(self._clocks.items())), "counted": sorted(self._counted)}

    def load_state_dict(self, saved: dict[str, Any], state: State) -> None:
        """Goes on from `state_dict`; a worker that was not there enters at the lowest clock."""
        self._clocks, self._counted = dict(saved["clocks"]), set(saved["counted"])

    def clocks(self, state: State) -> dict[int, int]:
        """The clocks of the active workers that have data."""
        busy = {record.worker for record in state.unapplied.values()}
        present = {worker for worker in state.active() if worker in busy or state.leases.fresh(worker)}
        staying = present & self._counted
        lowest = min((self._clocks[worker] for worker in staying), default=0)
        for worker in present - staying:
            self._clocks[worker] = max(self._clocks.get(worker, 0), lowest)
        self._counted = present
        return {worker: self._clocks[worker] for worker in sorted(present)}

    def settle(self, state: State) -> list[Drop]:
        """Admits what has arrived, and lets those enter who have data now."""
        self.clocks(state)
        return super().settle(state)

    def on_applied(self, state: State, records: list[SetRecord]) -> None:
        """The worker has completed one more."""
        for record in records:
            self._clocks[record.worker] = self._clocks.get(record.worker, 0) + 1

    def waiting_for(self, state: State) -> str:
        """Names the slowest, and who is kept waiting by them."""
        clocks = self.clocks(state)
        free = set(self._may_start(state))
        blocked = [worker for worker in state.idle() if worker in clocks and worker not in free]
        if not blocked:
            return super().waiting_for(state)
        lowest = min(clocks.values())
        slowest = [worker for worker, clock in clocks.items() if clock == lowest]
        return (
            f"{name_workers(blocked).capitalize()} may not be more than {self._max_staleness} batches ahead of "
            f"{name_workers(slowest)}, done with {lowest}."
        )

    def _may_start(self, state: State) -> list[int]:
        clocks = self.clocks(state)
        latest = min(clocks.values(), default=math.inf) + self._max_staleness
        return [worker for worker in state.idle() if self._clock_to_start(clocks, worker) <= latest]

    def _starts(self, state: State, worker: int) -> None:
        self._clocks[worker] = self._clock_to_start(self.clocks(state), worker)
        self._counted.add(worker)

    def _clock_to_start(self, clocks: dict[int, int], worker: int) -> int:
        """One without data of its own, who takes a batch that came back, enters at the lowest clock."""
        if worker in clocks:
            return clocks[worker]
        return max(self._clocks.get(worker, 0), min(clocks.values(), default=0))
