"""What do the programs of this folder share: models, data, strategies, and the one-device run beside them?"""

import math

import keras
import numpy as np
import tensorflow as tf

import tfdist_ext
from tests.single_host.oracle import batched
from tfdist_ext.ps import Asynchronous, BoundedStaleness, Synchronous
from tfdist_ext.ps.clocks import ClockRule
from tfdist_ext.ps.state import Status

POLICIES = {
    "synchronous": lambda: Synchronous(),
    "one backup": lambda: Synchronous(num_backup_workers=1),
    "one backup, stale by 2": lambda: Synchronous(1, max_staleness=2),
    "bounded 0": lambda: BoundedStaleness(0),
    "bounded 1": lambda: BoundedStaleness(1),
    "bounded 4": lambda: BoundedStaleness(4),
    "bounded 1, drop": lambda: BoundedStaleness(1, late="drop"),
    "clock 0": lambda: BoundedStaleness(0, clock="worker"),
    "clock 1": lambda: BoundedStaleness(1, clock="worker"),
    "clock 3": lambda: BoundedStaleness(3, clock="worker"),
    "clock unbounded": lambda: BoundedStaleness(math.inf, clock="worker"),
    "asynchronous": lambda: Asynchronous(),
    "clock 0, in order": lambda: InOrder(),
}


class InOrder:
    """Clocks with bound 0, where the sets of a round are applied in the order of dispatch, once all have come."""

    damping = None

    def rule(self, num_workers, too_few_workers):
        return _InOrderRule(0)


class _InOrderRule(ClockRule):
    def next_apply(self, state):
        admitted = state.with_status(Status.ADMITTED)
        if state.with_status(Status.IN_FLIGHT) or not admitted:
            return []
        return [min(admitted, key=lambda record: record.set_id)]


def strategy(cluster, policy="asynchronous", partitioner=None, **arguments):
    """Returns a strategy on the cluster inside this process, which all programs share."""
    resolver = tfdist_ext.cluster.in_process(*cluster)
    policy = POLICIES[policy]() if isinstance(policy, str) else policy
    return tfdist_ext.ParameterServerStrategy(resolver, partitioner, update_policy=policy, **arguments)


def network(optimizer=lambda: keras.optimizers.Adam(0.05), randomness=True, features=3):
    """Returns a compiled network, with batch normalization and dropout unless told not to."""
    extra = [keras.layers.BatchNormalization(), keras.layers.Dropout(0.3)] if randomness else []
    layers = [
        keras.Input((features,)),
        keras.layers.Dense(8, activation="tanh"),
        *extra,
        keras.layers.Dense(1),
    ]
    model = keras.Sequential(layers)
    model.compile(optimizer(), "mse", metrics=["mae"])
    return model


def weight_only(learning_rate=1.0, steps=None):
    """Returns y = w x from w = 1 with loss x w^2 / 2 per row: its gradient is x w."""
    layer = keras.layers.Dense(1, use_bias=False, kernel_initializer="ones", name="weight")
    model = keras.Sequential([keras.Input((1,)), layer])
    model.compile(keras.optimizers.SGD(learning_rate), half_square)
    return model


def half_square(target, prediction):
    """Returns prediction^2 / 2 for each row; the target counts for nothing."""
    return tf.reduce_sum(tf.square(prediction) / 2 + 0 * target, axis=-1)


class MinusOutput(keras.losses.Loss):
    """Minus the output of each row."""

    def call(self, y_true, y_pred):
        return -tf.reduce_sum(y_pred + 0 * y_true, axis=-1)


def row_counter(rows):
    """Returns a model whose weight i becomes the number of times row i was applied.

    The input is a one-hot row number and the loss is minus the output, summed over rows: each row's gradient is -1
    on its own weight, and SGD with rate 1 counts.
    """
    layer = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
    model = keras.Sequential([keras.Input((rows,)), layer])
    model.compile(keras.optimizers.SGD(1.0), MinusOutput(reduction="sum"))
    return model


def numbered_rows(rows, batch_size):
    """Returns the dataset of `row_counter`."""
    return batched((np.eye(rows, dtype="float32"), np.zeros((rows, 1), "float32")), batch_size)


def run_of(model, history=None):
    """Returns what two runs are compared by."""
    return {
        "weights": [np.asarray(w) for w in model.get_weights()],
        "optimizer": [np.asarray(v.numpy()) for v in model.optimizer.variables],
        "history": {} if history is None else history.history,
    }


def in_double_precision():
    keras.backend.clear_session()
    keras.config.set_floatx("float64")
    keras.utils.set_random_seed(11)


def in_single_precision():
    keras.backend.clear_session()
    keras.config.set_floatx("float32")
    keras.utils.set_random_seed(11)


class Weights(keras.callbacks.Callback):
    """Keeps the first weight after each step."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def on_train_batch_end(self, batch, logs=None):
        self.seen.append(float(self.model.get_weights()[0].ravel()[0]))
