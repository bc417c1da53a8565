"""What `on_train_begin` of any callback changes is as in the run that was not cut, in any order of callbacks.

The right values are those of the run that was not cut, in the same process with the same seeds.
"""

import keras
import numpy as np
import pytest

from tests.checkpoint import jobs
from tfdist_ext import errors
from tfdist_ext.checkpoint import EverySteps, LatestN


def linear():
    """Returns one weight that a step of SGD moves; nothing in it is random."""
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, kernel_initializer="ones")])
    model.compile(keras.optimizers.SGD(1.0), "mse", run_eagerly=True)
    return model


def rate_of(model):
    return float(model.optimizer.learning_rate.numpy())


class WarmUp(keras.callbacks.Callback):
    """The rate after s steps is s / 35 of what it was when training began."""

    def __init__(self):
        super().__init__()
        self.initial, self.steps = None, 0

    def on_train_begin(self, logs=None):
        self.initial = rate_of(self.model)

    def on_train_batch_end(self, batch, logs=None):
        self.steps += 1
        self.model.optimizer.learning_rate = self.initial * self.steps / 35


class ScalesTheRate(keras.callbacks.Callback):
    """Changes the model, not itself."""

    def on_train_begin(self, logs=None):
        self.model.optimizer.learning_rate = rate_of(self.model) / 8


class KnewTheRate(keras.callbacks.Callback):
    """What it reads in `on_train_begin` is what it holds already, unless the run is a resumed one."""

    def __init__(self):
        super().__init__()
        self.initial, self.steps = 1.0, 0

    def on_train_begin(self, logs=None):
        self.initial = rate_of(self.model)

    def on_train_batch_end(self, batch, logs=None):
        self.steps += 1
        self.model.optimizer.learning_rate = self.initial / (1 + self.steps)


class Anchor(keras.callbacks.Callback):
    """Draws the weights back to those of the beginning."""

    def on_train_begin(self, logs=None):
        self.anchor = self.model.get_weights()
        self.model.optimizer.learning_rate = 0.01

    def on_train_batch_end(self, batch, logs=None):
        self.model.set_weights(
            [(now + then) / 2 for now, then in zip(self.model.get_weights(), self.anchor, strict=True)]
        )


class FirstBatchesOfAnEpoch(keras.callbacks.Callback):
    """A flag that `on_epoch_begin` raises, and a batch lowers to what it was at first."""

    def __init__(self):
        super().__init__()
        self.raised = False

    def on_epoch_begin(self, epoch, logs=None):
        self.raised = True

    def on_train_batch_end(self, batch, logs=None):
        if batch == 2:
            self.raised = False
        self.model.optimizer.learning_rate = 0.02 if self.raised else 0.01


class Draws(keras.callbacks.Callback):
    """Draws from NumPy's stream when training begins, and at each step."""

    def on_train_begin(self, logs=None):
        self.phase = np.random.rand()

    def on_train_batch_end(self, batch, logs=None):
        self.model.optimizer.learning_rate = (self.phase + np.random.rand()) / 100


def results(directory, kind, ours_first, cut=None, epochs=2):
    """Fits; returns rates at the ends of steps and the last weights."""
    keras.utils.set_random_seed(1)
    checkpoints = jobs.manager(directory, linear(), save=EverySteps(1))
    rates = []
    note = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: rates.append(rate_of(checkpoints.state.model))
    )
    ours, cuts = checkpoints.keras_callback(), [jobs.Interrupt(steps=cut)] if cut else []
    callbacks = [ours, kind(), note, *cuts] if ours_first else [kind(), note, *cuts, ours]
    try:
        checkpoints.state.model.fit(checkpoints.state.dataset, epochs=epochs, callbacks=callbacks, verbose=0)
    except KeyboardInterrupt:
        checkpoints.wait()
    return rates, checkpoints.state.model.get_weights()


@pytest.mark.parametrize("ours_first", [True, False], ids=["ours first", "ours last"])
def test_f13_a_warm_up_goes_on_from_the_rate_of_the_first_begin(tmp_path, ours_first):
    # One epoch of ten steps: 1.0 * 10 / 35. Cut in its sixth.
    results(tmp_path, WarmUp, ours_first, cut=6, epochs=1)
    rates, _ = results(tmp_path, WarmUp, ours_first, epochs=1)
    np.testing.assert_array_equal(rates, np.float32([s / 35 for s in range(6, 11)]))
    assert round(rates[-1], 3) == 0.286


@pytest.mark.parametrize("kind", [ScalesTheRate, KnewTheRate, Anchor, FirstBatchesOfAnEpoch, Draws])
@pytest.mark.parametrize("ours_first", [True, False], ids=["ours first", "ours last"])
def test_f13_what_begins_change_is_as_without_the_cut(tmp_path, kind, ours_first):
    whole_rates, whole_weights = results(tmp_path / "whole", kind, ours_first)
    results(tmp_path / "cut", kind, ours_first, cut=6)
    # Again in mid-epoch, at step 14: what was restored once is restored again.
    results(tmp_path / "cut", kind, ours_first, cut=10)
    rates, weights = results(tmp_path / "cut", kind, ours_first)
    assert rates == whole_rates[-len(rates) :] and len(rates) == 6
    for expected, found in zip(whole_weights, weights, strict=True):
        np.testing.assert_array_equal(found, expected)


