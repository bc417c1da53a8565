"""One job writes to a directory; a second one is told who does, and a dead one does not stand in the way."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import threading

import pytest
import tensorflow as tf

from tests.checkpoint import jobs
from tfdist_ext.checkpoint import TrainingCheckpointManager, TrainingState, owner_lock
from tfdist_ext.checkpoint.owner_lock import OwnerLock
from tfdist_ext.errors import CheckpointError

# Takes the lock, says so, and lives until its input ends.
OWNER = """
import sys
from tfdist_ext.checkpoint.owner_lock import OwnerLock
lock = OwnerLock(sys.argv[1], "chief:0")
lock.acquire()
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def owner(tmp_path):
    """Another process that has the lock of a directory."""
    process = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
    )  # fmt: skip
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.communicate()


def counting(directory):
    state = TrainingState(counter=tf.Variable(0), allow_missing=["input"])
    return TrainingCheckpointManager(state, directory)


def test_h6_a_second_job_is_told_who_writes_and_a_reader_needs_no_lock(tmp_path, owner, monkeypatch):
    monkeypatch.setattr(owner_lock.OwnerLock.acquire, "__kwdefaults__", {
        **owner_lock.OwnerLock.acquire.__kwdefaults__, "here_seconds": 0.2,
    })  # fmt: skip
    assert counting(tmp_path).restore_or_initialize() is None
    said = f"is being written by another job: chief:0, process {owner.pid} on "
    with pytest.raises(CheckpointError, match=said):
        counting(tmp_path).save(1, wait=True)
    with pytest.raises(CheckpointError, match=said):
        jobs.fit(jobs.manager(tmp_path))
    # As a job that is killed leaves it: its successor works at once, without any patience.
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    successor = counting(tmp_path)
    successor.save(1, wait=True)
    assert successor.steps() == [1]


def test_h6_the_lock_ends_with_training_and_with_the_manager(tmp_path):
    checkpoints = jobs.manager(tmp_path)
    jobs.fit(checkpoints, epochs=1)
    assert ".owner" not in os.listdir(tmp_path)
    first, second = counting(tmp_path), counting(tmp_path)
    first.save(20, wait=True)
    second.save(21, wait=True)
    assert ".owner" in os.listdir(tmp_path)
    first.wait()
    assert ".owner" in os.listdir(tmp_path)
    del second
    assert sorted(name[:10] for name in os.listdir(tmp_path)) == ["checkpoint"] * 3


def lock_of(directory, **changes):
    """Leaves a lock of another process in a directory."""
    other = dataclasses.replace(owner_lock.this_process("chief:0"), **changes)
    (directory / ".owner").write_text(json.dumps(dataclasses.asdict(other)))
    return directory / ".owner"


@pytest.mark.parametrize(
    "changes",
    [
        {"started": "1"},  # Its number was given to another process.
        {"machine": "another-boot pid:[1]"},  # The machine was started again.
    ],
    ids=["process", "boot"],
)
def test_h6_an_owner_that_must_be_dead_is_not_waited_for(tmp_path, changes):
    lock_of(tmp_path, **changes)
    lock = OwnerLock(tmp_path, "worker:0")
    lock.acquire(patience_seconds=1e9, here_seconds=1e9, sleep=pytest.fail)
    lock.release()
    assert os.listdir(tmp_path) == []


class Clock:
    """Time that passes when somebody sleeps."""

    def __init__(self, beats=lambda: None):
        self.seconds, self._beats = 0.0, beats

    def __call__(self):
        return self.seconds

    def sleep(self, seconds):
        self.seconds += seconds
        self._beats()


def test_h6_an_owner_elsewhere_that_does_not_touch_its_lock_is_given_up(tmp_path):
    lock_of(tmp_path, machine="m pid:[1]", host="elsewhere")
    lock, clock = OwnerLock(tmp_path, "worker:0"), Clock()
    lock.acquire(patience_seconds=20.0, clock=clock, sleep=clock.sleep)
    lock.release()
    assert 20 <= clock.seconds < 21


def test_h6_an_owner_elsewhere_that_touches_its_lock_is_alive(tmp_path):
    path = lock_of(tmp_path, machine="m pid:[1]", host="elsewhere")
    clock = Clock(lambda: os.utime(path, ns=(1, int(clock.seconds * 1e9) + 10)))
    with pytest.raises(CheckpointError, match="by another job: chief:0, process .* on elsewhere"):
        OwnerLock(tmp_path, "worker:0").acquire(clock=clock, sleep=clock.sleep)
    assert clock.seconds < 20


def test_h6_of_many_that_find_a_dead_owner_one_gets_the_lock(tmp_path):
    lock_of(tmp_path, started="1")
    locks, outcomes = [OwnerLock(tmp_path, f"worker:{i}") for i in range(8)], []

    def acquire(lock):
        try:
            lock.acquire(here_seconds=0.3)
            outcomes.append(lock)
        except CheckpointError as error:
            outcomes.append(str(error))

    threads = [threading.Thread(target=acquire, args=(lock,)) for lock in locks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    (winner,) = [one for one in outcomes if isinstance(one, OwnerLock)]
    assert len(outcomes) == 8
    winner.release()
    assert os.listdir(tmp_path) == []


def test_h6_an_owner_whose_lock_was_taken_saves_nothing_more(tmp_path):
    lock = OwnerLock(tmp_path, "worker:0", beat_seconds=0.01)
    lock.acquire()
    lock.require()
    lock_of(tmp_path, token="another", task="worker:7")
    (beat,) = [thread for thread in threading.enumerate() if thread.name == f"owner of {tmp_path}"]
    beat.join(30)
    with pytest.raises(CheckpointError, match="taken over by another job: worker:7"):
        lock.require()
    lock.release()
    # It is the other's now.
    assert os.listdir(tmp_path) == [".owner"]
