"""How is what a user's function returns for each worker, or for each replica, distributed?"""

from __future__ import annotations

import tensorflow as tf

from tfdist_ext import compat
from tfdist_ext.data import batches, sharding_policy
from tfdist_ext.data.distributed_dataset import DistributedDataset, OpenLocal, require_batched, unwrapped
from tfdist_ext.data.exchanging_pipeline import as_spec, plain


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
        return _rows_counted([unwrapped(batch, dataset.element_spec)], extended)

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
        return True, as_spec(unwrapped(batch, spec), spec)

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
    require_batched(dataset)
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
        return as_spec(unwrapped(batch, spec), spec)

    padded = window.map(relax).concatenate(empty.map(relax).repeat(index + 1))
    return padded.skip(index).take(1).get_single_element()
