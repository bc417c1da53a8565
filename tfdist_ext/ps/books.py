"""How is each change of a set written down? The ledger's book-keeping, without decisions.

Each method moves one set from one state to another, and everything that counts it along.
"""

from __future__ import annotations

import collections
from collections.abc import Callable

from tfdist_ext.ps.records import AdmittedSet, Dispatch, DroppedSet, Verdict
from tfdist_ext.ps.rule import Choice
from tfdist_ext.ps.state import SetRecord, State, Status
from tfdist_ext.ps.statistics import Statistics


class Books:
    """The sets, and who counts them.

    Args:
        state: What rules see; changed here.
        push_every_steps: Batches of a set.
        clock: Gives seconds.

    Attributes:
        sets: Every set that may be applied, or that a worker still computes.
        num_sets: Sets dispatched so far.
        statistics: Counts per worker.
        drops: The last thousand dropped sets.
        num_drops: How many were dropped in all.
    """

    def __init__(self, state: State, push_every_steps: int, clock: Callable[[], float]):
        self.sets: dict[int, SetRecord] = {}
        self.num_sets = 0
        self.statistics = Statistics()
        self.drops: collections.deque[DroppedSet] = collections.deque(maxlen=1000)
        self.num_drops = 0
        self._state = state
        self._push_every_steps = push_every_steps
        self._clock = clock
        self._num_arrived = 0
        self._held: collections.Counter[int] = collections.Counter()
        self._draws: collections.Counter[int] = collections.Counter()

    def start(self, choice: Choice) -> Dispatch:
        """A worker starts on a set."""
        state, worker = self._state, self._state.workers[choice.worker]
        batches = state.leases.take(choice.batch, self._push_every_steps)
        refresh = choice.refresh or worker.cached_version is None
        if refresh:
            worker.cached_version, worker.num_batches_since_fetch = state.version, 0
        worker.num_batches_since_fetch += len(batches)
        assert worker.cached_version is not None
        record = SetRecord(
            set_id=self.num_sets,
            worker=choice.worker,
            incarnation=worker.incarnation,
            batches=batches,
            base_version=worker.cached_version,
            slot=choice.slot,
            round_slot=choice.slot,
            draw=self._draws[worker.cached_version] if choice.draw is None else choice.draw,
            dispatched_at=self._clock(),
            leases=state.leases,
        )
        self.num_sets += 1
        self._draws[record.base_version] += 1
        self.sets[record.set_id] = worker.computing = record
        state.mark(record, Status.IN_FLIGHT)
        statistics = self.statistics.of(choice.worker)
        statistics.dispatched += 1
        if worker.idle_since is not None:
            statistics.waited_seconds += record.dispatched_at - worker.idle_since
            worker.idle_since = None
        return Dispatch(
            record.set_id, choice.worker, batches, record.base_version, choice.slot, record.draw, refresh
        )

    def arrive(self, record: SetRecord, rows: int, weight: float) -> None:
        """A set has come; its worker is free."""
        for batch in record.batches:
            record.leases.confirm(batch)
        record.rows, record.weight = rows, weight
        if record.status is Status.IN_FLIGHT:
            record.order = self._num_arrived
            self._state.mark(record, Status.ARRIVED)
            self._num_arrived += 1
        elif record.status is Status.DROPPED:
            self.statistics.of(record.worker).rows_dropped += rows
        worker = self.release(record)
        worker.idle_since = self._clock()

    def release(self, record: SetRecord):
        """The worker of a set computes no more; a set whose fate was known before is forgotten.

        Returns:
            The worker's record.
        """
        worker = self._state.workers[record.worker]
        assert worker.computing is record
        worker.computing, worker.stalled = None, False
        if record.set_id not in self._state.unapplied:
            del self.sets[record.set_id]
        return worker

    def truncate(self, record: SetRecord, num_batches: int) -> None:
        """All but the first batches of a set turned out not to exist."""
        if record.status is Status.IN_FLIGHT:
            for batch in record.batches[num_batches:]:
                record.leases.discard(batch)
        if num_batches > 0:
            record.batches = record.batches[:num_batches]
            return
        statistics = self.statistics.of(record.worker)
        if record.status is Status.DROPPED:
            # It was counted before anybody knew.
            statistics.dropped -= 1
        if record.status in (Status.IN_FLIGHT, Status.DROPPED):
            statistics.ran_out += 1
            self._settle_as(record, Status.VOID)
        self.release(record)

    def drop(self, record: SetRecord, reason: str, read_again: bool) -> None:
        """A set will not be applied."""
        statistics = self.statistics.of(record.worker)
        statistics.dropped += 1
        if record.has_arrived:
            statistics.rows_dropped += record.rows
        for batch in record.batches:
            (record.leases.give_back if read_again else record.leases.drop)(batch)
        record.reason = reason
        self._settle_as(record, Status.DROPPED)
        self.num_drops += 1
        self.drops.append(
            DroppedSet(
                record.worker,
                record.set_id,
                record.batches,
                record.base_version,
                self._state.version,
                reason,
                read_again,
            )
        )

    def lose(self, record: SetRecord, reason: str) -> None:
        """A set is gone; its batches are read again."""
        self.statistics.of(record.worker).lost += 1
        for batch in record.batches:
            record.leases.give_back(batch)
        record.reason = reason
        self._settle_as(record, Status.LOST)

    def lose_all_of(self, worker: int) -> None:
        """All that a worker computes and holds is gone; what is being applied is not decided here."""
        for record in list(self._state.unapplied.values()):
            if record.worker == worker and record.status is not Status.APPLYING:
                self.lose(record, f"worker {worker} was lost")
        computing = self._state.workers[worker].computing
        if computing is not None:
            self.sets.pop(computing.set_id, None)

    def apply(self, record: SetRecord) -> None:
        """A set is part of the update that leads from the current version to the next."""
        statistics = self.statistics.of(record.worker)
        statistics.applied += 1
        statistics.rows_applied += record.rows
        statistics.ages[self._state.version - record.base_version] += 1
        for batch in record.batches:
            record.leases.apply(batch)
        self._settle_as(record, Status.APPLIED)

    def forget_draws(self) -> None:
        """Keeps the counts of those versions only that a set can still have as its base."""
        bases = {self._state.version, *(worker.cached_version for worker in self._state.workers.values())}
        for base in [base for base in self._draws if base not in bases]:
            del self._draws[base]

    def count_held(self) -> None:
        """Counts the sets held now."""
        held = collections.Counter(record.worker for record in self._state.with_status(Status.HELD))
        for worker in {*held, *self._held}:
            self.statistics.of(worker).held = held[worker]
        self._held = held

    def verdict(self, record: SetRecord) -> Verdict:
        """What has become of a set that came."""
        if record.status is Status.ADMITTED:
            return Verdict("admitted")
        if record.status is Status.HELD:
            return Verdict("held", "it may not be applied yet")
        return Verdict("dropped", record.reason)

    def admitted(self, record: SetRecord, total_weight: float) -> AdmittedSet:
        """A set as part of the step that is applied now."""
        return AdmittedSet(
            set_id=record.set_id,
            worker=record.worker,
            batches=record.batches,
            base_version=record.base_version,
            slot=record.round_slot,
            draw=record.draw,
            staleness=self._state.version - record.base_version,
            rows=record.rows,
            weight=record.weight,
            share=record.weight / total_weight if total_weight else 0.0,
        )

    def _settle_as(self, record: SetRecord, status: Status) -> None:
        self._state.mark(record, status)
        if self._state.workers[record.worker].computing is not record:
            self.sets.pop(record.set_id, None)
