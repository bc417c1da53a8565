"""How does a piece of code stay on one device? Its variables are made there and its operations run there."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import keras
import tensorflow as tf

from tfdist_ext import compat
from tfdist_ext.placement.devices import long_device, require_device, short_device


class on:
    """Pins variables and operations to a device: of a block, of a function, or of a Keras layer.

    `tf.device` does not reach as far: around the making of a layer it places the variables alone, and in a tf.function
    it does not reach into functions called there. This does, with loops, conditionals and gradients. What asks for
    another device inside, with `tf.device` or `on`, gets that. Layers that are made in a block are pinned wherever they
    are called later. When a tf.function is traced, every operation made inside is checked.

    The gradient of a pinned layer or function is pinned where the tape that takes it is inside, too; else use
    `apply_plan` for the whole step.

    Runs on: one process, or the chief of a cluster, whose devices can be named.

    Args:
        device: Name such as "CPU:1" or "/job:ps/task:0".

    Raises:
        ValueError: When entered or called: there is no such device; the message lists those there are. For a layer:
            it has variables elsewhere.

    Example:
        >>> import tensorflow as tf
        >>> @on("CPU:0")
        ... def double(x):
        ...     return 2.0 * x
        >>> double(tf.ones([])).numpy()
        np.float32(2.0)
    """

    def __init__(self, device: str):
        self._device = device
        self._scopes: list[contextlib.ExitStack] = []

    def __enter__(self) -> on:
        self._scopes.append(_pinning(require_device(self._device)))
        return self

    def __exit__(self, *failure: Any) -> bool | None:
        return self._scopes.pop().__exit__(*failure)

    def __call__(self, function):
        """Pins a function or a Keras layer.

        Args:
            function: Python function, tf.function, or Keras layer. A layer is changed and returned.

        Returns:
            The same kind of thing.
        """
        if isinstance(function, keras.layers.Layer):
            pin_layer(function, require_device(self._device))
            return function
        device = self._device
        plain = getattr(function, "python_function", function)

        @functools.wraps(plain)
        def pinned(*args, **kwargs):
            with on(device):
                return function(*args, **kwargs)

        if plain is function:
            return pinned
        return tf.function(pinned, input_signature=function.input_signature, autograph=False)


def pin_layer(layer, device: str) -> None:
    """Has a layer make its variables on a device and run there, with all the layers inside it.

    Args:
        layer: Keras layer.
        device: Short name of a device that exists.
    """
    # A dropout layer has made its seed already; that may lie anywhere.
    elsewhere = [one.path for one in layer.weights if short_device(one.value.device) != device]
    if elsewhere:
        raise ValueError(
            f"Layer {layer.name!r} has variables that are not on {device}, such as {elsewhere[0]!r}; variables that "
            "exist stay where they are. Try to pin the layer before it is built."
        )
    _wrap(layer, device)


def _wrap(layer, device: str) -> None:
    for method in ("build", "call"):
        setattr(layer, method, _inside(getattr(layer, method), device))


def _inside(method, device: str):
    @functools.wraps(method)
    def pinned(*args, **kwargs):
        with on(device):
            return method(*args, **kwargs)

    pinned.__dict__["device"] = device
    return pinned


def _pinning(device: str) -> contextlib.ExitStack:
    """Enters all that pins, and returns what leaves it."""
    with contextlib.ExitStack() as stack:
        layers = stack.enter_context(compat.new_keras_layers())

        def pin_layers(failure, *_) -> None:
            # A layer that was pinned by itself stays where it was pinned.
            for layer in layers if failure is None else ():
                if not hasattr(layer.call, "device"):
                    _wrap(layer, device)

        stack.push(pin_layers)
        if tf.inside_function():
            stack.enter_context(_pinned_operations(long_device(device)))
        stack.enter_context(tf.device(long_device(device)))
        return stack.pop_all()


@contextlib.contextmanager
def _pinned_operations(device: str):
    made = []

    def device_of(op) -> str | None:
        made.append(op)
        return None if op.device else device

    with compat.devices_of_new_operations(device_of):
        yield
    lost = next((op for op in made if not op.device), None)
    if lost is not None:
        raise ValueError(f"Operation {lost.name!r} is on no device, although it was made on {device}.")
