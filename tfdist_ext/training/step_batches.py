"""How does the batch of a step reach the replicas?"""

from __future__ import annotations

import keras
import tensorflow as tf

from tfdist_ext import compat
from tfdist_ext.data import batches, slot_values


def as_slots(strategy, data):
    """Returns a batch as distributed values, the rows of all slots, and whether a local one may be empty."""
    rows = slot_values.rows_of(data)
    extended = strategy.extended
    if rows is not None:
        fixed = [batches.static_num_rows(spec) for spec in _first_component_specs(data)]
        return data, rows, any(not count for count in fixed)
    if any(isinstance(leaf, compat.DistributedValues) for leaf in tf.nest.flatten(data)):
        num_slots = strategy.num_replicas_in_sync
        return data, tf.ones([num_slots], tf.int64), False
    # A batch given whole (train_on_batch, a Python generator): every worker has all of it, and takes its rows.
    data = keras.tree.map_structure(_as_tensor, data)
    known = batches.static_num_rows(tf.nest.map_structure(tf.type_spec_from_value, _without_none(data)))
    parts, rows = batches.split_over_slots(
        _without_none(data), extended.local_slots, strategy.num_replicas_in_sync, known
    )
    parts = [_with_none(data, part) for part in parts]
    # Every worker was given the whole batch: was it the same?
    digest = batches.digest(_without_none(data)) if extended.num_workers > 1 else None
    data = keras.tree.map_structure(
        lambda *values: None if values[0] is None else slot_values.PerSlot(values, rows, digest), *parts
    )
    empty = known is None or known < strategy.num_replicas_in_sync
    return data, rows, empty


def spec_of_rows(value):
    """Returns the spec of a component of a batch, with its rows unknown."""
    spec = value.value_specs[0] if isinstance(value, slot_values.PerSlotSpec) else None
    spec = spec or tf.type_spec_from_value(
        value.values[0] if isinstance(value, compat.DistributedValues) else value
    )
    return batches.with_unknown_rows(spec)


def all_on_the_first(strategy, data, rows):
    """Gives the whole batch to the first slot, and none of it to the others."""
    extended = strategy.extended
    total = tf.reduce_sum(rows)
    slots = strategy.num_replicas_in_sync
    rows = tf.concat([tf.reshape(total, [1]), tf.zeros([slots - 1], rows.dtype)], axis=0)

    def regroup(value):
        parts = list(value.values) if isinstance(value, compat.DistributedValues) else [value]
        if not all(isinstance(part, tf.Tensor) for part in parts):
            raise NotImplementedError(
                "A step whose loss is no mean and no sum over rows needs the whole batch on one replica, and a part of "
                f"this batch is a {type(parts[0]).__name__}. Give the loss to `compile`, or use dense inputs."
            )
        whole = extended.gather_slots([parts])[0]
        whole = tf.ensure_shape(whole, [None, *parts[0].shape[1:]])
        own = [whole if slot == 0 else whole[:0] for slot in extended.local_slots]
        return slot_values.PerSlot(own, rows)

    return tf.nest.map_structure(regroup, data), rows, True


def _as_tensor(leaf):
    if leaf is None or isinstance(leaf, (tf.Tensor, tf.RaggedTensor, tf.SparseTensor)):
        return leaf
    return tf.convert_to_tensor(leaf)


def _without_none(data):
    return [leaf for leaf in keras.tree.flatten(data) if leaf is not None]


def _with_none(structure, leaves):
    leaves = iter(leaves)
    return keras.tree.map_structure(lambda leaf: None if leaf is None else next(leaves), structure)


def _first_component_specs(data):
    for leaf in tf.nest.flatten(data):
        if isinstance(leaf, slot_values.PerSlot):
            return [tf.type_spec_from_value(value) for value in leaf.values]
    return []


def rows_or_zeros(has_rows, data):
    """Returns a replica's rows, or a row of zeros where it has none."""
    if tf.executing_eagerly():
        return data if bool(has_rows) else batches.one_row_of_zeros(data)
    return tf.cond(has_rows, lambda: data, lambda: _relaxed_zeros(data))


def _relaxed_zeros(data):
    return tf.nest.map_structure(
        lambda zero, value: tf.compat.v1.placeholder_with_default(zero, value.shape),
        batches.one_row_of_zeros(data),
        data,
        expand_composites=True,
    )


def in_this_name_scope(function):
    """Returns the function without the name scope of the branch that calls it: summaries carry it in their tags."""
    scope = tf.get_current_name_scope()

    def named():
        with tf.name_scope(f"{scope}/"):
            return function()

    return named


def is_first_with_rows(rows, slot: int):
    """Returns whether a slot is the first that has rows, as a scalar bool tensor."""
    first = tf.argmax(tf.cast(rows > 0, tf.int32), output_type=tf.int64)
    return tf.equal(first, tf.constant(slot, tf.int64))


def listed(tensors):
    """Returns a list: tf.cond unwraps a list of one; regroup() then wraps each tensor of it in a PerReplica."""
    return list(tensors) if isinstance(tensors, (list, tuple)) else [tensors]
