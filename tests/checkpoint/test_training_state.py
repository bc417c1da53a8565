"""Is everything found, and is what could not be captured named?"""

import dataclasses
import logging
import os
import pathlib
import random

import absl.logging
import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.checkpoint import jobs
from tfdist_ext import errors
from tfdist_ext.checkpoint import EverySteps, TrainingState


class Counter:
    """State that is no variable."""

    def __init__(self):
        self.count = 0
        self.array = np.zeros(2)

    def state_dict(self):
        return {"count": self.count, "array": self.array}

    def load_state_dict(self, state):
        self.count, self.array = state["count"], state["array"]


def test_objects_of_the_user_and_the_streams_of_python_and_numpy(tmp_path):
    def make():
        counter, variable = Counter(), tf.Variable([0.0, 0.0])
        arguments = {"counter": counter, "average": variable}
        return jobs.manager(tmp_path, state_arguments=arguments), counter, variable

    first, counter, variable = make()
    counter.count, counter.array = 3, np.array([1.5, np.nan])
    variable.assign([4.0, 5.0])
    first.restore_or_initialize()
    first.save(7, wait=True)
    expected = random.random(), np.random.rand(), int(tf.random.uniform([], 0, 10**6, tf.int32))
    second, counter, variable = make()
    keras.utils.set_random_seed(99)
    tf.random.set_seed(7)
    assert second.restore_or_initialize().step == 7
    assert counter.count == 3
    np.testing.assert_array_equal(counter.array, [1.5, np.nan])
    np.testing.assert_array_equal(variable, [4.0, 5.0])
    assert (random.random(), np.random.rand()) == expected[:2]


def test_tables_of_a_layer_that_was_adapted(tmp_path):
    """A lookup table is one object with two tensors; an adapted StringLookup counts its words in one."""

    def make():
        layer = keras.layers.StringLookup()
        layer.adapt(np.array([["red", "blue"], ["red", "green"]]))
        return jobs.manager(tmp_path, state_arguments={"lookup": layer}), layer

    first, layer = make()
    layer.token_counts.insert(tf.constant(["red"]), tf.constant([7], tf.int64))
    first.restore_or_initialize()
    first.save(3, wait=True)
    second, layer = make()
    assert second.restore_or_initialize().step == 3
    assert int(layer.token_counts.lookup(tf.constant(["red"]))[0]) == 7


def test_a_metric_of_no_model(tmp_path):
    def make():
        mean = keras.metrics.Mean()
        return jobs.manager(tmp_path, state_arguments={"mean_loss": mean}), mean

    first, mean = make()
    mean.update_state([1.0, 2.0, 6.0])
    assert "mean_loss" in [piece.name for piece in first.state.pieces() if piece.captured]
    first.save(3, wait=True)
    second, mean = make()
    assert second.restore_or_initialize().step == 3
    # (1 + 2 + 6) / 3; a fourth value makes it (9 + 7) / 4.
    assert float(mean.result()) == 3.0
    mean.update_state(7.0)
    assert float(mean.result()) == 4.0
    with pytest.raises(errors.CheckpointMismatchError, match="only in the checkpoint: mean_loss/0"):
        jobs.manager(tmp_path).restore_or_initialize()


def test_a_metric_that_has_variables_from_its_first_update_on(tmp_path):
    score = keras.metrics.F1Score()
    checkpoints = jobs.manager(tmp_path, state_arguments={"score": score})
    checkpoints.save(1, wait=True)
    score.update_state([[1.0, 0.0]], [[1.0, 0.0]])
    checkpoints.save(2, wait=True)
    names = [
        {tensor.name.split("/")[0] for tensor in record.manifest.tensors}
        for record in checkpoints.directory.records()
    ]
    assert ["score" in found for found in names] == [False, True]


class Tally(tf.train.experimental.PythonState):
    """State of Python with an attribute that a Keras variable has too."""

    def __init__(self):
        self._value = 3

    def serialize(self):
        return str(self._value)

    def deserialize(self, string_value):
        self._value = int(string_value)


def test_state_of_python_holds_no_parts():
    # Another worker than the chief reads only what holds parts.
    TrainingState(tally=Tally()).variables().take_part_in_snapshot()


def test_an_object_that_only_one_side_has(tmp_path):
    first = jobs.manager(tmp_path, state_arguments={"counter": Counter()})
    first.save(1, wait=True)
    with pytest.raises(errors.CheckpointMismatchError, match="Object `counter` is only in the checkpoint"):
        jobs.manager(tmp_path).restore_or_initialize()
    allowed = jobs.manager(tmp_path, state_arguments={"allow_missing": ["counter"]})
    assert allowed.restore_or_initialize().notes == ("object `counter` is only in the checkpoint",)


