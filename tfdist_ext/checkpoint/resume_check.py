"""Is a run that was cut in two the run that was not?

`verify_resume` trains k + n steps in one set of new processes, k steps and a save in another, and n steps from that
save in a third, and compares everything bit for bit: the rows that were read, the logs, and all state.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tfdist_ext.checkpoint import plain_data
from tfdist_ext.cluster import environment
from tfdist_ext.cluster.ports import ReservedPorts

_NUM_LINES = 25


@dataclasses.dataclass(frozen=True)
class ResumeReport:
    """What `verify_resume` found.

    Attributes:
        first_difference: One sentence, or None if the runs are equal bit for bit.
        num_steps: Steps that were compared.
        num_values: Arrays and numbers of the final state that were compared.
    """

    first_difference: str | None
    num_steps: int
    num_values: int

    @property
    def is_exact(self) -> bool:
        """True if nothing differs."""
        return self.first_difference is None


def verify_resume(
    make_state: Callable | str,
    k: int,
    n: int,
    *,
    fit: Mapping[str, Any] | None = None,
    num_workers: int = 1,
    timeout_seconds: float = 300.0,
) -> ResumeReport:
    """Compares k + n steps with k steps, a save, a new process, a restore and n steps.

    Runs on: the process of a test or a shell; all training is done in processes that it starts and ends.

    Args:
        make_state: Function without arguments at the top of a module, or "module:function". It makes model and data
            as the program does and returns a `TrainingState`, which is trained by `model.fit(state.dataset)`; or a
            pair of it and of a function `train(state, checkpoints)`, a custom loop that begins with
            `checkpoints.restore_or_initialize()` and calls `checkpoints.save_if_due(step)` after each step.
        k: Steps before the cut.
        n: Steps after it.
        fit: More arguments for `fit`, that JSON can hold; `epochs` is chosen large enough if it is not among them.
        num_workers: Processes of a cluster, each with its TF_CONFIG.
        timeout_seconds: For each of the runs.

    Returns:
        What was compared, and the first difference.

    Raises:
        RuntimeError: A run failed; the message ends with its last lines.

    Example:
        def make_state():
            model = keras.Sequential([...])
            model.compile("adam", "mse")
            return tfdist_ext.checkpoint.TrainingState(model, dataset)

        report = tfdist_ext.checkpoint.verify_resume(make_state, k=7, n=5)
        assert report.is_exact, report.first_difference
    """
    if k < 1 or n < 1:
        raise ValueError(f"Arguments `k` and `n` must be at least 1; received {k} and {n}. Try k=5, n=5.")
    with tempfile.TemporaryDirectory(prefix="verify-resume-") as folder:
        job = {"make_state": _address(make_state), "fit": dict(fit or {}), "folder": folder, "k": k, "n": n}
        # The first two know nothing of each other, and run side by side.
        with contextlib.ExitStack() as running:
            whole = running.enter_context(_Run(job, "whole", num_workers, timeout_seconds))
            first = running.enter_context(_Run(job, "first", num_workers, timeout_seconds))
            whole.wait()
            first.wait()
        with _Run(job, "second", num_workers, timeout_seconds) as second:
            second.wait()
        return _compared(pathlib.Path(folder), k, n, num_workers)


def assert_resumes_exactly(make_state: Callable | str, k: int, n: int, **arguments: Any) -> None:
    """Fails a test unless `verify_resume` finds no difference.

    Runs on: the process of a test.

    Args:
        make_state: See `verify_resume`.
        k: Steps before the cut.
        n: Steps after it.
        **arguments: More arguments of `verify_resume`.

    Raises:
        AssertionError: The message names the first difference.
    """
    report = verify_resume(make_state, k, n, **arguments)
    if not report.is_exact:
        raise AssertionError(f"Resuming after {k} of {k + n} steps is not exact: {report.first_difference}")


def _address(make_state: Callable | str) -> str:
    if isinstance(make_state, str):
        return make_state
    if make_state.__qualname__ != make_state.__name__ or make_state.__module__ == "__main__":
        raise ValueError(
            "Argument `make_state` must be a function at the top of a module that other processes can import; received "
            f"{make_state.__module__}:{make_state.__qualname__}. Put it in a module of its own."
        )
    return f"{make_state.__module__}:{make_state.__name__}"


class _Run:
    """The processes of one run; those that are left are killed at the end of the `with` block."""

    def __init__(self, job: Mapping[str, Any], name: str, num_workers: int, timeout_seconds: float):
        self._name, self._timeout_seconds = name, timeout_seconds
        self._processes: list[subprocess.Popen] = []
        self._logs: list[pathlib.Path] = []
        ports = ReservedPorts(num_workers)
        addresses = [f"127.0.0.1:{port}" for port in ports.ports]
        ports.release()
        for index in range(num_workers):
            text = json.dumps({**job, "run": name, "worker": index})
            variables = {**environment.inherited(), "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
            if num_workers > 1:
                task = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}}
                variables["TF_CONFIG"] = json.dumps(task)
            self._logs.append(pathlib.Path(job["folder"], f"{name}-{index}.log"))
            with open(self._logs[-1], "wb") as log:
                self._processes.append(
                    subprocess.Popen(
                        [sys.executable, "-m", "tfdist_ext.checkpoint.resume_run", text], env=variables,
                        stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
                    )
                )  # fmt: skip

    def __enter__(self) -> _Run:
        return self

    def __exit__(self, *error) -> None:
        for process in self._processes:
            process.kill()
            process.wait()

    def wait(self) -> None:
        """Waits for all processes; raises if one fails or none of the time is left."""
        deadline = time.monotonic() + self._timeout_seconds
        for index, process in enumerate(self._processes):
            try:
                code = process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                code = None
            if code != 0:
                ending = "took too long" if code is None else f"ended with exit code {code}"
                lines = self._logs[index].read_text(errors="replace").splitlines()[-_NUM_LINES:]
                raise RuntimeError(
                    f'Worker {index} of the run "{self._name}" {ending}. Its last lines:\n  '
                    + "\n  ".join(lines)
                )


def _compared(folder: pathlib.Path, k: int, n: int, num_workers: int) -> ResumeReport:
    num_values = 0
    for worker in range(num_workers):
        whole, first, second = (
            plain_data.loads(pathlib.Path(folder, f"{run}-{worker}.json").read_bytes())
            for run in ("whole", "first", "second")
        )
        who = f"worker {worker}: " if num_workers > 1 else ""
        num_values += len(whole["state"])
        difference = _first_difference(whole, first, second, k)
        if difference is not None:
            return ResumeReport(who + difference, n, num_values)
    return ResumeReport(None, n, num_values)


def _first_difference(whole: Mapping, first: Mapping, second: Mapping, k: int) -> str | None:
    """Compares in the order of causes: rows, then logs, then state."""
    parted = {what: [*first[what], *second[what]] for what in ("rows", "logs")}
    for what in ("rows", "logs"):
        for index, (expected, found) in enumerate(zip(whole[what], parted[what], strict=False)):
            if expected != found:
                where = "before the cut (the run is not deterministic)" if index < k else "after the cut"
                return f"{what} {index + 1}, {where}: {_shown(expected)} in one run, {_shown(found)} in two"
        if len(whole[what]) != len(parted[what]):
            return f"{len(whole[what])} {what} in one run, {len(first[what])} + {len(second[what])} in two"
    return _first_difference_of_state(whole["state"], second["state"])


def _first_difference_of_state(whole: Mapping[str, Any], second: Mapping[str, Any]) -> str | None:
    for name in whole:
        if name not in second:
            return f"{name} is missing after resuming"
        if plain_data.dumps(whole[name]) != plain_data.dumps(second[name]):
            return f"{name}: {_shown(whole[name])} in one run, {_shown(second[name])} in two"
    more: Sequence[str] = [name for name in second if name not in whole]
    return f"{more[0]} is there only after resuming" if more else None


def _shown(value: Any) -> str:
    text = repr(value).replace("\n", " ")
    return text if len(text) <= 200 else f"{text[:200]}..."
