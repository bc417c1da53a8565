"""Does a logged tensor carry the weight of a replica's loss already?

A `train_step` may return the loss that `compute_loss` gave it, which is weighted by the replica's rows, or
some mean of its own, which is not. The graph knows: the first kind is computed from a weighted loss.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf


def carries_weight(value: tf.Tensor, weighted: list, unweighted: Sequence = ()) -> bool:
    """Returns True when `value` is, or is computed in this graph from, one of the `weighted` tensors.

    Args:
        value: A tensor that the step returned.
        weighted: Tensors that were multiplied by the replica's weight.
        unweighted: Tensors from which the weight was taken out again; the search stops there.

    Returns:
        True or False; in eager mode only identity is known.
    """
    targets = {id(tensor) for tensor in weighted}
    if id(value) in targets:
        return True
    if not weighted or tf.executing_eagerly():
        return False
    names = {tensor.name for tensor in weighted if hasattr(tensor, "name")}
    pending, seen = [value], {tensor.name for tensor in unweighted}
    while pending:
        tensor = pending.pop()
        if tensor.name in seen:
            continue
        seen.add(tensor.name)
        if tensor.name in names:
            return True
        pending.extend(i for i in tensor.op.inputs if i.dtype.is_floating)
    return False
