"""What does the chief know of one worker, and who is told of it?"""

from __future__ import annotations

import queue
import time
from typing import Any, Protocol

import tensorflow as tf

from tfdist_ext.cluster import Task
from tfdist_ext.data.shard_reader import ShardReader


class Job(Protocol):
    """What a worker's thread does next."""

    def run(self, worker: Worker) -> None:
        """Runs on the worker's thread, with the worker as TensorFlow's device."""
        ...

    def lost(self, worker: Worker) -> None:
        """The worker did not do it, and is not there for whoever gave the job until it joins again."""
        ...

    def failed(self, worker: Worker, error: Exception) -> None:
        """Whoever gave the job cannot go on; the worker is not to blame, and is lost to the job all the same."""
        ...


class Owner(Protocol):
    """Whoever gives jobs to workers at present."""

    def worker_lost(self, index: int) -> None:
        """A worker died."""
        ...

    def worker_joined(self, index: int) -> None:
        """A worker is there again, or answers again."""
        ...

    def failed(self, error: Exception) -> None:
        """Training cannot go on."""
        ...

    def suspend(self) -> None:
        """Somebody else gives jobs until this one takes over again; what it gave before is still done."""
        ...


class Worker:
    """One worker, as the chief sees it.

    Attributes:
        index: Index of the worker.
        task: `Task` of the cluster.
        device: Device on which its functions run.
        reader: The iterators it has open.
        constants: Small tensors that were sent to it before, by value.
        cache: The program for which it has fetched variables, and those; or None.
        is_there: False from its death until it was connected again.
        is_slow: True while a call lasts that nobody waits for any more.
        is_leaving: True while it is taken out of TensorFlow's list.
        is_out: True when its own thread does not know yet that it was left out of TensorFlow's list, or cut off.
        calls: What its threads do, and since when.
        incarnation: How often it came back.
    """

    def __init__(self, index: int):
        self.index = index
        self.task = Task("worker", index)
        self.device = f"/job:worker/replica:0/task:{index}"
        self.inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.errands: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.failures_in_a_row = self.connections_in_a_row = 0
        self.is_there = True
        self.is_slow = self.is_leaving = self.is_out = False
        self.calls: dict[int, tuple[Job, float]] = {}
        self.answered = time.monotonic()
        self.incarnation = 0
        self.forget()

    def forget(self) -> None:
        """Drops everything that lived on it."""
        self.reader = ShardReader(f"{self.device}/device:CPU:0")
        self.constants: dict[int, tf.Tensor] = {}
        self.cache: tuple[Any, list] | None = None

    def constant(self, value: int) -> tf.Tensor:
        """Returns a scalar int64 tensor on the worker; each value is sent once."""
        tensor = self.constants.get(value)
        if tensor is None:
            with tf.device(f"{self.device}/device:CPU:0"):
                tensor = tf.constant(value, tf.int64)
            self.constants[value] = tensor
        return tensor


class Probe:
    """Finds out whether a worker is alive: its failure is treated like that of any job."""

    def run(self, worker: Worker) -> None:
        """See `Job`."""
        worker.constants.clear()
        worker.constant(0)

    def lost(self, worker: Worker) -> None:
        """See `Job`."""

    def failed(self, worker: Worker, error: Exception) -> None:
        """See `Job`."""
