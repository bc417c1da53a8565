"""Which sets are computed now, and what becomes of those that come?

Everything here is called under one lock, or takes it; what is computed, admitted and dropped the ledger decides.
"""

from __future__ import annotations

import dataclasses
import threading
from typing import Any

from tfdist_ext import errors, events
from tfdist_ext.ps import Batch, Dispatch, ResumableLedger, TooFewWorkers
from tfdist_ext.training.set_delivery import ComputedSet, TrainingCounts, TransferredBytes
from tfdist_ext.training.set_job import SetJob
from tfdist_ext.training.worker import Worker
from tfdist_ext.training.worker_threads import WorkerThreads


class SetDispatcher:
    """Gives workers sets to compute, and takes them in.

    Args:
        threads: The workers' threads.
        program: `SetProgram` of the model.
        ledger: The books.
    """

    def __init__(self, threads: WorkerThreads, program, ledger: ResumableLedger):
        self._threads = threads
        self._program = program
        self.ledger = ledger
        # Whoever else asks or tells the ledger holds `lock`.
        self._changed = self.lock = threading.Condition()
        self._sets: dict[int, ComputedSet] = {}
        self._epoch = 0
        self._arguments: list = []
        self._data: Any = None
        self._error: Exception | None = None
        self._joined: dict[int, int] = {}
        self._to_release: set[int] = set()
        self._is_open = False
        self._is_suspended = False
        self._num_drops_seen = 0
        self._bytes = TransferredBytes(len(threads.workers))
        self.counts = TrainingCounts(ledger, self.lock, self._bytes)

    def _note_members(self) -> None:
        """Tells the ledger who died, came, or both while somebody else had the workers."""
        for worker in self._threads.workers:
            known = self._joined.get(worker.index)
            there = worker.is_there and not worker.is_slow
            if known is not None and (not there or known != worker.incarnation):
                self._lose(worker.index)
            if there and worker.index not in self._joined:
                self._joined[worker.index] = worker.incarnation
                self.ledger.joined(worker.index)

    def suspend(self) -> None:
        """See `worker.Owner`: what is on its way arrives, and nothing is begun."""
        with self._changed:
            self._is_suspended = True

    # --- called under the lock ---------------------------------------------------------------------------------
    def _release(self, batches) -> None:
        """Has the chief forget batches that nobody will ask for again."""
        if self._data.feed is not None:
            for batch in batches:
                self._data.feed.release(batch.shard, batch.position)

    def _dispatch(self) -> None:
        self._changed.notify_all()
        if self._error is not None or not self._is_open or self._is_suspended:
            return
        try:
            started = self.ledger.dispatches()
        except TooFewWorkers as error:
            self._error = errors.WorkersLostError(
                f'{error} Start the missing workers again, or choose too_few_workers="wait" or "shrink".',
                tasks=self._threads.missing(),
                step=self.ledger.version,
            )
            return
        for dispatch in started:
            job = SetJob(self, dispatch, self._data, self._program, self._epoch, self._arguments)
            self._threads.submit(dispatch.worker, job)
        self._announce_drops()

    def _lose(self, index: int) -> None:
        for computed in self._sets.values():
            holds_it = computed.needs_others or not computed.delivered
            computed.lost = computed.lost or (computed.worker == index and holds_it)
        self._joined.pop(index, None)
        self.ledger.lost(index)

    def _announce_drops(self) -> None:
        new = self.ledger.num_drops - self._num_drops_seen
        self._num_drops_seen = self.ledger.num_drops
        for dropped in list(self.ledger.drops)[-new:] if new else []:
            has_come = self._sets.pop(dropped.set_id, None) is not None
            if not dropped.requeued and has_come:
                self._release(dropped.batches)
            elif not dropped.requeued:
                self._to_release.add(dropped.set_id)  # Its rows are counted when it comes.
            events.emit("set_dropped", **dataclasses.asdict(dropped))

    def _forget(self, set_ids) -> None:
        for set_id in set_ids:
            self._sets.pop(set_id, None)

    # --- from the workers' threads -------------------------------------------------------------------------------
    def ran_out(self, dispatch: Dispatch, batch: Batch) -> None:
        """See `set_job.Receiver`."""
        with self._changed:
            self.ledger.ran_out(dispatch.set_id, batch)
            self._dispatch()

    def unwanted(self, dispatch: Dispatch) -> None:
        """See `set_job.Receiver`."""
        with self._changed:
            self.ledger.arrived(dispatch.set_id, 0)
            self._dispatch()

    def pulled(self, worker: Worker, num_bytes: int) -> None:
        """See `set_job.Receiver`."""
        self._bytes.pulled[worker.index] += num_bytes

    def arrived(self, worker: Worker, dispatch: Dispatch, rows: int, computed: ComputedSet) -> None:
        """See `set_job.Receiver`."""
        pushed = computed.num_bytes
        with self._changed:
            self._sets[dispatch.set_id] = computed
            verdict = self.ledger.arrived(dispatch.set_id, rows)
            brings = verdict.outcome == "admitted" and not (computed.delivered or computed.needs_others)
            if verdict.outcome == "dropped":
                self._forget([dispatch.set_id])
            if dispatch.set_id in self._to_release:
                self._to_release.remove(dispatch.set_id)
                self._release(dispatch.batches)
            computed.busy = brings
            if verdict.outcome != "dropped" or computed.delivered or computed.needs_others:
                self._bytes.pushed[worker.index] += pushed
            if not brings:
                self._dispatch()
                return
        # If this fails, the worker is lost with all it holds.
        computed.deliver(worker)
        with self._changed:
            computed.busy = False
            self._dispatch()

    def set_failed(self, index: int, epoch: int, error: Exception) -> None:
        """See `set_job.Receiver`."""
        with self._changed:
            if epoch == self._epoch:
                self._error = self._error or error
            self.worker_lost(index)

    def worker_lost(self, index: int) -> None:
        """See `worker.Owner`."""
        with self._changed:
            self._lose(index)
            self._dispatch()

    def worker_joined(self, index: int) -> None:
        """See `worker.Owner`."""
        with self._changed:
            if self._joined.get(index) != self._threads.workers[index].incarnation:
                self._joined[index] = self._threads.workers[index].incarnation
                self.ledger.joined(index)
            self._dispatch()

    def failed(self, error: Exception) -> None:
        """See `worker.Owner`."""
        with self._changed:
            if self._error is None:
                self._error = error
            self._changed.notify_all()
