"""A damaged checkpoint is passed over with a notice; a disk that fails is told in one error, and harms nothing.

All through the manager, as a program sees it.
"""

import errno
import os
import pathlib
import shutil
import subprocess
import sys

import keras
import pytest
import tensorflow as tf

from tests.checkpoint import jobs
from tests.checkpoint.disks import WatchedFileSystem, failing_at
from tfdist_ext import errors, events
from tfdist_ext.checkpoint import EverySteps, LatestN, TrainingCheckpointManager, TrainingState
from tfdist_ext.checkpoint.directory import CheckpointDirectory
from tfdist_ext.checkpoint.tensors import Snapshot

ROOT = pathlib.Path(__file__).parents[2]
# Three numbers and a table, so that there is more than one tensor to damage.
FILES = ["manifest.json", "state.data-00000-of-00001", "state.index", "worker-00000.json"]


class Job:
    """A loop without Keras, of which everything is known: after step n all numbers are n."""

    def __init__(self, path, file_system=None):
        self.counter, self.table = tf.Variable(0), tf.Variable(tf.zeros([4, 3]))
        self.state = TrainingState(counter=self.counter, table=self.table, allow_missing=["input"])
        self.checkpoints = TrainingCheckpointManager(
            self.state, path, save=EverySteps(1), keep=LatestN(9), stop_on_sigterm=False
        )
        if file_system is not None:
            self.checkpoints.directory = CheckpointDirectory(path, file_system=file_system)

    def run(self, *steps, wait=True):
        for step in steps:
            self.set(step)
            self.checkpoints.save(step, wait=wait)

    def set(self, step):
        self.counter.assign(step)
        self.table.assign(tf.fill([4, 3], float(step)))

    def is_at(self, step):
        return int(self.counter) == step and (self.table.numpy() == step).all()


@pytest.fixture(scope="module")
def two_checkpoints(tmp_path_factory):
    path = tmp_path_factory.mktemp("two")
    Job(path).run(1, 2)
    return path


@pytest.fixture
def path(two_checkpoints, tmp_path):
    """A directory with the checkpoints of steps 1 and 2."""
    shutil.copytree(two_checkpoints, tmp_path / "checkpoints")
    return tmp_path / "checkpoints"


@pytest.fixture
def passed_over():
    """Paths and problems of the checkpoints that were passed over."""
    seen = []

    def note(name, fields):
        if name == "checkpoint_passed_over":
            seen.append((os.path.basename(fields["path"]).split("-")[1], fields["problem"]))

    events.subscribe(note)
    yield seen
    events.unsubscribe(note)


def folder_of(path, step):
    (folder,) = path.glob(f"checkpoint-{step:010d}-*")
    return folder


def delete(file, where):
    file.unlink()


def truncate(file, where):
    os.truncate(file, int(where * file.stat().st_size))


def flip(file, where):
    """Turns one bit of the byte at a part of the length."""
    data = bytearray(file.read_bytes())
    data[min(int(where * len(data)), len(data) - 1)] ^= 1 << int(8 * where) % 8
    file.write_bytes(bytes(data))


DAMAGES = [(delete, 0.0), *((truncate, where) for where in (0.0, 0.5, 0.99))]
DAMAGES += [(flip, number / 12) for number in range(13)]


def test_the_files_are_those_that_are_damaged_below(path):
    assert sorted(os.listdir(folder_of(path, 2))) == FILES


@pytest.mark.parametrize("name", FILES)
def test_c18_whatever_is_damaged_the_checkpoint_before_is_restored(name, path, tmp_path, passed_over, caplog):
    """A deleted file, a shortened one, and a flipped bit in thirteen places of each file."""
    for number, (damage, where) in enumerate(DAMAGES):
        copy = tmp_path / str(number)
        shutil.copytree(path, copy)
        damage(folder_of(copy, 2) / name, where)
        passed_over.clear()
        caplog.clear()
        job = Job(copy)
        restored = job.checkpoints.restore_or_initialize()
        assert restored.step == 1 and job.is_at(1), (damage, where)
        assert [step for step, _ in passed_over] == ["0000000002"]
        (notice,) = [record.getMessage() for record in caplog.records if "passed over" in record.getMessage()]
        assert str(folder_of(copy, 2)) in notice
        # Training goes on and saves the step again; the next start finds that one.
        job.run(2)
        again = Job(copy)
        assert again.checkpoints.restore_or_initialize().step == 2 and again.is_at(2)


@pytest.mark.parametrize("name", FILES)
def test_where_none_is_intact_there_is_one_error_that_names_all_and_no_variable_is_changed(name, path):
    for step in (1, 2):
        flip(folder_of(path, step) / name, 0.5)
    job = Job(path)
    job.set(7)
    with pytest.raises(errors.CheckpointCorruptError) as caught:
        job.checkpoints.restore_or_initialize()
    text = str(caught.value)
    assert text.startswith(f"None of the checkpoints in {path} is intact:")
    assert str(folder_of(path, 1)) in text and str(folder_of(path, 2)) in text
    assert text.endswith("Name another directory, or move this one away to train from the beginning.")
    assert job.is_at(7)


