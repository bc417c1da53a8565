"""How is a batch of any tf.data structure measured, cut into rows, and made empty?"""

from __future__ import annotations

import tensorflow as tf


def num_rows(structure) -> tf.Tensor:
    """Returns the rows of a batch as a scalar int64 tensor, read off its first component.

    Raises:
        ValueError: The batch has no component, or the first one has no batch dimension.
    """
    leaves = [leaf for leaf in tf.nest.flatten(structure) if leaf is not None]
    if not leaves:
        raise ValueError("A batch must hold at least one tensor; received an empty structure.")
    first = leaves[0]
    if isinstance(first, tf.RaggedTensor):
        return tf.cast(first.nrows(), tf.int64)
    if isinstance(first, tf.SparseTensor):
        return tf.cast(first.dense_shape[0], tf.int64)
    if first.shape.rank == 0:
        raise ValueError(
            "Each component of a batch must have a batch dimension; received a scalar. "
            "Call `dataset.batch(global_batch_size)` before you distribute the dataset."
        )
    return tf.shape(first, out_type=tf.int64)[0]


def static_num_rows(spec_structure) -> int | None:
    """Returns the rows of a batch when its spec fixes them, else None."""
    for spec in tf.nest.flatten(spec_structure):
        if isinstance(spec, tf.TensorSpec) and spec.shape.rank:
            return spec.shape[0]
    return None


def digest(structure) -> tf.Tensor:
    """Returns a number below 2**16 that is the same for the same rows in the same order, as a scalar int64 tensor.

    Sums of it over 256 replicas are exact in float32.
    """
    leaves = [leaf for leaf in tf.nest.flatten(structure, expand_composites=True) if leaf is not None]
    parts = tf.strings.join([tf.io.serialize_tensor(leaf) for leaf in leaves])
    return tf.strings.to_hash_bucket_fast(parts, 2**16)


def slice_rows(structure, start, size):
    """Returns rows `start` to `start + size` of every component.

    Args:
        structure: Batch of dense, ragged or sparse tensors.
        start: First row, int or scalar int64 tensor.
        size: Number of rows, int or scalar int64 tensor.

    Returns:
        A batch of the same structure.
    """

    def cut(value):
        if value is None:
            return None
        if isinstance(value, tf.SparseTensor):
            begin = tf.concat([[tf.cast(start, tf.int64)], tf.zeros_like(value.dense_shape[1:])], axis=0)
            extent = tf.concat([[tf.cast(size, tf.int64)], value.dense_shape[1:]], axis=0)
            return tf.sparse.slice(value, begin, extent)
        part = value[start : start + size]
        if isinstance(size, int) and isinstance(part, tf.Tensor):
            part = tf.ensure_shape(part, [size, *part.shape[1:]])
        return part

    return tf.nest.map_structure(cut, structure)


def split_over_slots(structure, slots, num_slots, known_rows: int | None):
    """Cuts a global batch into the sub-batches of some slots.

    Args:
        structure: The global batch.
        slots: Slots to cut out.
        num_slots: Number of slots of the global batch.
        known_rows: Rows of the batch when they are fixed, else None.

    Returns:
        Pair of a tuple of sub-batches, one for each of `slots`, and the int64 tensor `[num_slots]` of the
        rows of every slot.
    """
    if known_rows is not None and known_rows < num_slots:
        # Some slot would be empty, and known to be: layers are then traced for an axis of no length.
        known_rows = None
        structure = tf.nest.map_structure(_with_rows_forgotten, structure)
    rows = tf.constant(known_rows, tf.int64) if known_rows is not None else num_rows(structure)
    with tf.control_dependencies(_equal_rows(structure, rows)):
        rows = tf.identity(rows)
    counts = rows // num_slots + tf.cast(tf.range(num_slots, dtype=tf.int64) < rows % num_slots, tf.int64)
    starts = tf.cumsum(counts, exclusive=True)
    parts = []
    for slot in slots:
        if known_rows is None:
            start, size = starts[slot], counts[slot]
        else:
            quotient, remainder = divmod(known_rows, num_slots)
            size = quotient + (slot < remainder)
            start = slot * quotient + min(slot, remainder)
        parts.append(slice_rows(structure, start, size))
    return tuple(parts), counts


