"""`tfdist-ext demo`: does training on two workers give what one device gives?"""

from __future__ import annotations

import argparse
import json
import pathlib
import re
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from tfdist_ext import builds
from tfdist_ext.cluster import environment
from tfdist_ext.cluster.ports import ReservedPorts
from tfdist_ext.launch import demo_report
from tfdist_ext.launch.decisions import Rules
from tfdist_ext.launch.machine import describe_machine, num_cpus
from tfdist_ext.launch.plan import JobShape, plan_environments
from tfdist_ext.launch.run import secret_of_job
from tfdist_ext.launch.supervisor import Supervisor

# What TensorFlow's libraries say while they are loaded, whatever TF_CPP_MIN_LOG_LEVEL is.
_NOISE = re.compile(r"WARNING: All log messages before absl::InitializeLog|I0000 00:00:")
_DESCRIPTION = """\
Trains a small convolutional network with Keras `fit` on 1,437 handwritten digits, first on one device, then
on worker processes of this machine under tfdist_ext.MultiWorkerMirroredStrategy, and compares the two. Needs
no network. The exit code is 0 if the runs are equal and both accuracies are above 0.97.
"""


def main(argv: Sequence[str]) -> int:
    """Runs the subcommand.

    Args:
        argv: Its flags.

    Returns:
        The exit code.
    """
    parser = _parser()
    arguments = parser.parse_args(list(argv))
    if builds.is_missing():
        sys.stderr.write(f"tfdist-ext demo: {builds.MISSING}\n")
        return 1
    out = pathlib.Path(arguments.out)
    try:
        # Now, and not after a minute of training. The report of an earlier run must not be taken for this one's.
        out.mkdir(parents=True, exist_ok=True)
        (out / "report.json").unlink(missing_ok=True)
        tempfile.TemporaryFile(dir=out).close()
    except OSError as error:
        parser.error(f"cannot write to --out {arguments.out}: {error.strerror}")
    return run(out, epochs=arguments.epochs, num_workers=arguments.workers)


def run(out: pathlib.Path, *, epochs: int, num_workers: int) -> int:
    """Trains both ways, compares, and writes `report.json`.

    Args:
        out: An existing folder.
        epochs: Epochs of each run.
        num_workers: Workers of the second run.

    Returns:
        The exit code.
    """
    begin = time.monotonic()
    runs, weights = [], []
    with tempfile.TemporaryDirectory() as scratch:
        for index, count in enumerate((1, num_workers)):
            name = "one device" if count == 1 else f"{count} workers"
            _say(f"Training on {name} for {epochs} epochs ...")
            files = pathlib.Path(scratch, str(index))
            code = train(files, epochs=epochs, num_workers=count)
            if code != 0:
                sys.stderr.write(f"tfdist-ext demo: the training on {name} failed; its output says why.\n")
                return code
            runs.append(
                {"name": name, "workers": count, **json.loads(files.with_suffix(".json").read_text())}
            )
            with np.load(files.with_suffix(".npz"), allow_pickle=False) as arrays:
                weights.append(dict(arrays))
    report: dict[str, Any] = {
        "runs": runs,
        "equivalence": demo_report.compare(*weights),
        "seconds": round(time.monotonic() - begin, 1),
        "machine": describe_machine(),
    }
    (out / "report.json").write_text(json.dumps(report, indent=2) + "\n")
    _say(f"\n{demo_report.as_text(report)}\n\n{report['seconds']} s; the report is {out / 'report.json'}")
    complaints = demo_report.complaints(report)
    for complaint in complaints:
        sys.stderr.write(f"tfdist-ext demo: {complaint}\n")
    return 1 if complaints else 0


def train(files: pathlib.Path, *, epochs: int, num_workers: int) -> int:
    """Runs the training program as one process without TF_CONFIG, or as a cluster.

    Args:
        files: Where the chief writes, without ending.
        epochs: Epochs.
        num_workers: Number of processes.

    Returns:
        The exit code of the job.
    """
    ports = ReservedPorts(num_workers)
    environments = plan_environments(
        JobShape(num_workers=num_workers),
        ports.ports,
        num_threads=num_cpus(),
        inherited=environment.inherited(),
        secret=secret_of_job(),
    )
    names = {}
    for task, variables in environments.items():
        # The comparison is about processes: on CPUs, so that it is the same everywhere.
        variables["CUDA_VISIBLE_DEVICES"] = "-1"
        variables.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
        if num_workers == 1:
            del variables["TF_CONFIG"]
            names[task] = "one device"
    program = [
        sys.executable,
        "-m",
        "tfdist_ext.launch.demo_train",
        "--out",
        str(files),
        f"--epochs={epochs}",
    ]
    supervisor = Supervisor(program, lambda _: environments, rules=Rules(), names=names, hidden=_NOISE)
    ports.release()
    return supervisor.run()


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tfdist-ext demo",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--out", default="tfdist-ext-demo", metavar="DIR", help="for report.json (default ./tfdist-ext-demo)")
    add("--epochs", type=_at_least(1), default=12, metavar="N", help="epochs of each run (default 12)")
    add("--workers", type=_at_least(2), default=2, metavar="N", help="workers of the second run (default 2)")
    return parser


def _at_least(minimum: int):
    def parse(text: str) -> int:
        number = int(text)
        if number < minimum:
            raise argparse.ArgumentTypeError(f"must be at least {minimum}; received {number}")
        return number

    return parse
