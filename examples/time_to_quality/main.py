"""Time to quality: `python -m examples.time_to_quality.main --workers 4 --slow-worker 10x --plot plot.png`."""

import argparse
import dataclasses
import json
import pathlib

from examples.click_ranking import clicks
from examples.click_ranking.train import MARGIN, NUM_TEST_ROWS
from examples.time_to_quality import own_process, report, train


def main():
    """Parses the flags, trains under each policy, and reports."""
    policies = [name for name, arguments in train.POLICIES.items() if arguments is not None]
    parser = argparse.ArgumentParser("python -m examples.time_to_quality.main", description=__doc__)
    parser.add_argument("--workers", type=int, default=4, help="workers; the last one is slow")
    parser.add_argument("--slow-worker", default="10x", metavar="FACTORx", help="how many times slower it is")
    parser.add_argument(
        "--delay-ms", type=float, default=50.0, help="what a step of any worker takes at least"
    )
    parser.add_argument("--sets", type=int, default=936, help="batches of 64 rows that each policy applies")
    parser.add_argument("--measure-every", type=float, default=0.5, help="seconds between two looks")
    parser.add_argument(
        "--policies",
        nargs="+",
        choices=policies,
        default=policies,
        metavar="POLICY",
        help=f"some of: {', '.join(map(repr, policies))}; all if not given",
    )
    parser.add_argument(
        "--target", type=float, help=f"log-loss; one device's at the end + {MARGIN} if not given"
    )
    parser.add_argument(
        "--json",
        type=pathlib.Path,
        default=pathlib.Path("results.json"),
        help="where to write the results (%(default)s)",
    )
    parser.add_argument("--plot", type=pathlib.Path, help="where to write a PNG")
    flags = parser.parse_args()
    job = train.Job(
        num_workers=flags.workers,
        num_sets=flags.sets,
        delay_seconds=flags.delay_ms / 1000,
        slow_factor=float(flags.slow_worker.removesuffix("x")),
        measure_every_seconds=flags.measure_every,
    )
    one_device = own_process.train_in_own_process(["one device"], job)[0]["curve"][-1][-1]
    results = {
        "job": dataclasses.asdict(job),
        "one_device": one_device,
        "best_log_loss": clicks.Clicks().best_log_loss(NUM_TEST_ROWS),
        "target": one_device + MARGIN if flags.target is None else flags.target,
        "runs": [],
    }
    for policy in flags.policies:
        print(f"Training: {policy}", flush=True)
        results["runs"] += own_process.train_in_own_process([policy], job)
        flags.json.write_text(json.dumps(results, indent=1))
    print(
        f"One device {one_device:.4f}, best reachable {results['best_log_loss']:.4f}, target {results['target']:.4f}"
    )
    print(report.table(results))
    if flags.plot is not None:
        report.plot(results, flags.plot)


if __name__ == "__main__":
    main()
