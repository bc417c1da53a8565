"""Whenever a process dies, the power or the disk fails: what is read is the checkpoint of before or the new one, whole.

Exhaustive: each scenario of `disks.py` is cut at each of its calls to the operating system.
"""

import errno
import os
import pathlib
import random
import signal
import subprocess
import sys

import pytest

from tests.checkpoint.disks import (
    SCENARIOS,
    TEN,
    Crash,
    WatchedFileSystem,
    crashing_at,
    failing_at,
    intact,
    num_calls,
    save,
)
from tests.checkpoint.power import PoweredDisk
from tfdist_ext.checkpoint.directory import CheckpointDirectory
from tfdist_ext.errors import CheckpointError

ROOT = pathlib.Path(__file__).parents[2]
SAVES = ["first_save", "next_save", "save_again"]


@pytest.fixture(params=SCENARIOS)
def scenario(request, tmp_path):
    """(prepare, act, allowed states, number of calls)."""
    return *SCENARIOS[request.param], num_calls(request.param, str(tmp_path / "dry run"))


def test_c18_a_crash_at_any_call_leaves_the_old_or_the_new_checkpoint(scenario, tmp_path):
    prepare, act, states, total = scenario
    seen = []
    for number in range(total + 1):
        path = str(tmp_path / str(number))
        prepare(path)
        try:
            act(CheckpointDirectory(path, file_system=crashing_at(number)))
        except Crash:
            assert number < total
        assert intact(path) in states
        seen.append(intact(path))
        assert_goes_on(path)
    # The states come in their order, each of them at some call: nothing new is seen before all of it is.
    assert [
        state for state, next_state in zip(seen, [*seen[1:], None], strict=True) if state != next_state
    ] == states


def assert_goes_on(path):
    """The next process cleans up and saves; nothing is left but checkpoints."""
    directory = CheckpointDirectory(path)
    directory.sweep(older_than_seconds=-1.0)
    before = intact(path)
    save(directory, 40, "z", b"forty")
    assert intact(path) == [(40, b"forty"), *before]
    assert len(before) == len({step for step, _ in before})
    assert all(name.startswith("checkpoint-") for name in os.listdir(path))


def test_a_power_failure_at_any_call_leaves_the_old_or_the_new_checkpoint(scenario, tmp_path):
    prepare, act, states, total = scenario
    dice = random.Random(8)
    # What is not certain is lost; names came to the disk but no data, as some file systems do; or anything.
    choices = [lambda kind: False, lambda kind: kind == "name", lambda kind: kind == "data"]
    choices += [lambda kind: dice.random() < 0.5] * 6
    for number in range(total + 1):
        root = tmp_path / str(number)
        root.mkdir()
        prepare(str(root / "DIR"))
        disk = PoweredDisk(root, number)
        try:
            act(CheckpointDirectory(str(root / "DIR"), file_system=disk.file_system))
        except Crash:
            assert number < total
        for index, choose in enumerate(choices):
            disk.write_what_is_left(tmp_path / f"{number} {index}", choose)
            left = intact(str(tmp_path / f"{number} {index}" / "DIR"))
            assert left in states
            # Once the call has returned, its result is certain.
            assert number < total or left == states[-1]


@pytest.mark.parametrize("name", [*SAVES, "delete_oldest"])
def test_c18_kill_9_during_a_save(name, tmp_path):
    prepare, _, states = SCENARIOS[name]
    total = num_calls(name, str(tmp_path / "dry run"))
    for number in range(total):
        path = str(tmp_path / str(number))
        prepare(path)
        command = [sys.executable, "-m", "tests.checkpoint.crash_program", path, name, str(number)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
        assert done.returncode == -signal.SIGKILL, done.stderr
        assert intact(path) in states
        assert_goes_on(path)


def test_a_reader_beside_the_writer_sees_only_whole_checkpoints(scenario, tmp_path):
    prepare, act, states, total = scenario
    path = str(tmp_path / "DIR")
    prepare(path)
    seen = []
    act(CheckpointDirectory(path, file_system=WatchedFileSystem(lambda *call: seen.append(intact(path)))))
    assert len(seen) == total and all(state in states for state in seen)


@pytest.mark.parametrize("error_number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EIO])
@pytest.mark.parametrize("name", SAVES)
def test_a_full_disk_or_one_that_cannot_be_written_loses_nothing(name, error_number, tmp_path):
    prepare, act, states = SCENARIOS[name]
    num_failed = 0
    for number in range(num_calls(name, str(tmp_path / "dry run"))):
        path = str(tmp_path / str(number))
        prepare(path)
        try:
            act(CheckpointDirectory(path, file_system=failing_at(number, error_number)))
        except CheckpointError as error:
            num_failed += 1
            assert str(error).startswith(f"Cannot write to {path}: ") and error.path == path
            assert error.__cause__.errno == error_number
            assert not [entry for entry in _names(path) if entry.startswith(".draft")]
            assert intact(path) in states
        else:
            # Only what comes after the commit may fail without a word to the caller: the old one is in the way.
            assert name == "save_again" and intact(path)[0] == states[-1][0]
        assert_goes_on(path)
    # Folders, two files written, three folders and two files made durable, the manifest, and the commit.
    assert num_failed >= 10


def _names(path):
    return os.listdir(path) if os.path.isdir(path) else []


@pytest.mark.parametrize(
    ("error_number", "text"),
    [
        (
            errno.ENOSPC,
            "the disk is full; the checkpoint needs room for 5,000 bytes more. Delete old checkpoints",
        ),
        (errno.EROFS, "Read-only file system. Choose a directory that this user may write to"),
        (errno.EACCES, "Permission denied. Choose a directory that this user may write to"),
    ],
)
def test_a_full_disk_is_told_with_the_bytes_and_the_fix(error_number, text, tmp_path):
    path = str(tmp_path)
    save(CheckpointDirectory(path), 10, "a", b"ten")

    def before(number, name, *arguments):
        if name == "write":
            raise OSError(error_number, os.strerror(error_number))

    draft = CheckpointDirectory(path, file_system=WatchedFileSystem(before)).begin(20)
    with pytest.raises(CheckpointError, match=f"Cannot write to {path}: {text}"):
        draft.write_bytes("state", bytes(5000))
    assert intact(path) == [TEN] and not os.path.exists(draft.folder)
