"""Are the train_steps that people write right on several devices? GANs, teachers, losses made by hand."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist_ext
from tests.single_host import oracle

pytestmark = pytest.mark.usefixtures("float64")


def dense(units, **arguments):
    return keras.layers.Dense(units, **arguments)


class HandMadeLoss(keras.Model):
    """Computes a mean by hand, without a Keras loss object."""

    def __init__(self):
        super().__init__()
        self.hidden, self.out = dense(4, activation="tanh"), dense(1)
        self.tracker = keras.metrics.Mean(name="loss")

    def call(self, x):
        return self.out(self.hidden(x))

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(y - self(x, training=True)))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        self.tracker.update_state(loss)
        return {"loss": self.tracker.result(), "raw": loss}

    def test_step(self, data):
        x, y = data
        self.tracker.update_state(tf.reduce_mean(tf.square(y - self(x, training=False))))
        return {"loss": self.tracker.result()}

    @property
    def metrics(self):
        return [self.tracker]


class ComputeLossInLogs(HandMadeLoss):
    """Returns the loss that compute_loss gave, which carries the replica's weight."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            prediction = self(x, training=True)
            loss = self.compute_loss(x, y, prediction)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        self.tracker.update_state(loss)
        return {
            "loss": self.tracker.result(),
            "raw": loss,
            "twice": 2.0 * loss,
            "norm": tf.norm(prediction) * 0.0,
        }


@pytest.mark.parametrize("kind", [HandMadeLoss, ComputeLossInLogs])
def test_custom_train_step_equals_one_device(kind):
    def make():
        model = kind()
        model.build((None, 3))
        model.compile(keras.optimizers.Adam(0.01), loss="mse")
        return model

    data = oracle.batched(oracle.regression_data(rows=13), 4)
    oracle.assert_same_run(oracle.train(oracle.mirrored(4), make, data), oracle.train(None, make, data))


class Gan(keras.Model):
    """Two optimizers, neither of them the compiled one, stepped one after the other."""

    def __init__(self):
        super().__init__()
        self.generator = keras.Sequential([keras.Input((3,)), dense(4, activation="tanh"), dense(1)])
        self.discriminator = keras.Sequential([keras.Input((1,)), dense(4, activation="tanh"), dense(1)])
        self.generator_loss = keras.metrics.Mean(name="generator_loss")
        self.discriminator_loss = keras.metrics.Mean(name="discriminator_loss")

    def compile(self, generator_optimizer, discriminator_optimizer, loss_fn):
        super().compile()
        self.generator_optimizer = generator_optimizer
        self.discriminator_optimizer = discriminator_optimizer
        self.loss_fn = loss_fn

    @property
    def metrics(self):
        return [self.generator_loss, self.discriminator_loss]

    def train_step(self, data):
        noise, real = data
        fake = self.generator(noise)
        with tf.GradientTape() as tape:
            on_real, on_fake = self.discriminator(real), self.discriminator(fake)
            d_loss = self.loss_fn(tf.ones_like(on_real), on_real) + self.loss_fn(
                tf.zeros_like(on_fake), on_fake
            )
        weights = self.discriminator.trainable_weights
        self.discriminator_optimizer.apply_gradients(
            zip(tape.gradient(d_loss, weights), weights, strict=True)
        )
        with tf.GradientTape() as tape:
            verdict = self.discriminator(self.generator(noise))
            g_loss = self.loss_fn(tf.ones_like(verdict), verdict)
        weights = self.generator.trainable_weights
        self.generator_optimizer.apply_gradients(zip(tape.gradient(g_loss, weights), weights, strict=True))
        self.generator_loss.update_state(g_loss)
        self.discriminator_loss.update_state(d_loss)
        return {"g": self.generator_loss.result(), "d": self.discriminator_loss.result()}


def run_gan(strategy):
    keras.utils.set_random_seed(5)
    with oracle.scope_of(strategy):
        model = Gan()
        model.compile(
            keras.optimizers.Adam(0.01, clipnorm=0.1),
            keras.optimizers.SGD(0.1),
            keras.losses.BinaryCrossentropy(from_logits=True),
        )
    history = model.fit(
        oracle.batched(oracle.regression_data(rows=13), 4), epochs=2, verbose=0, shuffle=False
    ).history
    return model.get_weights(), history, [int(o.iterations.numpy()) for o in
                                          (model.generator_optimizer, model.discriminator_optimizer)]  # fmt: skip


@pytest.mark.parametrize("num_devices", [2, 4])
def test_gan_equals_one_device(num_devices):
    weights, history, iterations = run_gan(oracle.mirrored(num_devices))
    expected, expected_history, expected_iterations = run_gan(None)
    for one, other in zip(weights, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=oracle.TOLERANCE)
    assert iterations == expected_iterations == [8, 8]
    for name in expected_history:
        np.testing.assert_allclose(history[name], expected_history[name], rtol=0, atol=oracle.TOLERANCE)