@pytest.mark.parametrize(
    "name, value, kind, message",
    [
        ("table", [1, 2], TypeError, "Argument `table` must be a trackable object"),
        ("model", tf.Variable(0), TypeError, "multiple values"),
        ("metrics", tf.Variable(0), ValueError, "Argument `metrics` is taken"),
    ],
)
def test_wrong_objects(name, value, kind, message):
    with pytest.raises(kind, match=message):
        TrainingState(jobs.network(), **{name: value})


def test_a_dataset_of_another_kind():
    with pytest.raises(TypeError, match=r"Argument `dataset` must be a tf.data.Dataset .* received ndarray"):
        TrainingState(jobs.network(), np.zeros((4, 3)))
    with pytest.raises(ValueError, match='must be "replay" or "iterator"; received \'guess\''):
        TrainingState(jobs.network(), jobs.data(), input_position="guess")


class Stateful(keras.layers.Layer):
    """Draws from the runtime's own stream, which nobody can save."""

    def call(self, inputs, training=False):
        return inputs + tf.random.normal([1]) if training else inputs


class Remembers(keras.callbacks.Callback):
    """Keeps what cannot be written as text."""

    def __init__(self):
        super().__init__()
        self.models = [object()]


def test_all_that_is_not_captured_is_named_at_once(tmp_path):
    model = keras.Sequential([keras.Input((3,)), Stateful(), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    unseeded = tf.data.Dataset.from_tensor_slices((np.zeros((8, 3)), np.zeros((8, 1)))).shuffle(8).batch(4)
    # set_random_seed gave it one; a program that seeds nothing has none.
    unseeded._input_dataset._seed = unseeded._input_dataset._seed2 = tf.constant(0, tf.int64)
    checkpoints = jobs.manager(tmp_path, model, unseeded)
    with pytest.raises(errors.CheckpointIncompleteError) as caught:
        jobs.fit(checkpoints, Remembers())
    message = str(caught.value)
    assert "input: _ShuffleDataset draws other numbers in every process; give it a seed" in message
    assert "random/operations/" in message and "use keras.random with a" in message
    assert "callbacks/Remembers: `models` cannot be written as plain data" in message
    assert checkpoints.steps() == []
    # The message says what to write to go on without.
    names = ["input", "random/operations/*", "callbacks/Remembers"]
    allowed = jobs.manager(tmp_path, model, unseeded, state_arguments={"allow_missing": names})
    assert jobs.fit(allowed, Remembers(), epochs=1) is not None
    (record,) = allowed.directory.records()[-1:]
    missing = {piece.name for piece in record.manifest.pieces if not piece.captured}
    assert {"input", "callbacks/Remembers"} < missing


def test_a_map_that_draws_without_a_seed_is_named():
    tf.random.set_seed(None)
    noisy = jobs.data().map(lambda x, y: (x + tf.random.normal([3]), y))
    (piece,) = [one for one in TrainingState(jobs.network(), noisy).pieces() if one.name == "input"]
    assert not piece.captured
    assert "Map" in piece.reason and "draws other numbers in every process" in piece.reason
    seeded = jobs.data().map(lambda x, y: (x + tf.random.stateless_normal([3], [1, 2]), y))
    (piece,) = [one for one in TrainingState(jobs.network(), seeded).pieces() if one.name == "input"]
    assert piece.captured


def test_names_shapes_and_types_that_differ_are_all_named(tmp_path):
    first = jobs.manager(tmp_path)
    first.save(1, wait=True)
    other = keras.Sequential(
        [keras.Input((3,)), keras.layers.Dense(5), keras.layers.BatchNormalization(dtype="float64")]
    )
    other.compile("adam", "mse", metrics=["mae"])
    before = [weight.numpy() for weight in other.weights]
    with pytest.raises(errors.CheckpointMismatchError) as caught:
        jobs.manager(tmp_path, other).restore_or_initialize()
    message = str(caught.value)
    assert (
        "(sequential/dense/kernel): float32[3, 8] in the checkpoint, float32[3, 5] in the program" in message
    )
    assert "float32[8] in the checkpoint, float64[5] in the program" in message
    assert "only in the checkpoint: " in message and "(sequential/dense_1/kernel)" in message
    for expected, found in zip(before, other.weights, strict=True):
        np.testing.assert_array_equal(found, expected)


@dataclasses.dataclass
class Settings:
    count: int = 0


class Holds(keras.callbacks.Callback):
    """A callback that holds something."""

    def __init__(self, held):
        super().__init__()
        self.held = held


@pytest.mark.parametrize(
    "make",
    [
        lambda: open(os.devnull),
        Settings,
        lambda: np.random.default_rng(1),
        object,
        lambda: tf.Variable(0.0),
        keras.metrics.Mean,
        # An averaged copy, say.
        lambda: keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)]),
    ],
    ids=["file", "dataclass", "generator", "object", "variable", "metric", "model"],
)
def test_what_a_callback_holds_and_nobody_can_write_is_named(tmp_path, make):
    # A count in an object would begin anew after a resume, and nobody would know.
    held = make()
    checkpoints = jobs.manager(tmp_path)
    with pytest.raises(errors.CheckpointIncompleteError, match="callbacks/Holds: `held` cannot be written"):
        jobs.fit(checkpoints, Holds(held))
    if hasattr(held, "close"):
        held.close()


