"""`python -m tests.fuzz --seconds 300 --seed 1`: draws programs, compares, and prints what differs as scripts."""

import argparse
import dataclasses
import json
import sys
import time

from tests.fuzz import script
from tests.fuzz.running import Runner
from tests.fuzz.searching import Search

STRATEGIES = ("mirrored", "servers", "workers")


def main(arguments=None):
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seconds", type=float, default=300.0, help="how long to draw programs")
    parser.add_argument("--seed", type=int, default=0, help="which programs are drawn")
    parser.add_argument("--strategies", nargs="+", choices=STRATEGIES, default=STRATEGIES)
    parser.add_argument(
        "--shrink-seconds", type=float, default=90.0, help="how long to shrink one difference"
    )
    parser.add_argument("--log", help="file to which a line of JSON is added for each program")
    options = parser.parse_args(arguments)
    start, log = time.monotonic(), open(options.log, "a") if options.log else None

    def note(program, verdict):
        if log:
            line = {
                "seconds": round(time.monotonic() - start, 1),
                "verdict": verdict.kind,
                "text": verdict.text,
            }
            log.write(json.dumps({**line, "program": dataclasses.asdict(program)}) + "\n")
            log.flush()

    with Runner() as runner:
        search = Search(
            runner.verdict,
            options.seed,
            options.seconds,
            options.strategies,
            options.shrink_seconds,
            note,
        )
        search.run()
    for program, verdict in search.findings:
        print("=" * 100)
        print(f"{verdict.kind}: {verdict.text}\n{program}\n")
        print(script.script_of(program, f"Seed {options.seed}: {verdict.kind}."))
    summary = {
        "seed": options.seed, "seconds": round(time.monotonic() - start), "strategies": list(options.strategies),
        "programs": sum(search.counts.values()), "findings": len(search.findings), **search.counts,
    }  # fmt: skip
    print(json.dumps(summary))
    if log:
        log.write(json.dumps(summary) + "\n")
        log.close()
    return 1 if search.findings else 0


if __name__ == "__main__":
    sys.exit(main())
