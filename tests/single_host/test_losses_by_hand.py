"""Losses, logs and metrics that Keras did not make: is the run still the one device's? float64, ragged batches."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist_ext
from tests.single_host import oracle

pytestmark = pytest.mark.usefixtures("float64")


def network():
    return [keras.layers.Dense(4, activation="tanh"), keras.layers.Dense(1)]


def compiled(loss):
    model = keras.Sequential([keras.Input((3,)), *network()])
    model.compile(keras.optimizers.SGD(0.1), loss)
    return model


def squares(y, prediction):
    return keras.ops.square(y - prediction)


COMPILED_LOSSES = {
    "a function that returns the mean": lambda: lambda y, p: keras.ops.mean(squares(y, p)),
    "reduction none, which the tape sums": lambda: keras.losses.MeanSquaredError(reduction="none"),
}


@pytest.mark.parametrize("name", sorted(COMPILED_LOSSES))
def test_compiled_loss_without_keras_own_mean(name):
    data = oracle.batched(oracle.regression_data(rows=13), 4)
    runs = [
        oracle.train(s, lambda: compiled(COMPILED_LOSSES[name]()), data) for s in (None, oracle.mirrored(2))
    ]
    assert oracle.largest_difference(runs[1], runs[0]) <= oracle.TOLERANCE


class StepOf(keras.Model):
    """A train_step around one loss function of `(model, x, y)`; logs what it is given to log."""

    def __init__(self, loss_of, logs_of):
        super().__init__()
        hidden = keras.layers.Dense(4, activation="tanh", kernel_regularizer=keras.regularizers.L2(0.1))
        self.net = keras.Sequential([keras.Input((3,)), hidden, keras.layers.Dense(1)])
        self.loss_of, self.logs_of = loss_of, logs_of
        self.tracker = keras.metrics.Mean(name="loss")

    def call(self, x):
        return self.net(x)

    @property
    def metrics(self):
        return [self.tracker, self.tracker]  # Twice: some models do.

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.loss_of(self, x, y)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return self.logs_of(self, loss, x, y)

    def test_step(self, data):
        return {"zero": tf.zeros((), "float64")}


def plain_log(model, loss, x, y):
    model.tracker.update_state(loss)
    return {"loss": model.tracker.result(), "raw": loss}


def log_with_rows(model, loss, x, y):
    model.tracker.update_state(loss, sample_weight=tf.shape(x)[0])
    return {"loss": model.tracker.result(), "twice": 2.0 * loss, "rows": tf.shape(x)[0]}


MSE = keras.losses.MeanSquaredError
STEP_LOSSES = {
    "mean of reduction none": lambda m, x, y: tf.reduce_mean(MSE(reduction="none")(y, m(x))),
    "keras loss plus the model's losses": lambda m, x, y: MSE()(y, m(x)) + tf.add_n(m.losses),
    "keras loss plus a penalty": lambda m, x, y: MSE()(y, m(x)) + 0.5 * tf.reduce_mean(tf.square(m(x))),
    "sum plus a mean": lambda m, x, y: 0.01 * MSE(reduction="sum")(y, m(x)) + tf.reduce_mean(tf.abs(m(x))),
    "compute_loss": lambda m, x, y: m.compute_loss(x, y, m(x)),
}


@pytest.mark.parametrize("logs_of", [plain_log, log_with_rows])
@pytest.mark.parametrize("name", sorted(STEP_LOSSES))
def test_losses_of_a_train_step(name, logs_of):
    def make():
        model = StepOf(STEP_LOSSES[name], logs_of)
        model.build((None, 3))
        model.compile(keras.optimizers.SGD(0.1), "mse")
        return model

    data = oracle.batched(oracle.regression_data(rows=13), 4)
    expected = oracle.train(None, make, data)
    actual = oracle.train(oracle.mirrored(4), make, data)
    oracle.assert_same_run(actual, expected)


def test_a_total_scaled_by_the_optimizer():
    # As in Keras' own step: the scaled loss is for the gradient, and is not logged.
    def scaled(model, x, y):
        return model.optimizer.scale_loss(MSE()(y, model(x)))

    def make():
        model = StepOf(scaled, lambda model, loss, x, y: {"zero": tf.zeros((), "float64")})
        model.build((None, 3))
        model.compile(keras.optimizers.SGD(0.1), "mse")
        return model

    data = oracle.batched(oracle.regression_data(rows=13), 4)
    oracle.assert_same_run(oracle.train(oracle.mirrored(4), make, data), oracle.train(None, make, data))


def test_average_loss_as_in_tensorflows_tutorial():
    # Divides by the global batch size, also in a train_step and in a custom loop.
    def average(model, x, y):
        return tf.nn.compute_average_loss(tf.reduce_mean(squares(y, model(x)), axis=-1), global_batch_size=4)

    def make():
        model = StepOf(average, lambda model, loss, x, y: {"zero": tf.zeros((), "float64")})
        model.build((None, 3))
        model.compile(keras.optimizers.SGD(0.1), "mse")
        return model

    data = oracle.batched(oracle.regression_data(rows=13), 4)
    oracle.assert_same_run(oracle.train(oracle.mirrored(2), make, data), oracle.train(None, make, data))


def loop_weights(strategy, as_function, loss_of):
    keras.utils.set_random_seed(3)
    with oracle.scope_of(strategy):
        model = keras.Sequential([keras.Input((3,)), *network()])
        optimizer = keras.optimizers.SGD(0.1)
        optimizer.build(model.trainable_variables)

    def step(batch):
        x, y = batch
        with tf.GradientTape() as tape:
            loss = loss_of(y, model(x))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    data = oracle.batched(oracle.regression_data(rows=13), 4)
    if strategy is None:
        for batch in data:
            step(batch)
        return model.get_weights()
    run = tf.function(step) if as_function else step
    outer = (lambda batch: strategy.run(run, args=(batch,))) if as_function else None
    outer = outer or tf.function(lambda batch: strategy.run(run, args=(batch,)))
    for batch in strategy.experimental_distribute_dataset(data):
        outer(batch)
    return model.get_weights()


LOOP_LOSSES = {
    "keras object": lambda y, p: MSE()(y, p),
    "average": lambda y, p: tf.nn.compute_average_loss(squares(y, p)[:, 0], global_batch_size=4),
    "sum over the global batch size": lambda y, p: tf.reduce_sum(squares(y, p)) * (1.0 / 4),
}


@pytest.mark.parametrize("as_function", [False, True])
@pytest.mark.parametrize("name", sorted(LOOP_LOSSES))
def test_custom_loops_follow_tf_distributes_convention(name, as_function):
    # A function given to strategy.run must know the rows of its batch as one that is called in a function does.
    actual = loop_weights(oracle.mirrored(2), as_function, LOOP_LOSSES[name])
    for one, other in zip(actual, loop_weights(None, False, LOOP_LOSSES[name]), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=oracle.TOLERANCE)


def test_a_metric_shared_by_a_custom_loop_and_evaluate():
    # Counts true positives: 3 in `evaluate`; the loop adds 3 more of its own batch.
    strategy = oracle.mirrored(2)
    with strategy.scope():
        metric = keras.metrics.TruePositives(name="positives")
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, kernel_initializer="ones")])
        model.compile("sgd", "mse", metrics=[metric])
    x = np.array([[1.0], [1.0], [1.0], [0.0]])
    data = oracle.batched((x, x), 4)

    @tf.function
    def add(batch):
        strategy.run(lambda values: metric.update_state(values, values), args=(batch,))

    def evaluated():
        return float(model.evaluate(data, verbose=0, return_dict=True)["positives"])

    assert evaluated() == 3.0
    for _ in range(2):
        metric.reset_state()
        for batch in strategy.experimental_distribute_dataset(tf.data.Dataset.from_tensor_slices(x).batch(4)):
            add(batch)
        assert float(metric.result()) == 3.0
        assert evaluated() == 3.0


def test_components_of_unequal_length_are_refused():
    def make():
        return compiled("mse")

    x, y = np.zeros((4, 3)), np.zeros((8, 1))
    data = tf.data.Dataset.from_tensors((x, y)).repeat(2).map(lambda a, b: (tf.identity(a), tf.identity(b)))
    with pytest.raises((ValueError, tf.errors.InvalidArgumentError), match="another number of rows"):
        oracle.train(oracle.mirrored(2), make, data)


def test_a_batch_known_to_be_smaller_than_the_replicas():
    def make():
        inputs = keras.Input((3,))
        doubled = keras.layers.Add()([inputs, inputs])
        model = keras.Model(inputs, keras.layers.Dense(1)(doubled))
        model.compile(keras.optimizers.SGD(0.1), "mse")
        return model

    x, y = oracle.regression_data(rows=6)
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(2, drop_remainder=True)
    oracle.assert_same_run(oracle.train(oracle.mirrored(3), make, data), oracle.train(None, make, data))


def test_a_layer_that_assigns_what_is_trained_is_refused():
    with oracle.mirrored(2).scope():
        layer = keras.layers.SpectralNormalization(keras.layers.Dense(1))
        model = keras.Sequential([keras.Input((3,)), layer])
        model.compile("sgd", "mse")
    with pytest.raises(NotImplementedError, match="trainable variable"):
        model.fit(oracle.batched(oracle.regression_data(rows=8), 4), verbose=0)


def test_a_model_of_another_scope_is_refused_with_the_fix():
    model = compiled("mse")
    with oracle.mirrored(2).scope(), pytest.raises(ValueError, match="made outside the scope"):
        model.fit(oracle.batched(oracle.regression_data(rows=8), 4), verbose=0)


def test_plain_models_load_with_their_optimizer_while_strategies_are_in_use(tmp_path):
    assert issubclass(tfdist_ext.MirroredStrategy, tf.distribute.MirroredStrategy)  # The bridge is installed.
    model = compiled("mse")
    data = oracle.batched(oracle.regression_data(rows=8), 4)
    model.fit(data, verbose=0)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert int(loaded.optimizer.iterations) == 2
    loaded.fit(data, verbose=0)
    assert int(loaded.optimizer.iterations) == 4