def _with_rows_forgotten(value):
    if not isinstance(value, tf.Tensor):
        return value
    return tf.compat.v1.placeholder_with_default(value, [None, *value.shape[1:]])


def _equal_rows(structure, rows) -> list:
    """Returns checks that every dense component has the rows of the first: rows would be lost silently."""
    checks = []
    for position, value in enumerate(tf.nest.flatten(structure)):
        if isinstance(value, tf.Tensor) and value.shape.rank != 0:
            checks.append(
                tf.debugging.assert_equal(
                    tf.shape(value, out_type=tf.int64)[0],
                    rows,
                    message=f"Component {position} of a batch has another number of rows than the first. All "
                    "components of a batch must have one batch dimension.",
                )
            )
    return [check for check in checks if check is not None]


def empty_batch(spec_structure):
    """Returns a batch of zero rows that matches the specs.

    Args:
        spec_structure: Structure of `tf.TensorSpec`, `tf.RaggedTensorSpec` or `tf.SparseTensorSpec`.

    Returns:
        Structure of tensors whose first dimension is 0 and whose unknown dimensions are 0.
    """
    return tf.nest.map_structure(lambda spec: _filled(spec, 0), spec_structure)


def one_row_of_zeros(structure):
    """Returns a batch of one row of zeros shaped like the rows of `structure`; ragged dimensions have one element."""

    def row(value):
        if isinstance(value, tf.SparseTensor):
            indices = tf.zeros([0, value.shape.rank], tf.int64)
            return tf.SparseTensor(
                indices, row(value.values)[:0], tf.concat([[1], value.dense_shape[1:]], axis=0)
            )
        if isinstance(value, tf.RaggedTensor):
            splits = [tf.constant([0, 1], value.row_splits.dtype)] * value.ragged_rank
            return tf.RaggedTensor.from_nested_row_splits(row(value.flat_values), splits)
        shape = tf.concat([[1], tf.shape(value)[1:]], axis=0)
        return tf.zeros(shape, value.dtype) if value.dtype != tf.string else tf.fill(shape, "")

    return tf.nest.map_structure(row, structure)


def _filled(spec, rows):
    if isinstance(spec, tf.RaggedTensorSpec):
        flat = tf.zeros(
            [0] + [d or 0 for d in (spec.flat_values_spec.shape if spec.flat_values_spec else [])[1:]]
            if spec.flat_values_spec
            else [0],
            spec.dtype,
        )
        splits = tf.zeros([1], spec.row_splits_dtype)
        return tf.RaggedTensor.from_nested_row_splits(flat, [splits] * spec.ragged_rank)
    shape = [rows] + [dimension or 0 for dimension in (spec.shape.as_list() if spec.shape.rank else [])[1:]]
    if isinstance(spec, tf.SparseTensorSpec):
        return tf.SparseTensor(tf.zeros([0, len(shape)], tf.int64), tf.zeros([0], spec.dtype), shape)
    return tf.fill(shape, "") if spec.dtype == tf.string else tf.zeros(shape, spec.dtype)


def with_unknown_rows(spec_structure):
    """Returns the specs with the batch dimension unknown, as batches of differing sizes need it."""

    def relax(spec):
        if isinstance(spec, tf.TensorSpec) and spec.shape.rank:
            return tf.TensorSpec([None, *spec.shape[1:]], spec.dtype, spec.name)
        if isinstance(spec, tf.RaggedTensorSpec) and spec.shape.rank:
            return tf.RaggedTensorSpec(
                [None, *spec.shape[1:]], spec.dtype, spec.ragged_rank, spec.row_splits_dtype
            )
        if isinstance(spec, tf.SparseTensorSpec) and spec.shape.rank:
            return tf.SparseTensorSpec([None, *spec.shape[1:]], spec.dtype)
        return spec

    return tf.nest.map_structure(relax, spec_structure)
