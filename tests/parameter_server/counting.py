"""The model that counts rows, its data, and what happens in the middle of an epoch."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time

import keras
import numpy as np
import tensorflow as tf
from tensorflow.python.data.experimental.ops import testing as tf_data_testing

import tfdist_ext
from tfdist_ext import events
from tfdist_ext.training.parameter_server_bridge import threads_of

BATCH = 2
DEADLINE_SECONDS = 50.0


def say(*words):
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


def strategy_of_all(**arguments):
    """Returns a strategy once all workers are there, also those that were killed before and started again."""
    strategy = tfdist_ext.ParameterServerStrategy(**arguments)
    threads = threads_of(strategy)
    deadline = time.monotonic() + DEADLINE_SECONDS
    while len(threads.present()) < strategy.num_workers:
        assert time.monotonic() < deadline, f"absent: {threads.missing()}"
        time.sleep(0.02)
    return strategy


def counting_model(strategy, num_rows, learning_rate=1.0, **arguments):
    """Returns a model whose weight i is minus the number of times that row i was applied.

    The loss is the sum of the outputs w[i] over the rows i of a batch, so that its gradient is 1 for each row, and SGD
    with a learning rate of 1 counts. All numbers are small integers: float32 holds them exactly.
    """
    with strategy.scope():
        weights = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
        model = keras.Sequential([keras.layers.Input((num_rows,)), weights])
        model.compile(keras.optimizers.SGD(learning_rate), loss=_sum_of_outputs, metrics=["mae"], **arguments)
    return model


def _sum_of_outputs(_, outputs):
    return tf.reduce_sum(outputs)


def rows(num_rows, delay_seconds=0.0):
    """Returns one-hot rows, with their numbers as labels, in batches each of which takes a while to read."""
    inputs = np.eye(num_rows, dtype=np.float32)
    labels = np.arange(num_rows, dtype=np.float32)[:, None]
    data = tf.data.Dataset.from_tensor_slices((inputs, labels)).batch(BATCH)
    return data.apply(tf_data_testing.sleep(int(delay_seconds * 1e6))) if delay_seconds else data


def counts(model):
    """Returns the different numbers of times that rows were applied."""
    return sorted({-value for value in model.get_weights()[0][:, 0].tolist()})


class At(keras.callbacks.Callback):
    """Does something when an epoch, an evaluation or a prediction has come to a batch."""

    def __init__(self, actions):
        super().__init__()
        self._actions = dict(actions)

    def on_train_batch_end(self, batch, logs=None):
        self._actions.pop(batch, lambda: None)()

    on_test_batch_end = on_predict_batch_end = on_train_batch_end


class Events:
    """Keeps the names and tasks of events, and waits for them."""

    def __init__(self):
        self.seen = []
        self._news = threading.Condition()

    def __call__(self, name, fields):
        with self._news:
            self.seen.append((name, fields.get("task")))
            self._news.notify_all()

    def wait_for(self, name, task):
        """Returns a function that waits for an event."""

        def wait():
            with self._news:
                assert self._news.wait_for(lambda: (name, task) in self.seen, DEADLINE_SECONDS), (name, task)

        return wait


@contextlib.contextmanager
def listening_to_events():
    kept = events.subscribe(Events())
    try:
        yield kept
    finally:
        events.unsubscribe(kept)


def send(pids, signum, *indices):
    """Sends a signal to workers, and tells the test."""
    for index in indices:
        os.killpg(pids[f"worker:{index}"], signum)
    say("signalled", *indices)
