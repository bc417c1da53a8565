"""What does one worker read, and how does it come out as a distributed batch?

The local pipeline yields `(sub-batches of the local slots, rows of every slot)`. With several workers an
exchange one batch ahead tells everybody who still has data and how many rows each slot holds: a worker that
has run out goes on with empty sub-batches until the last one ends.
"""

from __future__ import annotations

import itertools
import weakref

import numpy as np
import tensorflow as tf

from tfdist_ext import compat
from tfdist_ext.data import batches, seeding, sharding_policy
from tfdist_ext.data.slot_values import PerSlot, PerSlotSpec

# AutoGraph has nothing to do in our own functions, and says so at length.
_plain = tf.autograph.experimental.do_not_convert


class DistributedDataset(tf.distribute.DistributedDataset):
    """The dataset of one worker, distributed over its replicas.

    Iterating it opens a new pass over the data. `sharding` says what was decided and why.

    Attributes:
        sharding: `sharding_policy.Sharding`, how rows are divided over workers.
        element_spec: Structure of specs of one distributed batch.
        cardinality: Number of global batches, or tf.data's INFINITE (-1) and UNKNOWN (-2).
    """

    def __init__(self, strategy, open_local, sharding, batch_spec, cardinality, plain=None):
        self._strategy = strategy
        self._open_local = open_local
        self._plain = plain
        self._batch_spec = batch_spec
        self._cardinality = cardinality
        self._passes = itertools.count()
        self.sharding = sharding

    @property
    def element_spec(self):
        """Specs of a batch; distributed components are `PerSlotSpec`."""
        if self._plain is not None:
            return self._batch_spec
        extended = self._strategy.extended
        rows = tf.TensorSpec([self._strategy.num_replicas_in_sync], tf.int64)
        locals_ = len(extended.worker_devices)
        return tf.nest.map_structure(lambda spec: PerSlotSpec([spec] * locals_, rows), self._batch_spec)

    @property
    def batch_spec(self):
        """Structure of specs of what one replica gets."""
        return self._batch_spec

    @property
    def cardinality(self):
        """Number of global batches, or tf.data's INFINITE (-1) and UNKNOWN (-2)."""
        return self._cardinality

    def __iter__(self):
        if not tf.executing_eagerly():
            raise RuntimeError(
                "Open the iterator of a distributed dataset outside of tf.function, then pass it in."
            )
        index = next(self._passes)
        if self._plain is not None:
            return iter(self._plain(index))
        local = self._open_local(index)
        group = self._strategy.extended.process_group
        stream = None
        if group is not None and group.size > 1:
            stream = f"input/{self._strategy.next_input_number()}"
            local = _with_exchange(local, self._strategy.extended, stream)
        local = local.prefetch(2)
        iterator = DistributedIterator(self._strategy, iter(local))
        if stream is not None:
            weakref.finalize(iterator, group.abandon, stream)
        return iterator


def _with_exchange(local, extended, stream):
    """Adds who-has-data to each element, and goes on until no worker has any."""
    (parts_spec, _) = local.element_spec
    parts_spec = batches.with_unknown_rows(parts_spec)
    num_local, num_workers = len(extended.worker_devices), extended.num_workers

    def exchange(has_data, rows):
        record = np.concatenate([[has_data], rows]).astype(np.int64)
        gathered = extended.exchange_input(stream, record)
        if gathered is None:
            return np.bool_(False), np.zeros(num_local * num_workers, np.int64)
        # Slot = local replica * number of workers + worker.
        by_slot = np.stack([record[1:] for record in gathered], axis=1).reshape(-1)
        return np.bool_(any(record[0] for record in gathered)), by_slot

    @_plain
    def exchanged(has_data, parts, rows):
        own = tf.gather(rows, list(extended.local_slots)) * tf.cast(has_data, tf.int64)
        anyone, all_rows = tf.numpy_function(exchange, [has_data, own], [tf.bool, tf.int64])
        all_rows.set_shape([num_local * num_workers])
        anyone.set_shape([])
        return anyone, parts, all_rows

    empty = tuple(batches.empty_batch(spec) for spec in parts_spec)
    no_rows = tf.zeros([num_local * num_workers], tf.int64)

    @_plain
    def mark(parts, rows):
        return True, _as_spec(parts, parts_spec), rows

    @_plain
    def nothing(_):
        return False, _as_spec(empty, parts_spec), no_rows

    with_data = local.map(mark)
    ended = tf.data.Dataset.from_tensors(0).repeat().map(nothing)
    # One exchange at a time: they are matched across workers by their order.
    all_elements = with_data.concatenate(ended).map(exchanged, num_parallel_calls=None)

    @_plain
    def anyone_has_data(anyone, parts, rows):
        return anyone

    @_plain
    def without_flag(anyone, parts, rows):
        return parts, rows

    return all_elements.take_while(anyone_has_data).map(without_flag)


