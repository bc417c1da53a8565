"""What makes the rows of a batch depend on each other or on chance, and is switched off while a step is tried?"""

from __future__ import annotations

import functools
import threading

import keras
import tensorflow as tf

from tfdist_ext import compat
from tfdist_ext.training.step_verdict import CannotTry


class _Trying(threading.local):
    active = False


_trying = _Trying()


class trying:  # noqa: N801 - reads as a statement
    """Switches off, in this thread, what makes rows depend on others or on chance."""

    def __enter__(self):
        _trying.active = True

    def __exit__(self, *_):
        _trying.active = False


def install() -> None:
    """Replaces the random functions and BatchNormalization's `call`, which elsewhere do what they did."""
    for name in ("normal", "uniform", "truncated_normal", "randint"):
        _replace(compat.KerasRandom, name, _one_row)
    for name in ("categorical", "gamma", "binomial", "beta", "shuffle"):
        _replace(compat.KerasRandom, name, _refused)
    _replace(compat.KerasRandom, "dropout", _no_dropout)
    _replace(keras.layers.BatchNormalization, "call", _not_training)


def _replace(owner, name: str, make) -> None:
    original = getattr(owner, name)

    @functools.wraps(original)
    def replacement(*args, **kwargs):
        return (replaced if _trying.active else original)(*args, **kwargs)

    replaced = make(original)
    setattr(owner, name, replacement)


def _one_row(original):
    def draw(shape, *args, **kwargs):
        shape = tf.convert_to_tensor(shape)
        if not shape.shape[0]:
            return original([], *args, **kwargs)
        row = original([1, *shape[1:].numpy().tolist()], *args, **kwargs)
        return tf.broadcast_to(row, shape)

    return draw


def _no_dropout(original):
    del original
    return lambda inputs, *args, **kwargs: inputs


def _refused(original):
    def refuse(*args, **kwargs):
        raise CannotTry(f"it draws from `keras.random.{original.__name__}`")

    return refuse


def _not_training(original):
    def call(self, inputs, training=None, mask=None):
        return original(self, inputs, training=False, mask=mask)

    return call
