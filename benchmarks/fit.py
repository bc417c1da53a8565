"""How long does a step of Keras `fit` take, ours and stock TensorFlow's?

    python -m benchmarks.fit --json results.json

Two things are measured. Two workers: ours and stock `MultiWorkerMirroredStrategy` (RING), each in two processes
of its own, and plain Keras on one device with all cores and the same global batch. One device: ours, stock
`MirroredStrategy` and plain Keras in one process. All processes are started before, and only one group of them
runs at a time, in turn, round by round; what is quoted is the median of all steps.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping, Sequence

import numpy as np

from benchmarks.machine import write_results
from tfdist_ext.launch.machine import num_cpus
from tfdist_ext.testing import WorkerGroup, start_group

MEGABYTES = (0.5, 8.0, 34.0)
BATCH_SIZE = 32
PROGRAMS = "benchmarks.fit_programs"
TIMEOUT_SECONDS = 300.0
TOLERANCE = 1e-3


def measure(
    sizes: Sequence[float], *, num_rounds: int, num_steps: int | None = None, num_workers: int = 2
) -> list[dict]:
    """Measures both cases for every size of model.

    Args:
        sizes: Megabytes of float32 parameters.
        num_rounds: How often each contestant has its turn.
        num_steps: Steps of a turn; None chooses by size.
        num_workers: Processes of ours and of stock.

    Returns:
        The results.
    """
    with (
        start_group(num_workers=num_workers) as ours,
        start_group(num_workers=num_workers) as stock,
        start_group(num_workers=1, num_threads=num_cpus()) as alone,
    ):
        results = []
        for megabytes in sizes:
            steps = num_steps or num_steps_for(megabytes)
            settings = {"megabytes": megabytes, "batch_size": BATCH_SIZE, "num_steps": steps}
            seconds = race({"ours": ours, "stock": stock, "plain": alone}, settings, num_rounds)
            results.append(two_workers_result(seconds, megabytes, num_workers))
            show(results[-1])
            contestants = dict.fromkeys(["plain", "ours_mirrored", "stock_mirrored"], alone)
            seconds = race(contestants, settings, 2 * num_rounds)
            results.append(one_device_result(seconds, megabytes))
            show(results[-1])
    return results


def race(
    contestants: Mapping[str, WorkerGroup], settings: Mapping, num_rounds: int
) -> dict[str, list[float]]:
    """Lets contestants take turns, every second round in reverse, and returns the seconds of their steps."""
    for kind, group in contestants.items():
        call(group, "prepare", kind=kind, **settings)
    seconds: dict[str, list[float]] = {kind: [] for kind in contestants}
    for index in range(num_rounds):
        turns = list(contestants.items())
        for kind, group in turns if index % 2 == 0 else reversed(turns):
            # All workers wait for each other: the first one's steps are everybody's.
            seconds[kind] += call(group, "time_steps", kind=kind)[0]
    check_same_training(
        {kind: call(group, "last_kernel", kind=kind)[0] for kind, group in contestants.items()}
    )
    return seconds


def check_same_training(kernels: Mapping[str, np.ndarray]) -> None:
    """Refuses to compare times of trainings that did not do the same work."""
    for kind, kernel in kernels.items():
        # float32, a rate of 0.01 and some hundred steps: rounding stays below this, a lost batch does not.
        difference = float(np.max(np.abs(kernel - kernels["plain"])))
        if not difference < TOLERANCE:
            raise RuntimeError(
                f"{kind} trained another model than plain Keras: weights differ by {difference}."
            )


def num_steps_for(megabytes: float) -> int:
    """Returns the steps of a turn: fewer of a large model, so that the whole takes some minutes."""
    return int(min(40, max(10, 240 / megabytes)))


def call(group: WorkerGroup, name: str, **arguments) -> list:
    """Runs a function of the programs; the processes keep what it makes."""
    return group.run(f"{PROGRAMS}:{name}", timeout_seconds=TIMEOUT_SECONDS, reset=False, **arguments)


def two_workers_result(seconds: Mapping[str, list[float]], megabytes: float, num_workers: int) -> dict:
    """Makes a result of the seconds of "ours", "stock" and "plain"."""
    median = {kind: statistics.median(values) for kind, values in seconds.items()}
    return {
        "case": f"{num_workers}_workers",
        "model_megabytes": megabytes,
        "ours_seconds": median["ours"],
        "stock_seconds": median["stock"],
        "one_device_seconds": median["plain"],
        "speedup_over_stock": median["stock"] / median["ours"],
        "steps": len(seconds["ours"]),
        "global_batch_size": BATCH_SIZE,
    }


def one_device_result(seconds: Mapping[str, list[float]], megabytes: float) -> dict:
    """Makes a result of the seconds of "plain", "ours_mirrored" and "stock_mirrored"."""
    median = {kind: statistics.median(values) for kind, values in seconds.items()}
    ours, plain = median["ours_mirrored"], median["plain"]
    return {
        "case": "one_device",
        "model_megabytes": megabytes,
        "plain_seconds": plain,
        "ours_seconds": ours,
        "mirrored_stock_seconds": median["stock_mirrored"],
        "overhead_fraction": ours / plain - 1,
        "overhead_milliseconds": 1000 * (ours - plain),
        "steps": len(seconds["plain"]),
        "global_batch_size": BATCH_SIZE,
    }


def show(result: Mapping) -> None:
    """Prints one result."""
    times = [
        f"{name.removesuffix('_seconds')} {1000 * value:.2f} ms"
        for name, value in result.items()
        if name.endswith("_seconds")
    ]
    ending = (
        f"{result['speedup_over_stock']:.2f} times as fast as stock"
        if "speedup_over_stock" in result
        else f"overhead {100 * result['overhead_fraction']:.1f} %, {result['overhead_milliseconds']:.2f} ms"
    )
    print(f"{result['case']}, {result['model_megabytes']:g} MB: {', '.join(times)}; {ending}", flush=True)


def main() -> None:
    """Measures, shows, and writes JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", help="file to write the results to")
    parser.add_argument("--quick", action="store_true", help="one small model and few steps: does it run?")
    parser.add_argument("--megabytes", type=float, nargs="+", default=MEGABYTES)
    arguments = parser.parse_args()
    if arguments.quick:
        results = measure([0.05], num_rounds=1, num_steps=5)
    else:
        results = measure(arguments.megabytes, num_rounds=6)
    if arguments.json:
        write_results(arguments.json, results)


if __name__ == "__main__":
    main()
