"""`python -m tests.conformance`: all of Keras at all places, judged."""

import argparse
import dataclasses
import json
import sys
import time

from tests.conformance import page, sweep
from tests.conformance.catalogue import catalogue
from tests.conformance.places import DISTRIBUTED, PLACES
from tests.conformance.programs import PROGRAMS


def main():
    parser = argparse.ArgumentParser(prog="python -m tests.conformance", description=__doc__)
    parser.add_argument("--json", metavar="FILE", help="write all verdicts")
    parser.add_argument("--places", nargs="+", default=list(DISTRIBUTED), choices=DISTRIBUTED)
    parser.add_argument("--programs", nargs="+", default=list(PROGRAMS), choices=list(PROGRAMS))
    parser.add_argument("--only", nargs="+", help="names of items")
    parser.add_argument("--docs", action="store_true", help=f"write {page.PATH.name}, and run nothing")
    options = parser.parse_args()
    if options.docs:
        page.PATH.write_text(page.page())
        return 0
    programs = {name: PROGRAMS[name] for name in options.programs}
    start = time.monotonic()
    log = lambda text: print(text, file=sys.stderr, flush=True)  # noqa: E731
    seen = sweep.run_all(options.places, programs, options.only, log)
    verdicts = sweep.verdicts_of(seen, options.places, programs)
    if options.only or programs != PROGRAMS:
        tried = {(PROGRAMS[program].family, item) for program, item in seen}
        verdicts = {
            place: {f: {n: v for n, v in names.items() if (f, n) in tried} for f, names in families.items()}
            for place, families in verdicts.items()
        }
    print(f"{sum(map(len, catalogue().values()))} public names, {time.monotonic() - start:.0f} s")
    for place in options.places:
        counts = sweep.counts_of(verdicts[place])
        print(f"{PLACES[place].title}: " + ", ".join(f"{count} {status}" for status, count in counts.items()))
    faults = sweep.faults_of(verdicts)
    print(*faults, sep="\n")
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"verdicts": verdicts}, file, indent=1, default=dataclasses.asdict)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
