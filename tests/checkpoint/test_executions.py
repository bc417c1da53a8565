"""Several steps in one execution: what is saved, and gone on from, is what was trained on."""

import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdist_ext.checkpoint import EverySteps, LatestN, TrainingCheckpointManager, TrainingState

BATCHES = 22


def rows_once():
    """Returns a model whose weight i is how often row i was trained on."""
    layer = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
    return keras.Sequential([keras.Input((BATCHES,)), layer])


def negative_output(target, prediction):
    """A loss with the gradient -1 by the weight of the row."""
    return -prediction[:, 0] + 0 * target[:, 0]


class TwoOptimizers(keras.Model):
    """Counts rows in half-steps of two optimizers, of which the compiled one applies twice a step."""

    def __init__(self):
        super().__init__()
        self.inner = rows_once()

    def build(self, shape):
        self.built = True

    def call(self, inputs):
        return self.inner(inputs)

    def train_step(self, data):
        for _ in range(2):
            with tf.GradientTape() as tape:
                loss = -tf.reduce_sum(self.inner(data[0]))
            weights = self.inner.trainable_variables
            self.optimizer.apply([gradient / 2 for gradient in tape.gradient(loss, weights)], weights)
        return {"loss": loss}


def batches(length="known"):
    rows = np.eye(BATCHES, dtype="float32")
    dataset = tf.data.Dataset.from_tensor_slices((rows, np.zeros((BATCHES, 1), "float32"))).batch(1)
    return dataset if length == "known" else dataset.filter(lambda x, y: True)


class Cut(keras.callbacks.Callback):
    """Ends the run after so many executions."""

    def __init__(self, executions):
        super().__init__()
        self._left = executions

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass

    def on_train_batch_begin(self, batch, logs=None):
        if not self._left:
            raise KeyboardInterrupt
        self._left -= 1


def trained(
    directory,
    length="known",
    cut=None,
    kind=rows_once,
    steps_per_epoch=None,
    epochs=3,
    execution=4,
    eagerly=True,
):
    """Fits from what the directory has; returns counts of rows, iterations and the manager."""
    model = kind()
    model.compile(
        keras.optimizers.SGD(1.0), negative_output, steps_per_execution=execution, run_eagerly=eagerly
    )
    state = TrainingState(model, batches(length))
    checkpoints = TrainingCheckpointManager(state, directory, save=EverySteps(1), keep=LatestN(99))
    callbacks = [checkpoints.keras_callback(), *([Cut(cut)] if cut else [])]
    try:
        model.fit(
            state.dataset, epochs=epochs, callbacks=callbacks, verbose=0, steps_per_epoch=steps_per_epoch
        )
    except KeyboardInterrupt:
        checkpoints.wait()
    return model.get_weights()[0][:, 0], int(model.optimizer.iterations), checkpoints


def test_f16_a_short_last_execution_counts_as_the_steps_that_it_had(tmp_path):
    # Epochs of 22 steps: executions of 4, 4, 4, 4, 4 and 2.
    counts, iterations, checkpoints = trained(tmp_path, eagerly=False)
    ends = [0, 4, 8, 12, 16, 20]
    expected = [epoch + end for epoch, end in itertools.product((0, 22, 44), ends)][1:]
    assert checkpoints.steps() == [*expected, 66]
    assert iterations == 66
    np.testing.assert_array_equal(counts, np.full(BATCHES, 3.0))


# --- More of the kind ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "arguments",
    [
        {"length": "unknown", "cut": 9},
        {"kind": TwoOptimizers, "length": "unknown", "cut": 8},
        {"execution": 5, "cut": 7},
        # An epoch of 9 steps is three executions of four; the sixth has but two left, the seventh begins a pass.
        {"steps_per_epoch": 9, "epochs": 4, "cut": 8},
        {"execution": 50, "cut": 1},
    ],
    ids=["unknown length", "two applications a step", "five", "epochs of nine", "more than there are"],
)
def test_f16_a_run_that_is_cut_is_the_run_that_was_not(tmp_path, arguments):
    cut = arguments.pop("cut")
    whole, iterations, reference = trained(tmp_path / "whole", **arguments)
    trained(tmp_path / "cut", cut=cut, **arguments)
    counts, found, checkpoints = trained(tmp_path / "cut", **arguments)
    np.testing.assert_array_equal(counts, whole)
    assert found == iterations
    assert checkpoints.steps() == reference.steps()
    if arguments.get("kind") is None:
        assert checkpoints.state.step == iterations == counts.sum()


@pytest.mark.parametrize("first, second", [(1, 4), (4, 3), (3, 1)])
def test_f16_another_number_of_steps_in_an_execution_reads_each_row_once(tmp_path, first, second):
    trained(tmp_path, cut=6, epochs=2, execution=first)
    counts, iterations, checkpoints = trained(tmp_path, epochs=2, execution=second)
    np.testing.assert_array_equal(counts, np.full(BATCHES, 2.0))
    assert iterations == checkpoints.state.step == 44
