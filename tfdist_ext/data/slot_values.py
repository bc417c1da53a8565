"""How does a batch carry the number of rows of every sub-batch?

Keras hands a batch through `tf.function`, `Optional` and `tree.map_structure` before a strategy sees it
again. A `PerSlot` is a `PerReplica` value (so that all of that works) with two tensors more: the rows of all
sub-batches of the global batch, and a digest of it where every worker has seen all of it.
"""

from __future__ import annotations

import tensorflow as tf

from tfdist_ext import compat


class PerSlot(compat.PerReplica):
    """One component of a batch: a value for each local replica, and the rows of every slot.

    Attributes:
        rows: int64 tensor `[num_slots]`.
        digest: Scalar int64 tensor, the same on all workers that cut the same rows; 0 where no worker knows them all.
    """

    def __init__(self, values, rows, digest=None):
        super().__init__(values)
        self.rows = rows
        self.digest = tf.zeros([], tf.int64) if digest is None else digest

    @property
    def _type_spec(self):
        return PerSlotSpec(
            tuple(tf.type_spec_from_value(value) for value in self._values),
            tf.type_spec_from_value(self.rows),
        )


class PerSlotSpec(tf.TypeSpec):
    """Type of a `PerSlot`."""

    __slots__ = ["_value_specs", "_rows_spec"]

    value_type = property(lambda self: PerSlot)

    def __init__(self, value_specs, rows_spec):
        self._value_specs = tuple(value_specs)
        self._rows_spec = rows_spec

    @property
    def value_specs(self) -> tuple:
        """Specs of the local replicas' values."""
        return self._value_specs

    def _serialize(self):
        return (self._value_specs, self._rows_spec)

    @property
    def _component_specs(self):
        return (*self._value_specs, self._rows_spec, tf.TensorSpec([], tf.int64))

    def _to_components(self, value):
        return (*value.values, value.rows, value.digest)

    def _from_components(self, components):
        *values, rows, digest = components
        return PerSlot(values, rows, digest)


def digest_of(*structures) -> tf.Tensor:
    """Returns the digest that the first distributed batch in `structures` carries, or 0."""
    for leaf in tf.nest.flatten(structures):
        if isinstance(leaf, PerSlot):
            return leaf.digest
    return tf.zeros([], tf.int64)


def rows_of(*structures) -> tf.Tensor | None:
    """Returns the rows of every slot that the first distributed batch in `structures` carries, or None."""
    for leaf in tf.nest.flatten(structures):
        if isinstance(leaf, PerSlot):
            return leaf.rows
    return None
