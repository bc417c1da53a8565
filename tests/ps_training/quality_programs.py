"""Runs on the chief: real training under each policy, and on one device."""

import keras
import numpy as np
import tensorflow as tf

import tfdist_ext
from tests.ps_training import models

POLICIES = ["synchronous", "one backup", "bounded 4", "clock 1", "asynchronous"]


def digits(cluster, epochs=6):
    """Trains a small network on handwritten digits; returns test accuracies and staleness histograms.

    The learning rate falls to zero, as in practice: with a constant one the sets that a bound held back and then
    applied in a row show in the last weights.
    """

    def train(placed, scope):
        models.in_single_precision()
        rows = tfdist_ext.data.load_digits("train", 32, shuffle_seed=1)
        rate = keras.optimizers.schedules.PolynomialDecay(0.005, epochs * int(rows.cardinality()), 0.0)
        with scope:
            model = keras.Sequential(
                [
                    keras.Input((8, 8, 1)),
                    keras.layers.Flatten(),
                    keras.layers.Dense(32, activation="relu"),
                    keras.layers.Dense(10),
                ]
            )
            model.compile(
                keras.optimizers.Adam(rate),
                keras.losses.SparseCategoricalCrossentropy(from_logits=True),
                metrics=["accuracy"],
            )
        model.fit(rows, epochs=epochs, verbose=0)
        return model.evaluate(tfdist_ext.data.load_digits("test", 32), verbose=0, return_dict=True)[
            "accuracy"
        ]

    return _under_each_policy(cluster, train)


def clicks(cluster, epochs=3):
    """Trains a logistic regression on embeddings, ids from Zipf's law; returns log-losses, with the best reachable."""
    generator = np.random.default_rng(5)
    rows, ids_of = 6000, 20_000
    ids = np.minimum(generator.zipf(1.3, (rows, 2)), ids_of) - 1
    effects = generator.normal(size=(2, ids_of))
    odds = effects[0][ids[:, 0]] + effects[1][ids[:, 1]]
    chance = 1 / (1 + np.exp(-odds))
    clicked = (generator.random(rows) < chance).astype("float32")[:, None]
    best = float(-np.mean(clicked[:, 0] * np.log(chance) + (1 - clicked[:, 0]) * np.log(1 - chance)))

    def train(placed, scope):
        models.in_single_precision()
        with scope:
            numbers = keras.Input((2,), dtype="int32")
            tables = [tfdist_ext.layers.ShardedEmbedding(ids_of, 4, name=f"table_{i}") for i in range(2)]
            looked_up = [table(numbers[:, i]) for i, table in enumerate(tables)]
            model = keras.Model(numbers, keras.layers.Dense(1)(keras.layers.Concatenate()(looked_up)))
            model.compile(keras.optimizers.Adagrad(0.5), keras.losses.BinaryCrossentropy(from_logits=True))
        model.fit(models.batched((ids.astype("int32"), clicked), 64), epochs=epochs, verbose=0)
        return model.evaluate(ids.astype("int32"), clicked, batch_size=500, verbose=0)

    return {**_under_each_policy(cluster, train), "best": best}


def _under_each_policy(cluster, train):
    """Returns the result of `train` for each policy and for one device, and the histograms of staleness."""
    results, ages = {}, {}
    for policy in POLICIES:
        placed = models.strategy(cluster, policy)
        results[policy] = float(train(placed, placed.scope()))
        ages[policy] = {str(age): count for age, count in placed.statistics["total"]["ages"].items()}
        print(f"{policy}: {results[policy]:.4f}, sets by staleness {ages[policy]}", flush=True)
    default = tf.distribute.get_strategy()
    results["one device"] = float(train(None, default.scope()))
    return {"results": results, "ages": ages}
