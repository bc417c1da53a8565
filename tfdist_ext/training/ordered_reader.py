"""How is every batch of a pass computed once, by any worker, and handed out in the order of the data?

For `evaluate` and `predict`: nothing is stale and nothing may be dropped, so that no policy is asked. A batch of a worker that died
is computed by another.
"""

from __future__ import annotations

import threading
from typing import Any

import tensorflow as tf

from tfdist_ext import errors
from tfdist_ext.ps import Batch, Leases
from tfdist_ext.training.worker_threads import Worker, WorkerThreads

_AHEAD = 4
_LOOK_AROUND_SECONDS = 0.5


class _BatchJob:
    def __init__(self, reader: OrderedReader, batch: Batch):
        self._reader, self._batch = reader, batch

    def run(self, worker: Worker) -> None:
        self._reader._compute(worker, self._batch)

    def lost(self, worker: Worker, error: Exception) -> None:
        self._reader._give_back(worker.index, self._batch)


class OrderedReader:
    """Computes a pass over the data on the workers.

    Args:
        threads: The workers' threads.
        data: `WorkerIterator`.
        compute: Function of a worker and of an iterator that stands at the batch, or of a worker and the batch itself
            where the chief reads. Runs on the worker's thread; what it returns must outlive the worker.
        patience_seconds: Longest wait for a batch.
    """

    def __init__(self, threads: WorkerThreads, data, compute, patience_seconds: float):
        self._threads, self._data, self._on_worker = threads, data, compute
        self._patience_seconds = patience_seconds
        self._changed = threading.Condition()
        self._leases = Leases(data.dataset.num_shards, data.dataset.lengths)
        self._results: dict[int, Any] = {}
        self._busy: set[int] = set()
        self._next = 0
        self._error: Exception | None = None
        self._closed = False
        threads.take_over(self)
        with self._changed:
            self._leases.set_workers(threads.present(), len(threads.workers))
            self._start()

    def has_next(self) -> bool:
        """Waits until the next batch is there, or the data have ended."""
        with self._changed:
            return self._wait()

    def next_result(self):
        """Returns what `compute` returned for the next batch.

        Raises:
            StopIteration: The data have ended.
        """
        with self._changed:
            if not self._wait():
                raise StopIteration
            result = self._results.pop(self._next)
            self._leases_apply(self._next)
            self._next += 1
            self._start()
        return result

    def close(self) -> None:
        """Stops; what is being computed is not used."""
        with self._changed:
            self._closed = True
            self._results.clear()

    def _wait(self) -> bool:
        waited = 0.0
        while True:
            if self._error is not None:
                raise self._error
            if self._next in self._results:
                return True
            if not self._leases.has_unread and not self._leases.in_flight and not self._results:
                return False
            if self._skips_missing():
                continue
            self._changed.wait(_LOOK_AROUND_SECONDS)
            waited += _LOOK_AROUND_SECONDS
            if waited > self._patience_seconds:
                raise errors.WorkersLostError(
                    f"Batch {self._next} was not computed in {waited:.0f} s by workers {sorted(self._busy)}. Check that they "
                    "are alive.",
                    tasks=tuple(f"worker:{index}" for index in sorted(self._busy)),
                )

    def _skips_missing(self) -> bool:
        """Steps over a batch that a shorter shard does not have; returns True if it did."""
        shard, position = self._next % self._data.dataset.num_shards, self._next // self._data.dataset.num_shards
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
        if self._closed:
            return
        limit = self._next + _AHEAD * len(self._threads.workers)
        for index in self._threads.present():
            if index in self._busy:
                continue
            batch = self._leases.peek(index)
            if batch is None or self._leases.index(batch) >= limit:
                continue
            self._leases.take(batch)
            self._busy.add(index)
            self._threads.submit(index, _BatchJob(self, batch))

    def _compute(self, worker: Worker, batch: Batch) -> None:
        if self._closed:
            return
        if self._data.feed is not None:
            with self._changed:
                element = self._data.feed.get(batch.shard, batch.position)
            result, exists = (None, False) if element is None else (self._on_worker(worker, element), True)
        else:
            try:
                iterator = worker.reader.at(self._data, batch.shard, batch.position)
                result, exists = self._on_worker(worker, iterator), True
            except tf.errors.OutOfRangeError:
                result, exists = None, False
        with self._changed:
            self._busy.discard(worker.index)
            if exists:
                self._leases.confirm(batch)
                self._results[self._leases.index(batch)] = result
            else:
                self._leases.exhausted(batch.shard, batch.position)
                self._leases.discard(batch)
            self._start()
            self._changed.notify_all()

    def _give_back(self, index: int, batch: Batch) -> None:
        with self._changed:
            self._busy.discard(index)
            self._leases.give_back(batch)

    def worker_lost(self, index: int) -> None:
        """See `worker_threads.Owner`."""
        with self._changed:
            self._busy.discard(index)
            self._leases.set_workers(self._threads.present(), len(self._threads.workers))
            self._start()
            self._changed.notify_all()

    def worker_joined(self, index: int) -> None:
        """See `worker_threads.Owner`."""
        with self._changed:
            self._leases.set_workers(self._threads.present(), len(self._threads.workers))
            self._start()
            self._changed.notify_all()

    def failed(self, error: Exception) -> None:
        """See `worker_threads.Owner`."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()
