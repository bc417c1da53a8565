"""How do several worker processes run one function at the same time?"""

from __future__ import annotations

import queue
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tfdist_ext.cluster import ClusterSpecification, Task, to_tf_config
from tfdist_ext.cluster.ports import ReservedPorts
from tfdist_ext.testing.outcomes import Failure, Outcome, results_of
from tfdist_ext.testing.worker_process import Inbox, WorkerProcess

# After the first failure the others get this long: they may be waiting for the one that failed.
GRACE_SECONDS = 10.0
_EXIT_SECONDS = 5.0


class WorkerGroup:
    """Worker processes that run functions together; worker r of the cluster is rank r.

    Attributes:
        processes: The processes by rank.
    """

    def __init__(self, processes: Sequence[WorkerProcess]):
        self.processes = list(processes)
        self._inbox: Inbox = queue.SimpleQueue()
        self._job = ""

    def __enter__(self) -> WorkerGroup:
        return self

    def __exit__(self, *exception: object) -> None:
        for process in self.processes:
            process.kill()

    def run(
        self,
        function: str | Callable[..., Any],
        *,
        timeout_seconds: float = 60.0,
        per_worker: Sequence[Mapping[str, Any]] | None = None,
        reset: bool = True,
        **arguments: Any,
    ) -> list[Any]:
        """Runs a function on every worker and waits; see `begin` and `outcomes`.

        Args:
            function: See `begin`.
            timeout_seconds: See `outcomes`.
            per_worker: See `begin`.
            reset: See `begin`.
            **arguments: See `begin`.

        Returns:
            The results by rank.

        Raises:
            WorkerJobTimeout: A worker did not answer in time.
            WorkerJobError: The function raised on a worker, or a process died.
        """
        self.begin(function, per_worker=per_worker, reset=reset, **arguments)
        return results_of(self.outcomes(timeout_seconds=timeout_seconds), self._job)

    def begin(
        self,
        function: str | Callable[..., Any],
        *,
        per_worker: Sequence[Mapping[str, Any]] | None = None,
        reset: bool = True,
        **arguments: Any,
    ) -> None:
        """Starts a function on every worker, with a TF_CONFIG of free ports in the environment.

        Args:
            function: `"package.module:name"`, or a function that can be imported by its name.
            per_worker: For each worker, arguments of its own.
            reset: Whether the workers forget Keras' session, seeds and precision afterwards.
            **arguments: Arguments for every worker: numbers, text, arrays, lists and dictionaries of them.

        Raises:
            ValueError: `function` is a lambda or local, or `per_worker` has not one entry a worker.
        """
        self._job = _import_path(function)
        num_workers = len(self.processes)
        own = [{}] * num_workers if per_worker is None else list(per_worker)
        if len(own) != num_workers:
            raise ValueError(
                f"Argument `per_worker` must have one entry for each of {num_workers} workers; received "
                f"{len(own)}."
            )
        for process in self.processes:
            process.wait_until_ready()
        self._inbox = queue.SimpleQueue()
        ports = ReservedPorts(num_workers)
        jobs = {"worker": [f"127.0.0.1:{port}" for port in ports.ports]}
        ports.release()
        for rank, process in enumerate(self.processes):
            cluster = ClusterSpecification.from_jobs(jobs, task=Task("worker", rank))
            job = {
                "function": self._job,
                "arguments": {**arguments, **own[rank]},
                "tf_config": to_tf_config(cluster),
                "reset": reset,
            }
            process.request(job, self._inbox, rank)

    def outcomes(
        self, *, timeout_seconds: float = 60.0, grace_seconds: float = GRACE_SECONDS
    ) -> list[Outcome]:
        """Waits until every worker has answered or died.

        Args:
            timeout_seconds: How long at most; then who has not answered is asked for its stacks.
            grace_seconds: How long at most after the first failure or death.

        Returns:
            What became of the function, by rank.
        """
        deadline = time.monotonic() + timeout_seconds
        answers: dict[int, Outcome] = {}
        while len(answers) < len(self.processes):
            try:
                rank, message = self._inbox.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                break
            outcome = self._as_outcome(rank, message)
            answers.setdefault(rank, outcome)
            if not outcome.succeeded:
                deadline = min(deadline, time.monotonic() + grace_seconds)
        return [answers.get(rank) or self._late(rank) for rank in range(len(self.processes))]

    def kill(self, rank: int) -> None:
        """Kills a worker as `kill -9` does, and waits for its end, after which its port is free.

        Args:
            rank: The worker.
        """
        self.processes[rank].send_signal(signal.SIGKILL)
        self.processes[rank].exit_code(_EXIT_SECONDS)

    def stop(self, rank: int) -> None:
        """Stops a worker as `kill -STOP` does: it lives and does not answer.

        Args:
            rank: The worker.
        """
        self.processes[rank].send_signal(signal.SIGSTOP)

    def resume(self, rank: int) -> None:
        """Lets a stopped worker go on.

        Args:
            rank: The worker.
        """
        self.processes[rank].send_signal(signal.SIGCONT)

    def wait_for(self, text: str, *, rank: int | None = None, timeout_seconds: float = 60.0) -> list[str]:
        """Waits for a line of output.

        Args:
            text: What the line contains.
            rank: The worker; None waits for a line of each.
            timeout_seconds: How long at most, for each.

        Returns:
            The lines.

        Raises:
            TimeoutError: There was none in time.
        """
        chosen = self.processes if rank is None else [self.processes[rank]]
        return [process.wait_for(text, timeout_seconds) for process in chosen]

    def close(self) -> list[int]:
        """Lets every process end by itself, and kills what does not.

        Returns:
            The exit codes by rank; negative for a signal.
        """
        return [process.close() for process in self.processes]

    def _as_outcome(self, rank: int, message: dict[str, Any] | None) -> Outcome:
        process = self.processes[rank]
        if message is None:
            code = process.exit_code(_EXIT_SECONDS)
            return Outcome(rank=rank, exit_code=code, timed_out=code is None, last_lines=process.last_lines())
        if "result" in message:
            return Outcome(rank=rank, result=message["result"])
        failure = Failure(**message["failure"])
        return Outcome(rank=rank, failure=failure, last_lines=process.last_lines())

    def _late(self, rank: int) -> Outcome:
        process = self.processes[rank]
        stacks = process.stacks()
        return Outcome(rank=rank, timed_out=True, stacks=stacks, last_lines=process.last_lines())


