"""One input pipeline for each replica: every function call sees its own replica, and no row is lost."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.multi_worker.agreement import linear_model, make_strategy
from tests.single_host import oracle

PER_REPLICA = tf.distribute.InputOptions(
    experimental_replication_mode=tf.distribute.InputReplicationMode.PER_REPLICA,
    experimental_fetch_to_device=False,
    experimental_place_dataset_on_device=True,
)


def rows_of_pipeline(context):
    """Replica r has the rows 100 r, 100 r + 1, ... up to 2 + r of them, two a batch."""
    first = 100 * context.input_pipeline_id
    return tf.data.Dataset.range(first, first + 2 + context.input_pipeline_id).batch(2)


def read(strategy):
    contexts = []

    def make_dataset(context):
        contexts.append(
            (context.input_pipeline_id, context.num_input_pipelines, context.num_replicas_in_sync)
        )
        return rows_of_pipeline(context)

    distributed = strategy.distribute_datasets_from_function(make_dataset, PER_REPLICA)
    steps = [
        [part.numpy().tolist() for part in strategy.experimental_local_results(batch)]
        for batch in distributed
    ]
    return contexts, steps, [int(distributed.cardinality)]


def read_on_a_worker():
    return read(make_strategy())


def test_I10_each_replica_of_one_host_sees_its_own_id():
    # TF#43832. Replica 1 has three rows, so it has a second batch; replica 0 takes part without rows.
    contexts, steps, cardinality = read(oracle.mirrored(2))
    assert contexts == [(0, 2, 2), (1, 2, 2)]
    assert steps == [[[0, 1], [100, 101]], [[], [102]]]
    assert cardinality == [2]


def test_I10_ids_are_those_of_the_sync_group_on_several_workers(worker_pool):
    first, second = worker_pool.run(read_on_a_worker, num_workers=2, devices=2)
    # Slot = local replica * number of workers + worker: worker 0 has the replicas 0 and 2.
    assert first[0] == [(0, 4, 4), (2, 4, 4)] and second[0] == [(1, 4, 4), (3, 4, 4)]
    # Replica 3 has five rows: three steps, in which the others run out one after another.
    assert first[1] == [[[0, 1], [200, 201]], [[], [202, 203]], [[], []]]
    assert second[1] == [[[100, 101], [300, 301]], [[102], [302, 303]], [[], [304]]]


def test_fit_reads_one_pipeline_for_each_replica():
    def make_dataset(context):
        # Replica r reads one batch of r + 1 rows, and the label 3 (r + 1).
        count = context.input_pipeline_id + 1
        labels = np.full((count, 1), 3.0 * count, "float32")
        return tf.data.Dataset.from_tensors((np.ones((count, 1), "float32"), labels))

    strategy = oracle.mirrored(2)
    model = linear_model(strategy, lambda: keras.optimizers.SGD(0.5))
    model.fit(strategy.distribute_datasets_from_function(make_dataset, PER_REPLICA), verbose=0)
    # From 0, a step of rate 1/2 on mse goes to the mean of the labels 3, 6, 6.
    np.testing.assert_allclose(model.get_weights()[0], [[5.0]], rtol=1e-6)


def test_a_dataset_cannot_have_one_pipeline_for_each_replica():
    strategy = oracle.mirrored(2)
    with pytest.raises(NotImplementedError, match="distribute_datasets_from_function"):
        strategy.experimental_distribute_dataset(tf.data.Dataset.range(4).batch(2), PER_REPLICA)


def test_replicas_with_other_elements_are_named():
    def make_dataset(context):
        values = np.arange(4, dtype="int64" if context.input_pipeline_id else "float32")
        return tf.data.Dataset.from_tensor_slices(values).batch(2)

    with pytest.raises(ValueError, match="for replica 0 and .* for replica 1"):
        oracle.mirrored(2).distribute_datasets_from_function(make_dataset, PER_REPLICA)
