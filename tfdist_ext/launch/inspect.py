"""`tfdist-ext inspect`: which checkpoints are in a directory, are they intact, and what is in them?"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence

from tfdist_ext.checkpoint.directory import CheckpointDirectory
from tfdist_ext.checkpoint.manifest import CheckpointRecord
from tfdist_ext.errors import CheckpointError
from tfdist_ext.launch.inspect_report import Inspected, as_json, details, overview


def main(argv: Sequence[str]) -> int:
    """Runs the subcommand.

    Args:
        argv: Its flags.

    Returns:
        0 if all that was asked for is well, 1 if something is not intact, 2 if there is nothing to look at.
    """
    arguments = _parser().parse_args(list(argv))
    try:
        directory = CheckpointDirectory(arguments.directory)
        records = _wanted(directory, arguments.step)
    except (CheckpointError, ValueError) as error:
        sys.stderr.write(f"tfdist-ext inspect: {error}\n")
        return 2
    checked = [
        Inspected(record, directory.check(record, deep=arguments.verify), arguments.verify)
        for record in records
    ]
    # Training may have deleted one meanwhile; that is no problem of the checkpoint.
    found = [one for one in checked if one.problem is None or os.path.isdir(one.record.path)]
    sys.stdout.write(_text(directory, found, arguments))
    return 1 if any(one.problem is not None for one in found) else 0


def _wanted(directory: CheckpointDirectory, step: int | None) -> list[CheckpointRecord]:
    if not os.path.exists(directory.path):
        raise CheckpointError(f"{directory.path} does not exist. Is the path spelled right?")
    records = directory.records()
    if not records:
        raise CheckpointError(f"{directory.path} holds no checkpoint.{_hint(directory.path)}")
    wanted = [record for record in records if step in (None, record.step)]
    if not wanted:
        steps = ", ".join(str(one) for one in sorted({record.step for record in records}))
        raise CheckpointError(f"{directory.path} holds no checkpoint of step {step}. Try one of: {steps}.")
    return wanted


def _hint(path: str) -> str:
    """Somebody may have named the directory above, or one checkpoint."""
    if CheckpointDirectory(os.path.dirname(path)).records():
        return f" Try the directory it is in, {os.path.dirname(path)}."
    for name in sorted(os.listdir(path)):
        inner = os.path.join(path, name)
        if os.path.isdir(inner) and CheckpointDirectory(inner).records():
            return f" Try {inner}."
    return ""


def _text(directory: CheckpointDirectory, found: Sequence[Inspected], arguments: argparse.Namespace) -> str:
    now = time.time()
    if arguments.json:
        rows = [as_json(one, now, with_details=arguments.step is not None) for one in found]
        return (
            json.dumps({"directory": directory.path, "checkpoints": rows}, indent=1, allow_nan=False) + "\n"
        )
    if arguments.step is None:
        return "\n".join(overview(found, now)) + "\n"
    return "\n\n".join("\n".join(details(one, now)) for one in found) + "\n"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tfdist-ext inspect",
        description="Lists the checkpoints in a directory: step, epoch/batch, age, size, state and metrics.",
        epilog="The exit code is 0 if all is well, 1 if something is not intact, 2 if there is nothing to look at.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("directory", metavar="DIR", help="the directory that was given for checkpoints")
    add("--step", type=int, metavar="N", help="tell all about the checkpoint of this step")
    add("--verify", action="store_true", help="read every tensor and compare its checksum; starts TensorFlow")
    add("--json", action="store_true", help="print JSON")
    return parser
