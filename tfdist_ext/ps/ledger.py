"""What happens to each set? The one place that decides, and keeps the books.

A state machine without threads or clock of its own; the engine calls it under a lock and does what it says.
The policy's rule decides, this class carries out: every transition ends with the rule settling what has
arrived, and leaves each set in exactly one state.

    joined -> begin_epoch -> [ dispatches -> arrived -> next_apply -> applied ] ... -> close_epoch
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Sequence

from tfdist_ext.ps.arguments import require_choice, require_count
from tfdist_ext.ps.books import Books
from tfdist_ext.ps.damping import factor
from tfdist_ext.ps.exceptions import TooFewWorkers
from tfdist_ext.ps.invariants import check
from tfdist_ext.ps.leases import Batch, Leases
from tfdist_ext.ps.records import Apply, Dispatch, DroppedSet, Verdict
from tfdist_ext.ps.rule import Drop, Policy
from tfdist_ext.ps.sentences import nobody_there, step_applied_now
from tfdist_ext.ps.state import SetRecord, State, Status, WorkerRecord
from tfdist_ext.ps.statistics import Statistics


class Ledger:
    """The books of parameter-server training; see the module.

    No worker is live before `joined`. A worker computes one set at a time, and is busy until that set has
    come, whatever was decided about it meanwhile.

    Args:
        policy: `Synchronous`, `BoundedStaleness`, `Asynchronous` or one's own, see `rule.py`.
        num_workers: Number of workers of the cluster: the slots of a round.
        too_few_workers: With fewer live workers than a step needs (the quorum of `Synchronous`, else one):
            "wait" lets the live ones do the work of the dead and waits if nobody is live, "shrink" makes
            rounds smaller, "fail" raises `TooFewWorkers` from `dispatches`.
        requeue_dropped: Whether the batches of dropped sets are read again.
        fetch_every_steps: Batches a worker may compute on one copy of the variables.
        push_every_steps: Consecutive batches of a set.
        version: Updates the variables have seen already.
        clock: Gives seconds.
    """

    def __init__(
        self,
        policy: Policy,
        num_workers: int,
        *,
        too_few_workers: str = "wait",
        requeue_dropped: bool = False,
        fetch_every_steps: int = 1,
        push_every_steps: int = 1,
        version: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ):
        require_count("num_workers", num_workers, at_least=1)
        require_count("fetch_every_steps", fetch_every_steps, at_least=1)
        require_count("push_every_steps", push_every_steps, at_least=1)
        require_count("version", version)
        require_choice("too_few_workers", too_few_workers, ("wait", "shrink", "fail"))
        self._rule = policy.rule(num_workers, too_few_workers)
        if self._rule.needs_fresh_variables and fetch_every_steps > 1:
            raise ValueError(
                f"Argument `fetch_every_steps` must be 1 with {policy!r}; received {fetch_every_steps}. Try 1."
            )
        self._damping = policy.damping
        self._fails = too_few_workers == "fail"
        self._requeue_dropped = requeue_dropped
        self._open = False
        self._apply: Apply | None = None
        self._state = State(Leases(1, [0]), num_workers, fetch_every_steps, version)
        self._books = Books(self._state, push_every_steps, clock)

    @property
    def version(self) -> int:
        """Updates applied so far."""
        return self._state.version

    @property
    def steps_left(self) -> int | None:
        """Updates after which the open epoch ends, or None where the data end it."""
        return None if math.isinf(self._state.steps_left) else int(self._state.steps_left)

    @property
    def statistics(self) -> Statistics:
        """Counts per worker."""
        return self._books.statistics

    @property
    def drops(self) -> Sequence[DroppedSet]:
        """The last thousand dropped sets."""
        return self._books.drops

    @property
    def num_drops(self) -> int:
        """How many sets were dropped in all."""
        return self._books.num_drops

    @property
    def is_applying(self) -> bool:
        """True between `next_apply` and the report of what came of it."""
        return bool(self._state.applying)

    @property
    def epoch_finished(self) -> bool:
        """True if no epoch is open, or nothing will be applied in it any more."""
        state = self._state
        if not self._open or state.applying:
            return not self._open
        return state.steps_left <= 0 or not (state.leases.has_unread or state.unapplied)

    def begin_epoch(self, leases: Leases, max_steps: int | None = None) -> None:
        """Opens an epoch; every worker fetches the variables before its first set.

        Args:
            leases: The batches; those of an earlier epoch go on where it stopped.
            max_steps: Updates after which the epoch ends; None: when the data does.
        """
        if self._open:
            raise RuntimeError("An epoch is open. Call `close_epoch` first.")
        if max_steps is not None:
            require_count("max_steps", max_steps)
        self._open = True
        self._state.leases = leases
        self._state.steps_left = math.inf if max_steps is None else max_steps
        for worker in self._state.workers.values():
            worker.cached_version = worker.idle_since = None
        self._lease()
        self._rule.begin_epoch(self._state)

    def allow_steps(self, num_steps: int) -> None:
        """Moves the end of an epoch with `max_steps` back."""
        self._state.steps_left += num_steps

    def close_epoch(self, reads_again: bool = False) -> None:
        """Ends the epoch: what is not applied by now is dropped, and read again if so wished.

        Args:
            reads_again: True where somebody goes on with the same leases: no batch is lost, whatever the policy.
        """
        if self._state.applying:
            raise RuntimeError(
                f"Step {self.version} is being applied. Call `applied` or `apply_failed` first."
            )
        again = True if reads_again else None
        drops = [
            Drop(record, "the epoch ended without it", again) for record in self._state.unapplied.values()
        ]
        self._drop(drops)
        self._open = False
        self._settle()

    def joined(self, worker: int) -> None:
        """A worker is there, for the first time or again; it has no variables and computes nothing."""
        if worker in self._state.workers and self._state.workers[worker].live:
            self.lost(worker)
        record = self._state.workers.setdefault(worker, WorkerRecord())
        self._state.workers = dict(sorted(self._state.workers.items()))
        record.live = True
        record.incarnation += 1
        self.statistics.of(worker).num_joined += 1
        self._lease()
        self._settle()

    def lost(self, worker: int) -> None:
        """A worker is gone, with all it computes and holds; a step being applied decides for itself."""
        record = self._state.workers.get(worker)
        if record is None or not record.live:
            return
        self._books.lose_all_of(worker)
        self._state.workers[worker] = WorkerRecord(incarnation=record.incarnation)
        self._lease()
        self._settle()

    def dispatches(self) -> list[Dispatch]:
        """Starts all that may start now.

        Returns:
            The sets to compute, in flight from here on.

        Raises:
            TooFewWorkers: If a step needs more live workers, and the user asked for an error.
        """
        started: list[Dispatch] = []
        if self.epoch_finished:
            return started
        num_needed, live = self._rule.num_needed(self._state), self._state.active()
        if self._fails and len(live) < num_needed:
            raise TooFewWorkers(tuple(live), num_needed)
        while True:
            started += [self._books.start(choice) for choice in self._rule.choices(self._state)]
            drops = self._rule.give_up(self._state)
            if not drops:
                return started
            self._drop(drops)
            self._settle()

    def arrived(self, set_id: int, rows: int, weight: float | None = None) -> Verdict:
        """A worker has computed a set.

        Args:
            set_id: The set.
            rows: Rows of its batches.
            weight: What its share of a step is measured by; None: its rows.

        Returns:
            What becomes of it.

        Raises:
            ShardMismatch: If another reading of the shard has ended before one of its batches.
        """
        record = self._computed(set_id)
        if record is None:
            return Verdict("dropped", "it was settled before")
        stalled = self._state.workers[record.worker].stalled
        self._books.arrive(record, rows, float(rows if weight is None else weight))
        if stalled:
            self._lease()
        self._settle()
        return self._books.verdict(record)

    def ran_out(self, set_id: int, batch: Batch) -> None:
        """A worker found that a batch of its set does not exist: the shard ends there.

        The batches before it, if any, are still computed, and arrive as the rest of the set.

        Args:
            set_id: The set.
            batch: The first of its batches that does not exist.

        Raises:
            ShardMismatch: If another reading of the shard found that batch, or one behind it.
        """
        record = self._computed(set_id)
        if record is None:
            return
        if batch not in record.batches:
            raise ValueError(f"{batch} is not in set {set_id}, of {list(record.batches)}.")
        record.leases.exhausted(batch.shard, batch.position)
        self._books.truncate(record, record.batches.index(batch))
        self._lease()
        self._settle()

    def next_apply(self) -> Apply | None:
        """What to apply now, if a step is complete and none is being applied.

        Returns:
            The step; report it with `applied` or `apply_failed`.
        """
        state = self._state
        if state.applying or self.epoch_finished or not (records := self._rule.next_apply(state)):
            return None
        total = sum(record.weight for record in records)
        sets = tuple(self._books.admitted(record, total) for record in records)
        self._apply = Apply(self.version, sets, factor(self._damping, max(one.staleness for one in sets)))
        for record in records:
            state.mark(record, Status.APPLYING)
        state.applying = records
        self._settle()
        return self._apply

    def applied(self, apply: Apply) -> None:
        """A step has been applied: the variables have the next version."""
        records = self._end_of(apply)
        for record in records:
            self._books.apply(record)
        self._state.version += 1
        self._state.steps_left -= 1
        self._rule.on_applied(self._state, records)
        self._books.forget_draws()
        self._settle()

    def apply_failed(self, apply: Apply, lost_set_ids: Collection[int]) -> None:
        """A step could not be applied, and no variable has changed.

        Args:
            apply: The step.
            lost_set_ids: Sets that could not be pulled. Those of workers that were lost meanwhile are too; the
                others are admitted again.
        """
        for record in self._end_of(apply):
            # A worker that was lost and came back has joined once more.
            worker = self._state.workers[record.worker]
            if record.set_id in lost_set_ids or not worker.live or worker.incarnation != record.incarnation:
                self._books.lose(record, "it could not be pulled")
            else:
                self._state.mark(record, Status.ADMITTED)
        self._settle()

    def overdue(self, now: float, timeout_seconds: float) -> list[int]:
        """The sets that workers have computed for too long, also those dropped meanwhile.

        Args:
            now: On the ledger's clock.
            timeout_seconds: How long a set may take.

        Returns:
            Set ids, for `lost_set`.
        """
        return [
            worker.computing.set_id
            for worker in self._state.workers.values()
            if worker.active and worker.computing and now - worker.computing.dispatched_at >= timeout_seconds
        ]

    def lost_set(self, set_id: int) -> None:
        """A set is lost, its batches are read again; its worker, if still at it, gets no work before it comes."""
        record = self._books.sets.get(set_id)
        if record is None:
            return
        if record.status is Status.APPLYING:
            raise ValueError(f"Set {set_id} is being applied. Call `apply_failed` instead.")
        worker = self._state.workers[record.worker]
        if worker.computing is record:
            worker.stalled = True
        if record.set_id in self._state.unapplied:
            self._books.lose(record, "it did not come back in time")
        self._lease()
        self._settle()

    def waiting_for(self) -> str:
        """One sentence: whom training waits for, and why."""
        state = self._state
        if state.applying:
            return step_applied_now(state)
        if self.epoch_finished:
            return "The epoch is finished." if self._open else "No epoch is open."
        return self._rule.waiting_for(state) if state.active() else nobody_there(state)

    def check(self) -> None:
        """Asserts what must always hold; for tests."""
        check(self._state, self._books)

    def _computed(self, set_id: int) -> SetRecord | None:
        """The set of that id if a worker computes it; None if it was settled and its worker is free of it."""
        if not 0 <= set_id < self._books.num_sets:
            raise ValueError(f"Set {set_id} was never dispatched.")
        record = self._books.sets.get(set_id)
        if record is not None and self._state.workers[record.worker].computing is not record:
            raise ValueError(f"Set {set_id} has arrived before, and is {record.status.value}.")
        return record

    def _end_of(self, apply: Apply) -> list[SetRecord]:
        if apply is not self._apply:
            raise ValueError(f"Step {apply.version} is not being applied.")
        records, self._state.applying, self._apply = self._state.applying, [], None
        return records

    def _drop(self, drops: list[Drop]) -> None:
        for record, reason, read_again in drops:
            self._books.drop(record, reason, self._requeue_dropped if read_again is None else read_again)

    def _lease(self) -> None:
        if self._open:
            self._state.leases.set_workers(self._state.active(), self._state.num_workers)

    def _settle(self) -> None:
        self._drop(self._rule.settle(self._state))
        self._books.count_held()
