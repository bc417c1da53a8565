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
from tfdist_ext.data.exchanging_pipeline import ExchangingPipeline, endless, plain
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
    require_batched(dataset)
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
        batch = unwrapped(batch, local.element_spec)
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


def require_batched(dataset) -> None:
    """Refuses a dataset whose elements are single rows."""
    for spec in tf.nest.flatten(dataset.element_spec):
        if isinstance(spec, tf.TensorSpec) and spec.shape.rank == 0:
            raise ValueError(
                "A dataset must be batched before it is distributed; an element has a scalar component "
                f"({spec}). Call `dataset.batch(global_batch_size)` first."
            )


def unwrapped(batch, spec):
    """Returns a batch out of the arguments that a function of `map` got."""
    return batch[0] if len(batch) == 1 and not isinstance(spec, tuple) else batch
