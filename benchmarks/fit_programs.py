"""What runs in the processes of `benchmarks.fit`: models that are made once and timed round by round."""

from __future__ import annotations

import contextlib
import math

import keras
import numpy as np
import tensorflow as tf

from tfdist_ext.launch.step_times import StepTimes

NUM_INPUTS = 64
NUM_CLASSES = 10
# What this process has made: strategies by kind (a process may have only one of the stock multi-worker kind),
# and the models of the size that is being measured.
_strategies: dict = {}
_models: dict = {}


class PatchedMultiWorkerMirroredStrategy(tf.distribute.MultiWorkerMirroredStrategy):
    """Stock TensorFlow's, with the two calls mended without which Keras 3 cannot `fit` on it at all."""

    def reduce(self, reduce_op, value, axis):
        """Reduces a nested batch part by part, and a scalar, which has no axis 0, over the replicas alone."""
        if axis is None:
            return tf.nest.map_structure(
                lambda part: super(type(self), self).reduce(reduce_op, part, None), value
            )
        first = self.experimental_local_results(value)[0]
        return super().reduce(reduce_op, value, axis if first.shape.rank else None)


def make_strategy(kind):
    """Returns the strategy of a kind, always the same one; None is plain Keras."""
    if kind == "plain":
        return None
    if kind not in _strategies:
        _strategies[kind] = _STRATEGIES[kind]()
    return _strategies[kind]


def _ours():
    import tfdist_ext

    return tfdist_ext.MultiWorkerMirroredStrategy()


def _ours_mirrored():
    import tfdist_ext

    return tfdist_ext.MirroredStrategy(["CPU:0"])


def _stock():
    options = tf.distribute.experimental.CommunicationOptions(
        implementation=tf.distribute.experimental.CommunicationImplementation.RING
    )
    return PatchedMultiWorkerMirroredStrategy(communication_options=options)


_STRATEGIES = {
    "ours": _ours,
    "ours_mirrored": _ours_mirrored,
    "stock": _stock,
    "stock_mirrored": lambda: tf.distribute.MirroredStrategy(["CPU:0"]),
}


def width_of(megabytes):
    """Returns the width of two square hidden layers, so that the whole model has this size in float32.

    width**2 + (inputs + classes + 2) * width + classes parameters, for one square layer between the first
    layer and the last.
    """
    others = NUM_INPUTS + NUM_CLASSES + 2
    return round((-others + math.sqrt(others**2 + 4 * (megabytes * 1e6 / 4 - NUM_CLASSES))) / 2)


def prepare(kind, megabytes, batch_size, num_steps):
    """Makes a model and its data, and trains an epoch, in which everything is traced."""
    strategy = make_strategy(kind)
    keras.utils.set_random_seed(1)
    width = width_of(megabytes)
    with strategy.scope() if strategy else contextlib.nullcontext():
        model = keras.Sequential(
            [
                keras.Input((NUM_INPUTS,)),
                keras.layers.Dense(width, activation="relu"),
                keras.layers.Dense(width, activation="relu"),
                keras.layers.Dense(NUM_CLASSES),
            ]
        )
        model.compile(
            optimizer=keras.optimizers.SGD(0.01),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            # With two workers XLA cannot be used: it is off for everybody.
            jit_compile=False,
        )
    generator = np.random.default_rng(1)
    x = generator.normal(size=(batch_size * num_steps, NUM_INPUTS)).astype(np.float32)
    y = generator.integers(NUM_CLASSES, size=batch_size * num_steps)
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(batch_size).with_options(options)
    _models[kind] = (model, dataset)
    model.fit(dataset, epochs=1, shuffle=False, verbose=0)


def time_steps(kind):
    """Trains one epoch and returns the seconds of each step but the first."""
    model, dataset = _models[kind]
    times = StepTimes()
    model.fit(dataset, epochs=1, shuffle=False, verbose=0, callbacks=[times])
    return times.seconds


def last_kernel(kind):
    """Returns the weights of the last layer, `[width, classes]`, which tell two trainings apart."""
    return _models[kind][0].layers[-1].get_weights()[0]
