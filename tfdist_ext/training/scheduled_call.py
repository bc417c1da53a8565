"""Which arguments does a scheduled step get, and which of them are part of its trace?"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf


class ScheduledCall:
    """One call that a user has scheduled.

    As in a `tf.function`, tensors and NumPy arrays are inputs of the trace, and a step with other ones runs the same
    trace; any other value is part of it, and a step with another one is traced anew.

    Args:
        fn: Step function or `tf.function`.
        args: Its arguments; exactly one of them, or of what they hold, is an iterator of `iterator_type`.
        kwargs: Its keyword arguments.
        iterator_type: Class of the iterators of per-worker datasets.
        remote_type: Class of the results of other steps, which are fetched.

    Attributes:
        iterator: The iterator.
        inputs: The tensors.
        key: Equal for calls that run the same trace.

    Raises:
        ValueError: No iterator, or several.
    """

    def __init__(self, fn: Callable, args, kwargs, iterator_type: type, remote_type: type):
        self._fn = fn
        self._structure = (tuple(args), dict(kwargs or {}))
        leaves = tf.nest.flatten(self._structure)
        iterators = [leaf for leaf in leaves if isinstance(leaf, iterator_type)]
        if len(iterators) != 1:
            raise ValueError(
                "The arguments of a scheduled step must hold exactly one iterator of a per-worker dataset; received "
                f"{len(iterators)}. Use iter(coordinator.create_per_worker_dataset(...))."
            )
        iterator: Any = iterators[0]
        self.iterator = iterator
        self._leaves = [_value(leaf, remote_type) for leaf in leaves]
        self.inputs = [tf.convert_to_tensor(leaf) for leaf in self._leaves if _is_input(leaf)]
        self.key = (
            fn,
            str(tf.nest.map_structure(lambda leaf: 0, self._structure)),
            tuple(_identity(leaf, iterator_type) for leaf in self._leaves),
            tuple(tf.nest.flatten(self.iterator.data.element_spec)),
        )

    @property
    def input_specs(self) -> list[tf.TensorSpec]:
        """Types of the inputs."""
        return [tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in self.inputs]

    def continues(self, other: ScheduledCall | None) -> bool:
        """Returns True where this call is the one before once more, on the next batch."""
        return (
            other is not None
            and self.iterator is other.iterator
            and self.key == other.key
            and all(map(np.array_equal, self.inputs, other.inputs))
        )

    def step(self, batch_iterator: Callable) -> Callable:
        """Returns the function of a batch and of the inputs.

        Args:
            batch_iterator: Makes what stands for the iterator out of a batch.
        """
        function = getattr(self._fn, "python_function", self._fn)

        def run(batch, *inputs):
            rest = iter(inputs)
            leaves = [
                batch_iterator(batch) if leaf is self.iterator else next(rest) if _is_input(leaf) else leaf
                for leaf in self._leaves
            ]
            args, kwargs = tf.nest.pack_sequence_as(self._structure, leaves)
            return function(*args, **kwargs)

        return run


def _value(leaf: Any, remote_type: Any):
    if isinstance(leaf, remote_type):
        return np.asarray(leaf.fetch())
    return np.array(leaf) if isinstance(leaf, np.ndarray) else leaf  # The user may write into it afterwards.


def _is_input(leaf) -> bool:
    return isinstance(leaf, (np.ndarray, np.generic, tf.Tensor))


def _identity(leaf, iterator_type: type):
    if isinstance(leaf, iterator_type):
        return "iterator"
    if _is_input(leaf):
        return tf.type_spec_from_value(tf.convert_to_tensor(leaf))
    if isinstance(leaf, (bool, int, float, complex, str, bytes, type(None))):
        return type(leaf), leaf
    # Anything else is what it is: the trace sees how it changes only where TensorFlow reads it.
    return _Same(leaf)


class _Same:
    """Is equal to what stands for the same object."""

    def __init__(self, value):
        self._value = value

    def __eq__(self, other):
        return isinstance(other, _Same) and other._value is self._value

    def __hash__(self):
        return id(self._value)
