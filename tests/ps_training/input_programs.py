"""Runs on the chief: the kinds of input that `fit` takes, and what cannot work on workers."""

import time

import keras
import numpy as np
import tensorflow as tf

import tfdist_ext
from tests.ps_training import models
from tests.single_host import oracle
from tfdist_ext.data.shard_reader import ChiefFeed
from tfdist_ext.ps import BoundedStaleness
from tfdist_ext.training.set_job import SetJob


class _Batches(keras.utils.PyDataset):
    """Twelve rows in batches of two."""

    def __init__(self, x, y):
        super().__init__()
        self._x, self._y = x, y

    def __len__(self):
        return 6

    def __getitem__(self, index):
        return self._x[2 * index : 2 * index + 2], self._y[2 * index : 2 * index + 2]


def _rows():
    return np.eye(12, dtype="float32"), np.zeros((12, 1), "float32")


def kinds_of_input(cluster):
    """Counts how often each row is applied, for every kind of input; says who read it."""
    x, y = _rows()
    kinds = {
        "numpy": lambda: {"x": x, "y": y, "batch_size": 2, "shuffle": True},
        "dataset": lambda: {"x": models.batched((x, y), 2)},
        "shuffled": lambda: {"x": tf.data.Dataset.from_tensor_slices((x, y)).shuffle(12).batch(2)},
        "generator": lambda: {"x": ((x[i : i + 2], y[i : i + 2]) for i in range(0, 12, 2))},
        "pydataset": lambda: {"x": _Batches(x, y)},
        "python function": lambda: {"x": models.batched((x, y), 2).map(_through_python)},
    }
    results = {}
    for name, arguments in kinds.items():
        models.in_single_precision()
        placed = models.strategy(cluster, "bounded 1")
        with placed.scope():
            model = models.row_counter(12)
        model.fit(**arguments(), verbose=0)
        results[name] = [model.get_weights()[0].ravel().tolist(), int(model.optimizer.iterations.numpy())]
    results["batches"] = _on_batches(placed, model, x, y)
    return results


def _through_python(x, y):
    (same,) = tf.py_function(lambda value: [value], [x], [tf.float32])
    return tf.ensure_shape(same, [None, 12]), y


def _on_batches(placed, model, x, y):
    before = model.get_weights()[0].ravel()
    model.train_on_batch(x[:4], y[:4])
    moved = (model.get_weights()[0].ravel() - before).tolist()
    loss = model.test_on_batch(x[:4], y[:4])
    outputs = model.predict_on_batch(x[:4])
    return {"moved": moved, "loss": float(np.ravel(loss)[0]), "outputs": np.ravel(outputs).tolist()}


def order_of_shuffled_rows(cluster):
    """Trains on rows that are shuffled with a seed, one at a time in the order of the data; and on one device."""

    def weights_after(placed):
        models.in_double_precision()
        with placed.scope():
            model = models.weight_only(learning_rate=0.5)
        x = np.arange(1.0, 8.0)[:, None] / 8
        data = tf.data.Dataset.from_tensor_slices((x, x)).shuffle(7, seed=3).batch(1)
        seen = models.Weights()
        model.fit(data, epochs=3, verbose=0, callbacks=[seen])
        return seen.seen

    distributed = weights_after(models.strategy(cluster, BoundedStaleness(0)))
    return {"distributed": distributed, "alone": weights_after(tf.distribute.get_strategy())}


def results_in_order(cluster):
    """Predicts and evaluates 23 rows in batches of 4, of unequal shards too."""
    models.in_double_precision()
    placed = models.strategy(cluster, BoundedStaleness(0))
    with placed.scope():
        model = models.network(randomness=False)
    x, y = oracle.regression_data(23)
    predicted = model.predict(models.batched(x, 4), verbose=0)
    logs = model.evaluate(models.batched((x, y), 4), verbose=0, return_dict=True)
    outputs = np.asarray(model(x))
    return {
        "difference": float(np.abs(predicted - outputs).max()), "rows": len(predicted),
        "loss": logs["loss"], "expected": float(np.mean((outputs - y) ** 2)),
    }  # fmt: skip


