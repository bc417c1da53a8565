"""Trains in a process of its own: a process has one cluster, and no policy should feel what ran before it."""

import dataclasses
import json
import pathlib
import subprocess
import sys
from collections.abc import Sequence

from examples.time_to_quality import train


def train_in_own_process(policies: Sequence[str], job: train.Job) -> list[dict]:
    """Calls `train.train` in a new process, for one policy after the other.

    Args:
        policies: Names in `train.POLICIES`.
        job: What is trained.

    Returns:
        What it returned for each.

    Raises:
        RuntimeError: The process failed; its error output is in the message.
    """
    text = json.dumps({"policies": list(policies), "job": dataclasses.asdict(job)})
    done = subprocess.run(
        [sys.executable, "-m", "examples.time_to_quality.own_process", text],
        cwd=pathlib.Path(__file__).parents[2],
        capture_output=True,
        text=True,
    )
    if done.returncode != 0:
        raise RuntimeError(f"Training under {', '.join(policies)} failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def main():
    """Trains as the only argument says, and prints the results as JSON."""
    arguments = json.loads(sys.argv[1])
    job = train.Job(**arguments["job"])
    print(json.dumps([train.train(policy, job) for policy in arguments["policies"]]))


if __name__ == "__main__":
    main()
