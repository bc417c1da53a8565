"""Losses, states, optimizers and collectives of a user's own: is the run still the one device's? float64, ragged.

13 rows in batches of 4: the last batch has one row, so that all replicas but one are empty.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.single_host import oracle
from tests.single_host import programs_of_a_kind as programs

pytestmark = pytest.mark.usefixtures("float64")


def regression(rows=13):
    return oracle.batched(oracle.regression_data(rows), 4)


def assert_equal_to_one_device(make, data, replicas=2):
    actual = oracle.train(oracle.mirrored(replicas), make, data)
    oracle.assert_same_run(actual, oracle.train(None, make, data))
    return actual


@pytest.mark.parametrize("name", sorted(programs.COMPILED_LOSSES))
def test_f19_any_compiled_loss(name):
    weighted = name in ("Dice", "own __call__")
    arrays = programs.fractions()
    arrays = (*arrays, np.linspace(0.1, 2.0, 13)) if weighted else arrays
    loss = programs.COMPILED_LOSSES[name]
    replicas = 4 if weighted else 2
    assert_equal_to_one_device(lambda: programs.compiled(loss()), oracle.batched(arrays, 4), replicas)


def test_f19_loss_on_pairs_of_rows():
    # Circle compares every row with every other; classes are its targets.
    x, _ = oracle.regression_data(rows=13)
    data = oracle.batched((x, np.arange(13) % 2), 4)
    # Its exponents are of order 100 (gamma 80), so that roundings grow by that much.
    actual = oracle.train(oracle.mirrored(2), lambda: programs.compiled(keras.losses.Circle()), data)
    expected = oracle.train(None, lambda: programs.compiled(keras.losses.Circle()), data)
    oracle.assert_same_run(actual, expected, tolerance=100 * oracle.TOLERANCE)


def test_f19_functions_as_metrics():
    # A root of a mean and a sum, as metrics; the loss is Keras' own.
    def make():
        metrics = [programs.root_of_mean, programs.sum_over_batch_size, programs.in_batch_negatives]
        return programs.compiled("mse", metrics=metrics)

    assert_equal_to_one_device(make, oracle.batched(programs.fractions(), 4))


def test_f19_one_of_several_outputs_has_such_a_loss():
    def make():
        inputs = keras.Input((3,))
        outputs = {
            "mask": keras.layers.Dense(2, activation="sigmoid", name="mask")(inputs),
            "value": keras.layers.Dense(1, name="value")(inputs),
        }
        model = keras.Model(inputs, outputs)
        losses = {"mask": keras.losses.Dice(), "value": "mse"}
        model.compile(keras.optimizers.SGD(0.1), losses, loss_weights={"mask": 0.3, "value": 1.0})
        return model

    (x, mask), (_, value) = programs.fractions(), oracle.regression_data(rows=13)
    assert_equal_to_one_device(make, oracle.batched((x, {"mask": mask, "value": value}), 4))


@pytest.mark.parametrize("name", sorted(programs.STEP_LOSSES))
def test_f19_losses_by_hand(name):
    make = lambda: programs.by_hand(programs.STEP_LOSSES[name])  # noqa: E731
    assert_equal_to_one_device(make, regression())


def test_f19_losses_by_hand_run_eagerly():
    loss_of = programs.STEP_LOSSES["rows' losses over the batch size"]
    assert_equal_to_one_device(lambda: programs.by_hand(loss_of, run_eagerly=True), regression())


def test_f19_own_compute_loss():
    def make():
        model = programs.OwnComputeLoss()
        model.build((None, 3))
        model.compile(keras.optimizers.SGD(0.01))
        return model

    assert_equal_to_one_device(make, regression())


def test_f19_a_layer_that_adds_a_sum():
    # Keras' loss is a mean and the layer's a sum: one replica computes the whole batch.
    def make():
        layers = [keras.layers.Dense(2), programs.SumsUp(), keras.layers.Dense(1)]
        model = keras.Sequential([keras.Input((3,)), *layers])
        model.compile(keras.optimizers.SGD(0.01), "mse")
        return model

    assert_equal_to_one_device(make, regression())


class RunningMaximum(keras.metrics.Metric):
    """No sum: the largest error seen."""

    def __init__(self):
        super().__init__(name="largest_error")
        self.largest = self.add_variable((), "zeros", name="largest")

    def update_state(self, y_true, y_pred, sample_weight=None):
        error = keras.ops.max(keras.ops.abs(y_true - y_pred))
        self.largest.assign(keras.ops.maximum(self.largest, error))

    def result(self):
        return self.largest


def test_f19_a_metric_that_is_no_sum_is_right_in_evaluation(caplog):
    def make():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.01), "mse", metrics=[RunningMaximum()])
        return model

    runs = [oracle.train(strategy, make, regression()) for strategy in (None, oracle.mirrored(2))]
    assert runs[0]["evaluation"] == pytest.approx(runs[1]["evaluation"], abs=oracle.TOLERANCE)
    assert "`largest_error/largest`" in caplog.text  # In training it is named.


def test_f19_a_step_that_cannot_be_tried_says_so(caplog):
    # Two of three targets are refused by the step's own check, so that random rows never pass.
    def checked(model, x, y):
        tf.debugging.assert_less(tf.reduce_max(tf.abs(x)), tf.constant(0.05, x.dtype), message="too large")
        return tf.reduce_mean(tf.square(y - model(x)))

    x, y = oracle.regression_data(rows=8)
    with oracle.mirrored(2).scope():
        model = programs.by_hand(checked)
    model.fit(oracle.batched((0.001 * x, y), 4), verbose=0)
    assert "could not be tried on random rows" in caplog.text


@pytest.mark.parametrize("eager", [False, True])
def test_f9_counts_and_totals_of_a_layer(eager):
    # Two epochs of 13 rows in 4 steps each: 26 rows, 8 steps, one row in the last.
    loss_of = programs.STEP_LOSSES["mean"]
    run = assert_equal_to_one_device(
        lambda: programs.by_hand(loss_of, counts=True, run_eagerly=eager), regression(), replicas=3
    )
    counts = {v.name: v.numpy() for v in run["model"].non_trainable_variables if v.shape == ()}
    assert {name: counts[name] for name in ("rows", "last_rows", "steps", "float_steps")} == {
        "rows": 26,
        "last_rows": 1,
        "steps": 8,
        "float_steps": 8.0,
    }


def test_f9_a_number_of_the_last_batch_is_no_total():
    """From zero a sum of changes and a sum of values look alike. The last batch of 11 rows in fours has 3."""
    run = assert_equal_to_one_device(
        lambda: programs.by_hand(programs.STEP_LOSSES["mean"], counts=True), regression(rows=11), replicas=2
    )
    (last,) = (v for v in run["model"].non_trainable_variables if v.name == "last_rows")
    assert int(last.numpy()) == 3


def test_f9_a_float_step_counter_is_exact_for_thousands_of_steps():
    # 9,990 steps, as in the report: float32 shares of a third made 9,991.2 of them.
    with oracle.mirrored(3).scope():
        model = keras.Sequential([keras.Input((3,)), programs.Counting(), keras.layers.Dense(1)])
        model.compile("sgd", "mse", steps_per_execution=999)
    data = tf.data.Dataset.from_tensors((np.zeros((3, 3)), np.zeros((3, 1)))).repeat(9990)
    model.fit(data, verbose=0)
    counting = model.layers[0]
    assert (int(counting.rows), int(counting.steps), float(counting.float_steps)) == (29970, 9990, 9990.0)


@pytest.mark.parametrize("scaled", ["one loss for both", "the first", "the second", "each", "none"])
def test_f10_two_optimizers_in_a_step(scaled):
    assert_equal_to_one_device(lambda: programs.two_optimizers(scaled), regression())


@pytest.mark.parametrize("name", sorted(programs.OWN_OPTIMIZERS))
def test_f10_optimizers_that_apply_by_themselves(name):
    assert_equal_to_one_device(lambda: programs.with_optimizer(programs.OWN_OPTIMIZERS[name]), regression())


@pytest.mark.parametrize("name", sorted(programs.COLLECTIVES))
def test_f11_collectives_in_a_step(name):
    make = lambda: programs.with_collective(programs.COLLECTIVES[name])  # noqa: E731
    assert_equal_to_one_device(make, regression())


def test_f11_collectives_with_fixed_sizes():
    # Batches of 5 rows, known when the step is traced: replicas of 3 and 2.
    make = lambda: programs.with_collective(programs.COLLECTIVES["all_gather of negatives"])  # noqa: E731
    data = tf.data.Dataset.from_tensor_slices(oracle.regression_data(rows=10)).batch(5, drop_remainder=True)
    assert_equal_to_one_device(make, data)


def test_f11_a_merge_call_in_a_step_is_refused():
    def merged(model, x, y):
        context = tf.distribute.get_replica_context()
        return context.merge_call(lambda strategy, loss: loss, args=(tf.reduce_mean(y - model(x)),))

    with oracle.mirrored(2).scope():
        model = programs.with_collective(merged)
    with pytest.raises(NotImplementedError, match="Use `all_reduce` or `all_gather`"):
        model.fit(regression(), verbose=0)


STATEFUL = {
    "GRU": lambda: keras.layers.GRU(2, stateful=True),
    "LSTM": lambda: keras.layers.LSTM(2, stateful=True),
    "Bidirectional": lambda: keras.layers.Bidirectional(keras.layers.LSTM(2, stateful=True)),
    "stacked cells": lambda: keras.layers.RNN(
        keras.layers.StackedRNNCells([keras.layers.GRUCell(2), keras.layers.LSTMCell(2)]), stateful=True
    ),
    "ConvLSTM1D": lambda: keras.layers.ConvLSTM1D(2, 1, stateful=True),
}


@pytest.mark.parametrize("rows", [2, 4])
@pytest.mark.parametrize("name", sorted(STATEFUL))
def test_f12_stateful_layers_are_refused_by_name(name, rows):
    # A state for each row of the batch is no replica's to share: on 2 replicas each has other rows.
    shape = (3, 2, 1) if name == "ConvLSTM1D" else (3, 2)
    with oracle.mirrored(2).scope():
        layer = STATEFUL[name]()
        model = keras.Sequential([keras.Input(batch_shape=(rows, *shape)), layer])
        model.compile("sgd", "mse")
    x, y = np.zeros((4, *shape)), np.zeros((4, *model.output_shape[1:]))
    calls = (
        lambda: model.fit(x, y, batch_size=4, verbose=0),
        lambda: model.evaluate(x, y, batch_size=4, verbose=0),
        lambda: model.predict(x, batch_size=4, verbose=0),
    )
    for call in calls:
        with pytest.raises(NotImplementedError, match=f"`{layer.name}` is stateful"):
            call()


def test_a_variable_without_gradient_is_keras_own_warning():
    def without_keys(model, x, y):
        return tf.reduce_mean(tf.square(y - model.net(x)))

    with oracle.mirrored(2).scope():
        model = programs.by_hand(without_keys)
    kernel, bias = (variable.path for variable in model.keys.trainable_variables)
    with pytest.warns(UserWarning, match="Gradients do not exist for variables") as seen:
        model.fit(regression(), verbose=0)
    told = [str(w.message) for w in seen if "Gradients do not exist" in str(w.message)]
    assert len(told) == 1 and kernel in told[0] and bias in told[0]


def test_no_gradient_flows_through_an_assignment():
    """All rows are alike, so that the mean over the rows of a replica is that over the batch."""

    def make():
        layers = [keras.layers.Dense(3), programs.MovingMean(), keras.layers.Dense(1)]
        model = keras.Sequential([keras.Input((3,)), *layers])
        model.compile(keras.optimizers.SGD(0.1), "mse")
        return model

    assert_equal_to_one_device(make, oracle.batched((np.full((8, 3), 0.5), np.ones((8, 1))), 4))