def start_group(*, num_workers: int = 2, devices: int = 1, num_threads: int = 1) -> WorkerGroup:
    """Starts fresh processes that no pool keeps, for many functions one after another.

    With `reset=False` a function finds what the one before it made: a benchmark builds a model once and times
    it again and again.

    Args:
        num_workers: Number of processes.
        devices: Logical CPU devices of each.
        num_threads: Intra-op threads of each.

    Returns:
        The group, whose processes may still be importing TensorFlow. Use it in a `with`: at the end every
        process is killed and reaped.
    """
    return WorkerGroup(
        [WorkerProcess(num_devices=devices, num_threads=num_threads) for _ in range(num_workers)]
    )


def start_processes(
    function: str | Callable[..., Any],
    *,
    num_workers: int = 2,
    devices: int = 1,
    per_worker: Sequence[Mapping[str, Any]] | None = None,
    **arguments: Any,
) -> WorkerGroup:
    """Starts a function on fresh processes that no pool keeps, for a test that kills or stops one of them.

    Args:
        function: `"package.module:name"`, or a function that can be imported by its name.
        num_workers: Number of processes.
        devices: Logical CPU devices of each.
        per_worker: For each worker, arguments of its own.
        **arguments: Arguments for every worker.

    Returns:
        The group, in which the function runs. Use it in a `with`: at the end every process is killed and
        reaped.
    """
    group = start_group(num_workers=num_workers, devices=devices)
    try:
        group.begin(function, per_worker=per_worker, **arguments)
    except BaseException:
        group.__exit__()
        raise
    return group


def _import_path(function: str | Callable[..., Any]) -> str:
    path = function if isinstance(function, str) else f"{function.__module__}:{function.__qualname__}"
    module, _, name = path.partition(":")
    if not module or not name or "<" in name:
        raise ValueError(
            "Argument `function` must be a text such as 'tests.programs:train', or a function at the top of "
            f"a module; received {path!r}."
        )
    return path
