"""How is every batch of a pass computed once, by any worker, and handed out in the order of the data?

For `evaluate` and `predict`: nothing is stale and nothing may be dropped, so that no policy is asked. A batch of a
worker that died is computed by another.
"""

from __future__ import annotations

import threading
from typing import Any

import tensorflow as tf

from tfdist_ext import compat
from tfdist_ext.ps import Batch, Leases
from tfdist_ext.training.waiting import LOOK_AROUND_SECONDS, Waiting
from tfdist_ext.training.worker import Worker
from tfdist_ext.training.worker_threads import WorkerThreads

_AHEAD = 4


class _BatchJob:
    """Computes one batch on a worker."""

    def __init__(self, reader: OrderedReader, batch: Batch):
        self._reader, self.batch = reader, batch

    def run(self, worker: Worker) -> None:
        self._reader._compute(worker, self)

    def lost(self, worker: Worker) -> None:
        self._reader.worker_lost(worker.index)

    def failed(self, worker: Worker, error: Exception) -> None:
        self._reader._job_failed(worker.index, self, error)


class OrderedReader:
    """Computes a pass over the data on the workers.

    Args:
        threads: The workers' threads.
        data: `WorkerIterator`.
        compute: Function of a worker and of an iterator that stands at the batch, or of a worker and the batch itself
            where the chief reads. Runs on the worker's thread; what it returns must outlive the worker.
        timeout_seconds: A batch that is not back in this time is computed by another worker.
        patience_seconds: Longest wait for a batch.
    """

    def __init__(
        self, threads: WorkerThreads, data, compute, timeout_seconds: float, patience_seconds: float
    ):
        self._threads, self._data, self._on_worker = threads, data, compute
        self._patience_seconds = patience_seconds
        self._changed = threading.Condition()
        self._leases = Leases(data.dataset.num_shards, data.dataset.lengths)
        self._results: dict[int, Any] = {}
        self._jobs: dict[int, _BatchJob] = {}
        self._next = 0
        self._error: Exception | None = None
        self._closed = self._is_suspended = False
        self._timeout_seconds = timeout_seconds
        threads.take_over(self, timeout_seconds, patience_seconds)
        with self._changed:
            self._lease()

    def has_next(self, data=None) -> bool:
        """Waits until the next batch is there, or the data have ended."""
        self._go_on()
        with self._changed:
            return self._wait()

    def next_result(self):
        """Returns what `compute` returned for the next batch.

        Raises:
            StopIteration: The data have ended.
        """
        self._go_on()
        with self._changed:
            if not self._wait():
                raise StopIteration
            result = self._results.pop(self._next)
            self._leases_apply(self._next)
            self._next += 1
            self._start()
        return result

    def close(self, data=None) -> None:
        """Stops; what is being computed is not used. There is no other pass than its own that `data` could mean."""
        with self._changed:
            self._closed = True
            self._results.clear()
        self._threads.let_go(self)

    def suspend(self) -> None:
        """See `worker.Owner`: what is on its way arrives, and nothing is begun."""
        with self._changed:
            self._is_suspended = True

    def _go_on(self) -> None:
        """Takes the workers back from whoever had them in the meantime."""
        if self._is_suspended and not self._closed:
            self._threads.take_over(self, self._timeout_seconds, self._patience_seconds)
            with self._changed:
                self._is_suspended = False
                self._lease()

    def _wait(self) -> bool:
        waiting = Waiting(self._threads, self._patience_seconds, "No batch", self._waiting_for)
        while True:
            if self._error is not None:
                raise self._error
            if self._next in self._results:
                return True
            if not self._leases.has_unread and not self._leases.in_flight and not self._results:
                return False
            if self._skips_missing():
                continue
            self._changed.wait(LOOK_AROUND_SECONDS)
            waiting.look_around()

    def _waiting_for(self) -> str:
        busy = ", ".join(f"worker:{index}" for index in sorted(self._jobs)) or "a worker"
        return f"Batch {self._next} waits for {busy}."

    def _skips_missing(self) -> bool:
        """Steps over a batch that a shorter shard does not have; returns True if it did."""
        shard, position = (
            self._next % self._data.dataset.num_shards,
            self._next // self._data.dataset.num_shards,
        )
        end = self._leases.end_of(shard)
        if end is not None and position >= end:
            self._next += 1
            return True
        return False

    def _leases_apply(self, index: int) -> None:
        shard, position = index % self._data.dataset.num_shards, index // self._data.dataset.num_shards
        self._leases.apply(Batch(shard, position))
        if self._data.feed is not None:
            self._data.feed.release(shard, position)

    def _start(self) -> None:
        """Gives free workers their next batches, not too far ahead; called under the lock."""
        self._changed.notify_all()
        if self._closed or self._is_suspended or self._error is not None:
            return
        limit = self._next + _AHEAD * len(self._threads.workers)
        for index in self._threads.present():
            batch = self._leases.peek(index) if index not in self._jobs else None
            if batch is None or self._leases.index(batch) >= limit:
                continue
            self._leases.take(batch)
            self._jobs[index] = _BatchJob(self, batch)
            self._threads.submit(index, self._jobs[index])

    # --- from the workers' threads -------------------------------------------------------------------------------
    def _compute(self, worker: Worker, job: _BatchJob) -> None:
        if self._closed:
            return
        batch, result, exists = job.batch, None, True
        if self._data.feed is not None:
            try:
                element = self._data.feed.get(batch.shard, batch.position)
            except LookupError:
                return  # Another worker computed it when this one was given up.
            if element is not None:
                result = self._on_worker(worker, element)
            exists = element is not None
        else:
            try:
                result = self._on_worker(worker, worker.reader.at(self._data, batch.shard, batch.position))
            except tf.errors.OutOfRangeError:
                compat.forget_error()
                exists = False
        with self._changed:
            if self._jobs.get(worker.index) is not job:
                return  # Nobody waits for it any more: another worker has computed the batch, or will.
            del self._jobs[worker.index]
            if exists:
                self._leases.confirm(batch)
                self._results[self._leases.index(batch)] = result
            else:
                self._leases.exhausted(batch.shard, batch.position)
                self._leases.discard(batch)
            self._start()

    def _job_failed(self, index: int, job: _BatchJob, error: Exception) -> None:
        with self._changed:
            if self._jobs.get(index) is job:
                self.failed(error)
            self.worker_lost(index)

    def worker_lost(self, index: int) -> None:
        """See `worker.Owner`."""
        with self._changed:
            job = self._jobs.pop(index, None)
            if job is not None:
                self._leases.give_back(job.batch)
            self._lease()

    def worker_joined(self, index: int) -> None:
        """See `worker.Owner`."""
        with self._changed:
            self._lease()

    def failed(self, error: Exception) -> None:
        """See `worker.Owner`."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def _lease(self) -> None:
        self._leases.set_workers(self._threads.present(), len(self._threads.workers))
        self._start()
