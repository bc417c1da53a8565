"""How do many tests share the seconds that the import of TensorFlow takes?"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tfdist_ext.testing.outcomes import Outcome, results_of
from tfdist_ext.testing.worker_group import WorkerGroup
from tfdist_ext.testing.worker_process import WorkerProcess


class WorkerPool:
    """Started worker processes that run functions, one job after another.

    A job takes idle processes that have the number of devices it asks for, and starts those that are missing.
    After a success they are idle again; after a failure, a death or a time-out all processes of the job are
    killed, so that no later job suffers. It may be used from several threads.

    Args:
        max_idle_processes: How many to keep; those unused for longest end first. Each holds some 500 MB.

    Example:
        >>> with WorkerPool() as pool:  # doctest: +SKIP
        ...     first, second = pool.run("tests.programs:train", num_workers=2, epochs=3)
    """

    def __init__(self, *, max_idle_processes: int = 6):
        self._max_idle_processes = max_idle_processes
        self._idle: list[WorkerProcess] = []
        self._lock = threading.Lock()

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def run(
        self,
        function: str | Callable[..., Any],
        *,
        num_workers: int = 2,
        devices: int = 1,
        timeout_seconds: float = 60.0,
        per_worker: Sequence[Mapping[str, Any]] | None = None,
        fresh: bool = False,
        **arguments: Any,
    ) -> list[Any]:
        """Runs a function on all workers of a cluster at the same time.

        Args:
            function: `"package.module:name"`, or a function that can be imported by its name.
            num_workers: Number of workers.
            devices: Logical CPU devices of each worker.
            timeout_seconds: How long at most, once all processes have started.
            per_worker: For each worker, arguments of its own.
            fresh: Whether to use new processes and not to keep them, for a function that changes its process
                for good: TensorFlow's own collectives, or determinism, cannot be turned off again.
            **arguments: Arguments for every worker: numbers, text, arrays, lists and dictionaries of them.

        Returns:
            The results by rank.

        Raises:
            WorkerJobTimeout: A worker did not answer in time; the text has the stacks of all that did not.
            WorkerJobError: The function raised on a worker, or a process died; `outcomes` says more.
        """
        outcomes = self.outcomes(
            function,
            num_workers=num_workers,
            devices=devices,
            timeout_seconds=timeout_seconds,
            per_worker=per_worker,
            fresh=fresh,
            **arguments,
        )
        return results_of(outcomes, function if isinstance(function, str) else function.__qualname__)

    def outcomes(
        self,
        function: str | Callable[..., Any],
        *,
        num_workers: int = 2,
        devices: int = 1,
        timeout_seconds: float = 60.0,
        per_worker: Sequence[Mapping[str, Any]] | None = None,
        fresh: bool = False,
        **arguments: Any,
    ) -> list[Outcome]:
        """Runs a function as `run` does, for a test that expects it to fail.

        Args:
            function: As for `run`.
            num_workers: As for `run`.
            devices: As for `run`.
            timeout_seconds: As for `run`.
            per_worker: As for `run`.
            fresh: As for `run`.
            **arguments: As for `run`.

        Returns:
            What became of the function on each worker, by rank.
        """
        group = WorkerGroup(self._take(0 if fresh else num_workers, devices))
        group.processes += [
            WorkerProcess(num_devices=devices) for _ in range(num_workers - len(group.processes))
        ]
        outcomes: list[Outcome] = []
        try:
            group.begin(function, per_worker=per_worker, **arguments)
            outcomes = group.outcomes(timeout_seconds=timeout_seconds)
        finally:
            reusable = not fresh and outcomes and all(outcome.succeeded for outcome in outcomes)
            self._give_back(group.processes) if reusable else group.__exit__()
        return outcomes

    def close(self) -> None:
        """Ends all idle processes."""
        with self._lock:
            idle, self._idle = self._idle, []
        for process in idle:
            process.kill()

    def _take(self, count: int, num_devices: int) -> list[WorkerProcess]:
        with self._lock:
            fitting = [process for process in self._idle if process.num_devices == num_devices]
            taken = fitting[len(fitting) - min(count, len(fitting)) :]
            self._idle = [process for process in self._idle if process not in taken]
        return taken

    def _give_back(self, processes: list[WorkerProcess]) -> None:
        with self._lock:
            self._idle += processes
            surplus = self._idle[: max(0, len(self._idle) - self._max_idle_processes)]
            self._idle = self._idle[len(surplus) :]
        for process in surplus:
            process.kill()