def _as_spec(parts, specs):
    """Forgets static row counts, so that the batches of data and the empty ones are of one type."""

    def relax(value, spec):
        if isinstance(value, tf.Tensor):
            return tf.compat.v1.placeholder_with_default(value, spec.shape)
        return value

    return tf.nest.map_structure(relax, parts, specs)


class DistributedIterator(tf.distribute.DistributedIterator, compat.CompositeTensor):
    """Iterator over distributed batches; may be passed into a tf.function."""

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
        return tf.nest.map_structure(lambda *specs: PerSlotSpec(specs, rows), *parts)

    def _packed(self, element):
        parts, rows = element
        return tf.nest.map_structure(lambda *values: PerSlot(values, rows), *parts)

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
        return self._packed(self._iterator.get_next())

    def get_next_as_optional(self):
        """Returns the next distributed batch as an Optional, empty at the end."""
        optional = self._iterator.get_next_as_optional()
        return tf.cond(
            optional.has_value(),
            lambda: tf.experimental.Optional.from_value(self._packed(optional.get_value())),
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


def from_global_dataset(dataset, strategy) -> DistributedDataset:
    """Distributes a dataset of global batches.

    Runs on: every worker, with the same dataset.

    Args:
        dataset: `tf.data.Dataset` batched to the global batch size. Its option
            `experimental_distribute.auto_shard_policy` chooses how rows are divided (see `sharding_policy`).
        strategy: The strategy.

    Returns:
        A `DistributedDataset`.

    Raises:
        ValueError: The dataset is not batched, or its files cannot be divided as asked.
    """
    if not isinstance(dataset, tf.data.Dataset):
        raise ValueError(f"Argument `dataset` must be a tf.data.Dataset; received {type(dataset).__name__}.")
    extended = strategy.extended
    _require_batched(dataset)
    sharding, local = sharding_policy.decide(dataset, extended)
    cardinality = int(dataset.cardinality())
    num_slots = strategy.num_replicas_in_sync
    if num_slots == 1:
        return DistributedDataset(
            strategy, None, sharding, dataset.element_spec, cardinality, plain=lambda _: dataset
        )
    if sharding.by_rows:
        slots, total = extended.local_slots, num_slots
        reopen = seeding.agreed_order(local, extended)
    else:
        slots, total = tuple(range(len(extended.local_slots))), len(extended.local_slots)
        local = sharding_policy.split_batches(local, extended.num_workers)
        cardinality = tf.data.UNKNOWN_CARDINALITY
        reopen = lambda _: local  # noqa: E731
    known = batches.static_num_rows(local.element_spec)

    @_plain
    def split(*batch):
        batch = _unwrapped(batch, local.element_spec)
        parts, counts = batches.split_over_slots(batch, slots, total, known)
        if total != num_slots:
            counts = tf.tensor_scatter_nd_update(
                tf.zeros([num_slots], tf.int64), [[s] for s in extended.local_slots], counts
            )
        return parts, counts

    def open_local(index):
        return reopen(index).map(split, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)

    spec = _spec_of_first_part(local, split)
    return DistributedDataset(strategy, open_local, sharding, spec, cardinality)


def _spec_of_first_part(local, split):
    parts_spec, _ = local.map(split).element_spec
    return (
        batches.with_unknown_rows(parts_spec[0]) if len({str(p) for p in parts_spec}) > 1 else parts_spec[0]
    )


def _require_batched(dataset) -> None:
    for spec in tf.nest.flatten(dataset.element_spec):
        if isinstance(spec, tf.TensorSpec) and spec.shape.rank == 0:
            raise ValueError(
                "A dataset must be batched before it is distributed; an element has a scalar component "
                f"({spec}). Call `dataset.batch(global_batch_size)` first."
            )


def from_function(dataset_fn, strategy) -> DistributedDataset:
    """Distributes what `dataset_fn(context)` returns on each worker.

    Runs on: every worker.

    Args:
        dataset_fn: Function of a `tf.distribute.InputContext`. Returns a dataset batched to the size of *one
            replica's* batch; each replica takes the next element.
        strategy: The strategy.

    Returns:
        A `DistributedDataset`.
    """
    extended = strategy.extended
    context = compat.InputContext(extended.num_workers, extended.worker_index, strategy.num_replicas_in_sync)
    dataset = dataset_fn(context)
    if not isinstance(dataset, tf.data.Dataset):
        raise ValueError(
            f"Argument `dataset_fn` must return a tf.data.Dataset; it returned {type(dataset).__name__}."
        )
    _require_batched(dataset)
    sharding = sharding_policy.Sharding("FUNCTION", "each worker reads what the function returned for it")
    if strategy.num_replicas_in_sync == 1:
        return DistributedDataset(
            strategy,
            None,
            sharding,
            dataset.element_spec,
            int(dataset.cardinality()),
            plain=lambda _: dataset,
        )
    num_local = len(extended.local_slots)
    spec = batches.with_unknown_rows(dataset.element_spec)

    @_plain
    def group_elements(*window):
        parts = [_element_or_empty(window, i, spec) for i in range(num_local)]
        counts = tf.stack([batches.num_rows(part) for part in parts])
        slots = [[slot] for slot in extended.local_slots]
        zeros = tf.zeros([strategy.num_replicas_in_sync], tf.int64)
        return tuple(parts), tf.tensor_scatter_nd_update(zeros, slots, counts)

    @_plain
    def single(*batch):
        batch = _unwrapped(batch, dataset.element_spec)
        counts = tf.tensor_scatter_nd_update(
            tf.zeros([strategy.num_replicas_in_sync], tf.int64),
            [[extended.local_slots[0]]],
            [batches.num_rows(batch)],
        )
        return (batch,), counts

    def open_local(_):
        if num_local == 1:
            return dataset.map(single)
        return dataset.window(num_local).map(group_elements)

    cardinality = int(dataset.cardinality())
    if cardinality >= 0:
        cardinality = (
            -(-cardinality // num_local) if extended.num_workers == 1 else tf.data.UNKNOWN_CARDINALITY
        )
    return DistributedDataset(strategy, open_local, sharding, spec, cardinality)


def _element_or_empty(window, index, spec):
    """Returns element `index` of a window, or an empty batch where the window is short."""
    window = window[0] if len(window) == 1 else tf.nest.pack_sequence_as(spec, tf.nest.flatten(window))
    if not isinstance(window, tf.data.Dataset):
        window = tf.data.Dataset.zip(window)
    empty = tf.data.Dataset.from_tensors(batches.empty_batch(spec))

    @_plain
    def relax(*batch):
        return _as_spec(_unwrapped(batch, spec), spec)

    padded = window.map(relax).concatenate(empty.map(relax).repeat(index + 1))
    return padded.skip(index).take(1).get_single_element()


def _unwrapped(batch, spec):
    return batch[0] if len(batch) == 1 and not isinstance(spec, tuple) else batch
