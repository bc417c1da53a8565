"""How does a set get from its worker to the ps, when the worker may die or stop on the way?

A set that is admitted as soon as it is computed is brought by the thread that computed it; one that had to wait is
fetched by the worker's second thread. Whoever applies never blocks on a worker: a set that does not come in time is
lost, and computed again.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdist_ext.training.gradient_set import FIRST_PS
from tfdist_ext.training.set_program import SetProgram
from tfdist_ext.training.worker import Worker
from tfdist_ext.training.worker_threads import WorkerThreads

_LOOK_AROUND_SECONDS = 0.5


@dataclasses.dataclass(eq=False)
class ComputedSet:
    """The tensors of a set: on its worker, then on the ps.

    Attributes:
        worker: Index of the worker that made it.
        program: What it was computed by.
        wires: Remote tensors.
        kept: Remote tensors that commit needs besides.
        delivered: True once `wires` are on the ps.
        busy: True while somebody brings them there.
        lost: True when they will not come any more.
    """

    worker: int
    program: SetProgram
    wires: list
    kept: list
    delivered: bool
    busy: bool = False
    lost: bool = False

    @property
    def needs_others(self) -> bool:
        """Whether it can be brought to the ps only when the other sets of its step are known."""
        return False

    @property
    def num_bytes(self) -> int:
        """Bytes that go to the ps."""
        return self.program.bytes_pushed(self.wires)

    def deliver(self, worker: Worker) -> None:
        """Brings it to the ps; blocks as long as the worker does not answer."""
        with tf.device(FIRST_PS):
            wires = list(self.program.deliver(*self.wires))
        self.wires, self.delivered = wires, True


class TransferredBytes:
    """What travelled, by worker.

    Args:
        num_workers: Number of workers.

    Attributes:
        pulled: Bytes of variables that each worker pulled.
        pushed: Bytes of sets that went to the ps.
    """

    def __init__(self, num_workers: int):
        self.pulled, self.pushed = [0] * num_workers, [0] * num_workers

    def add_to(self, counts: dict) -> None:
        """Adds `bytes_pulled` and `bytes_pushed` to what `Statistics.as_dict` returned."""
        for index, of_worker in counts["workers"].items():
            of_worker.update(bytes_pulled=self.pulled[index], bytes_pushed=self.pushed[index])
        counts["total"].update(bytes_pulled=sum(self.pulled), bytes_pushed=sum(self.pushed))


@dataclasses.dataclass(eq=False)
class TrainingCounts:
    """What was computed, applied, dropped and sent so far; knows no model, and outlives it.

    Attributes:
        ledger: The books.
        lock: Held by whoever asks or tells them.
        transferred: `TransferredBytes`.
    """

    ledger: Any
    lock: threading.Condition
    transferred: TransferredBytes

    def as_dict(self) -> dict:
        """Returns the counts as plain data."""
        with self.lock:
            counts = self.ledger.statistics.as_dict()
        self.transferred.add_to(counts)
        return counts


class _Fetch:
    """Brings a set to the ps while its worker computes the next one."""

    def __init__(self, computed: ComputedSet, changed: threading.Condition, failed: Callable):
        self._computed, self._changed, self._failed = computed, changed, failed

    def run(self, worker: Worker) -> None:
        self._computed.deliver(worker)
        self._end()

    def lost(self, worker: Worker) -> None:
        self._computed.lost = True
        self._end()

    def failed(self, worker: Worker, error: Exception) -> None:
        self.lost(worker)
        self._failed(error)

    def _end(self) -> None:
        with self._changed:
            self._computed.busy = False
            self._changed.notify_all()


def bring_all(
    sets: Sequence[ComputedSet],
    threads: WorkerThreads,
    changed: threading.Condition,
    failed: Callable[[Exception], None],
    check: Callable[[], None],
) -> None:
    """Waits until each of some sets is on the ps or lost. Called with `changed` held.

    Args:
        sets: The sets.
        threads: The workers' threads.
        changed: Notified when the state of a set changes.
        failed: Called with an error that is no worker's fault.
        check: Raises where waiting has become vain.
    """
    for computed in sets:
        if not (computed.delivered or computed.busy or computed.lost):
            computed.busy = True
            threads.fetch(computed.worker, _Fetch(computed, changed, failed))
    while not all(computed.delivered or computed.lost for computed in sets):
        check()
        changed.wait(_LOOK_AROUND_SECONDS)
