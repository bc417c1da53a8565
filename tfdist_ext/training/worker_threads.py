"""How does the chief run functions on its workers, and what does it do when one does not answer?

Each worker has a thread here, which runs one job at a time on it and blocks until the job is done. When a call fails
the thread finds out whose fault it was: a worker that died is waited for and connected again; a dead ps, or an error of
the user's function, ends the training with one typed error. A second thread a worker fetches what it holds, so that
nobody else has to block on a worker that may never answer. One more thread watches them all: TensorFlow's calls have no
deadline, and whatever is new to the chief is sent to every worker, so that one stopped process would stop everything.
"""

from __future__ import annotations

import atexit
import queue
import re
import threading
import time

import tensorflow as tf
from absl import logging

from tfdist_ext import compat, errors, events
from tfdist_ext.cluster import Task
from tfdist_ext.cluster.reachability import answers, hang_up, listening
from tfdist_ext.training.silent_servers import SilentServers
from tfdist_ext.training.worker import Job, Owner, Probe, Worker

# Words in the errors of a task that was started again: it does not know what its predecessor did.
_FORGOT = ("context_id", "Unable to find the relevant tensor", "not found in the context", "remote_handle")
_FORGETFUL_PS = re.compile(r"remote target /job:ps/replica:\d+/task:(\d+)")
UNREACHABLE = (
    tf.errors.UnavailableError,
    tf.errors.AbortedError,
    tf.errors.CancelledError,
    tf.errors.DeadlineExceededError,
)
# A worker whose calls fail so often in a row is taken for dead, though something listens at its address.
_MOST_FAILURES_IN_A_ROW = 5
# After so many failed connections in a row a worker that listens is no longer worth waiting for alone.
_MOST_CONNECTIONS_IN_A_ROW = 5
_SHORTEST_WATCH_SECONDS = 0.25
_LONGEST_WATCH_SECONDS = 2.0
_LONGEST_CHANGE_SECONDS = 10.0
_FIRST_PAUSE_SECONDS = 0.1
_LONGEST_PAUSE_SECONDS = 2.0