def test_f13_changes_of_the_program_between_its_restore_and_fit_stay(tmp_path):
    results(tmp_path, FirstBatchesOfAnEpoch, True, cut=6, epochs=1)
    checkpoints = jobs.manager(tmp_path, linear())
    assert checkpoints.restore_or_initialize().step == 5
    checkpoints.state.model.optimizer.learning_rate = 0.125
    jobs.fit(checkpoints, epochs=1)
    assert rate_of(checkpoints.state.model) == 0.125


def epochs_and_rate(directory, callback, cuts):
    """Fits in as many processes as there are cuts, and one more; returns the epochs of all, and the last rate."""
    number = 0
    for cut in [*cuts, None]:
        checkpoints, seen = jobs.manager(directory, linear(), keep=LatestN(2)), jobs.Seen()
        stop = [] if cut is None else [jobs.Interrupt(epochs=cut)]
        jobs.fit(checkpoints, callback(), seen, *stop, epochs=8)
        # An epoch in whose `on_epoch_begin` it was cut has not run.
        number += len(seen.epochs) - (cut is not None)
    return number, rate_of(checkpoints.state.model)


# No loss of the linear network gets smaller by 1 in an epoch: the first epoch is the best one.
def stopping():
    return keras.callbacks.EarlyStopping("loss", min_delta=100, patience=3)


def plateau():
    return keras.callbacks.ReduceLROnPlateau("loss", min_delta=100, patience=2, factor=0.5)


class OwnStopping(keras.callbacks.EarlyStopping):
    """One of the user's own."""

    def __init__(self):
        super().__init__("loss", min_delta=100, patience=3)


class GivesMaxASign(keras.callbacks.EarlyStopping):
    """Whose mode is the other one; what it monitors gets no greater by 100."""

    def __init__(self):
        super().__init__("grows", mode="max", min_delta=100, patience=3)

    def on_epoch_end(self, epoch, logs=None):
        super().on_epoch_end(epoch, {"grows": float(epoch)})


@pytest.mark.parametrize("cuts", [[2], [3], [2, 2]], ids=["epoch 1", "epoch 2", "twice"])
@pytest.mark.parametrize("kind", [stopping, OwnStopping, GivesMaxASign])
def test_f17_early_stopping_keeps_the_sign_of_min_delta(tmp_path, kind, cuts):
    # By hand: the first epoch is the best, three more are waited for.
    assert epochs_and_rate(tmp_path, kind, cuts)[0] == 4


@pytest.mark.parametrize("cuts", [[2], [3], [2, 2]], ids=["epoch 1", "epoch 2", "twice"])
def test_f17_a_plateau_keeps_the_sign_of_min_delta(tmp_path, cuts):
    # Epochs 3, 5 and 7 of eight halve it.
    assert epochs_and_rate(tmp_path, plateau, cuts) == (8, 0.125)


class LazySign(keras.callbacks.Callback):
    """Does by itself what Keras' monitors do: a function, set at first use, that no checkpoint can hold."""

    def __init__(self):
        super().__init__()
        self.operation, self.delta = None, 100

    def on_epoch_end(self, epoch, logs=None):
        if self.operation is None:
            self.operation, self.delta = np.less, -self.delta


def test_f17_a_function_that_training_sets_is_named(tmp_path):
    with pytest.raises(
        errors.CheckpointIncompleteError, match="LazySign: `operation` became a .* while training"
    ):
        jobs.fit(jobs.manager(tmp_path, linear()), LazySign())


class Grows(keras.callbacks.EarlyStopping):
    """Changes a setting of Keras' own."""

    def on_epoch_end(self, epoch, logs=None):
        self.patience += 1


def test_f17_a_setting_of_keras_that_training_changes_is_named(tmp_path):
    with pytest.raises(errors.CheckpointIncompleteError, match="`patience` is a setting of EarlyStopping"):
        jobs.fit(jobs.manager(tmp_path, linear()), Grows("loss"))


def test_f13_a_callback_that_two_fits_share_keeps_what_the_first_left(tmp_path):
    class Once(keras.callbacks.Callback):
        def __init__(self):
            super().__init__()
            self.limit = 0

        def on_train_begin(self, logs=None):
            if not self.limit:
                self.limit = 5

    def program(cut=None):
        checkpoints, once = jobs.manager(tmp_path, linear()), Once()
        callback = checkpoints.keras_callback()
        try:
            for cuts in ([], [jobs.Interrupt(steps=cut)] if cut else []):
                checkpoints.state.model.fit(
                    checkpoints.state.dataset, epochs=1, verbose=0, callbacks=[callback, once, *cuts]
                )
                once.limit += 1
        except KeyboardInterrupt:
            checkpoints.wait()
        return once.limit

    program(cut=4)
    # 5, and 1 after each fit.
    assert program() == 7