class _TwoOptimizers(keras.Model):
    """Two linear parts, each with an optimizer of its own."""

    def __init__(self, second, misbehaves=""):
        super().__init__()
        start = {"use_bias": False, "kernel_initializer": "ones"}
        self.one, self.two = keras.layers.Dense(1, **start), keras.layers.Dense(1, **start)
        self.second, self.misbehaves = second, misbehaves

    def call(self, x):
        return self.one(x) + self.two(x)

    def train_step(self, data):
        x, _ = data
        with tf.GradientTape(persistent=True) as tape:
            first = tf.reduce_mean(tf.square(self.one(x)) / 2)
            second = tf.reduce_mean(tf.square(self.two(x)) / 2)
        gradients = tape.gradient(first, self.one.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.one.trainable_variables, strict=True))
        if self.misbehaves == "twice":
            self.optimizer.apply_gradients(zip(gradients, self.one.trainable_variables, strict=True))
        if self.misbehaves == "reads":
            first = first + tf.reduce_sum(self.one.kernel)
        gradients = tape.gradient(second, self.two.trainable_variables)
        self.second.apply_gradients(zip(gradients, self.two.trainable_variables, strict=True))
        return {"first": first, "second": second}


def two_optimizers(cluster):
    """Trains two parts with rates of 1/2 and 1/4, one row at a time."""
    models.in_double_precision()
    placed = models.strategy(cluster, BoundedStaleness(0))
    ones = np.ones((3, 1))

    def fit(misbehaves=""):
        with placed.scope():
            model = _TwoOptimizers(keras.optimizers.SGD(0.25), misbehaves)
            model.compile(keras.optimizers.SGD(0.5))
            model(np.ones((1, 1)))
            model.second.build(model.two.trainable_variables)
        history = model.fit(models.batched((ones, ones), 1), verbose=0).history
        weights = [float(np.ravel(w)[0]) for w in model.get_weights()]
        return {"weights": weights, "logs": {name: values[-1] for name, values in history.items()}}

    results = {"good": fit()}
    for misbehaves in ("twice", "reads"):
        results[misbehaves] = _text_of_error(lambda kind=misbehaves: fit(kind))
    results["after"] = fit()
    return results


def _text_of_error(function):
    try:
        function()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def refusals(cluster):
    """Returns what is said about settings that cannot work."""
    placed = models.strategy(cluster)

    def eager():
        with placed.scope():
            models.weight_only().compile("sgd", "mse", run_eagerly=True)

    def accumulating():
        with placed.scope():
            table = tfdist_ext.layers.ShardedEmbedding(40_000, 4)
            model = keras.Sequential([keras.Input((1,), dtype="int32"), table, keras.layers.Dense(1)])
            model.compile(keras.optimizers.SGD(0.1, gradient_accumulation_steps=2), "mse")
        model.fit(np.zeros((4, 1), "int32"), np.zeros((4, 1, 1)), verbose=0)

    def foreign_optimizer():
        optimizer = keras.optimizers.Adam()
        with placed.scope():
            model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        model.compile(optimizer, "mse")

    return {
        "foreign optimizer": _text_of_error(foreign_optimizer),
        "eager": _text_of_error(eager),
        "accumulating": _text_of_error(accumulating),
        "policy": _text_of_error(lambda: models.strategy(cluster, 3)),
        "too few": _text_of_error(lambda: models.strategy(cluster, too_few_workers="hope")),
        "cached rounds": _text_of_error(lambda: models.strategy(cluster, "synchronous", fetch_every_steps=2)),
        "wire": _text_of_error(lambda: models.strategy(cluster, wire_dtype="int8")),
        "timeout": _text_of_error(lambda: models.strategy(cluster, worker_timeout_seconds=0)),
        "another cluster": _text_of_error(lambda: models.strategy([cluster[0] + 1, cluster[1]])),
        "stale rounds": _text_of_error(lambda: tfdist_ext.Synchronous(-1)),
    }


def input_report(cluster):
    """Returns on which tasks the operations of pipelines run."""
    placed = models.strategy(cluster)
    files = tf.data.Dataset.range(4).interleave(lambda i: tf.data.Dataset.range(i, i + 3), cycle_length=2)
    numbers = placed.experimental_distribute_dataset(files.batch(2))
    endless = placed.experimental_distribute_dataset(files.repeat().batch(2))
    python = tf.data.Dataset.range(4).map(lambda i: tf.numpy_function(lambda v: v, [i], tf.int64)).batch(2)
    return {
        "interleave": numbers.report(), "repeat": endless.report(), "cardinality": int(endless.cardinality),
        "python": placed.experimental_distribute_dataset(python).report(), "placement": str(placed.placement),
    }  # fmt: skip


