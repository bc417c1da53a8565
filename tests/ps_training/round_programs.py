"""Runs on the chief: steps of several batches whose losses depend on the rows of all of them."""

import functools

import keras
import numpy as np
import tensorflow as tf

import tfdist_ext
from tests.ps_training import models
from tests.single_host import oracle
from tests.single_host import programs_of_a_kind as programs
from tfdist_ext.training import half_set

# A round is two batches of two, and one batch of four on one device. Eleven rows: the last round has two and one.
ROWS, BATCH = 11, 2


def _difference(make, data, placed, **arguments):
    """Returns the largest difference of weights, optimizer and history from one device."""
    expected = oracle.train(None, make, oracle.batched(data, 2 * BATCH), **arguments)
    actual = oracle.train(placed, make, oracle.batched(data, BATCH), **arguments)
    logs = [
        np.max(np.abs(np.subtract(actual["history"][name], values)))
        for name, values in expected["history"].items()
    ]
    return float(max(oracle.largest_difference(actual, expected), *logs))


def _dice_metric(y_true, y_pred):
    return keras.losses.dice(y_true, y_pred)


def _root_metric(y_true, y_pred):
    return keras.ops.sqrt(keras.ops.mean(keras.ops.square(y_true - y_pred)))


def _mean_metric(y_true, y_pred):
    return keras.ops.mean(keras.ops.abs(y_true - y_pred))


def _with_metrics(loss):
    return programs.compiled(loss(), metrics=[_dice_metric, _root_metric, _mean_metric, "mae"])


class _Masked(keras.layers.Layer):
    """Masks rows whose first number is below the given bound."""

    def __init__(self, bound):
        super().__init__()
        self.bound, self.supports_masking = bound, True

    def call(self, x):
        return x

    def compute_mask(self, x, mask=None):
        return x[:, :, 0] > self.bound


def _sequences():
    generator = np.random.default_rng(3)
    x = generator.normal(size=(ROWS, 5, 3))
    return x, {"one": generator.normal(size=(ROWS, 5, 1)), "two": generator.uniform(size=(ROWS, 5, 1))}


def _two_outputs(losses, bounds=(None, None)):
    inputs = keras.Input((5, 3))
    outputs = {}
    for name, bound in zip(("one", "two"), bounds, strict=True):
        part = inputs if bound is None else _Masked(bound)(inputs)
        outputs[name] = keras.layers.Dense(1, activation="sigmoid", name=name)(part)
    model = keras.Model(inputs, outputs)
    model.compile(keras.optimizers.Adam(0.05), dict(zip(("one", "two"), losses(), strict=True)))
    return model


def _mean_with_weight():
    return keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")


def _sum():
    return keras.losses.MeanSquaredError(reduction="sum")


def read_after_assignment(cluster):
    """Returns the difference from one device of a layer that reads what it assigned, under `BoundedStaleness(0)`."""
    keras.config.set_floatx("float64")

    def make():
        layers = [keras.layers.Dense(3), programs.MovingMean(), keras.layers.Dense(1)]
        model = keras.Sequential([keras.Input((3,)), *layers])
        model.compile(keras.optimizers.SGD(0.1), "mse")
        return model

    data = oracle.batched(oracle.regression_data(ROWS), BATCH)
    expected = oracle.train(None, make, data)
    actual = oracle.train(models.strategy(cluster, "bounded 0"), make, data)
    return oracle.largest_difference(actual, expected)


def masked_losses(cluster):
    """Returns, by loss with a denominator of its own, the difference from one device."""
    keras.config.set_floatx("float64")
    x, _ = oracle.regression_data(ROWS)
    ignored = np.arange(ROWS)[:, None] % 3 * (np.arange(ROWS)[:, None] > 2)
    data = {
        "ignored class": (x, ignored),
        "sum of weights": (x, ignored, np.linspace(0.5, 2.0, ROWS)),
    }
    losses = {
        "ignored class": lambda: keras.losses.SparseCategoricalCrossentropy(ignore_class=0),
        "sum of weights": lambda: keras.losses.SparseCategoricalCrossentropy(
            reduction="mean_with_sample_weight"
        ),
    }

    def make(name):
        model = keras.Sequential(
            [keras.Input((3,)), keras.layers.Dense(3, "softmax", kernel_regularizer="l2")]
        )
        model.compile(keras.optimizers.Adam(0.05), losses[name]())
        return model

    return {
        name: _difference(functools.partial(make, name), data[name], models.strategy(cluster, "synchronous"))
        for name in losses
    }


MIXTURES = {
    "a mean and Dice": (lambda: ("mse", keras.losses.Dice()), (None, None)),
    "a mask and a sum": (lambda: ("mse", _sum()), (0.0, None)),
    "two denominators": (lambda: (_mean_with_weight(), _mean_with_weight()), (0.0, -0.5)),
}


def mixtures(cluster):
    """Returns, by mixture of two outputs, the difference from one device."""
    keras.config.set_floatx("float64")
    return {
        name: _difference(
            functools.partial(_two_outputs, *mixture), _sequences(), models.strategy(cluster, "synchronous")
        )
        for name, mixture in MIXTURES.items()
    }


def compiled_losses(cluster):
    """Returns, by loss, the difference from one device, with metrics of every kind."""
    keras.config.set_floatx("float64")
    data = programs.fractions(ROWS)
    weighted = (*data, np.linspace(0.5, 2.0, ROWS))
    results = {}
    for name in ("Dice, summed", "in-batch negatives", "own __call__", "sum over the batch size"):
        make = functools.partial(_with_metrics, programs.COMPILED_LOSSES[name])
        results[name] = _difference(make, data, models.strategy(cluster, "synchronous"))
    make = functools.partial(programs.compiled, keras.losses.Dice())
    results["weighted"] = _difference(make, weighted, models.strategy(cluster, "synchronous"))
    return results


