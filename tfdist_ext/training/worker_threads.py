"""How does the chief run functions on its workers, and what does it do when one does not answer?

Each worker has a thread here, which runs one job at a time on it and blocks until the job is done. When a call fails the thread
finds out whose fault it was: a worker that died is waited for and connected again; a dead ps, or an error of the user's
function, ends the training with one typed error.
"""

from __future__ import annotations

import queue
import threading
import time
from typing import Any, Protocol

import tensorflow as tf
from absl import logging

from tfdist_ext import compat, errors, events
from tfdist_ext.cluster import Task
from tfdist_ext.cluster.reachability import listening
from tfdist_ext.data.worker_dataset import ShardReader

# Words in the errors of a task that was started again: it does not know what its predecessor did.
_FORGOT = ("context_id", "Unable to find the relevant tensor", "not found in the context", "remote_handle")
_UNREACHABLE = (
    tf.errors.UnavailableError,
    tf.errors.AbortedError,
    tf.errors.CancelledError,
    tf.errors.DeadlineExceededError,
)
_MOST_FAILURES_IN_A_ROW = 5
_LONGEST_PAUSE_SECONDS = 2.0


class Job(Protocol):
    """What a worker's thread does next."""

    def run(self, worker: Worker) -> None:
        """Runs on the worker's thread, with the worker as TensorFlow's device."""
        ...

    def lost(self, worker: Worker, error: Exception) -> None:
        """The call failed because something did not answer; nothing of it may be used."""
        ...


class Owner(Protocol):
    """Whoever gives jobs to workers at present."""

    def worker_lost(self, index: int) -> None:
        """A worker died."""
        ...

    def worker_joined(self, index: int) -> None:
        """A worker is there again."""
        ...

    def failed(self, error: Exception) -> None:
        """Training cannot go on."""
        ...

    def close(self) -> None:
        """Somebody else gives jobs from now on."""
        ...


class Worker:
    """One worker, as the chief sees it.

    Attributes:
        index: Index of the worker.
        task: `Task` of the cluster.
        device: Device on which its functions run.
        reader: The iterators it has open.
        constants: Small tensors that were sent to it before, by value.
        cache: Variables it has fetched, or None.
        is_there: False from its death until it was connected again.
        incarnation: How often it came back.
    """

    def __init__(self, index: int):
        self.index = index
        self.task = Task("worker", index)
        self.device = f"/job:worker/replica:0/task:{index}"
        self.executor = compat.synchronous_executor()
        self.inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.failures_in_a_row = 0
        self.is_there = True
        self.incarnation = 0
        self.forget()

    def forget(self) -> None:
        """Drops everything that lived on it."""
        self.reader = ShardReader(f"{self.device}/device:CPU:0")
        self.constants: dict[int, tf.Tensor] = {}
        self.cache: list | None = None

    def constant(self, value: int) -> tf.Tensor:
        """Returns a scalar int64 tensor on the worker; each value is sent once."""
        tensor = self.constants.get(value)
        if tensor is None:
            with tf.device(f"{self.device}/device:CPU:0"):
                tensor = tf.identity(tf.constant(value, tf.int64))
            self.constants[value] = tensor
        return tensor


