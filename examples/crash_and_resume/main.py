"""Killed and resumed: `tfdist-ext run --workers 2 --max-restarts 3 -- python -m examples.crash_and_resume.main`."""

import argparse
import os
import pathlib
import tempfile

from examples.crash_and_resume import train

DIRECTORY = pathlib.Path(tempfile.gettempdir(), f"crash_and_resume-{os.getuid()}")


def main():
    """Parses the flags."""
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add(
        "--kill-at-steps",
        type=_numbers,
        default=(),
        metavar="K,K",
        help="of the first, the second, ... start",
    )
    add(
        "--directory",
        default=DIRECTORY,
        help="for checkpoints; training goes on with what is there (%(default)s)",
    )
    add("--losses", metavar="FILE", help="append the loss of each step to this file, as JSON lines")
    arguments = parser.parse_args()
    result = train.train(arguments.directory, arguments.kill_at_steps, arguments.losses)
    fewest, most = result["times_seen"]
    print(f"weights {result['weights']}, optimizer {result['optimizer']}, after {result['steps']} steps")
    print(f"each row seen {fewest if fewest == most else f'{fewest} to {most}'} times")
    print(f"test accuracy {result['test_accuracy']:.4f}", flush=True)


def _numbers(text):
    return tuple(int(number) for number in text.split(","))


if __name__ == "__main__":
    main()
