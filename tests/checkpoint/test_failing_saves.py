"""Who hears of a save that failed, and of a signal that came late?"""

import os
import signal
import subprocess
import sys

import pytest
import tensorflow as tf

import tfdist_ext
from tests.checkpoint import jobs
from tests.checkpoint.test_several_workers import counting_model, rows_once
from tests.multi_worker.agreement import facts_of
from tfdist_ext.checkpoint import EverySteps, TrainingCheckpointManager, TrainingState

# The package without TensorFlow: a job of the writer fails, and the program ends; argument: what it does before.
PROGRAM = """
import sys
from tfdist_ext.checkpoint.background import BackgroundWriter
writer = BackgroundWriter()
def fails():
    raise RuntimeError("the disk is gone")
writer.submit(fails)
if sys.argv[1] == "asks":
    try:
        writer.wait()
    except RuntimeError:
        pass
print("the end")
"""


@pytest.mark.parametrize("last_call, code", [("nothing", 1), ("asks", 0)])
def test_h8_the_last_save_that_fails_is_raised_at_exit(last_call, code):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, last_call], capture_output=True, text=True, timeout=60,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
    )  # fmt: skip
    assert done.returncode == code, done.stderr
    assert done.stdout == "the end\n"
    assert ("RuntimeError: the disk is gone" in done.stderr.splitlines()) == bool(code)


class Breaks:
    """State that one worker cannot give, or cannot write."""

    def __init__(self, how):
        self._how = how
        self._calls = 0

    def state_dict(self):
        self._calls += 1
        if self._how == "state":
            raise ZeroDivisionError("no state today")
        return {"held": object()} if self._how == "plain" else {}

    def load_state_dict(self, state):
        if self._how == "load":
            raise ZeroDivisionError("no loading today")


def failing_save(directory, how):
    """Saves twice; at the second one a worker fails in one of several ways. Returns what each was told."""
    strategy = tfdist_ext.MultiWorkerMirroredStrategy()
    first = strategy.process_group.rank == 0
    checkpoints = jobs.manager(directory, counting_model(strategy), rows_once())
    checkpoints.restore_or_initialize()
    checkpoints.save(1, wait=True)
    fails = Breaks(how if not first else "")
    checkpoints.state._stateful["breaks"] = fails
    if how == "commit" and first:
        checkpoints.keep_policy = _Policy()
    try:
        if how == "load":
            checkpoints.save(2, wait=True)
            checkpoints.restore_or_initialize()
        else:
            checkpoints.save(2, wait=True)
    except Exception as error:
        return facts_of(error)
    finally:
        strategy.process_group.barrier("the end", timeout_seconds=60)
    return None


class _Policy:
    def keeps(self, records):
        raise ZeroDivisionError("no policy today")


@pytest.mark.parametrize(
    "how, own_type, said",
    [
        (
            "state",
            "ZeroDivisionError",
            "worker:1 could not write its part: ZeroDivisionError: no state today",
        ),
        ("plain", "CheckpointIncompleteError", "breaks: in its state_dict"),
        ("commit", "CheckpointError", "ZeroDivisionError: no policy today"),
        ("load", "ZeroDivisionError", "worker:1: ZeroDivisionError: no loading today"),
    ],
)
def test_g11_whatever_fails_on_one_worker_is_raised_on_all(worker_pool, tmp_path, how, own_type, said):
    facts = worker_pool.run(failing_save, directory=str(tmp_path), how=how, timeout_seconds=60)
    assert said in facts[0]["message"]
    assert facts[1]["type"] == own_type


def test_h9_after_training_sigterm_does_what_it_did_before(tmp_path):
    received = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: received.append(number))
    try:
        checkpoints = jobs.manager(tmp_path)
        jobs.fit(checkpoints, epochs=1)
        os.kill(os.getpid(), signal.SIGTERM)
        assert received == [signal.SIGTERM]
        # A second fit listens again.
        with pytest.raises(SystemExit):
            jobs.fit(checkpoints, _Terminates(), epochs=2)
        assert received == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_h9_a_loop_that_has_waited_for_its_last_save_gives_the_signal_back(tmp_path):
    received = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: received.append(number))
    try:
        state = TrainingState(counter=tf.Variable(0), allow_missing=["input"])
        checkpoints = TrainingCheckpointManager(state, tmp_path, save=EverySteps(1))
        checkpoints.restore_or_initialize()
        checkpoints.save_if_due(1)
        checkpoints.wait()
        os.kill(os.getpid(), signal.SIGTERM)
        assert received == [signal.SIGTERM]
        checkpoints.save_if_due(2)
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(SystemExit):
            checkpoints.save_if_due(3)
        assert received == [signal.SIGTERM] and checkpoints.steps() == [1, 2, 3]
    finally:
        signal.signal(signal.SIGTERM, before)


class _Terminates(jobs.Seen):
    def on_train_batch_end(self, batch, logs=None):
        if batch == 3:
            os.kill(os.getpid(), signal.SIGTERM)


def test_h9_a_signal_after_the_last_step_ends_the_process_too(tmp_path):
    class Late(jobs.Seen):
        def on_train_end(self, logs=None):
            os.kill(os.getpid(), signal.SIGTERM)

    checkpoints = jobs.manager(tmp_path)
    with pytest.raises(SystemExit) as caught:
        jobs.fit(checkpoints, Late(), epochs=1)
    assert caught.value.code == 143 and checkpoints.steps()[-1] == 10
