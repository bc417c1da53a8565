"""What do the tests of this folder train?"""

import keras
import numpy as np
import tensorflow as tf

from tfdist_ext.checkpoint import EverySteps, TrainingCheckpointManager, TrainingState


class Interrupt(keras.callbacks.Callback):
    """Ends a run as Ctrl-C would: at the end of its n-th step, at the begin of its n-th epoch, or before a batch."""

    def __init__(self, steps=None, epochs=None, before_batch=None):
        super().__init__()
        self._before_batch = before_batch
        self._left = {"steps": steps, "epochs": epochs}

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass

    def _count(self, what):
        if self._left[what] is not None:
            self._left[what] -= 1
            if not self._left[what]:
                raise KeyboardInterrupt

    def on_train_batch_begin(self, batch, logs=None):
        if batch == self._before_batch:
            raise KeyboardInterrupt

    def on_train_batch_end(self, batch, logs=None):
        self._count("steps")

    def on_epoch_begin(self, epoch, logs=None):
        self._count("epochs")


class Seen(keras.callbacks.Callback):
    """Notes the numbers of epochs and batches that run."""

    def __init__(self):
        super().__init__()
        self.epochs, self.batches = [], []

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass

    def on_epoch_begin(self, epoch, logs=None):
        self.epochs.append(epoch)

    def on_train_batch_end(self, batch, logs=None):
        self.batches.append(batch)


def data(rows=40, batch=4, seed=3):
    """Returns a shuffled dataset; by default 10 batches a pass."""
    x = np.random.RandomState(0).randn(rows, 3).astype("float32")
    return (
        tf.data.Dataset.from_tensor_slices((x, x.sum(1, keepdims=True))).shuffle(rows, seed=seed).batch(batch)
    )


def network(optimizer="adam", **compile_arguments):
    """Returns a compiled network with dropout and batch normalization."""
    model = keras.Sequential(
        [
            keras.Input((3,)),
            keras.layers.Dense(8, activation="tanh"),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.3),
            keras.layers.Dense(1),
        ]
    )
    model.compile(keras.optimizers.get(optimizer), "mse", metrics=["mae"], **compile_arguments)
    return model


def manager(directory, model=None, dataset=None, save=None, state_arguments=None, **arguments):
    """Returns a manager that saves after each step unless told otherwise."""
    model = network() if model is None else model
    state = TrainingState(model, data() if dataset is None else dataset, **(state_arguments or {}))
    return TrainingCheckpointManager(state, directory, save=save or EverySteps(1), **arguments)


def fit(checkpoints, *callbacks, epochs=3, **arguments):
    """Fits with a manager's callback, an interrupt included; returns the history, or None if interrupted."""
    try:
        history = checkpoints.state.model.fit(
            checkpoints.state.dataset, epochs=epochs, verbose=0,
            callbacks=[checkpoints.keras_callback(), *callbacks], **arguments,
        )  # fmt: skip
    except KeyboardInterrupt:
        checkpoints.wait()
        return None
    return history.history


def values(state):
    """Returns all variables of a state by key."""
    return {entry.key: entry.tensor.numpy() for entry in state.variables().snapshot().entries}


def assert_equal(expected, found):
    """Asserts that two dictionaries of arrays are equal bit for bit."""
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)
