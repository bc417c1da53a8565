"""How many updates a second does training on parameter servers apply, beside TensorFlow's own coordinator?

    python -m benchmarks.parameter_server --json results.json

Two clusters, one after the other: 2 workers and 1 ps, 4 workers and 2 ps, all tasks processes of this machine
with a TF_CONFIG. On each the chief lets our loop, `tf.distribute.coordinator.ClusterCoordinator` and `fit` take
turns on the same model and data, and quotes medians. What is measured:

    async, fit      updates per second of Dense models: what the engine itself costs
    sparse          bytes and updates per second of a large embedding table, beside a small one
    no delay,       every step sleeps on its worker, and one worker sleeps ten times as long: how much of the speed
    one slow worker does each policy keep?
"""

from __future__ import annotations

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence

from benchmarks.machine import write_results

CLUSTERS = ((2, 1), (4, 2))
# The smallest cluster in which one slow worker is a quarter of all.
CLUSTER_WITH_DELAYS = (4, 2)
PROGRAM = "benchmarks.parameter_server_programs"
# (beginning of the case, its field, at least or at most, number)
AIMS = (
    ("async 0.5MB 6", "ratio_to_stock", ">=", 0.9),
    ("async 8MB 6", "ratio_to_stock", ">=", 0.9),
    ("async 8MB 200", "ratio_to_stock", ">=", 1.5),
    ("fit", "ratio_to_custom_loop", ">=", 0.9),
    ("sparse", "ratio_to_touched_rows", "<=", 2.0),
    ("sparse", "ratio_to_small_table", ">=", 0.8),
    ("one slow worker Synchronous(1)", "ratio_to_workers_that_are_not_slow", ">=", 0.85),
)


def measure(num_workers: int, num_ps: int, cases: Sequence[str], *, quick: bool = False) -> list[dict]:
    """Measures on one cluster of this machine.

    Args:
        num_workers: Workers.
        num_ps: Parameter servers.
        cases: Some of "dense", "sparse" and "delays".
        quick: Whether to measure small models for moments only.

    Returns:
        The results.

    Raises:
        RuntimeError: A task failed; the text has its last lines.
    """
    with tempfile.TemporaryDirectory() as folder:
        results = pathlib.Path(folder, "results.jsonl")
        output = pathlib.Path(folder, "output.txt")
        program = [sys.executable, "-m", PROGRAM, "--results", str(results), "--cases", *cases]
        shape = ["--chief", "--workers", str(num_workers), "--ps", str(num_ps), "--worker-restarts", "0"]
        launcher = [sys.executable, "-m", "tfdist_ext.launch.command", "run", *shape, "--", *program]
        with output.open("wb") as file:
            code = subprocess.call(
                [*launcher, *(["--quick"] if quick else [])], stdout=file, stderr=subprocess.STDOUT
            )
        if code != 0:
            lines = output.read_text(errors="replace").splitlines()
            raise RuntimeError(f"The cluster ended with exit code {code}:\n" + "\n".join(lines[-30:]))
        return [json.loads(line) for line in results.read_text().splitlines()]


def aims_of(result: Mapping) -> list[tuple[str, bool]]:
    """Returns what a result is to reach, as text, and whether it did."""
    found = []
    for beginning, field, relation, number in AIMS:
        if result["case"].startswith(beginning) and field in result:
            value = result[field]
            reached = value >= number if relation == ">=" else value <= number
            found.append((f"{field} {value:.2f}, aim {relation} {number:g}", reached))
    return found


def table(results: Sequence[Mapping]) -> str:
    """Returns the results as text, with the aims beside."""
    lines = [
        f"{'workers':>7} {'ps':>2}  {'case':42} {'updates/s':>9} {'stock':>7} {'ratio':>6}  what is aimed at"
    ]
    for result in results:
        stock = result.get("stock_updates_per_second")
        numbers = f"{stock:7.1f} {result['ratio_to_stock']:6.2f}" if stock else f"{'-':>7} {'-':>6}"
        aims = [f"{text}: {'reached' if reached else 'MISSED'}" for text, reached in aims_of(result)]
        if not aims and "ratio_to_no_delay" in result:
            aims = [f"ratio_to_no_delay {result['ratio_to_no_delay']:.2f}"]
        lines.append(
            f"{result['workers']:7} {result['ps']:2}  {result['case']:42} {result['updates_per_second']:9.1f} "
            f"{numbers}  {'; '.join(aims)}".rstrip()
        )
    return "\n".join(lines)


def main() -> None:
    """Measures, shows a table, and writes it as JSON if asked to."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", help="file to write the results to")
    parser.add_argument(
        "--quick", action="store_true", help="2 workers, small models and few steps: does it run?"
    )
    arguments = parser.parse_args()
    results = []
    for cluster in CLUSTERS[:1] if arguments.quick else CLUSTERS:
        cases = ["dense", "sparse"]
        if arguments.quick or cluster == CLUSTER_WITH_DELAYS:
            cases.append("delays")
        some = measure(*cluster, cases, quick=arguments.quick)
        print(table(some), flush=True)
        results += some
        if arguments.json:
            write_results(arguments.json, results)


if __name__ == "__main__":
    main()
