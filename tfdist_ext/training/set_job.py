"""What does a worker do for one set?"""

from __future__ import annotations

from typing import Protocol

import tensorflow as tf

from tfdist_ext import compat
from tfdist_ext.ps import Batch, Dispatch
from tfdist_ext.training.half_set import HalfSet
from tfdist_ext.training.set_delivery import ComputedSet
from tfdist_ext.training.set_program import SetProgram
from tfdist_ext.training.worker import Worker


class Receiver(Protocol):
    """Whoever wants the set."""

    def ran_out(self, dispatch: Dispatch, batch: Batch) -> None:
        """There is no such batch; those before it make the set."""
        ...

    def unwanted(self, dispatch: Dispatch) -> None:
        """Its batch was used by another set in the meantime."""
        ...

    def pulled(self, worker: Worker, num_bytes: int) -> None:
        """The worker has pulled variables."""
        ...

    def arrived(self, worker: Worker, dispatch: Dispatch, rows: int, computed: ComputedSet) -> None:
        """The set is computed."""
        ...

    def worker_lost(self, index: int) -> None:
        """The worker died, or nobody waits for it any more."""
        ...

    def set_failed(self, index: int, epoch: int, error: Exception) -> None:
        """The set cannot be computed by anybody."""
        ...


class SetJob:
    """Computes one set.

    Args:
        receiver: Whoever wants it.
        dispatch: Which batches, on which version.
        data: `WorkerIterator`.
        program: What to compute.
        epoch: Number of the epoch.
        arguments: Tensors that the step takes besides the batch.
    """

    def __init__(
        self, receiver: Receiver, dispatch: Dispatch, data, program: SetProgram, epoch: int, arguments=()
    ):
        self._receiver, self._dispatch, self._data = receiver, dispatch, data
        self._program, self._epoch = program, epoch
        self._arguments = list(arguments)

    def run(self, worker: Worker) -> None:
        """See `worker.Job`."""
        program, dispatch = self._program, self._dispatch
        wires, kept, rows = None, [], 0
        draw = worker.constant(dispatch.draw if program.uses_draw else 0)
        cached, on_ps = self._cached(worker)
        for batch in dispatch.batches:
            try:
                outputs = self._compute(worker, batch, cached, draw)
            except LookupError:
                self._receiver.unwanted(dispatch)
                return
            if outputs is None:
                self._receiver.ran_out(dispatch, batch)
                break
            if program.halves is not None:
                self._arrive_half(worker, outputs, (cached, draw, self._arguments), on_ps)
                return
            counts, some, kept = program.divide(outputs)
            rows += program.layout.num_rows(some)
            self._receiver.pulled(worker, program.bytes_pulled(counts, some))
            wires = some if wires is None else list(program.join(*wires, *some))
        if wires is not None:
            computed = ComputedSet(worker.index, program, wires, on_ps or kept, delivered=program.pushes)
            self._receiver.arrived(worker, dispatch, rows, computed)

    def _arrive_half(self, worker: Worker, outputs, inputs: tuple, kept: list) -> None:
        program = self._program
        rows, batch, shown = program.halves.divide(outputs)
        self._receiver.pulled(worker, program.bytes_pulled_for_first_half)
        half = HalfSet(
            worker.index, program, [], kept, False, batch=batch, inputs=inputs, shown=shown,
            pulled=self._receiver.pulled,
        )  # fmt: skip
        self._receiver.arrived(worker, self._dispatch, rows, half)

    def lost(self, worker: Worker) -> None:
        """See `worker.Job`."""
        self._receiver.worker_lost(worker.index)

    def failed(self, worker: Worker, error: Exception) -> None:
        """See `worker.Job`."""
        self._receiver.set_failed(worker.index, self._epoch, error)

    def _cached(self, worker: Worker) -> tuple[list, list]:
        """Returns the variables that the worker has, fetched again if it is time to, and what the ps keep of them."""
        program = self._program
        if program.fetch is None:
            return [], []
        # Another model may have had the worker since.
        if self._dispatch.refresh or worker.cache is None or worker.cache[0] is not program:
            worker.cache = program, list(program.fetch())
            self._receiver.pulled(worker, program.plan.packing.num_bytes)
        num_groups = len(program.plan.packing.groups)
        copies = worker.cache[1]
        return copies[:num_groups], copies[num_groups:]

    def _compute(self, worker: Worker, batch: Batch, cached: list, draw: tf.Tensor):
        """Returns the outputs for one batch, or None when there is no such batch."""
        program, data = self._program, self._data
        if data.feed is not None:
            fed = data.feed.get(batch.shard, batch.position)
            return None if fed is None else program.compute_batch(fed, cached, draw, self._arguments)
        try:
            iterator = worker.reader.at(data, batch.shard, batch.position)
            return program.compute_next(iterator, cached, draw, self._arguments)
        except tf.errors.OutOfRangeError:
            compat.forget_error()
            return None