class MeanTeacher(HandMadeLoss):
    """Updates an averaged teacher from the student's weights after applying gradients."""

    def __init__(self):
        super().__init__()
        self.teacher = keras.Sequential([keras.Input((3,)), dense(4, activation="tanh"), dense(1)])
        self.teacher.trainable = False

    def train_step(self, data):
        logs = super().train_step(data)
        student = [*self.hidden.weights, *self.out.weights]
        for slow, fast in zip(self.teacher.weights, student, strict=True):
            slow.assign(0.9 * slow + 0.1 * fast)
        return logs


def test_teacher_that_follows_the_student_after_the_step():
    def make():
        model = MeanTeacher()
        model.build((None, 3))
        model.compile(keras.optimizers.SGD(0.1), loss="mse")
        return model

    data = oracle.batched(oracle.regression_data(rows=13), 4)
    oracle.assert_same_run(oracle.train(oracle.mirrored(4), make, data), oracle.train(None, make, data))


def test_the_in_place_path_is_announced_once(caplog):
    caplog.set_level("INFO", logger="absl")
    run_gan(oracle.mirrored(2))
    announcements = [r.getMessage() for r in caplog.records if "applied in place" in r.getMessage()]
    assert len(announcements) == 1
    assert "not the compiled optimizer" in announcements[0]


def layout_run(num_devices, make_layers):
    keras.backend.clear_session()
    keras.utils.set_random_seed(9)
    with oracle.mirrored(num_devices).scope():
        model = keras.Sequential([keras.Input((3,)), *make_layers()])
        model.compile(keras.optimizers.SGD(0.05), "mse")
    model.fit(oracle.batched(oracle.regression_data(rows=14), 4), epochs=2, verbose=0, shuffle=False)
    return model


def test_dropout_trains_the_same_again_under_one_seed():
    def layers():
        return [
            dense(16),
            keras.layers.Dropout(0.4, seed=1),
            keras.layers.GaussianNoise(0.1, seed=2),
            dense(1),
        ]  # noqa: E731

    first, again = layout_run(4, layers), layout_run(4, layers)
    for one, other in zip(first.get_weights(), again.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)


def test_seed_state_moves_on_as_on_one_device():
    layers = lambda: [keras.layers.Dropout(0.4, seed=1), dense(1)]  # noqa: E731
    states = []
    for num_devices in (1, 2, 4):
        model = layout_run(num_devices, layers)
        states.append(model.layers[0].seed_generator.state.numpy().tolist())
    # Two epochs of four batches draw eight seeds.
    assert states == [[1, 8]] * 3


class GeneratorNoise(keras.layers.Layer):
    """Draws from a tf.random.Generator of its own."""

    def __init__(self):
        super().__init__()
        self.generator = tf.random.Generator.from_seed(3)

    def call(self, x, training=False):
        return x + self.generator.normal(tf.shape(x), dtype=x.dtype) if training else x


def test_generator_state_is_one_on_all_replicas_after_ragged_batches():
    def make():
        return [GeneratorNoise(), dense(1)]

    first, again = (
        layout_run(4, make),
        layout_run(4, make),
    )  # Batches of 4, 4, 4 and 2 rows: two replicas idle.
    for one, other in zip(first.get_weights(), again.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)
    states = {tuple(component.numpy()) for component in first.layers[0].generator.state.values}
    assert len(states) == 1


def test_stateful_random_ops_are_reported(caplog):
    caplog.set_level("WARNING", logger="absl")

    def noisy():
        return [
            keras.layers.Lambda(lambda x: x + tf.random.normal(tf.shape(x), dtype=x.dtype)),
            dense(1),
        ]  # noqa: E731

    layout_run(2, noisy)
    messages = [r.getMessage() for r in caplog.records if "stateful tf.random" in r.getMessage()]
    assert len(messages) == 1
    assert "SeedGenerator" in messages[0]


def test_mixed_precision_equals_one_device():
    # Activations are float16 (2**-11 relative), so sums over rows in another order differ by that; weights move by
    # at most lr * gradient = 0.1 a step over 8 steps.
    def make():
        keras.mixed_precision.set_global_policy("mixed_float16")
        model = keras.Sequential([keras.Input((3,)), dense(8, activation="tanh"), dense(1, dtype="float32")])
        model.compile(keras.optimizers.SGD(0.1), "mse")
        assert isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
        return model

    keras.config.set_floatx("float32")
    data = oracle.batched(tuple(a.astype("float32") for a in oracle.regression_data(rows=13)), 4)
    expected = oracle.train(None, make, data)
    actual = oracle.train(oracle.mirrored(4), make, data)
    oracle.assert_same_run(actual, expected, tolerance=8 * 0.1 * 2**-11)
    assert float(actual["model"].optimizer.dynamic_scale.numpy()) == 2.0**15