@pytest.mark.parametrize(
    "held",
    [len, np.less, pathlib.Path("x"), keras.losses.MeanSquaredError(), logging.getLogger("x"), {"a": 1}],
)
def test_what_a_callback_only_refers_to_is_no_state(tmp_path, held):
    checkpoints = jobs.manager(tmp_path)
    jobs.fit(checkpoints, Holds(held))
    assert checkpoints.steps()


def test_a_variable_of_the_model_in_a_callback_is_saved_with_the_model(tmp_path):
    checkpoints = jobs.manager(tmp_path)
    model = checkpoints.state.model
    jobs.fit(
        checkpoints, Holds(model.trainable_variables[0]), Holds(model.layers[-1]), Holds(model.optimizer)
    )
    assert checkpoints.steps()


def test_callbacks_get_their_state_back_and_settings_stay_the_programs(tmp_path):
    stop = keras.callbacks.EarlyStopping("loss", patience=9, restore_best_weights=True)
    assert jobs.fit(jobs.manager(tmp_path), stop, jobs.Interrupt(steps=23)) is None
    again = keras.callbacks.EarlyStopping("loss", patience=8, restore_best_weights=True)
    history = jobs.fit(jobs.manager(tmp_path), again)
    assert len(history["loss"]) == 3 and again.patience == 8
    assert again.best == min(history["loss"])
    assert again.best_epoch == int(np.argmin(history["loss"]))


def test_a_run_that_stopped_early_is_not_taken_up_again(tmp_path):
    def stopping():
        return keras.callbacks.EarlyStopping("loss", patience=1, min_delta=1e9)

    first = jobs.fit(jobs.manager(tmp_path), stopping(), epochs=9)
    assert len(first["loss"]) == 2
    seen = jobs.Seen()
    assert jobs.fit(jobs.manager(tmp_path), stopping(), seen, epochs=9) == first
    assert seen.epochs == []


def test_two_fits_in_a_program(tmp_path):
    def program(*interrupts):
        seen = [jobs.Seen(), jobs.Seen()]
        checkpoints = jobs.manager(tmp_path, save=EverySteps(4))
        callback = checkpoints.keras_callback()
        for part, epochs in enumerate((2, 3)):
            try:
                checkpoints.state.model.fit(
                    checkpoints.state.dataset, epochs=epochs, verbose=0,
                    callbacks=[callback, seen[part], *interrupts[part : part + 1]],
                )  # fmt: skip
            except KeyboardInterrupt:
                checkpoints.wait()
                break
        return [one.epochs for one in seen], seen[1].batches, checkpoints

    ran, batches, _ = program(jobs.Interrupt(), jobs.Interrupt(steps=15))
    assert ran == [[0, 1], [0, 1]] and len(batches) == 15
    # Steps 20 + 12 were saved last: the first fit is over, the second goes on in its second epoch.
    ran, batches, checkpoints = program()
    assert ran == [[], [1, 2]]
    assert batches == [*range(2, 10), *range(10)]
    assert checkpoints.state.step == 50


def test_unbuilt_models_are_built_from_the_data(tmp_path):
    model = keras.Sequential([keras.layers.Dense(2), keras.layers.Dense(1)])
    model.compile("adam", "mse", metrics=["mae"])
    checkpoints = jobs.manager(tmp_path, model)
    assert checkpoints.restore_or_initialize() is None
    checkpoints.save(1, wait=True)
    assert len(checkpoints.directory.records()[0].manifest.tensors) == len(checkpoints.state.variables().ids)
    lone = keras.Sequential([keras.layers.Dense(2)])
    with pytest.raises(ValueError, match="is not built, so that it has no variables to save or restore"):
        TrainingState(lone).variables()


def test_fit_on_other_data_is_an_error(tmp_path):
    checkpoints = jobs.manager(tmp_path)
    with pytest.raises(ValueError, match="`fit` does not read the dataset of the TrainingState"):
        checkpoints.state.model.fit(jobs.data(), verbose=0, callbacks=[checkpoints.keras_callback()])
    with pytest.raises(ValueError, match="of another model"):
        jobs.network().fit(checkpoints.state.dataset, verbose=0, callbacks=[checkpoints.keras_callback()])


def test_a_run_that_is_complete_says_that_nothing_is_left(tmp_path, monkeypatch):
    said = []
    monkeypatch.setattr(absl.logging, "warning", lambda text, *values: said.append(text % values))
    jobs.fit(jobs.manager(tmp_path), epochs=2)
    assert not said
    again = jobs.manager(tmp_path)
    jobs.fit(again, epochs=2)
    (sentence,) = said
    assert (
        f"The checkpoint of step {again.state.step} is the end of these 2 epochs: nothing is left" in sentence
    )
