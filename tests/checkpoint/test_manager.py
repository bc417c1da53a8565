"""When is it saved, what is kept, and what happens when the process must go?"""

import os
import signal
import threading

import pytest
import tensorflow as tf

from tests.checkpoint import jobs
from tfdist_ext import errors, events
from tfdist_ext.checkpoint import (
    BestN,
    EverySeconds,
    EverySteps,
    LatestN,
    OverheadBudget,
    TrainingCheckpointManager,
    TrainingState,
)
from tfdist_ext.checkpoint.background import BackgroundWriter


def counter_manager(directory, **arguments):
    state = TrainingState(counter=tf.Variable(0), allow_missing=["input"])
    return TrainingCheckpointManager(state, directory, **arguments)


def test_the_best_by_validation_and_the_newest_are_kept(tmp_path):
    checkpoints = jobs.manager(tmp_path, save=EverySteps(7), keep=LatestN(1) | BestN("val_loss", 1))
    history = jobs.fit(checkpoints, epochs=5, validation_data=jobs.data(seed=4))
    best = history["val_loss"].index(min(history["val_loss"]))
    assert checkpoints.steps() == sorted({10 * (best + 1), 50})
    by_step = {record.step: record.manifest for record in checkpoints.directory.records()}
    assert by_step[10 * (best + 1)].metrics["val_loss"] == min(history["val_loss"])


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"save": 500}, "`save` must be like EverySteps"),
        ({"save": EverySteps}, "`save` must be like EverySteps"),
        ({"keep": 3}, "`keep` must be like LatestN"),
    ],
)
def test_wrong_arguments(tmp_path, arguments, message):
    with pytest.raises(TypeError, match=message):
        counter_manager(tmp_path, **arguments)
    with pytest.raises(TypeError, match="`state` must be like TrainingState"):
        TrainingCheckpointManager(tf.Variable(0), tmp_path)


def test_steps_and_the_end_of_training(tmp_path):
    checkpoints = jobs.manager(tmp_path, save=EverySteps(7), keep=LatestN(99))
    jobs.fit(checkpoints, epochs=2)
    # The last state is saved whatever the policy says: a second run has nothing to do again.
    assert checkpoints.steps() == [7, 14, 20]


def test_every_second_of_a_policy_joined_with_steps(tmp_path):
    checkpoints = counter_manager(tmp_path, save=EverySteps(3) | EverySeconds(1e-9), keep=LatestN(9))
    assert [checkpoints.save_if_due(step) for step in range(1, 5)] == [True, True, True, True]


def test_a_budget_saves_again_only_when_it_is_paid_for(tmp_path):
    checkpoints = counter_manager(tmp_path, save=OverheadBudget(1e-9, steps_before_measured=8))
    saved = [step for step in range(1, 90) if checkpoints.save_if_due(step)]
    # The first measures, with the five steps after it. A budget of nothing then allows no second.
    assert saved == [8]


def test_a_save_that_fails_is_told_by_the_next_call_and_harms_nothing(tmp_path):
    checkpoints = counter_manager(tmp_path)
    checkpoints.save(1, wait=True)
    os.rename(tmp_path, tmp_path.with_name("away"))
    tmp_path.write_text("in the way")
    checkpoints.save(2)
    with pytest.raises(errors.CheckpointError, match="Step 2 was not saved: .*is a file"):
        checkpoints.wait()
    tmp_path.unlink()
    os.rename(tmp_path.with_name("away"), tmp_path)
    checkpoints.save(3, wait=True)
    assert checkpoints.steps() == [1, 3]


def test_one_save_at_a_time_and_the_wait_is_counted(tmp_path):
    checkpoints = counter_manager(tmp_path, keep=LatestN(9))
    may_end, began = threading.Event(), threading.Event()

    def hold(name, fields):
        if name == "checkpoint_committed" and fields["step"] == 1:
            began.set()
            may_end.wait(30)

    events.subscribe(hold)
    try:
        checkpoints.save(1)
        assert began.wait(30)
        second = threading.Thread(target=lambda: checkpoints.save(2, wait=True))
        second.start()
        second.join(0.2)
        assert second.is_alive()
        may_end.set()
        second.join(30)
        assert not second.is_alive()
    finally:
        events.unsubscribe(hold)
    assert checkpoints.statistics["waited_seconds"] >= 0.2
    assert checkpoints.statistics["num_saves"] == 2


def test_the_writer_raises_once_and_waits_no_longer_than_told():
    writer, release = BackgroundWriter(), threading.Event()

    def fails():
        release.wait(30)
        raise OSError("no")

    writer.submit(fails)
    with pytest.raises(errors.CheckpointError, match="still being written after 0 s"):
        writer.wait(0.01)
    release.set()
    with pytest.raises(OSError, match="no"):
        writer.wait()
    assert writer.wait() < 1


def test_sigterm_saves_and_ends_with_143(tmp_path):
    class Terminate(jobs.Interrupt):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 3:
                os.kill(os.getpid(), signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    checkpoints = jobs.manager(tmp_path, save=EverySteps(500))
    with pytest.raises(SystemExit) as caught:
        jobs.fit(checkpoints, Terminate())
    assert caught.value.code == 143
    assert signal.getsignal(signal.SIGTERM) == before
    assert checkpoints.steps() == [4]


def test_restore_of_one_step_and_of_one_that_is_not_there(tmp_path):
    checkpoints = counter_manager(tmp_path, keep=LatestN(9))
    for step in (1, 2):
        checkpoints.save(step, wait=True)
    assert checkpoints.restore_or_initialize(step=1).step == 1
    with pytest.raises(errors.CheckpointCorruptError, match=r"no checkpoint of step 5 .* those of \[1, 2\]"):
        checkpoints.restore_or_initialize(step=5)


def test_what_was_left_half_done_goes_with_the_first_save_and_not_with_a_restore(tmp_path):
    draft = counter_manager(tmp_path).directory.begin(1)
    reader = counter_manager(tmp_path)
    assert reader.restore_or_initialize() is None
    assert os.path.isdir(draft.folder)
    reader.save(1, wait=True)
    assert not os.path.isdir(draft.folder) and reader.steps() == [1]


def test_an_evaluator_reads_while_training_writes_and_deletes(tmp_path):
    writer = counter_manager(tmp_path, keep=LatestN(1))
    stop, steps, failures = threading.Event(), [], []

    def evaluate():
        reader = counter_manager(tmp_path, stop_on_sigterm=False)
        while not stop.is_set():
            try:
                restored = reader.restore_or_initialize()
                steps.append(0 if restored is None else restored.step)
            except Exception as error:
                failures.append(error)
                return

    thread = threading.Thread(target=evaluate)
    thread.start()
    try:
        for step in range(1, 40):
            writer.save(step, wait=True)
    finally:
        stop.set()
        thread.join(60)
    assert not failures
    assert steps == sorted(steps) and len(set(steps)) > 1
