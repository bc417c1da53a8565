"""The one-device run, and how far a right distributed run may be from it.

A sum of P terms taken in another order differs by at most (P - 1) * u * sum |term|, u = 2**-53 in float64. Here
P <= 48 rows, terms are of order 1, and a step multiplies an earlier difference by at most about 3 (learning
rates of 0.1 on losses with curvature of order 10), over at most 8 steps:

    48 * 2**-53 * sum(3**k for k in range(8))  =  1.7e-11

`TOLERANCE` is that bound rounded up. A missing factor (a row weighted wrongly, a clip per replica) shows as 1e-3
or more on this data.
"""

import contextlib

import keras
import numpy as np
import tensorflow as tf

import tfdist_ext

TOLERANCE = 2e-11


def devices(count):
    return [f"CPU:{i}" for i in range(count)]


def mirrored(count):
    return tfdist_ext.MirroredStrategy(devices(count))


def scope_of(strategy):
    return strategy.scope() if strategy is not None else contextlib.nullcontext()


def regression_data(rows=22, features=3, seed=0):
    generator = np.random.default_rng(seed)
    x = generator.normal(size=(rows, features))
    y = np.tanh(x @ generator.normal(size=(features, 1))) + 0.1 * generator.normal(size=(rows, 1))
    return x, y


def batched(arrays, batch_size):
    return tf.data.Dataset.from_tensor_slices(arrays).batch(batch_size)


def train(strategy, make_model, dataset, epochs=2, **fit_arguments):
    """Returns weights, optimizer state, history and evaluation of a run; `dataset` may be a function."""
    keras.backend.clear_session()
    keras.utils.set_random_seed(11)
    with scope_of(strategy):
        model = make_model()
    data = dataset() if callable(dataset) else dataset
    history = model.fit(data, epochs=epochs, verbose=0, shuffle=False, **fit_arguments).history
    evaluation = model.evaluate(dataset() if callable(dataset) else dataset, verbose=0, return_dict=True)
    optimizer = [np.asarray(v.numpy()) for v in model.optimizer.variables]
    return {
        "weights": [np.asarray(w) for w in model.get_weights()],
        "optimizer": optimizer,
        "history": history,
        "evaluation": evaluation,
        "model": model,
    }


def largest_difference(one, other):
    """Returns the largest absolute difference of weights and optimizer variables."""
    pairs = zip(one["weights"] + one["optimizer"], other["weights"] + other["optimizer"], strict=True)
    return max(
        float(np.max(np.abs(a.astype("float64") - b.astype("float64")), initial=0.0)) for a, b in pairs
    )


def assert_same_run(actual, expected, tolerance=TOLERANCE):
    """Asserts that weights, optimizer state, logs of each epoch and evaluation agree."""
    assert largest_difference(actual, expected) <= tolerance
    assert actual["history"].keys() == expected["history"].keys()
    for name, values in expected["history"].items():
        np.testing.assert_allclose(actual["history"][name], values, rtol=0, atol=tolerance, err_msg=name)
    for name, value in expected["evaluation"].items():
        np.testing.assert_allclose(actual["evaluation"][name], value, rtol=0, atol=tolerance, err_msg=name)
