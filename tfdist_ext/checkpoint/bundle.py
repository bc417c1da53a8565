"""Are the tensors in a TensorFlow bundle those that were written?

The index file of a bundle carries a CRC-32C of every tensor, and TensorFlow compares it whenever it reads one.
"""

from __future__ import annotations

import os

import tensorflow as tf

# TensorFlow's reader gives a file that is too short as IndexError, a missing one as ValueError, other damage by name.
_DAMAGE = (tf.errors.OpError, ValueError, IndexError, RuntimeError)


def verify_bundle(prefix: str) -> str | None:
    """Reads every tensor once; no more than one is in memory at a time.

    Args:
        prefix: Of the bundle, whose files are `prefix.index` and `prefix.data-0000i-of-0000n`.

    Returns:
        The first problem as one sentence that names the tensor, or None if there is none.
    """
    name = os.path.basename(prefix)
    try:
        reader = tf.train.load_checkpoint(prefix)
        tensors = sorted(reader.get_variable_to_shape_map())
    except _DAMAGE as error:
        return f"The index of {name} cannot be read: {_first_line(error)}"
    for tensor in tensors:
        try:
            reader.get_tensor(tensor)
        except _DAMAGE as error:
            return f"Tensor {tensor} of {name} is damaged: {_first_line(error)}"
    return None


def _first_line(error: Exception) -> str:
    text = getattr(error, "message", None) or str(error)
    return text.strip().split("\n")[0]
