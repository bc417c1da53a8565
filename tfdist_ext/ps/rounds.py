"""Which sets make a round? The rule of `Synchronous`.

Round t opens at version t with N slots. Slot k takes one set a round, of a batch of the shards that belong to
worker k; a dead worker's slot and batch go to a live one, who may then fill several slots, one after the
other; a slow worker's do not. When the quorum is there, its sets are summed in the order of their slots, and
round t + 1 opens.

Without backup workers a round therefore holds the same batches in the same slots whoever died, and its sum is
the same to the last bit. With backup workers, batches that came back fill any slot.

References:
    J. Chen, X. Pan, R. Monga, S. Bengio, R. Jozefowicz, "Revisiting Distributed Synchronous SGD",
    arXiv:1604.00981, 2016.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from tfdist_ext.ps.leases import Batch
from tfdist_ext.ps.rule import Choice, Drop
from tfdist_ext.ps.sentences import name_batches, name_workers
from tfdist_ext.ps.state import SetRecord, State, Status


class RoundRule:
    """Gathers a quorum for each step; see the module.

    The quorum is num_workers - num_backup_workers, but never more than the sets that can still fill different
    slots: the data may be at its end. With fewer live workers than that, `too_few_workers` decides:

    - "wait": the live ones fill the slots of the dead in turn; training waits only if nobody is live;
    - "shrink": a round takes one set of each live worker;
    - "fail": the ledger raises.

    Args:
        num_workers: N, the number of slots.
        num_backup_workers: Slots a round may do without.
        max_staleness: Age in steps up to which a late set fills a slot of a later round.
        too_few_workers: "wait", "shrink" or "fail".
    """

    needs_fresh_variables = True

    def __init__(self, num_workers: int, num_backup_workers: int, max_staleness: int, too_few_workers: str):
        if num_backup_workers >= num_workers:
            raise ValueError(
                "Argument `num_backup_workers` must be less than the number of workers; received "
                f"{num_backup_workers} for {num_workers} workers. Try {num_workers - 1} at most."
            )
        self._num_slots = num_workers
        self._quorum = num_workers - num_backup_workers
        self._max_staleness = max_staleness
        self._shrinks = too_few_workers == "shrink"
        # Else each batch keeps its slot, and a round its batches.
        self._any_slot = num_backup_workers > 0 or self._shrinks

    def begin_epoch(self, state: State) -> None:
        """Nothing to reset: a round is what the state says."""

    def num_needed(self, state: State) -> int:
        """The quorum."""
        return self._quorum

    def choices(self, state: State) -> Iterator[Choice]:
        """Fills the empty slots of the open round with the free workers."""
        if state.applying or self._has_quorum(state):
            return
        free = state.free()
        occupied = self._occupied(state) if free else {}
        if not free or len(occupied) == self._num_slots:
            return
        orphans = self._orphans(state)
        for worker in free:
            place = self._place(state, worker, occupied, orphans)
            if place is not None:
                slot, batch = place
                yield Choice(worker, batch, slot=slot, draw=slot)
                occupied[slot] = worker

    def settle(self, state: State) -> list[Drop]:
        """Admits the sets that fill a slot, holds the others, drops those too old for this round."""
        if state.applying:
            for record in state.with_status(Status.ARRIVED):
                state.mark(record, Status.HELD)
            return []
        # Bases grow in order of dispatch: the oldest come first.
        old = itertools.takewhile(
            lambda record: state.version - record.base_version > self._max_staleness,
            state.unapplied.values(),
        )
        drops = [Drop(record, f"late: step {record.base_version} went on without it") for record in old]
        too_old = {drop.record.set_id for drop in drops}
        arrived = state.with_status(Status.ARRIVED, Status.HELD)
        occupied = self._occupied(state) if arrived else {}
        for record in sorted(arrived, key=lambda record: (record.base_version, record.order)):
            if record.set_id in too_old:
                continue
            slot = None if self._has_quorum(state) else self._slot_of(record, state, occupied)
            state.mark(record, Status.HELD if slot is None else Status.ADMITTED)
            if slot is not None:
                occupied[slot] = record.worker
                record.round_slot = slot
        return drops

    def next_apply(self, state: State) -> list[SetRecord]:
        """The admitted sets in slot order, once they are a quorum."""
        admitted = state.with_status(Status.ADMITTED)
        if admitted and (self._has_quorum(state) or not self._can_grow(state)):
            return sorted(admitted, key=lambda record: record.round_slot)
        return []

    def on_applied(self, state: State, records: list[SetRecord]) -> None:
        """Nothing to count: `settle` opens the next round."""

    def give_up(self, state: State) -> list[Drop]:
        """None: a set is too late when its round is over, and `settle` sees that."""
        return []

    def waiting_for(self, state: State) -> str:
        """Names the workers of the slots that are missing."""
        admitted = state.with_status(Status.ADMITTED)
        sentence = f"Step {state.version} has {len(admitted)} of {self._size(state)} sets"
        flying = state.with_status(Status.IN_FLIGHT)
        if flying:
            names = ", ".join(f"worker {record.worker} ({name_batches(record)})" for record in flying)
            return f"{sentence}; it waits for {names}."
        late = [worker for worker in state.active() if state.workers[worker].computing is not None]
        if late:
            return f"{sentence}; it waits for {name_workers(late)}, busy with sets that came too late."
        return f"{sentence}; the next ones can be dispatched."

    def _size(self, state: State) -> int:
        return min(self._quorum, len(state.active())) if self._shrinks else self._quorum

    def _has_quorum(self, state: State) -> bool:
        return state.num_with_status(Status.ADMITTED) >= max(1, self._size(state))

    def _can_grow(self, state: State) -> bool:
        """Whether one more slot of the open round may still be filled, now or by who is busy."""
        flying = state.with_status(Status.IN_FLIGHT)
        if any(record.base_version == state.version for record in flying):
            return True
        occupied = self._occupied(state)
        if any(self._slot_of(record, state, occupied) is not None for record in flying):
            return True
        active, orphans = state.active(), self._orphans(state)
        if not active and not self._shrinks:
            # Whoever comes next may go on with this round.
            return state.leases.has_unread
        return any(
            self._place(state, worker, occupied, orphans) is not None
            for worker in active
            if state.workers[worker].computing not in flying
        )

    def _occupied(self, state: State) -> dict[int, int]:
        """Slot to worker, of the slots that are filled or that somebody computes for."""
        slots = {record.round_slot: record.worker for record in state.with_status(Status.ADMITTED)}
        for record in state.with_status(Status.IN_FLIGHT):
            if record.base_version == state.version:
                slots[record.round_slot] = record.worker
        return slots

    def _orphans(self, state: State) -> list[int]:
        """Slots whose worker is not there."""
        return [slot for slot in range(self._num_slots) if not state.is_active(slot)]

    def _slot_of(self, record: SetRecord, state: State, occupied: dict[int, int]) -> int | None:
        """The slot a set fills in the open round; one that comes late takes its worker's slot if it can."""
        if record.base_version == state.version:
            return None if record.slot in occupied else record.slot
        own = [record.worker] if record.worker < self._num_slots else []
        return next((slot for slot in [*own, record.slot] if slot not in occupied), None)

    def _place(
        self, state: State, worker: int, occupied: dict[int, int], orphans: list[int]
    ) -> tuple[int, Batch] | None:
        """The slot a worker fills next in the open round, and with which batch; None if there is nothing."""
        own = [worker] if worker < self._num_slots and worker not in occupied else []
        if self._shrinks and worker in occupied.values():
            return None
        slots = [*own, *(slot for slot in orphans if slot not in occupied)]
        if self._shrinks:
            slots = slots[:1]
        if not slots:
            return None
        pending, fresh = state.leases.pending(), state.leases.fresh(worker)
        behind = state.leases.behind(worker)
        # Its own slot first, then whatever of the queue has its slot open, then what it reads itself.
        for batch in [
            *(batch for batch in pending if batch.shard % self._num_slots in own),
            *pending,
            *([] if behind is None else [behind]),
            *fresh,
        ]:
            if batch.shard % self._num_slots in slots:
                return batch.shard % self._num_slots, batch
            if self._any_slot and (self._shrinks or batch in pending or batch == behind):
                return slots[0], batch
        return None