class WorkerThreads:
    """The threads of all workers of a strategy.

    Args:
        specification: `ClusterSpecification`.
        server_def: Description of the whole cluster, for connecting again.
    """

    def __init__(self, specification, server_def):
        self._specification = specification
        self._server_def = server_def
        self._connecting = threading.Lock()
        self._owner: Owner | None = None
        self._owner_lock = threading.Lock()
        count = len(specification.jobs["worker"])
        self.workers = [Worker(index) for index in range(count)]
        for worker in self.workers:
            threading.Thread(
                target=self._serve, args=(worker,), name=f"tfdist_ext-{worker.task}", daemon=True
            ).start()

    def present(self) -> list[int]:
        """Returns the indices of the workers that are there."""
        return [worker.index for worker in self.workers if worker.is_there]

    def take_over(self, owner: Owner) -> None:
        """Makes `owner` the one that hears of workers; closes the one before."""
        with self._owner_lock:
            before, self._owner = self._owner, owner
        if before is not None and before is not owner:
            before.close()

    def submit(self, index: int, job: Job) -> None:
        """Gives a worker its next job."""
        self.workers[index].inbox.put(job)

    def address(self, task: Task) -> str:
        """Returns `host:port` of a task."""
        return self._specification.address_of(task)

    # --- on the worker's thread ----------------------------------------------------------------------------------
    def _serve(self, worker: Worker) -> None:
        while True:
            job = worker.inbox.get()
            try:
                with compat.executing_on(worker.executor), tf.device(worker.device):
                    job.run(worker)
                worker.failures_in_a_row = 0
            except Exception as error:
                self._after_failure(worker, job, error)

    def _after_failure(self, worker: Worker, job: Job, error: Exception) -> None:
        owner = self._owner
        lost_ps = self._lost_ps() if isinstance(error, tf.errors.OpError) else None
        if lost_ps is not None:
            owner.failed(lost_ps)
        elif not isinstance(error, tf.errors.OpError):
            owner.failed(error)
        elif self._is_dead(worker, error):
            self._connect_again(worker, job, error)
        elif isinstance(error, _UNREACHABLE):
            self._pause_and_retry(worker, job, error)
        else:
            owner.failed(error)

    def _lost_ps(self) -> errors.ParameterServerLostError | None:
        for index in range(len(self._specification.jobs["ps"])):
            task = Task("ps", index)
            if not listening(self.address(task)):
                return errors.ParameterServerLostError(
                    f"{task} at {self.address(task)} died, and the variables on it are lost. Start the job again; it "
                    "can go on from its last checkpoint.",
                    task=str(task),
                )
        return None

    def _is_dead(self, worker: Worker, error: Exception) -> bool:
        return any(word in str(error) for word in _FORGOT) or not listening(self.address(worker.task))

    def _pause_and_retry(self, worker: Worker, job: Job, error: Exception) -> None:
        """Everybody answers, but the call did not come through: try again a few times, ever more slowly."""
        worker.failures_in_a_row += 1
        if worker.failures_in_a_row >= _MOST_FAILURES_IN_A_ROW:
            self._owner.failed(
                errors.WorkersLostError(
                    f"{worker.task} at {self.address(worker.task)} answers, but {worker.failures_in_a_row} calls in a row "
                    f"failed; the last one said: {str(error).splitlines()[0]}",
                    tasks=(f"{worker.task} at {self.address(worker.task)}",),
                )
            )
            return
        logging.warning(
            "A call to %s failed (%s); trying again.", worker.task, str(error).splitlines()[0][:200]
        )
        time.sleep(min(0.1 * 2**worker.failures_in_a_row, _LONGEST_PAUSE_SECONDS))
        job.lost(worker, error)
        self._owner.worker_lost(worker.index)
        self._owner.worker_joined(worker.index)

    def _connect_again(self, worker: Worker, job: Job, error: Exception) -> None:
        worker.is_there = False
        logging.warning("%s at %s died; training goes on without it.", worker.task, self.address(worker.task))
        events.emit("worker_lost", task=str(worker.task), reason=str(error).splitlines()[0])
        worker.forget()
        job.lost(worker, error)
        self._owner.worker_lost(worker.index)
        self._drain(worker, error)
        pause = 0.1
        while not self._connected(worker):
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
            time.sleep(pause)
        worker.incarnation += 1
        worker.is_there = True
        logging.warning("%s at %s is back.", worker.task, self.address(worker.task))
        events.emit("worker_returned", task=str(worker.task))
        self._owner.worker_joined(worker.index)

    def _drain(self, worker: Worker, error: Exception) -> None:
        while True:
            try:
                worker.inbox.get_nowait().lost(worker, error)
            except queue.Empty:
                return

    def _connected(self, worker: Worker) -> bool:
        if not listening(self.address(worker.task)):
            return False
        with self._connecting:
            absent = {other.index for other in self.workers if not other.is_there and other is not worker}
            absent = {index for index in absent if not listening(self.address(Task("worker", index)))}
            try:
                compat.update_cluster(self._server_def, {"worker": absent})
            except tf.errors.OpError as error:
                logging.info("Connecting to %s failed (%s); trying again.", worker.task, error)
                return False
        return True
