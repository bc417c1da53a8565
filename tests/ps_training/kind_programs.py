"""Runs on the chief: losses, states and pipelines of a user's own."""

import functools

import keras
import numpy as np
import tensorflow as tf

from tests.ps_training import models
from tests.single_host import oracle
from tests.single_host import programs_of_a_kind as programs


def counted_states(cluster):
    """Trains on 12 rows in rounds of two batches of two; returns what a layer counted."""
    keras.config.set_floatx("float64")
    placed = models.strategy(cluster, "synchronous")
    with placed.scope():
        model = keras.Sequential([keras.Input((3,)), programs.Counting(), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    model.fit(models.batched((np.ones((12, 3)), np.ones((12, 1))), 2), verbose=0)
    layer = model.layers[0]
    return {name: float(getattr(layer, name).numpy()) for name in ("rows", "steps", "float_steps")}


def losses(cluster):
    """Returns, by loss, the largest difference from one device."""
    keras.config.set_floatx("float64")
    data = oracle.batched(programs.fractions(rows=12), 2)
    made = {
        "Dice": keras.losses.Dice,
        "in-batch negatives": lambda: programs.in_batch_negatives,
        "sum over the batch size": lambda: programs.sum_over_batch_size,
        "mean": keras.losses.MeanSquaredError,
    }
    results = {}
    for name, loss in made.items():
        make = functools.partial(lambda loss: programs.compiled(loss()), loss)
        expected = oracle.train(None, make, data)
        actual = oracle.train(models.strategy(cluster, "bounded 0"), make, data)
        results[name] = oracle.largest_difference(actual, expected)
    return results


def unordered_rows(cluster):
    """Counts how often each of 12 rows is applied from pipelines that may give rows in any order."""
    rows = tf.data.Dataset.from_tensor_slices((np.eye(12, dtype="float32"), np.zeros((12, 1), "float32")))
    options = tf.data.Options()
    options.deterministic = False

    def slowly(x, y):
        size = tf.cast(x[0] * 200 + x[5] * 100, tf.int32) + 1
        return x + 0 * tf.reduce_sum(tf.matmul(tf.ones([size, size]), tf.ones([size, size]))), y

    pipelines = {
        "map": rows.map(slowly, num_parallel_calls=4, deterministic=False),
        "option": rows.map(slowly, num_parallel_calls=4).with_options(options),
        "interleave": tf.data.Dataset.range(4).interleave(
            lambda i: rows.skip(3 * i).take(3).map(slowly),
            cycle_length=4,
            num_parallel_calls=4,
            deterministic=False,
        ),
    }
    counts = {}
    for name, pipeline in pipelines.items():
        models.in_single_precision()
        placed = models.strategy(cluster, "bounded 1")
        with placed.scope():
            model = models.row_counter(12)
        model.fit(pipeline.batch(2), verbose=0)
        counts[name] = model.get_weights()[0].ravel().tolist()
    return counts
