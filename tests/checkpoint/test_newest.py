"""The newest checkpoint is the one that was committed last, whatever its step."""

import keras
import pytest
import tensorflow as tf

from tests.checkpoint import jobs
from tests.checkpoint.disks import intact, save
from tfdist_ext.checkpoint import (
    BestN,
    EverySteps,
    LatestN,
    TrainingCheckpointManager,
    TrainingState,
)
from tfdist_ext.checkpoint.directory import CheckpointDirectory


def counting(directory, **arguments):
    """Returns a manager, and the variable that its checkpoints hold."""
    counter = tf.Variable(0)
    state = TrainingState(counter=counter, allow_missing=["input"])
    return TrainingCheckpointManager(state, directory, **arguments), counter


def saved(directory, steps, values=None, **arguments):
    """Saves steps in one run; the variable is the step unless told otherwise."""
    checkpoints, counter = counting(directory, **arguments)
    for step, value in zip(steps, values or steps, strict=True):
        counter.assign(value)
        checkpoints.save(step, wait=True)
    return checkpoints


def newest(directory):
    """Returns the step that a new process restores, and the value there."""
    checkpoints, counter = counting(directory)
    return checkpoints.restore_or_initialize().step, int(counter)


def test_f5_after_a_restore_by_hand_what_is_saved_stays(tmp_path):
    saved(tmp_path, [8, 9, 10], keep=LatestN(3))
    checkpoints, counter = counting(tmp_path, keep=LatestN(3))
    assert checkpoints.restore_or_initialize(8).step == 8
    # 9 is replaced at once; 10, of the branch that was left, is older than what was saved since.
    counter.assign(90)
    checkpoints.save(9, wait=True)
    assert checkpoints.steps() == [8, 9, 10]
    assert newest(tmp_path) == (9, 90)


def test_f5_a_new_run_in_a_folder_that_is_not_empty_keeps_its_own(tmp_path):
    saved(tmp_path, [8, 9, 10], keep=LatestN(3))
    # By hand: each save keeps the three that were committed last.
    assert saved(tmp_path, [1, 2, 3, 4, 5], keep=LatestN(3)).steps() == [3, 4, 5]
    assert newest(tmp_path) == (5, 5)


def test_f5_the_callback_does_not_undo_a_restore_by_hand(tmp_path):
    jobs.fit(jobs.manager(tmp_path, save=EverySteps(1), keep=LatestN(99)), epochs=2)
    again = jobs.manager(tmp_path, save=EverySteps(500), keep=LatestN(99))
    assert again.restore_or_initialize(8).step == 8
    seen = jobs.Seen()
    jobs.fit(again, seen, epochs=2)
    # Step 8 is the end of batch 7 of the first epoch.
    assert (seen.epochs, seen.batches) == ([0, 1], [8, 9, *range(10)])


# --- More of the kind ------------------------------------------------------------------------------------------------
def test_f5_the_only_one_kept_is_the_last_one_committed(tmp_path):
    saved(tmp_path, [1000], keep=LatestN(1))
    assert saved(tmp_path, [3], keep=LatestN(1)).steps() == [3]
    assert newest(tmp_path) == (3, 3)


def test_f5_a_clock_that_went_back_does_not_make_the_newest_old(tmp_path):
    directory = CheckpointDirectory(tmp_path)
    save(directory, 10, "a", created=5000.0)
    save(directory, 4, "b", created=100.0)
    assert [record.step for record in directory.newest_first()] == [4, 10]
    assert [step for step, _ in intact(tmp_path)] == [4, 10]


def test_f5_of_two_equally_good_ones_the_one_committed_last_stays(tmp_path):
    checkpoints, _ = counting(tmp_path, keep=BestN("loss", 1))
    checkpoints.save(20, {"loss": 0.5}, wait=True)
    checkpoints.save(5, {"loss": 0.5}, wait=True)
    assert checkpoints.steps() == [5]


def test_f5_the_callback_goes_on_from_a_loop_of_the_users_own(tmp_path):
    jobs.fit(jobs.manager(tmp_path, keep=LatestN(99)), epochs=1)
    # A new run, whose own first steps are not in any fit: the folder's ten steps are not its past.
    checkpoints = jobs.manager(tmp_path, keep=LatestN(99))
    checkpoints.state.build()
    bias = checkpoints.state.model.layers[-1].bias
    bias.assign([42.0])
    checkpoints.save(3, wait=True)
    first = []
    note = keras.callbacks.LambdaCallback(
        on_epoch_begin=lambda epoch, logs: first.append((epoch, float(bias.numpy()[0])))
    )
    jobs.fit(checkpoints, note, epochs=1)
    assert first == [(0, 42.0)]
    assert checkpoints.state.step == 13


@pytest.mark.parametrize("interrupt", [4, 7])
def test_f5_a_branch_that_is_cut_goes_on_as_itself(tmp_path, interrupt):
    jobs.fit(jobs.manager(tmp_path, keep=LatestN(2)), epochs=2)
    first = jobs.manager(tmp_path, keep=LatestN(2))
    assert first.restore_or_initialize(19).step == 19
    # One step is left of the second epoch; then it is cut in the third.
    assert jobs.fit(first, jobs.Interrupt(steps=interrupt), epochs=3) is None
    second, seen = jobs.manager(tmp_path), jobs.Seen()
    jobs.fit(second, seen, epochs=3)
    # The step at which it was cut had not been saved.
    assert seen.batches == list(range(interrupt - 2, 10))
    assert second.state.step == 30
