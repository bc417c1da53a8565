"""Runs on the chief: custom loops whose steps get other arguments each time."""

import keras
import numpy as np
import tensorflow as tf

import tfdist_ext
from tests.ps_training import models


class Adder:
    """A weight to which each step adds what its function says."""

    def __init__(self, cluster, policy="asynchronous", dataset=None):
        models.in_double_precision()
        self.placed = models.strategy(cluster, policy)
        with self.placed.scope():
            self.weight = keras.Variable(np.zeros(()), name="sum")
            self.optimizer = keras.optimizers.SGD(1.0)
            self.optimizer.build([self.weight])
        self.coordinator = tfdist_ext.ClusterCoordinator(self.placed)
        data = tf.data.Dataset.from_tensor_slices(np.ones((8, 1))).batch(1).repeat()
        self.iterator = iter(self.coordinator.create_per_worker_dataset(data))

    def add(self, value):
        with tf.GradientTape() as tape:
            loss = -self.weight * tf.reshape(tf.cast(value, tf.float64), [])
        (gradient,) = tape.gradient(loss, [self.weight])
        self.optimizer.apply_gradients([(gradient, self.weight)])
        return tf.identity(tf.cast(value, tf.float64))

    def result(self):
        self.coordinator.join()
        return float(self.weight.numpy())


def _python_numbers(adder):
    def step(iterator, scale):
        return adder.add(scale * next(iterator))

    for scale in (1, 10, 100):
        adder.coordinator.schedule(step, args=(adder.iterator, scale))


def _tensors(adder):
    def step(iterator, scale):
        return adder.add(scale * next(iterator))

    for scale in (1.0, 10.0, 100.0):
        adder.coordinator.schedule(step, args=(adder.iterator, tf.constant(scale, tf.float64)))


def _many_arrays(adder):
    traces = []

    def step(iterator, scale):
        traces.append(1)
        return adder.add(scale * next(iterator))

    for number in range(1, 38):
        adder.coordinator.schedule(step, args=(adder.iterator, np.array(number / 703 * 111)))
    adder.coordinator.join()
    assert len(traces) <= 2, f"traced {len(traces)} times"


def _functions(adder):
    @tf.function
    def step(iterator, scale):
        return adder.add(scale * next(iterator))

    for scale in (np.float64(1), np.float64(10), np.float64(100)):
        adder.coordinator.schedule(step, args=(adder.iterator, scale))


def _keywords_and_structures(adder):
    def step(iterator, weights, twice=False):
        total = weights["a"] * next(iterator) + weights["b"][0]
        return adder.add(2.0 * total if twice else total)

    # 2 * (3 + 2) + 1 + 100 = 111
    for a, b, twice in ((3.0, 2.0, True), (1.0, 0.0, False), (90.0, 10.0, False)):
        weights = {"a": tf.constant(a, tf.float64), "b": [np.array(b)]}
        adder.coordinator.schedule(step, args=(adder.iterator,), kwargs={"weights": weights, "twice": twice})


def _words(adder):
    def step(iterator, mode):
        return adder.add({"one": 1.0, "ten": 10.0, "hundred": 100.0}[mode] * next(iterator))

    for mode in ("one", "ten", "hundred"):
        adder.coordinator.schedule(step, args=(adder.iterator, mode))


def _equal_but_of_other_types(adder):
    def step(iterator, flag):
        return adder.add((1.0 if isinstance(flag, bool) else 55.0) * next(iterator))

    for flag in (True, 1, 1.0):  # One key of a dictionary; 1 + 55 + 55 = 111.
        adder.coordinator.schedule(step, args=(adder.iterator, flag))


def _remote_values(adder):
    def step(iterator, earlier):
        return adder.add(10.0 * earlier * next(iterator))

    def first(iterator):
        return adder.add(next(iterator))

    value = adder.coordinator.schedule(first, args=(adder.iterator,))
    for _ in range(2):
        value = adder.coordinator.schedule(step, args=(adder.iterator, value))


def _variables(adder):
    scale = tf.Variable(1.0, dtype=tf.float64)

    def step(iterator, scale):
        return adder.add(scale * next(iterator))

    for value in (1.0, 10.0, 100.0):
        scale.assign(value)
        adder.coordinator.schedule(step, args=(adder.iterator, scale))
        adder.coordinator.join()


KINDS = {
    "python numbers": _python_numbers, "tensors": _tensors, "many arrays": _many_arrays, "functions": _functions,
    "keywords": _keywords_and_structures, "words": _words, "types": _equal_but_of_other_types,
    "remote values": _remote_values, "variables": _variables,
}  # fmt: skip


def sums(cluster):
    """Returns by kind of argument what the steps have added up to."""
    results = {}
    for name, schedule in KINDS.items():
        adder = Adder(cluster)
        try:
            schedule(adder)
            results[name] = adder.result()
        except Exception as error:
            results[name] = f"{type(error).__name__}: {error}"
    adder = Adder(cluster, "synchronous")
    _tensors(adder)
    results["synchronous"] = adder.result()
    return results