def test_a_fit_whose_last_checkpoint_is_damaged_ends_where_it_would_have_bit_for_bit(tmp_path):
    """10 batches an epoch; of the saves at steps 4 and 8 the later one is damaged."""
    keras.utils.set_random_seed(1)
    whole = jobs.manager(tmp_path / "whole", save=EverySteps(4), keep=LatestN(9))
    history = jobs.fit(whole, epochs=2)
    keras.utils.set_random_seed(1)
    cut = jobs.manager(tmp_path / "cut", save=EverySteps(4), keep=LatestN(9))
    assert jobs.fit(cut, jobs.Interrupt(steps=9), epochs=2) is None
    assert cut.steps() == [4, 8]
    flip(folder_of(tmp_path / "cut", 8) / "state.data-00000-of-00001", 0.5)
    resumed = jobs.manager(tmp_path / "cut", save=EverySteps(4), keep=LatestN(9))
    assert jobs.fit(resumed, epochs=2) == history
    jobs.assert_equal(jobs.values(whole.state), jobs.values(resumed.state))


# --- disks that fail -----------------------------------------------------------------------------------------------
ERRORS = {
    errno.ENOSPC: "the disk is full; the checkpoint needs .* Delete old checkpoints or other files there",
    errno.EROFS: "Read-only file system. Choose a directory that this user may write to",
    errno.EACCES: "Permission denied. Choose a directory that this user may write to",
}


def assert_harmless(job, path, error, newest=2):
    """One error that names path and fix; the state and earlier checkpoints are as before; the next save works."""
    assert isinstance(error, errors.CheckpointError)
    assert str(error).startswith("Step 3 was not saved: ") and str(path) in str(error)
    assert error.path == str(path)
    assert job.is_at(3) and job.state.step == 3
    # The job that writes here has its name in `.owner`.
    assert set(os.listdir(path)) - {".owner"} == {folder_of(path, step).name for step in range(1, newest + 1)}
    again = Job(path)
    assert again.checkpoints.restore_or_initialize().step == newest and again.is_at(newest)
    job.checkpoints.directory = CheckpointDirectory(path)
    job.run(4)
    assert job.checkpoints.steps() == [*range(1, newest + 1), 4]


@pytest.mark.parametrize("error_number", ERRORS)
@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_disk_that_is_full_or_read_only_is_told_once_and_harms_nothing(path, error_number, asynchronous):
    """Each of the calls of a save fails in turn."""
    dry_run = shutil.copytree(path, path.with_name("dry run"))
    watched = WatchedFileSystem()
    job = Job(dry_run, watched)
    job.checkpoints.restore_or_initialize()
    watched.calls.clear()
    job.run(3)
    num_calls = len(watched.calls)
    assert num_calls >= 9  # A folder, two files written, three and two folders made durable, the commit.
    for number in range(num_calls):
        directory = shutil.copytree(path, path.with_name(f"{number}"))
        job = Job(directory)
        job.checkpoints.restore_or_initialize()
        job.checkpoints.directory = CheckpointDirectory(
            directory, file_system=failing_at(number, error_number)
        )
        with pytest.raises(errors.CheckpointError, match=ERRORS[error_number]) as caught:
            job.run(3, wait=not asynchronous)
            job.checkpoints.wait()
        # At the last call the checkpoint has its name, whole, and only might not have it after a power failure.
        assert_harmless(job, directory, caught.value, newest=3 if number == num_calls - 1 else 2)


@pytest.mark.parametrize(
    ("kind", "error_number"),
    [
        (tf.errors.ResourceExhaustedError, errno.ENOSPC),
        (tf.errors.PermissionDeniedError, errno.EACCES),
        (OSError, errno.ENOSPC),
        (OSError, errno.EROFS),
    ],
)
def test_the_same_where_tensorflow_or_the_early_flush_meets_it(path, monkeypatch, kind, error_number):
    """The tensors are written by TensorFlow, which has errors of its own."""
    job = Job(path)
    job.checkpoints.restore_or_initialize()

    def fail(self, prefix):
        pathlib.Path(f"{prefix}.data-00000-of-00001.tempstate1").write_bytes(b"half")
        raise kind(error_number, os.strerror(error_number)) if kind is OSError else kind(None, None, prefix)

    monkeypatch.setattr(Snapshot, "write", fail)
    with pytest.raises(errors.CheckpointError, match=ERRORS[error_number]) as caught:
        job.run(3)
    monkeypatch.undo()
    assert_harmless(job, path, caught.value)


def test_a_disk_that_is_really_full(tmp_path):
    """In a child, on a disk of 1 MB of its own if the system lets it have one; else its file system says so."""
    command = [sys.executable, "-m", "tests.checkpoint.full_disk_program", str(tmp_path / "disk")]
    may_mount = subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode == 0
    if may_mount:
        command = ["unshare", "--mount", *command, "mount"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    *_, kind, message, saved = done.stdout.splitlines()
    assert kind == ("a tmpfs of 1 MB" if may_mount else "an injected error")
    assert message.startswith("Step 2 was not saved: ") and str(tmp_path / "disk") in message
    assert "the disk is full" in message and "Delete old checkpoints" in message
    assert saved == "saved [1, 3], restored 3, values right True"
