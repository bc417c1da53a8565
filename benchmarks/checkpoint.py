"""What does a save cost: how long is training held up, until when is it on the disk, and how long does a restore take?

    python -m benchmarks.checkpoint --json results.json

Three ways to save the same variables take turns in one process, round by round: ours (asynchronous), TensorFlow's
`tf.train.Checkpoint.write`, and the same with `CheckpointOptions(enable_async=True)`. What is measured:

    blocking        extra wall time of the call that saves and of the 5 steps after it, over 5 steps without a save.
                    A copy may be made by the call or by the steps that overwrite what is still to be written: either
                    way training waits for it.
    until written   the same for all steps until the save is complete: what training loses in all
    while training  from the call to the commit while steps go on, to which the writing threads give way
    total           from the call to the commit of a save that the caller waits for, everything durable, while nothing
                    else runs; beside one write and fsync of as many bytes. TensorFlow's writes are not durable when
                    they return.
    restore         from the files, which are in the page cache, to the variables

A turn during which other processes were busy is repeated.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Mapping, Sequence

from benchmarks.checkpoint_contestants import (
    STEPS_THAT_PAY,
    Ours,
    PlainWrite,
    StockAsynchronous,
    Synchronous,
    Training,
    best_variable_megabytes,
)
from benchmarks.machine import write_results
from benchmarks.quiet import QuietMachine

MEGABYTES = (256.0, 1024.0)
# (field, largest value that is aimed at)
AIMS = (
    ("blocking_ratio_to_synchronous", 0.15),
    ("blocking_ratio_to_stock_async", 1.2),
    ("total_ratio_to_plain_write", 1.25),
    ("restore_ratio_to_stock", 1.0),
)


def measure(
    megabytes: float, *, num_rounds: int, directory: str | None = None, patience_seconds: float = 20.0
) -> dict:
    """Measures at one size.

    Args:
        megabytes: Of float32 variables, momenta included.
        num_rounds: Turns of each contestant that count.
        directory: Where to write; by default a temporary directory.
        patience_seconds: How long to wait, each time, until nobody else uses the machine.

    Returns:
        The result.

    Raises:
        RuntimeError: What a contestant wrote is not what the variables were.
    """
    machine = QuietMachine(patience_seconds=patience_seconds)
    training = Training(megabytes, best_variable_megabytes(megabytes))
    with tempfile.TemporaryDirectory(prefix="benchmark-", dir=directory) as folder:
        contestants = {
            "ours": Ours(training, folder),
            "synchronous": Synchronous(training, folder),
            "stock_async": StockAsynchronous(training, folder),
        }
        plain = PlainWrite(training, folder)
        seconds: dict[str, list[float]] = {}

        def note(name: str, value: float) -> None:
            seconds.setdefault(name, []).append(value)

        for contestant in contestants.values():
            training.check(contestant)
        for index in range(num_rounds + 1):
            if index == 1:
                seconds.clear()  # What is done once was done in the first round.
            turns = list(contestants.items())
            for name, contestant in turns if index % 2 == 0 else reversed(turns):
                for what, value in machine.run(contestant.turn).items():
                    note(f"{name} {what}", value)
            note("ours total", machine.run(contestants["ours"].seconds_until_durable))
            note("plain write", machine.run(plain.seconds))
        return result_of(megabytes, seconds) | {
            "turns": machine.num_turns,
            "turns_repeated": machine.num_disturbed,
        }


def result_of(megabytes: float, seconds: Mapping[str, Sequence[float]]) -> dict:
    """Makes a result of the seconds of all rounds, by contestant and what was measured."""
    median = {name: statistics.median(values) for name, values in seconds.items()}
    blocking = {name: median[f"{name} blocking"] for name in ("ours", "synchronous", "stock_async")}
    return {
        "case": f"{megabytes:g} MB",
        "megabytes": megabytes,
        "blocking_seconds": blocking["ours"],
        "synchronous_blocking_seconds": blocking["synchronous"],
        "stock_async_blocking_seconds": blocking["stock_async"],
        "blocking_ratio_to_synchronous": blocking["ours"] / blocking["synchronous"],
        "blocking_ratio_to_stock_async": blocking["ours"] / blocking["stock_async"],
        "until_written_seconds": median["ours until written"],
        "synchronous_until_written_seconds": median["synchronous until written"],
        "stock_async_until_written_seconds": median["stock_async until written"],
        "written_while_training_seconds": median["ours written after"],
        "total_seconds": median["ours total"],
        "plain_write_seconds": median["plain write"],
        "total_ratio_to_plain_write": median["ours total"] / median["plain write"],
        "restore_seconds": median["ours restore"],
        "stock_restore_seconds": median["synchronous restore"],
        "restore_ratio_to_stock": median["ours restore"] / median["synchronous restore"],
        "step_seconds": median["synchronous steps"] / STEPS_THAT_PAY,
        "rounds": len(seconds["ours blocking"]),
        "steps_that_pay": STEPS_THAT_PAY,
    }


def table(result: Mapping) -> str:
    """Returns a result as text, with the aims beside."""
    lines = [f"{result['case']}, a step {1000 * result['step_seconds']:.0f} ms, {result['rounds']} rounds"]
    rows = (
        ("blocking", "blocking_seconds", "synchronous", "stock_async"),
        ("until written", "until_written_seconds", "synchronous", "stock_async"),
    )
    for name, field, *others in rows:
        beside = ", ".join(f"{other} {1000 * result[f'{other}_{field}']:.0f} ms" for other in others)
        lines.append(f"  {name:14} ours {1000 * result[field]:.0f} ms, {beside}")
    lines.append(
        f"  {'total':14} ours {1000 * result['total_seconds']:.0f} ms, "
        f"one write and fsync {1000 * result['plain_write_seconds']:.0f} ms"
    )
    lines.append(
        f"  {'restore':14} ours {1000 * result['restore_seconds']:.0f} ms, "
        f"tf.train.Checkpoint.read {1000 * result['stock_restore_seconds']:.0f} ms"
    )
    lines.append(
        f"  {'while training':14} ours is committed {1000 * result['written_while_training_seconds']:.0f} ms after "
        "the call"
    )
    for field, most in AIMS:
        reached = "reached" if result[field] <= most else "MISSED"
        lines.append(f"  {field} {result[field]:.2f}, aim <= {most:g}: {reached}")
    return "\n".join(lines)


def main() -> None:
    """Measures, shows, and writes JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", help="file to write the results to")
    parser.add_argument("--megabytes", type=float, nargs="+", default=MEGABYTES, help="sizes to measure")
    parser.add_argument("--rounds", type=int, default=9, help="turns of each contestant (default 9)")
    parser.add_argument("--directory", help="where to write (default: the system's temporary directory)")
    parser.add_argument(
        "--patience-seconds",
        type=float,
        default=20.0,
        help="how long to wait, each time, until nobody else uses the machine (default 20)",
    )
    arguments = parser.parse_args()
    results = []
    for megabytes in arguments.megabytes:
        results.append(
            measure(
                megabytes,
                num_rounds=arguments.rounds,
                directory=arguments.directory,
                patience_seconds=arguments.patience_seconds,
            )
        )
        print(table(results[-1]), flush=True)
        if arguments.json:
            write_results(arguments.json, results)


if __name__ == "__main__":
    main()