def kept_by_the_chief(cluster, batches=160):
    """Trains on endless data that the chief reads, the last worker being slow; returns by policy the most it kept."""
    run, get = SetJob.run, ChiefFeed.get
    most = [0]

    def slow(self, worker):
        if worker.index == cluster[0] - 1:
            time.sleep(0.02)
        return run(self, worker)

    def watched(self, shard, position):
        batch = get(self, shard, position)
        most[0] = max(most[0], len(self._kept))
        return batch

    results = {}
    SetJob.run, ChiefFeed.get = slow, watched
    try:
        for policy in ("asynchronous", "bounded 1, drop", "one backup", "one backup, stale by 2", "clock 3"):
            models.in_single_precision()
            most[0] = 0
            placed = models.strategy(cluster, policy)
            with placed.scope():
                model = models.row_counter(12)
            data = models.batched(_rows(), 1).map(_through_python).repeat()
            model.fit(data, steps_per_epoch=batches, verbose=0)
            total = placed.statistics["total"]
            results[policy] = [
                most[0],
                float(np.sum(model.get_weights()[0])),
                total["applied"],
                total["dropped"],
            ]
    finally:
        SetJob.run, ChiefFeed.get = run, get
    return results


class Late(keras.Model):
    """Makes its weights when it is called."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(2, kernel_initializer="ones")

    def call(self, x):
        return self.dense(x)


def _never_called(use):
    def run(placed):
        with placed.scope():
            model = Late()
            model.compile("sgd", "mse")
        return np.asarray(use(model)).tolist()

    return run


def _nothing_to_train(placed):
    with placed.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Rescaling(2.0)])
        model.compile("sgd", "mse", metrics=["mae"])
    history = model.fit(models.batched((_LATE_X, _LATE_X), 2), epochs=2, verbose=0).history
    return [history["loss"], history["mae"], int(model.optimizer.iterations.numpy())]


def _frozen(placed):
    with placed.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(3, kernel_initializer="ones")])
        model.layers[0].trainable = False
        model.compile("adam", "mse")
    seen = []
    counter = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: seen.append(batch))
    model.fit(
        models.batched((_LATE_X, _LATE_X), 2), epochs=2, verbose=0, steps_per_epoch=2, callbacks=[counter]
    )
    return [seen, [w.tolist() for w in model.get_weights()]]


def _counted_in_executions(placed):
    with placed.scope():
        model = models.row_counter(20)
        model.compile(keras.optimizers.SGD(1.0), models.MinusOutput(reduction="sum"), steps_per_execution=3)
    model.fit(models.numbered_rows(20, 1), epochs=1, verbose=0)
    return [int(model.optimizer.iterations.numpy()), float(np.sum(model.get_weights()[0]))]


_LATE_X = np.arange(12.0).reshape(4, 3)
AS_ONE_DEVICE = {
    "predict": _never_called(lambda m: m.predict(_LATE_X, verbose=0)),
    "predict_on_batch": _never_called(lambda m: m.predict_on_batch(_LATE_X)),
    "test_on_batch": _never_called(lambda m: m.test_on_batch(_LATE_X, _LATE_X[:, :2])),
    "evaluate": _never_called(lambda m: m.evaluate(_LATE_X, _LATE_X[:, :2], verbose=0)),
    "train_on_batch": _never_called(lambda m: m.train_on_batch(_LATE_X, _LATE_X[:, :2])),
    "nothing to train": _nothing_to_train, "frozen": _frozen, "executions": _counted_in_executions,
}  # fmt: skip


def as_on_one_device(cluster):
    """Returns by name what a use of a model gives on parameter servers and on one device."""
    results = {}
    for name, run in AS_ONE_DEVICE.items():
        both = []
        for placed in (models.strategy(cluster, BoundedStaleness(0)), tf.distribute.get_strategy()):
            models.in_double_precision()
            try:
                both.append(run(placed))
            except Exception as error:
                both.append(f"{type(error).__name__}: {error}")
        results[name] = both
    return results