class WorkerThreads:
    """The threads of all workers of a cluster.

    Args:
        specification: `ClusterSpecification`.
        server_def: Description of the whole cluster, for connecting again.

    Attributes:
        timeout_seconds: A call that lasts longer is not waited for, and a worker that does not answer for so long is
            taken for dead.
        patience_seconds: A ps that does not answer for so long is given up.
    """

    _of_this_process: WorkerThreads | None = None

    def __init__(self, specification, server_def):
        self._specification = specification
        self._server_def = server_def
        self.timeout_seconds = 60.0
        self.patience_seconds = 600.0
        self._servers = {Task("ps", index): address for index, address in specification.jobs["ps"].items()}
        self._silent = SilentServers(self._servers, time.monotonic())
        self._connecting = threading.Lock()
        # When the interpreter has ended nobody cuts connections: a change of TensorFlow's list is finished before, and
        # no other one begun.
        atexit.register(self._connecting.acquire, timeout=_LONGEST_CHANGE_SECONDS)
        self._owner: Owner | None = None
        self._owner_lock = threading.Lock()
        count = len(specification.jobs["worker"])
        self.workers = [Worker(index) for index in range(count)]
        for worker in self.workers:
            for inbox, fetches in ((worker.inbox, False), (worker.errands, True)):
                threading.Thread(
                    target=self._serve,
                    args=(worker, inbox, fetches),
                    name=f"tfdist_ext-{worker.task}{'-fetch' if fetches else ''}",
                    daemon=True,
                ).start()
        threading.Thread(target=self._watch, name="tfdist_ext-watch", daemon=True).start()

    @classmethod
    def shared(cls, specification, server_def) -> WorkerThreads:
        """Returns the threads of this process, which has one cluster; started at first use.

        All strategies share them: connecting to a worker again must not be done by two threads at a time.
        """
        if cls._of_this_process is None:
            cls._of_this_process = cls(specification, server_def)
        return cls._of_this_process

    def present(self) -> list[int]:
        """Returns the indices of the workers that are there and answer."""
        return [worker.index for worker in self.workers if worker.is_there and not worker.is_slow]

    def missing(self) -> tuple[str, ...]:
        """Names the other ones, with their addresses: `("worker:1 at 127.0.0.1:2222", ...)`."""
        return tuple(
            f"{worker.task} at {self.address(worker.task)}{'' if not worker.is_there else ' (slow)'}"
            for worker in self.workers
            if not worker.is_there or worker.is_slow
        )

    def take_over(self, owner: Owner, timeout_seconds: float, patience_seconds: float) -> None:
        """Makes `owner` the one that hears of workers; the one before is suspended until it takes over again."""
        self.timeout_seconds, self.patience_seconds = timeout_seconds, patience_seconds
        with self._owner_lock:
            before, self._owner = self._owner, owner
        if before is not None and before is not owner:
            before.suspend()

    def let_go(self, owner: Owner) -> None:
        """Forgets an owner that has nothing left to do: it holds the graphs of a model."""
        with self._owner_lock:
            if self._owner is owner:
                self._owner = None

    def submit(self, index: int, job: Job) -> None:
        """Gives a worker its next job."""
        self.workers[index].inbox.put(job)

    def fetch(self, index: int, job: Job) -> None:
        """Has a job done beside the others: it takes what the worker holds elsewhere."""
        self.workers[index].errands.put(job)

    def address(self, task: Task) -> str:
        """Returns `host:port` of a task."""
        return self._specification.address_of(task)

    def lost_ps(self, error: Exception) -> errors.ParameterServerLostError | None:
        """Returns the error to raise if a failed call means that a ps died, or was given up, else None."""
        if not isinstance(error, tf.errors.OpError):
            return None
        if (given_up := self.silent_ps()) is not None:
            return given_up
        for task, address in self._servers.items():
            if not listening(address):
                return self._without(task, "died")
        found = _FORGETFUL_PS.search(str(error))
        if found is not None and any(word in str(error) for word in _FORGOT):
            return self._without(Task("ps", int(found.group(1))), "was started again")
        return None

    def broken_connection(self, error: Exception) -> errors.ParameterServerLostError:
        """Returns the error to raise where a step may be applied on one ps and not on another."""
        return errors.ParameterServerLostError(
            f"A connection to a ps broke in the midst of a step ({_first_line(error)}), which may be applied on one ps "
            "and not on another. Start the job again; it can go on from its last checkpoint.",
            task=str(next(iter(self._servers))),
        )

    @property
    def num_ps(self) -> int:
        """Number of ps of the cluster."""
        return len(self._servers)

    def silent_ps(self) -> errors.ParameterServerLostError | None:
        """Returns the error to raise if a ps has not answered for too long, else None."""
        for task, seconds in self._silent.given_up(self.patience_seconds).items():
            return errors.ParameterServerLostError(
                f"{task} at {self.address(task)} has not answered for {seconds:.0f} s, and nobody else has the "
                "variables on it. See whether its process is stopped and whether its machine can be reached, and start "
                "the job again; it can go on from its last checkpoint.",
                task=str(task),
            )
        return None

    def _without(self, task: Task, what: str) -> errors.ParameterServerLostError:
        return errors.ParameterServerLostError(
            f"{task} at {self.address(task)} {what}, and the variables on it are lost. Start the job again; it can "
            "go on from its last checkpoint.",
            task=str(task),
        )

    # --- on the thread that watches ------------------------------------------------------------------------------
    def _watch(self) -> None:
        """A call to a process that is stopped, or to a machine that is cut off, would last for ever."""
        while True:
            time.sleep(max(_SHORTEST_WATCH_SECONDS, min(self.timeout_seconds / 4, _LONGEST_WATCH_SECONDS)))
            for worker in self.workers:
                if worker.is_there or worker.is_leaving:
                    self._watch_one(worker)
            self._watch_servers()

    def _watch_servers(self) -> None:
        """Says of a ps that it does not answer, and in the end fails all calls to ps: they may wait for that one."""
        for task, address in self._servers.items():
            words = self._silent.heard(task, answers(address), time.monotonic(), self.patience_seconds)
            if words is not None:
                logging.warning("%s", words)
        error = self.silent_ps()
        if error is not None:
            self._tell("failed", error)
            for address in self._servers.values():
                hang_up(address)

    def _watch_one(self, worker: Worker) -> None:
        address, now = self.address(worker.task), time.monotonic()
        if answers(address):
            worker.answered = now
            if any(now - began > self.timeout_seconds for _, began in list(worker.calls.values())):
                self._stop_waiting_for(worker, f"needs more than {self.timeout_seconds:g} s")
        elif worker.is_there and not worker.calls and not listening(address):
            self.submit(worker.index, Probe())  # It died while it had nothing to do.
        elif now - worker.answered > self.timeout_seconds:
            self._stop_waiting_for(worker, "does not answer; its connections are cut")
            # Whatever was new to the chief meanwhile has not come there: the next failure means a new connection.
            worker.is_out = True
            # Again and again, because TensorFlow connects again.
            hang_up(address)

    def _stop_waiting_for(self, worker: Worker, why: str) -> None:
        if worker.is_slow or not worker.is_there:
            return
        worker.is_slow = True
        logging.warning(
            "%s at %s %s; training goes on without it.", worker.task, self.address(worker.task), why
        )
        events.emit("worker_overdue", task=str(worker.task), reason=why)
        for job, _ in list(worker.calls.values()):
            job.lost(worker)
        self._tell("worker_lost", worker.index)
        self.submit(worker.index, Probe())

    # --- on the worker's threads ---------------------------------------------------------------------------------
    def _serve(self, worker: Worker, inbox: queue.SimpleQueue, fetches: bool) -> None:
        executor = compat.synchronous_executor()
        while True:
            job = inbox.get()
            worker.calls[fetches] = job, time.monotonic()
            try:
                with compat.executing_on(executor), tf.device(worker.device):
                    job.run(worker)
                worker.failures_in_a_row = worker.connections_in_a_row = 0
            except Exception as error:
                executor.clear_error()
                del worker.calls[fetches]
                try:
                    self._after_failure(worker, job, error, fetches)
                except Exception as unforeseen:
                    # Training must not wait for a thread that is no more.
                    job.failed(worker, unforeseen)
            worker.calls.pop(fetches, None)
            del job  # Holds tensors.
            if worker.is_slow and worker.is_there:
                worker.is_slow = False
                logging.warning("%s at %s has answered.", worker.task, self.address(worker.task))
                self._tell("worker_joined", worker.index)

    def _tell(self, event: str, *arguments) -> None:
        owner = self._owner
        if owner is not None:
            getattr(owner, event)(*arguments)

    def _after_failure(self, worker: Worker, job: Job, error: Exception, fetches: bool) -> None:
        lost_ps = self.lost_ps(error)
        unreachable = isinstance(error, UNREACHABLE)
        dead = isinstance(error, tf.errors.OpError) and self._is_dead(worker, error)
        if lost_ps is not None:
            job.failed(worker, lost_ps)
        elif fetches and (dead or unreachable):
            job.lost(worker)
            self.submit(worker.index, Probe())
        elif dead:
            self._connect_again(worker, job, error)
        elif unreachable:
            self._pause(worker, job, error)
        else:
            # Nobody knows how far an iterator came.
            worker.reader.close()
            job.failed(worker, error)

    def _is_dead(self, worker: Worker, error: Exception) -> bool:
        forgot = any(word in str(error) for word in _FORGOT)
        return worker.is_out or forgot or not answers(self.address(worker.task))

    def _pause(self, worker: Worker, job: Job, error: Exception) -> None:
        """Everybody listens, but the call did not come through: try again a few times, ever more slowly."""
        worker.failures_in_a_row += 1
        if worker.failures_in_a_row >= _MOST_FAILURES_IN_A_ROW:
            self._connect_again(worker, job, error)
            return
        logging.warning("A call to %s failed (%s); trying again.", worker.task, _first_line(error))
        worker.reader.close()
        job.lost(worker)
        self._tell("worker_lost", worker.index)
        time.sleep(min(_FIRST_PAUSE_SECONDS * 2**worker.failures_in_a_row, _LONGEST_PAUSE_SECONDS))
        self._tell("worker_joined", worker.index)

    def _connect_again(self, worker: Worker, job: Job, error: Exception) -> None:
        worker.is_there = False
        logging.warning("%s at %s is lost; training goes on without it (%s).", worker.task, self.address(worker.task),
                        _first_line(error))  # fmt: skip
        events.emit("worker_lost", task=str(worker.task), reason=_first_line(error))
        worker.forget()
        job.lost(worker)
        self._tell("worker_lost", worker.index)
        self._drain(worker)
        self._leave_out(worker)
        pause = _FIRST_PAUSE_SECONDS * 2 ** min(worker.connections_in_a_row, 5)
        while not self._connected(worker):
            self._check_attempts(worker, error)
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
            time.sleep(pause)
        self._check_attempts(worker, error)
        worker.incarnation += 1
        worker.answered = time.monotonic()
        worker.is_there, worker.is_slow = True, False
        worker.failures_in_a_row = 0
        logging.warning("%s at %s is back.", worker.task, self.address(worker.task))
        events.emit("worker_returned", task=str(worker.task))
        self._tell("worker_joined", worker.index)

    def _check_attempts(self, worker: Worker, error: Exception) -> None:
        """Ends the training if nobody else is there and this one, though it listens, cannot be used."""
        if listening(self.address(worker.task)):
            worker.connections_in_a_row += 1
        if worker.connections_in_a_row < _MOST_CONNECTIONS_IN_A_ROW or self.present():
            return
        self._tell(
            "failed",
            errors.WorkersLostError(
                f"{worker.task} at {self.address(worker.task)} listens, but {worker.connections_in_a_row} "
                "connections in a row were of no use, and no other worker is there. The last error: "
                f"{_first_line(error)}. See whether another program uses the port, and whether the worker can "
                "reach the ps.",
                tasks=self.missing(),
            ),
        )

    def _drain(self, worker: Worker) -> None:
        while True:
            try:
                worker.inbox.get_nowait().lost(worker)
            except queue.Empty:
                return

    def _leave_out(self, worker: Worker) -> None:
        """Takes a worker that does not answer out of TensorFlow's list, to all of which every new function is sent."""
        if not listening(self.address(worker.task)):
            return  # A call to it fails at once.
        worker.is_leaving = True
        try:
            self._update(None)
        except tf.errors.OpError as error:
            logging.info("Leaving out %s failed (%s).", worker.task, _first_line(error))
        finally:
            worker.is_leaving = False

    def _connected(self, worker: Worker) -> bool:
        if not answers(self.address(worker.task)):
            return False
        try:
            self._update(worker)
        except tf.errors.OpError as error:
            logging.info("Connecting to %s failed (%s); trying again.", worker.task, _first_line(error))
            return False
        return True

    def _update(self, joining: Worker | None) -> None:
        """Makes TensorFlow's list that of the workers that answer, and of one that comes back.

        With one in it that died a moment ago TensorFlow would wait until it is back.
        """
        with self._connecting:
            absent = set()
            for worker in self.workers:
                if worker is joining:
                    worker.is_out = False
                elif not worker.is_there or not answers(self.address(worker.task)):
                    absent.add(worker.index)
                    if worker.is_there:
                        worker.is_out = True
                        self.submit(worker.index, Probe())
            compat.update_cluster(self._server_def, {"worker": absent})


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0][:200]
