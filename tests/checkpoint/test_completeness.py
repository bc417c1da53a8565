"""Completeness is judged at every save, not once."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.checkpoint import jobs
from tests.checkpoint.test_resumed_callbacks import linear
from tfdist_ext import errors
from tfdist_ext.checkpoint import EverySteps


class OpensAFile(keras.callbacks.Callback):
    """Holds plain data at first, and then what nobody can write."""

    def __init__(self):
        super().__init__()
        self.held = 0

    def on_train_batch_end(self, batch, logs=None):
        if batch == 4:
            self.held = np.random.default_rng(3)


def test_f15_an_attribute_that_cannot_be_written_any_more_is_named_at_that_save(tmp_path):
    checkpoints = jobs.manager(tmp_path, linear())
    with pytest.raises(errors.CheckpointIncompleteError, match="OpensAFile: `held` cannot be written"):
        jobs.fit(checkpoints, OpensAFile(), epochs=1)
    checkpoints.wait()
    # Batch 4 is the fifth step.
    assert checkpoints.steps()[-1] == 4


def test_f15_the_callbacks_of_a_second_fit_are_judged(tmp_path):
    checkpoints = jobs.manager(tmp_path, linear(), save=EverySteps(5))
    callback = checkpoints.keras_callback()
    checkpoints.state.model.fit(checkpoints.state.dataset, verbose=0, callbacks=[callback])
    held = OpensAFile()
    held.held = np.random.default_rng(3)
    with pytest.raises(errors.CheckpointIncompleteError, match="OpensAFile: `held` cannot be written"):
        checkpoints.state.model.fit(checkpoints.state.dataset, verbose=0, callbacks=[callback, held])


# --- More of the kind ------------------------------------------------------------------------------------------------
def test_f15_what_can_be_written_again_is_saved_again(tmp_path):
    class OnlyInTheMiddle(OpensAFile):
        def on_train_batch_end(self, batch, logs=None):
            super().on_train_batch_end(batch, logs)
            if batch == 6:
                self.held = 7

    checkpoints = jobs.manager(tmp_path, linear(), save=EverySteps(8))
    assert jobs.fit(checkpoints, OnlyInTheMiddle(), jobs.Interrupt(steps=9), epochs=1) is None
    again, callback = jobs.manager(tmp_path, linear()), OnlyInTheMiddle()
    jobs.fit(again, callback, epochs=1)
    assert callback.held == 7


def test_f15_an_operation_traced_after_the_first_save_is_named(tmp_path):
    class Noise(keras.layers.Layer):
        def call(self, inputs):
            return inputs + tf.random.normal([1])

    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    checkpoints = jobs.manager(tmp_path, model)
    jobs.fit(checkpoints, epochs=1)
    noise = Noise()
    model.train_function = None
    model.train_step = lambda data: {"loss": tf.reduce_sum(noise(data[0]))}
    with pytest.raises(errors.CheckpointIncompleteError, match="random/operations/.*random_normal"):
        jobs.fit(checkpoints, epochs=1)


class Changes:
    """An object with state, whose state is plain data until it is not."""

    held: object = 1

    def state_dict(self):
        return {"held": self.held}

    def load_state_dict(self, state):
        self.held = state["held"]


def test_f15_an_object_whose_state_cannot_be_written_any_more_is_named(tmp_path):
    changes = Changes()
    checkpoints = jobs.manager(
        tmp_path, linear(), state_arguments={"changes": changes, "allow_missing": ["input"]}
    )
    checkpoints.save(1, wait=True)
    changes.held = object()
    with pytest.raises(
        errors.CheckpointIncompleteError, match=r"changes: in its state_dict\(\), `changes.*object"
    ):
        checkpoints.save(2, wait=True)
    assert checkpoints.steps() == [1]


def test_f15_the_manifest_has_the_pieces_of_its_own_save(tmp_path):
    checkpoints = jobs.manager(tmp_path, linear(), state_arguments={"allow_missing": ["callbacks/*"]})
    jobs.fit(checkpoints, OpensAFile(), epochs=1)
    captured = [
        {piece.name: piece.captured for piece in record.manifest.pieces}["callbacks/OpensAFile"]
        for record in checkpoints.directory.records()
    ]
    # Of the steps 8, 9 and 10 none has it; of the first four all had.
    assert captured == [False] * 3


def test_f15_the_means_of_adaptive_delay_compensation_are_named():
    import tfdist_ext
    from tfdist_ext.checkpoint import TrainingState

    class Strategy:
        delay_compensation = tfdist_ext.DelayCompensation(2.0, adaptive=True)

    state = TrainingState(linear(), jobs.data())
    pieces = {piece.name: piece for piece in state.pieces()}
    assert "delay_compensation" not in pieces
    state.strategy.__dict__["delay_compensation"] = Strategy.delay_compensation
    try:
        pieces = {piece.name: piece for piece in state.pieces()}
    finally:
        del state.strategy.__dict__["delay_compensation"]
    assert not pieces["delay_compensation"].captured and "moving means" in pieces["delay_compensation"].reason
