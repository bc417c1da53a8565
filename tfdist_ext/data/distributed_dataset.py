"""What does one worker read, and how does it come out as a distributed batch?

The local pipeline yields `(sub-batches of the local slots, rows of every slot and the digest)`. With several workers an
exchange one batch ahead tells everybody who still has data and how many rows each slot holds: a worker that
has run out goes on with empty sub-batches until the last one ends.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable

import numpy as np
import tensorflow as tf

from tfdist_ext import compat
from tfdist_ext.data import batches, seeding, sharding_policy
from tfdist_ext.data.distributed_iterator import DistributedIterator
from tfdist_ext.data.exchanging_pipeline import ExchangingPipeline, as_spec, endless, plain
from tfdist_ext.data.slot_values import PerSlotSpec


@dataclasses.dataclass(frozen=True)
class OpenLocal:
    """How this worker opens a pass over its part of the data.

    Attributes:
        open_pass: Function of the pass number that returns the local pipeline.
        same_each_pass: True where the pipeline of the first pass serves all later ones.
        exchanges: True where workers must tell each other batch by batch who still has data.
    """

    open_pass: Callable
    same_each_pass: bool = True
    exchanges: bool = True

    def __call__(self, number: int):
        """Returns the local pipeline of a pass."""
        return self.open_pass(number)


class DistributedDataset(compat.DistributedDataset):
    """The dataset of one worker, distributed over its replicas.

    Iterating it opens a new pass over the data. `sharding` says what was decided and why.

    Attributes:
        sharding: `sharding_policy.Sharding`, how rows are divided over workers.
    """

    def __init__(self, strategy, open_local, sharding, batch_spec, cardinality, plain=None):
        self._strategy = strategy
        self._open_local = open_local
        self._plain = plain
        self._batch_spec = batch_spec
        self._cardinality = cardinality
        self._passes = itertools.count()
        self._local = None
        self._pipelines: list[ExchangingPipeline] = []
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
                "`iter`, `enumerate` and `zip` of a distributed dataset do not work inside a tf.function. Write `for "
                "batch in dataset`, or open the iterator outside of the function and pass it in."
            )
        if self._plain is not None:
            return iter(self._plain)
        if not self._open_local.exchanges:
            return self._wrap(iter(self._local_pipeline()))
        return self._pipeline().open(self._strategy.next_input_number(), self._wrap)

    def reduce(self, initial_state, reduce_func):
        """Walks one pass of the dataset inside a tf.function: what AutoGraph makes of `for batch in dataset`.

        Args:
            initial_state: Structure of tensors.
            reduce_func: Function of the state and a distributed batch that returns the next state.

        Returns:
            The state after the last batch.

        Raises:
            RuntimeError: The workers must tell each other batch by batch who has data, or each pass has an order of
                its own: such a pass is opened outside of the function.
        """
        if self._plain is not None:
            iterator, batch_of = iter(self._plain), lambda element: element
        elif self._open_local.exchanges or not self._open_local.same_each_pass:
            raise RuntimeError(
                "This distributed dataset cannot be walked inside a tf.function: its length is not known to all, "
                "or each pass has another order. Open its iterator outside of the function and pass it in."
            )
        else:
            iterator = iter(self._local_pipeline())
            batch_of = self._wrap(iterator).packed

        def has_value(optional, state):
            return optional.has_value()

        def advance(optional, state):
            state = reduce_func(state, batch_of(optional.get_value()))
            return iterator.get_next_as_optional(), state

        loop_variables = (iterator.get_next_as_optional(), initial_state)
        return tf.while_loop(has_value, advance, loop_variables, parallel_iterations=1)[1]

    def _wrap(self, iterator):
        return DistributedIterator(self._strategy, iterator)

    def _local_pipeline(self) -> tf.data.Dataset:
        if not self._open_local.same_each_pass:
            return self._open_local(next(self._passes)).prefetch(2)
        self._local = self._local or self._open_local(0).prefetch(2)
        return self._local

    def _pipeline(self) -> ExchangingPipeline:
        """Returns a pipeline that nobody reads: an earlier one where it serves all passes, or a new one."""
        extended = self._strategy.extended
        if not self._open_local.same_each_pass:
            return ExchangingPipeline(endless(self._open_local(next(self._passes)), extended), extended)
        for pipeline in self._pipelines:
            if pipeline.is_free:
                return pipeline
        # All pipelines share one dataset, so that the order of a pass depends on how many were opened before, and
        # not on which pipeline happened to be free.
        self._local = self._local or endless(self._open_local(0), extended)
        self._pipelines.append(ExchangingPipeline(self._local, extended))
        return self._pipelines[-1]


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
        return DistributedDataset(strategy, None, sharding, dataset.element_spec, cardinality, plain=dataset)
    if sharding.by_rows:
        slots, total = extended.local_slots, num_slots
        reopen, same_each_pass = seeding.agreed_order(local, extended)
    else:
        slots, total = tuple(range(len(extended.local_slots))), len(extended.local_slots)
        local = sharding_policy.split_batches(local, extended.num_workers)
        cardinality = tf.data.UNKNOWN_CARDINALITY
        reopen, same_each_pass = (lambda _: local), True
    known = batches.static_num_rows(local.element_spec)

    @plain
    def split(*batch):
        batch = _unwrapped(batch, local.element_spec)
        parts, counts = batches.split_over_slots(batch, slots, total, known)
        if total != num_slots:
            counts = tf.tensor_scatter_nd_update(
                tf.zeros([num_slots], tf.int64), [[s] for s in extended.local_slots], counts
            )
        seen = (
            batches.digest(batch) if sharding.by_rows and extended.num_workers > 1 else tf.zeros([], tf.int64)
        )
        return parts, tf.concat([counts, [seen]], axis=0)

    def open_local(index):
        return reopen(index).map(split, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)

    spec = batches.with_unknown_rows(local.element_spec)
    exchanges = not (sharding.by_rows and _all_know_the_end(cardinality, extended))
    opening = OpenLocal(open_local, same_each_pass, exchanges)
    return DistributedDataset(strategy, opening, sharding, spec, cardinality)


def _all_know_the_end(cardinality: int, extended) -> bool:
    """Returns True where the workers walk datasets of one known length: they then end together by themselves.

    The rows of each batch are counted on every worker alike; the step checks that the counts add up.
    """
    if extended.num_workers == 1:
        return True
    lengths = extended.process_group.all_gather(np.array([cardinality], np.int64), name="input/cardinality")
    return cardinality != tf.data.UNKNOWN_CARDINALITY and all(int(n[0]) == cardinality for n in lengths)


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
    dataset = _made_by(dataset_fn, context)
    sharding = sharding_policy.Sharding("FUNCTION", "each worker reads what the function returned for it")
    if strategy.num_replicas_in_sync == 1:
        return DistributedDataset(
            strategy,
            None,
            sharding,
            dataset.element_spec,
            int(dataset.cardinality()),
            plain=dataset,
        )
    num_local = len(extended.local_slots)
    spec = batches.with_unknown_rows(dataset.element_spec)

    @plain
    def group_elements(*window):
        return _rows_counted([_element_or_empty(window, i, spec) for i in range(num_local)], extended)

    @plain
    def single(*batch):
        return _rows_counted([_unwrapped(batch, dataset.element_spec)], extended)

    def open_pass(_):
        if num_local == 1:
            return dataset.map(single)
        return dataset.window(num_local).map(group_elements)

    cardinality = int(dataset.cardinality())
    if cardinality >= 0:
        cardinality = (
            -(-cardinality // num_local) if extended.num_workers == 1 else tf.data.UNKNOWN_CARDINALITY
        )
    opening = OpenLocal(open_pass, exchanges=extended.num_workers > 1)
    return DistributedDataset(strategy, opening, sharding, spec, cardinality)


def from_function_of_replicas(dataset_fn, strategy) -> DistributedDataset:
    """Distributes what `dataset_fn(context)` returns for each replica; replicas may have unequal amounts of data.

    Runs on: every worker.

    Args:
        dataset_fn: Function of a `tf.distribute.InputContext`, whose `input_pipeline_id` is the replica's id in the
            sync group. Returns a dataset batched to the size of one replica's batch.
        strategy: The strategy.

    Returns:
        A `DistributedDataset`. It ends when the last replica's dataset does; the others go on without rows.

    Raises:
        ValueError: The replicas' datasets have elements of different structure.
    """
    extended = strategy.extended
    num_replicas = strategy.num_replicas_in_sync
    datasets = [
        _made_by(dataset_fn, compat.InputContext(num_replicas, slot, num_replicas))
        for slot in extended.local_slots
    ]
    spec = batches.with_unknown_rows(datasets[0].element_spec)
    for slot, dataset in zip(extended.local_slots, datasets, strict=True):
        if batches.with_unknown_rows(dataset.element_spec) != spec:
            raise ValueError(
                "Argument `dataset_fn` must return datasets of one structure for all replicas; it returned "
                f"{datasets[0].element_spec} for replica {extended.local_slots[0]} and {dataset.element_spec} for "
                f"replica {slot}."
            )

    @plain
    def mark(*batch):
        return True, as_spec(_unwrapped(batch, spec), spec)

    @plain
    def nothing(_):
        return False, as_spec(batches.empty_batch(spec), spec)

    @plain
    def anyone_has_data(*marked):
        return tf.reduce_any([has_data for has_data, _ in marked])

    @plain
    def join(*marked):
        return _rows_counted([part for _, part in marked], extended)

    def open_pass(_):
        without_end = [
            dataset.map(mark).concatenate(tf.data.Dataset.from_tensors(0).repeat().map(nothing))
            for dataset in datasets
        ]
        return tf.data.Dataset.zip(tuple(without_end)).take_while(anyone_has_data).map(join)

    sharding = sharding_policy.Sharding("FUNCTION", "each replica reads what the function returned for it")
    cardinality = max(int(dataset.cardinality()) for dataset in datasets)
    if extended.num_workers > 1 or any(dataset.cardinality() < 0 for dataset in datasets):
        cardinality = tf.data.UNKNOWN_CARDINALITY
    opening = OpenLocal(open_pass, exchanges=extended.num_workers > 1)
    return DistributedDataset(strategy, opening, sharding, spec, cardinality)


def _made_by(dataset_fn, context) -> tf.data.Dataset:
    dataset = dataset_fn(context)
    if not isinstance(dataset, tf.data.Dataset):
        raise ValueError(
            f"Argument `dataset_fn` must return a tf.data.Dataset; it returned {type(dataset).__name__}."
        )
    _require_batched(dataset)
    return dataset


def _rows_counted(parts, extended):
    """Returns the sub-batches of the local slots, and the rows of every slot: 0 where another worker knows."""
    counts = tf.stack([batches.num_rows(part) for part in parts])
    slots = [[slot] for slot in extended.local_slots]
    num_slots = len(extended.local_slots) * extended.num_workers
    # The digest of a batch that no worker sees whole is 0.
    return tuple(parts), tf.tensor_scatter_nd_update(tf.zeros([num_slots + 1], tf.int64), slots, counts)


def _element_or_empty(window, index, spec):
    """Returns element `index` of a window, or an empty batch where the window is short."""
    window = window[0] if len(window) == 1 else tf.nest.pack_sequence_as(spec, tf.nest.flatten(window))
    if not isinstance(window, tf.data.Dataset):
        window = tf.data.Dataset.zip(window)
    empty = tf.data.Dataset.from_tensors(batches.empty_batch(spec))

    @plain
    def relax(*batch):
        return as_spec(_unwrapped(batch, spec), spec)

    padded = window.map(relax).concatenate(empty.map(relax).repeat(index + 1))
    return padded.skip(index).take(1).get_single_element()


def _unwrapped(batch, spec):
    return batch[0] if len(batch) == 1 and not isinstance(spec, tuple) else batch
