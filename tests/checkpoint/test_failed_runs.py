"""A run that a failure has stopped is not complete: started again, it goes on from the last finite checkpoint."""

import os

import absl.logging
import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.checkpoint import jobs
from tfdist_ext.checkpoint import EverySteps, LatestN


def data(bad_row=None, value=np.nan):
    """Returns ten batches of a row each, in order, of which one may be bad."""
    rows = np.ones((10, 3), "float32")
    if bad_row is not None:
        rows[bad_row] = value
    return tf.data.Dataset.from_tensor_slices((rows, np.ones((10, 1), "float32"))).batch(1)


def linear():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, kernel_initializer="zeros")])
    model.compile(keras.optimizers.SGD(0.01), "mse", run_eagerly=True)
    return model


@pytest.fixture
def warnings(monkeypatch):
    said = []
    monkeypatch.setattr(absl.logging, "warning", lambda text, *values: said.append(text % values))
    return said


def manager(directory, dataset, save=1, keep=3):
    return jobs.manager(directory, linear(), dataset, save=EverySteps(save), keep=LatestN(keep))


class StopsAtNaN(keras.callbacks.Callback):
    """One of the user's own, that looks at validation at the end of an epoch."""

    def on_epoch_end(self, epoch, logs=None):
        if not np.isfinite(logs["val_loss"]):
            self.model.stop_training = True


def test_f14_a_run_that_nan_stopped_goes_on_from_the_last_finite_checkpoint(tmp_path, warnings):
    first = manager(tmp_path, data(5))
    jobs.fit(first, keras.callbacks.TerminateOnNaN(), epochs=2)
    # The loss of the sixth step is NaN: what five steps have made is whole.
    assert first.steps() == [3, 4, 5]
    (sentence,) = warnings
    assert "stopped at step 6 by a failure, loss is nan" in sentence and "step 5" in sentence
    # The same script with a mended row.
    second, seen = manager(tmp_path, data()), jobs.Seen()
    history = jobs.fit(second, keras.callbacks.TerminateOnNaN(), seen, epochs=2)
    assert seen.batches == [5, 6, 7, 8, 9, *range(10)]
    assert np.isfinite(history["loss"]).all() and second.state.step == 20


# --- More of the kind ------------------------------------------------------------------------------------------------
def test_f14_weights_that_overflow_before_the_loss_does_are_set_aside(tmp_path, warnings):
    # As an update that overflows would leave them; the loss of its step is finite still.
    first = manager(tmp_path, data())
    kernel = first.state.model.layers[0].kernel
    overflow = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: batch == 3 and kernel.assign(np.full((3, 1), np.inf))
    )
    jobs.fit(first, overflow, keras.callbacks.TerminateOnNaN(), epochs=1)
    # Saved after four steps, when the loss was still finite.
    assert first.steps() == [2, 3]
    (aside,) = [name for name in os.listdir(tmp_path) if not name.startswith("checkpoint-")]
    assert aside.startswith("not-finite-0000000004-")
    assert "step 4" in warnings[0] and "step 3" in warnings[0]
    second, seen = manager(tmp_path, data()), jobs.Seen()
    jobs.fit(second, seen, epochs=1)
    assert seen.batches == list(range(3, 10))


def test_f14_the_last_step_of_the_last_epoch(tmp_path, warnings):
    jobs.fit(manager(tmp_path, data(9)), keras.callbacks.TerminateOnNaN(), epochs=1)
    assert "stopped at step 10 by a failure" in warnings[0]
    second, seen = manager(tmp_path, data()), jobs.Seen()
    jobs.fit(second, seen, epochs=1)
    assert seen.batches == [9] and np.isfinite(second.state.model.get_weights()[0]).all()


def test_f14_a_failure_before_the_first_checkpoint_begins_anew(tmp_path, warnings):
    first = manager(tmp_path, data(2), save=500)
    jobs.fit(first, keras.callbacks.TerminateOnNaN(), epochs=1)
    assert first.steps() == [] and "from the beginning" in warnings[0]
    second, seen = manager(tmp_path, data()), jobs.Seen()
    jobs.fit(second, seen, epochs=1)
    assert seen.batches == list(range(10))


def test_f14_a_callback_that_stops_for_validation_that_is_not_finite(tmp_path, warnings):
    first = manager(tmp_path, data(), save=5)
    jobs.fit(first, StopsAtNaN(), validation_data=data(1, np.inf), epochs=3)
    assert "val_loss is inf" in warnings[0] or "val_loss is nan" in warnings[0]
    assert first.steps() == [5]
    second, seen = manager(tmp_path, data()), jobs.Seen()
    jobs.fit(second, StopsAtNaN(), seen, validation_data=data(), epochs=1)
    assert seen.batches == list(range(5, 10))


def test_f14_patience_that_ends_on_weights_that_are_not_finite(tmp_path, warnings):
    # NaN is no improvement: three epochs without one stop, and all that was saved of them is NaN.
    first = manager(tmp_path, data(5), save=10, keep=2)
    stop = keras.callbacks.EarlyStopping("loss", patience=2)
    jobs.fit(first, stop, epochs=9)
    assert first.steps() == []
    assert "from the beginning" in warnings[0]
    names = sorted(name[:21] for name in os.listdir(tmp_path))
    assert names and all(name.startswith("not-finite-") for name in names)


def test_f14_a_stop_that_is_no_failure_is_complete(tmp_path, warnings):
    class Odd(keras.metrics.Metric):
        """A metric that is not finite says nothing of training."""

        def update_state(self, *arguments, **more):
            pass

        def result(self):
            return tf.constant(np.nan)

    def fit(*callbacks):
        checkpoints = manager(tmp_path, data())
        checkpoints.state.model.compile(
            keras.optimizers.SGD(0.01), "mse", metrics=[Odd(name="odd")], run_eagerly=True
        )
        stop = keras.callbacks.EarlyStopping("loss", patience=1, min_delta=1e9)
        return jobs.fit(checkpoints, stop, *callbacks, epochs=9)

    assert len(fit()["loss"]) == 2
    seen = jobs.Seen()
    fit(seen)
    assert seen.epochs == [] and not warnings


def test_f14_what_an_earlier_version_saved_of_a_failure_is_named(tmp_path, warnings):
    checkpoints = manager(tmp_path, data())
    model = checkpoints.state.model
    checkpoints.state.build()
    model.layers[0].kernel.assign(np.full((3, 1), np.nan))
    checkpoints.state.fit, model.stop_training = 1, True
    checkpoints.save(6, wait=True)
    jobs.fit(manager(tmp_path, data()), epochs=2)
    assert any("saved step 6 was stopped" in text and "not finite" in text for text in warnings)