class Batches(keras.utils.PyDataset):
    """Dictionary inputs, as in K#20329."""

    def __init__(self, rows, batch_size):
        super().__init__()
        self.x, self.y = oracle.regression_data(rows)
        self.batch_size = batch_size

    def __len__(self):
        return -(-len(self.x) // self.batch_size)

    def __getitem__(self, index):
        rows = slice(index * self.batch_size, (index + 1) * self.batch_size)
        return {"a": self.x[rows], "b": self.x[rows, :1]}, self.y[rows]


def test_py_dataset_with_named_inputs():
    def make():
        inputs = {"a": keras.Input((3,), name="a"), "b": keras.Input((1,), name="b")}
        out = dense(1)(keras.layers.Concatenate()([inputs["a"], inputs["b"]]))
        model = keras.Model(inputs, out)
        model.compile(keras.optimizers.SGD(0.1), "mse", metrics=["mae"])
        return model

    expected = oracle.train(None, make, lambda: Batches(11, 4))
    oracle.assert_same_run(oracle.train(oracle.mirrored(2), make, lambda: Batches(11, 4)), expected)


def test_callbacks_see_the_global_values(tmp_path):
    def run(strategy):
        keras.utils.set_random_seed(2)
        with oracle.scope_of(strategy):
            model = keras.Sequential([keras.Input((3,)), dense(1)])
            model.compile(keras.optimizers.SGD(0.3), "mse")
        directory = tmp_path / ("one" if strategy is None else "four")
        callbacks = [
            keras.callbacks.EarlyStopping("val_loss", patience=1, restore_best_weights=True),
            keras.callbacks.ReduceLROnPlateau("val_loss", factor=0.5, patience=0),
            keras.callbacks.ModelCheckpoint(str(directory / "best.keras"), "val_loss", save_best_only=True),
        ]
        x, y = oracle.regression_data(rows=13)
        history = model.fit(
            oracle.batched((x, y), 4), validation_data=oracle.batched((x[:5] * 2, y[:5]), 4), epochs=12,
            verbose=0, shuffle=False, callbacks=callbacks,
        ).history  # fmt: skip
        loaded = keras.models.load_model(directory / "best.keras")
        return history, model.get_weights(), loaded.get_weights()

    history, weights, saved = run(oracle.mirrored(4))
    expected_history, expected_weights, expected_saved = run(None)
    assert len(history["loss"]) == len(expected_history["loss"])
    for name, values in expected_history.items():
        np.testing.assert_allclose(history[name], values, rtol=0, atol=1e-9, err_msg=name)
    for one, other in zip([*weights, *saved], [*expected_weights, *expected_saved], strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-9)


def test_checkpoint_of_metrics_restores_the_whole_value(tmp_path):
    strategy = oracle.mirrored(3)
    with strategy.scope():
        metric = keras.metrics.Mean()
        model = keras.Sequential([keras.Input((3,)), dense(1)])
        model.compile("sgd", "mse", metrics=["mae"])
    x, y = oracle.regression_data(rows=7)
    model.fit(oracle.batched((x, y), 4), verbose=0)
    before = [v.numpy() for v in model.metrics_variables]
    assert before[1] == 7.0  # Rows counted by the loss tracker.
    checkpoint = tf.train.Checkpoint(variables=[v.value for v in model.metrics_variables])
    path = checkpoint.save(str(tmp_path / "metrics"))
    model.reset_metrics()
    assert model.metrics_variables[1].numpy() == 0.0
    checkpoint.restore(path)
    np.testing.assert_array_equal([v.numpy() for v in model.metrics_variables], before)
    del metric


def test_metric_in_a_custom_loop_is_summed_over_replicas():
    strategy = oracle.mirrored(4)
    with strategy.scope():
        metric = keras.metrics.Mean()

    @tf.function
    def step(batch):
        strategy.run(lambda values: metric.update_state(values), args=(batch,))

    metric.reset_state()
    for batch in strategy.experimental_distribute_dataset(tf.data.Dataset.range(10).batch(4).map(_as_double)):
        step(batch)
    assert float(metric.result()) == 4.5  # Mean of 0..9.
    metric.reset_state()
    assert float(metric.result()) == 0.0
    assert isinstance(strategy, tfdist_ext.MirroredStrategy)


def _as_double(x):
    return tf.cast(x, tf.float64)
