"""What does `next` on a distributed dataset return, in Python and inside a tf.function?"""

from __future__ import annotations

import tensorflow as tf

from tfdist_ext import compat
from tfdist_ext.data.slot_values import PerSlot, PerSlotSpec


class DistributedIterator(tf.distribute.DistributedIterator, compat.CompositeTensor, compat.Trackable):
    """Iterator over distributed batches; may be passed into a tf.function, and saved in a `tf.train.Checkpoint`.

    What is saved is the state of the worker's own pipeline with what it has prefetched, where all of it can be.
    """

    def __init__(self, strategy, iterator):
        self._strategy = strategy
        self._iterator = iterator

    @property
    def _type_spec(self):
        return DistributedIteratorSpec(self._strategy, tf.type_spec_from_value(self._iterator))

    @property
    def element_spec(self):
        """Specs of a batch."""
        parts, rows = self._iterator.element_spec
        slots = tf.TensorSpec([rows.shape[0] - 1], tf.int64)
        return tf.nest.map_structure(lambda *specs: PerSlotSpec(specs, slots), *parts)

    def _trackable_children(self, save_type="checkpoint", **kwargs):
        return {"iterator": self._iterator}

    def _lookup_dependency(self, name, cached_dependencies=None):
        return self._iterator if name == "iterator" else None

    def packed(self, element):
        """Returns a distributed batch out of what the pipeline yields."""
        parts, rows_and_digest = element
        rows, digest = rows_and_digest[:-1], rows_and_digest[-1]
        return tf.nest.map_structure(lambda *values: PerSlot(values, rows, digest), *parts)

    def __iter__(self):
        return self

    def __next__(self):
        with self._strategy.translating_failures():
            try:
                return self.get_next()
            except tf.errors.OutOfRangeError:
                raise StopIteration from None

    def get_next(self):
        """Returns the next distributed batch; raises `tf.errors.OutOfRangeError` at the end."""
        return self.packed(self._iterator.get_next())

    def get_next_as_optional(self):
        """Returns the next distributed batch as an Optional, empty at the end."""
        optional = self._iterator.get_next_as_optional()
        return tf.cond(
            optional.has_value(),
            lambda: tf.experimental.Optional.from_value(self.packed(optional.get_value())),
            lambda: tf.experimental.Optional.empty(self.element_spec),
        )


class DistributedIteratorSpec(tf.TypeSpec):
    """Type of a `DistributedIterator`."""

    __slots__ = ["_strategy", "_iterator_spec"]

    value_type = property(lambda self: DistributedIterator)

    def __init__(self, strategy, iterator_spec):
        self._strategy = strategy
        self._iterator_spec = iterator_spec

    def _serialize(self):
        return (id(self._strategy), self._iterator_spec)

    @property
    def _component_specs(self):
        return [self._iterator_spec]

    def _to_components(self, value):
        return [value._iterator]

    def _from_components(self, components):
        (iterator,) = components
        return DistributedIterator(self._strategy, iterator)

    def _without_tensor_names(self):
        # The base class would rebuild the spec from its serialized form, which has only the strategy's id.
        return DistributedIteratorSpec(self._strategy, self._iterator_spec._without_tensor_names())

    def _with_tensor_ranks_only(self):
        return DistributedIteratorSpec(self._strategy, self._iterator_spec._with_tensor_ranks_only())

    def most_specific_common_supertype(self, others):
        """Two iterators are of one type when their strategies and elements are."""
        for other in others:
            if type(other) is not type(self) or other._strategy is not self._strategy:
                return None
        spec = self._iterator_spec.most_specific_common_supertype([o._iterator_spec for o in others])
        return None if spec is None else DistributedIteratorSpec(self._strategy, spec)
