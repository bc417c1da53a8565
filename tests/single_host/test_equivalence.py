"""Is a run on 2, 3 or 4 devices the run of one device? float64, ragged batches, everything compared."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.single_host import oracle

pytestmark = pytest.mark.usefixtures("float64")

LAYOUTS = [2, 4]


def dense_model(optimizer, loss="mse", metrics=("mae",), **compile_arguments):
    model = keras.Sequential(
        [keras.Input((3,)), keras.layers.Dense(4, activation="tanh"), keras.layers.Dense(1)]
    )
    model.compile(optimizer(), loss, metrics=list(metrics), **compile_arguments)
    return model


OPTIMIZERS = {
    "sgd_momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True),
    "adam": lambda: keras.optimizers.Adam(0.01),
    "adamw": lambda: keras.optimizers.AdamW(0.01, weight_decay=0.1),
    "rmsprop": lambda: keras.optimizers.RMSprop(0.01),
    "adagrad": lambda: keras.optimizers.Adagrad(0.1),
    "lamb": lambda: keras.optimizers.Lamb(0.01),
    "clipnorm": lambda: keras.optimizers.SGD(0.5, clipnorm=0.05),
    "global_clipnorm": lambda: keras.optimizers.SGD(0.5, global_clipnorm=0.05),
    "clipvalue": lambda: keras.optimizers.SGD(0.5, clipvalue=0.02),
    "ema": lambda: keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.8, ema_overwrite_frequency=3),
    "accumulation": lambda: keras.optimizers.Adam(0.01, gradient_accumulation_steps=2),
    "schedule": lambda: keras.optimizers.SGD(keras.optimizers.schedules.CosineDecay(0.2, 10)),
    "loss_scale": lambda: keras.optimizers.LossScaleOptimizer(
        keras.optimizers.Adam(0.01), initial_scale=1024.0
    ),
    "weight_decay": lambda: keras.optimizers.SGD(0.1, weight_decay=0.01),
}


@pytest.mark.parametrize(
    ("name", "num_devices"), [*((name, 4) for name in sorted(OPTIMIZERS)), ("adam", 2), ("loss_scale", 3)]
)
def test_optimizer_equals_one_device(name, num_devices):
    # 22 rows in batches of 6: the last batch has 4 rows, one a replica on 4 devices.
    data = oracle.batched(oracle.regression_data(), 6)
    expected = oracle.train(None, lambda: dense_model(OPTIMIZERS[name]), data)
    actual = oracle.train(oracle.mirrored(num_devices), lambda: dense_model(OPTIMIZERS[name]), data)
    oracle.assert_same_run(actual, expected)


def sgd():
    return keras.optimizers.SGD(0.1, momentum=0.5)


LOSSES = {
    "sum": lambda: keras.losses.MeanSquaredError(reduction="sum"),
    "mean_with_sample_weight": lambda: keras.losses.MeanSquaredError(reduction="mean_with_sample_weight"),
    "mean": lambda: keras.losses.Huber(reduction="mean"),
    "function": lambda: lambda y, p: keras.ops.mean(keras.ops.abs(y - p), axis=-1),
}


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("name", sorted(LOSSES))
def test_loss_reduction_equals_one_device(name, weighted):
    x, y = oracle.regression_data(rows=13)
    weights = np.linspace(0.1, 2.0, len(x))
    data = oracle.batched((x, y, weights) if weighted else (x, y), 4)  # The last batch has one row.
    optimizer = lambda: keras.optimizers.SGD(0.02)  # noqa: E731
    make = lambda: dense_model(optimizer, LOSSES[name](), weighted_metrics=["mse"])  # noqa: E731
    expected = oracle.train(None, make, data)
    oracle.assert_same_run(oracle.train(oracle.mirrored(4), make, data), expected)


def test_regularizers_and_added_losses():
    class WithLoss(keras.layers.Layer):
        def call(self, x):
            self.add_loss(0.1 * keras.ops.mean(keras.ops.square(x)))
            return x

    def make():
        model = keras.Sequential(
            [
                keras.Input((3,)),
                keras.layers.Dense(4, kernel_regularizer="l2", bias_regularizer="l1"),
                WithLoss(),
                keras.layers.Dense(1, kernel_constraint=keras.constraints.MaxNorm(0.3)),
            ]
        )
        model.compile(sgd(), "mse")
        return model

    data = oracle.batched(oracle.regression_data(rows=10), 4)
    oracle.assert_same_run(oracle.train(oracle.mirrored(4), make, data), oracle.train(None, make, data))


def test_several_outputs_losses_and_weights():
    def make():
        inputs = {"a": keras.Input((3,), name="a"), "b": keras.Input((2,), name="b")}
        joined = keras.layers.Concatenate()([inputs["a"], inputs["b"]])
        outputs = {
            "value": keras.layers.Dense(1, name="value")(joined),
            "kind": keras.layers.Dense(3, activation="softmax", name="kind")(joined),
        }
        model = keras.Model(inputs, outputs)
        model.compile(
            sgd(),
            loss={"value": "mse", "kind": "sparse_categorical_crossentropy"},
            loss_weights={"value": 0.3, "kind": 1.7},
            metrics={"kind": ["accuracy"], "value": ["mae"]},
        )
        return model

    x, y = oracle.regression_data(rows=11)
    features = {"a": x, "b": x[:, :2] ** 2}
    targets = {"value": y, "kind": np.arange(11) % 3}
    data = oracle.batched((features, targets), 4)
    oracle.assert_same_run(oracle.train(oracle.mirrored(2), make, data), oracle.train(None, make, data))


def sequence_data(rows=10):
    generator = np.random.default_rng(3)
    tokens = generator.integers(1, 10, size=(rows, 6))
    for row, length in enumerate(generator.integers(1, 7, size=rows)):
        tokens[row, length:] = 0
    return tokens, generator.normal(size=(rows, 6, 1))


@pytest.mark.parametrize("num_devices", LAYOUTS)
def test_masked_sequences_with_lstm_and_embedding(num_devices):
    # Rows have different lengths, so replicas have different numbers of unmasked steps: the loss divides by those.
    def make():
        model = keras.Sequential(
            [
                keras.Input((6,), dtype="int32"),
                keras.layers.Embedding(10, 4, mask_zero=True),
                keras.layers.LSTM(3, return_sequences=True),
                keras.layers.Dense(1),
            ]
        )
        model.compile(sgd(), "mse", weighted_metrics=["mae"])
        return model

    data = oracle.batched(sequence_data(), 4)
    expected = oracle.train(None, make, data)
    oracle.assert_same_run(oracle.train(oracle.mirrored(num_devices), make, data), expected)


# E[x^2] - E[x]^2 cancels: with |mean| of order the standard deviation the variance loses about two bits more than
# the two-pass formula, and 1/sqrt(var + 1e-3) multiplies that by at most 1e3 / 2 per layer.
BATCH_NORM_TOLERANCE = 500 * oracle.TOLERANCE


@pytest.mark.parametrize("num_devices", LAYOUTS)
def test_synchronized_batch_norm(num_devices):
    def make():
        model = keras.Sequential(
            [
                keras.Input((3,)),
                keras.layers.Dense(4),
                keras.layers.BatchNormalization(synchronized=True),
                keras.layers.Dense(1),
            ]
        )
        model.compile(sgd(), "mse")
        return model

    data = oracle.batched(oracle.regression_data(rows=13), 4)  # The last batch leaves replicas empty.
    expected = oracle.train(None, make, data)
    oracle.assert_same_run(
        oracle.train(oracle.mirrored(num_devices), make, data), expected, BATCH_NORM_TOLERANCE
    )


@pytest.mark.parametrize("steps_per_execution", [1, 3])
@pytest.mark.parametrize("run_eagerly", [False, True])
def test_S26_run_eagerly_and_steps_per_execution(run_eagerly, steps_per_execution):
    data = oracle.batched(oracle.regression_data(rows=13), 4)
    arguments = {"run_eagerly": run_eagerly, "steps_per_execution": steps_per_execution}
    make = lambda: dense_model(sgd, **arguments)  # noqa: E731
    expected = oracle.train(None, lambda: dense_model(sgd), data)
    oracle.assert_same_run(oracle.train(oracle.mirrored(4), make, data), expected)


def test_class_weight_and_validation():
    x, _ = oracle.regression_data(rows=14)
    labels = np.arange(14) % 2

    def make():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, activation="softmax")])
        model.compile(sgd(), "sparse_categorical_crossentropy", metrics=["accuracy"])
        return model

    arguments = {"class_weight": {0: 0.3, 1: 2.0}, "validation_data": oracle.batched((x[:5], labels[:5]), 4)}
    data = oracle.batched((x, labels), 4)
    expected = oracle.train(None, make, data, **arguments)
    oracle.assert_same_run(oracle.train(oracle.mirrored(4), make, data, **arguments), expected)


@pytest.mark.parametrize("num_devices", LAYOUTS)
def test_metrics_of_many_kinds(num_devices):
    x, _ = oracle.regression_data(rows=21)
    labels = (x[:, :1] > 0).astype("int32")

    def make():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, activation="sigmoid")])
        model.compile(
            sgd(),
            "binary_crossentropy",
            metrics=["accuracy", keras.metrics.AUC(name="auc"), keras.metrics.Precision(name="precision"),
                     keras.metrics.F1Score(threshold=0.5, name="f1"), keras.metrics.R2Score(name="r2")],
        )  # fmt: skip
        return model

    data = oracle.batched((x, labels), 4)
    expected = oracle.train(None, make, data)
    actual = oracle.train(oracle.mirrored(num_devices), make, data)
    # F1Score returns an array an epoch; compare it as numbers.
    oracle.assert_same_run(actual, expected)


def test_convolution_with_dropout_free_pooling():
    generator = np.random.default_rng(5)
    images, labels = generator.normal(size=(9, 8, 8, 1)), generator.integers(0, 3, size=9)

    def make():
        model = keras.Sequential(
            [
                keras.Input((8, 8, 1)),
                keras.layers.Conv2D(4, 3, activation="tanh"),
                keras.layers.GlobalAveragePooling2D(),
                keras.layers.Dense(3, activation="softmax"),
            ]
        )
        model.compile(sgd(), "sparse_categorical_crossentropy", metrics=["accuracy"])
        return model

    data = oracle.batched((images, labels), 4)
    oracle.assert_same_run(oracle.train(oracle.mirrored(4), make, data), oracle.train(None, make, data))


def test_train_on_batch_takes_a_global_batch():
    x, y = oracle.regression_data(rows=5)

    def run(strategy):
        keras.utils.set_random_seed(1)
        with oracle.scope_of(strategy):
            model = dense_model(sgd)
        logs = [model.train_on_batch(x, y, return_dict=True) for _ in range(3)]
        return model.get_weights(), logs, model.test_on_batch(x, y, return_dict=True)

    weights, logs, tested = run(oracle.mirrored(4))
    expected_weights, expected_logs, expected_tested = run(None)
    for one, other in zip(weights, expected_weights, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=oracle.TOLERANCE)
    for one, other in zip([*logs, tested], [*expected_logs, expected_tested], strict=True):
        assert one.keys() == other.keys()
        for name in one:
            np.testing.assert_allclose(one[name], other[name], rtol=0, atol=oracle.TOLERANCE)


def test_numpy_input_with_shuffle_follows_the_one_device_order():
    x, y = oracle.regression_data(rows=18)

    def run(strategy):
        keras.utils.set_random_seed(3)
        with oracle.scope_of(strategy):
            model = dense_model(sgd)
        history = model.fit(x, y, batch_size=5, epochs=3, shuffle=True, verbose=0)
        return model.get_weights(), history.history

    weights, history = run(oracle.mirrored(2))
    expected_weights, expected_history = run(None)
    for one, other in zip(weights, expected_weights, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=oracle.TOLERANCE)
    np.testing.assert_allclose(history["loss"], expected_history["loss"], rtol=0, atol=oracle.TOLERANCE)


def test_reshuffled_dataset_follows_the_one_device_order():
    x, y = oracle.regression_data(rows=18)
    make_data = lambda: tf.data.Dataset.from_tensor_slices((x, y)).shuffle(18, seed=5).batch(5)  # noqa: E731
    expected = oracle.train(None, lambda: dense_model(sgd), make_data, epochs=3)
    oracle.assert_same_run(
        oracle.train(oracle.mirrored(2), lambda: dense_model(sgd), make_data, epochs=3), expected
    )
