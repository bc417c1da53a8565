"""Runs Keras' own tests under the strategies of this package, and says what fails that passes on one device.

`python -m tests.peers [--places mirrored parameter_servers] [--folders losses optimizers callbacks trainers]`. Some
minutes; ends with 1 where a test fails for no reason that `known.py` has.
"""

import argparse
import collections
import json
import os
import pathlib
import subprocess
import sys
import tempfile

from tests.peers.known import reason_of

FOLDERS = ("losses", "optimizers", "callbacks", "trainers")
PLACES = ("mirrored", "parameter_servers")
_MOST_SECONDS = 1800


def results_at(place, folders):
    """Returns outcome and words of each of Keras' tests, by name."""
    import keras

    source = pathlib.Path(keras.__file__).parent / "src"
    files = sorted(str(path) for folder in folders for path in (source / folder).glob("*_test.py"))
    with tempfile.TemporaryDirectory() as empty:
        results = pathlib.Path(empty, "results.json")
        environ = {
            **os.environ,
            "KERAS_BACKEND": "tensorflow",
            "PYTHONPATH": str(pathlib.Path(__file__).parents[2]),
            "TFDIST_EXT_TESTS_PEERS": json.dumps({"place": place, "results": str(results)}),
        }
        command = [sys.executable, "-m", "pytest", "-q", "-c", os.devnull, "--rootdir", empty]
        command += ["-p", "tests.peers.plugin", "-p", "no:cacheprovider", "--continue-on-collection-errors"]
        log = subprocess.run(
            [*command, *files], cwd=empty, env=environ, capture_output=True, text=True, timeout=_MOST_SECONDS
        )
        if not results.exists():
            raise RuntimeError(f"No results from {place}: {log.stdout[-2000:]}{log.stderr[-2000:]}")
        return {name: (outcome, words) for name, outcome, words in json.loads(results.read_text())}


def compared(place, results, expected):
    """Returns the counts of a place, and what fails there for no known reason."""
    counts, unknown = collections.Counter(), {}
    for name, (outcome, words) in results.items():
        if outcome != "failed":
            counts[outcome] += 1
        elif expected.get(name, ("failed",))[0] == "failed":
            counts["fails on one device too"] += 1
        elif reason_of(place, name, words) is not None:
            counts["fails for a known reason"] += 1
        else:
            counts["wrong"] += 1
            unknown[name] = words
    return dict(counts), unknown


def main():
    """Prints one line of JSON for each place, and what is wrong; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.peers", description=__doc__)
    parser.add_argument("--places", nargs="+", choices=PLACES, default=PLACES)
    parser.add_argument("--folders", nargs="+", default=FOLDERS, help="Folders of Keras' source.")
    arguments = parser.parse_args()
    expected = results_at("one_device", arguments.folders)
    failures = {}
    for place in arguments.places:
        counts, unknown = compared(place, results_at(place, arguments.folders), expected)
        print(json.dumps({"place": place, **counts}), flush=True)
        failures.update({f"{place} {name}": words for name, words in unknown.items()})
    for name, words in failures.items():
        print(f"{name}: {words}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