def _table_model():
    inputs = keras.Input((2,), dtype="int64")
    rows = keras.layers.Embedding(20, 4)(inputs)
    outputs = keras.layers.Dense(1, activation="sigmoid")(keras.layers.Flatten()(rows))
    model = keras.Model(inputs, outputs)
    model.compile(keras.optimizers.SGD(0.1), keras.losses.Dice())
    return model


def tables(cluster):
    """Returns the difference from one device of a model with a table, whole and in shards on two ps."""
    keras.config.set_floatx("float64")
    generator = np.random.default_rng(5)
    data = generator.integers(0, 20, (ROWS, 2)), generator.uniform(size=(ROWS, 1))
    sharded = tf.distribute.experimental.partitioners.FixedShardsPartitioner(2)
    return {
        "whole": _difference(_table_model, data, models.strategy(cluster, "synchronous")),
        "sharded": _difference(_table_model, data, models.strategy(cluster, "synchronous", sharded)),
    }


def steps_by_hand(cluster):
    """Returns, by loss, the difference from one device of a `train_step` by hand around a layer that counts.

    A mean, a ratio and Dice are like those that are left in.
    """
    keras.config.set_floatx("float64")
    data = oracle.regression_data(ROWS)
    return {
        name: _difference(
            functools.partial(programs.by_hand, loss, counts=True),
            data,
            models.strategy(cluster, "synchronous"),
        )
        for name, loss in programs.STEP_LOSSES.items()
        if name not in ("mean", "root of the mean", "Keras' Dice")
    }


def _loop(placed, batches, steps):
    keras.utils.set_random_seed(5)
    with oracle.scope_of(placed):
        model = programs.compiled("mse")
        optimizer = keras.optimizers.SGD(0.1)
        optimizer.build(model.trainable_variables)
    dice = keras.losses.Dice()

    def step(iterator):
        x, y = next(iterator)
        with tf.GradientTape() as tape:
            loss = dice(y, model(x, training=True))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    if placed is None:
        iterator = iter(batches)
        losses = [float(step(iterator)) for _ in range(steps)]
    else:
        coordinator = tfdist_ext.ClusterCoordinator(placed)
        iterator = iter(
            coordinator.create_per_worker_dataset(placed.experimental_distribute_dataset(batches))
        )
        values = [coordinator.schedule(step, args=(iterator,)) for _ in range(steps)]
        coordinator.join()
        losses = [float(value.fetch()) for value in values]
    return [*model.get_weights(), np.array(losses)]


def custom_loop(cluster):
    """Returns the difference from one device of a loop whose steps compute Keras' Dice."""
    keras.config.set_floatx("float64")
    data = programs.fractions(12)
    expected = _loop(None, oracle.batched(data, 4), 3)
    actual = _loop(models.strategy(cluster, "synchronous"), oracle.batched(data, 2), 3)
    return max(float(np.max(np.abs(a - b))) for a, b in zip(actual, expected, strict=True))


def fed_by_the_chief(cluster):
    """Returns the difference from one device where the chief sends the batches."""
    keras.config.set_floatx("float64")
    x, y = programs.fractions(12)

    def rows(size):
        def batches():
            yield from ((x[i : i + size], y[i : i + size]) for i in range(0, len(x), size))

        return tf.data.Dataset.from_generator(
            batches,
            output_signature=(tf.TensorSpec((None, 3), tf.float64), tf.TensorSpec((None, 2), tf.float64)),
        )

    make = functools.partial(programs.compiled, keras.losses.Dice())
    expected = oracle.train(None, make, lambda: rows(4))
    actual = oracle.train(models.strategy(cluster, "synchronous"), make, lambda: rows(2))
    # Where a dataset does not know its size, one device counts a step more at the end of each epoch.
    pairs = zip(actual["weights"], expected["weights"], strict=True)
    return max(float(np.max(np.abs(a - b))) for a, b in pairs)


def dropped_units(cluster):
    """Returns weights of two runs with dropout and Dice, which draw the same."""
    keras.config.set_floatx("float64")

    def make():
        layers = [keras.layers.Dense(4), keras.layers.Dropout(0.5), keras.layers.Dense(2, "sigmoid")]
        model = keras.Sequential([keras.Input((3,)), *layers])
        model.compile("sgd", keras.losses.Dice())
        return model

    data = oracle.batched(programs.fractions(ROWS), BATCH)
    runs = [oracle.train(models.strategy(cluster, "synchronous"), make, data) for _ in range(2)]
    return [run["weights"] for run in runs]


def refusal(cluster):
    """Returns the words with which late sets are refused."""
    keras.config.set_floatx("float64")
    data = oracle.batched(programs.fractions(ROWS), BATCH)
    make = functools.partial(programs.compiled, keras.losses.Dice())
    try:
        oracle.train(models.strategy(cluster, "one backup, stale by 2"), make, data)
    except NotImplementedError as error:
        return str(error)
    return ""


def broken_second_halves(cluster):
    """Returns the difference from one device where the second halves of two sets do not come through."""
    keras.config.set_floatx("float64")
    placed = models.strategy(cluster, "synchronous")
    deliver, calls = half_set.HalfSet.deliver, []

    def failing(computed, worker):
        calls.append(worker.index)
        if len(calls) in (2, 5):
            raise tf.errors.UnavailableError(None, None, "cut off")
        deliver(computed, worker)

    half_set.HalfSet.deliver = failing
    try:
        difference = _difference(
            functools.partial(programs.compiled, keras.losses.Dice()), programs.fractions(ROWS), placed
        )
    finally:
        half_set.HalfSet.deliver = deliver
    return difference, len(calls)
