"""What do the programs of several workers share, and when do their results agree?"""

import contextlib
import logging

import keras
import numpy as np
import tensorflow as tf

import tfdist_ext
from tests.single_host import oracle


def make_strategy(distributed=True, **arguments):
    """Returns the strategy of this worker, or None where the program is the one-device oracle."""
    return tfdist_ext.MultiWorkerMirroredStrategy(**arguments) if distributed else None


def train(distributed, make_model, dataset, **fit_arguments):
    """Trains as `oracle.train` does, in double precision; the result can cross to another process."""
    keras.config.set_floatx("float64")
    run = oracle.train(make_strategy(distributed), make_model, dataset, **fit_arguments)
    del run["model"]
    return run


def linear_model(strategy, make_optimizer=lambda: keras.optimizers.SGD(1.0), **compile_arguments):
    """Returns y = w x from w = 0, where each update can be done by hand."""
    with oracle.scope_of(strategy):
        layer = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
        model = keras.Sequential([keras.Input((1,)), layer])
        model.compile(make_optimizer(), "mse", **compile_arguments)
    return model


def pairs(targets, batch_size):
    """Returns a dataset of x = 1 and the given targets."""
    y = np.asarray(targets, "float32")[:, None]
    return tf.data.Dataset.from_tensor_slices((np.ones_like(y), y)).batch(batch_size)


def facts_of(error):
    """Returns what a typed error says, as values that can cross to another process."""
    return {"type": type(error).__name__, "message": str(error), **vars(error)}


@contextlib.contextmanager
def logged():
    """Yields a list that receives every line that the package logs."""
    lines = []

    class Handler(logging.Handler):
        def emit(self, record):
            lines.append(record.getMessage())

    handler, logger = Handler(), logging.getLogger("absl")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel("INFO")
    try:
        yield lines
    finally:
        logger.setLevel(level)
        logger.removeHandler(handler)


def assert_identical(results, place="result"):
    """Asserts that all workers returned the same, to the last bit."""
    first = results[0]
    for rank, other in enumerate(results):
        where = f"{place} of worker {rank}"
        if isinstance(first, dict):
            assert list(other) == list(first), where
        elif isinstance(first, (list, tuple)):
            assert len(other) == len(first), where
        else:
            np.testing.assert_array_equal(other, first, err_msg=where)
    if isinstance(first, dict):
        for key in first:
            assert_identical([result[key] for result in results], f"{place}[{key!r}]")
    elif isinstance(first, (list, tuple)):
        for index in range(len(first)):
            assert_identical([result[index] for result in results], f"{place}[{index}]")
