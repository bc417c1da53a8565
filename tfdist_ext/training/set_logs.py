"""How do the logs of a step travel to the chief?

Scalars in one vector, everything else by itself.
"""

from __future__ import annotations

import tensorflow as tf


class LogReading:
    """What the tensors of a step's logs mean.

    Args:
        logs: Structure of the logs, while the step is traced.

    Attributes:
        outputs: The tensors to fetch, only while the step is traced: one vector of all scalars, then the others.
        is_named: Whether the logs are a dictionary.
    """

    def __init__(self, logs):
        flat = tf.nest.flatten(logs)
        self._leaves = [(_kind(leaf), None if tf.is_tensor(leaf) else leaf) for leaf in flat]
        self._structure = tf.nest.map_structure(lambda leaf: None, logs)
        numbers, others = (
            [leaf for leaf, (kind, _) in zip(flat, self._leaves, strict=True) if kind == wanted]
            for wanted in ("number", "other")
        )
        self._dtypes = [leaf.dtype.as_numpy_dtype for leaf in numbers]
        vector = [tf.cast(number, tf.float64) for number in numbers]
        self.outputs = [tf.stack(vector) if vector else tf.zeros([0], tf.float64), *others]
        self.is_named = isinstance(logs, dict)

    def read(self, outputs):
        """Returns the fetched logs as a structure of NumPy values."""
        numbers = iter(zip(outputs[0].numpy(), self._dtypes, strict=True))
        others = iter(outputs[1:])
        flat = []
        for kind, constant in self._leaves:
            if kind == "number":
                value, dtype = next(numbers)
                flat.append(dtype(value))
            else:
                flat.append(next(others).numpy() if kind == "other" else constant)
        return tf.nest.pack_sequence_as(self._structure, flat)


def _kind(leaf) -> str:
    if not tf.is_tensor(leaf):
        return "constant"
    return "number" if leaf.shape.rank == 0 and leaf.dtype != tf.string else "other"
