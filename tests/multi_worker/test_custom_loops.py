"""Do training loops that people write by hand give the one-device answer on several workers?"""

import keras
import numpy as np
import tensorflow as tf

from tests.multi_worker.agreement import assert_identical, linear_model, make_strategy, pairs


def loop_over_batches():
    strategy = make_strategy()
    with strategy.scope():
        kernel = keras.Variable(np.zeros((1, 1), "float32"), name="kernel")
        optimizer = keras.optimizers.SGD(1.0)
        optimizer.build([kernel])
        metric = keras.metrics.Mean()
    loss_object = keras.losses.MeanSquaredError()

    def step(batch):
        x, y = batch
        with tf.GradientTape() as tape:
            loss = loss_object(y, tf.matmul(x, kernel))
        optimizer.apply_gradients(zip(tape.gradient(loss, [kernel.value]), [kernel], strict=True))
        metric.update_state(y)
        return loss

    @tf.function
    def run(batch):
        return strategy.reduce(tf.distribute.ReduceOp.SUM, strategy.run(step, args=(batch,)), axis=None)

    # As S2: batches [3, 3, 3, 3] and [9], so that in the second all replicas but one are empty.
    losses = [
        float(run(batch)) for batch in strategy.experimental_distribute_dataset(pairs([3, 3, 3, 3, 9], 4))
    ]
    return {
        "kernel": kernel.numpy().item(),
        "iterations": int(optimizer.iterations),
        "losses": losses,
        "mean": float(metric.result()),
        "traces": run.experimental_get_tracing_count(),
    }


def test_loop_with_run_and_reduce(worker_pool):
    for num_workers, devices in [(2, 2), (3, 1)]:
        results = worker_pool.run(loop_over_batches, num_workers=num_workers, devices=devices)
        assert_identical(results)
        result = results[0]
        # w = 0 + 2 * 3 = 6, then 6 + 2 * (9 - 6) = 12. Losses before each update: 3**2 and (9 - 6)**2.
        assert (result["kernel"], result["iterations"]) == (12.0, 2)
        assert result["losses"] == [9.0, 9.0]
        assert result["mean"] == np.float32(21 / 5)
        assert result["traces"] <= 2


def reductions():
    strategy = make_strategy()

    def number():
        # Replica ids of tf.distribute count worker by worker: 0 and 1 on the first, 2 and 3 on the second.
        return tf.cast(tf.distribute.get_replica_context().replica_id_in_sync_group, tf.float32) + 1.0

    def rows():
        return tf.fill([1 + tf.cast(number(), tf.int32), 2], number())

    def sum_in_replica():
        return tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, number())

    @tf.function
    def gathered_columns():
        column = strategy.run(lambda: tf.reshape(number(), [1, 1]))
        return strategy.gather(column, axis=1)

    per_replica, unequal = strategy.run(number), strategy.run(rows)
    sums = strategy.experimental_local_results(strategy.run(sum_in_replica))
    return {
        "sum": float(strategy.reduce("SUM", per_replica, axis=None)),
        "mean": float(strategy.reduce("MEAN", per_replica, axis=None)),
        "mean_over_rows": strategy.reduce("MEAN", unequal, axis=0).numpy().tolist(),
        "integers": int(strategy.reduce("SUM", strategy.run(lambda: tf.constant(3, tf.int32)), axis=None)),
        "gathered": strategy.gather(unequal, axis=0).numpy()[:, 0].tolist(),
        "gathered_columns": gathered_columns().numpy().tolist(),
        "sum_in_replica": [float(value) for value in sums],
    }


def test_reduce_and_gather(worker_pool):
    results = worker_pool.run(reductions, devices=2)
    assert_identical(results)
    # Replica r holds the number r + 1, and r + 2 rows of it: 14 rows, whose sum is 1*2 + 2*3 + 3*4 + 4*5 = 40.
    assert results[0] == {
        "sum": 10.0,
        "mean": 2.5,
        "mean_over_rows": [float(np.float32(40 / 14))] * 2,
        "integers": 12,
        "gathered": [1] * 2 + [2] * 3 + [3] * 4 + [4] * 5,
        "gathered_columns": [[1, 2, 3, 4]],
        "sum_in_replica": [10.0, 10.0],
    }


def train_on_datasets_from_function(rows_of_worker):
    """Each worker makes its own input; the elements are one replica's batches."""
    strategy = make_strategy()
    seen = []

    def make_dataset(context):
        seen.append([context.num_input_pipelines, context.input_pipeline_id, context.num_replicas_in_sync])
        seen.append(context.get_per_replica_batch_size(4))
        return pairs(rows_of_worker[context.input_pipeline_id], 2)

    dataset = strategy.distribute_datasets_from_function(make_dataset)
    model = linear_model(strategy)
    history = model.fit(dataset, verbose=0).history
    return {
        "w": model.get_weights()[0].item(),
        "loss": history["loss"],
        "sharding": dataset.sharding.policy,
    }, seen


def test_M6_datasets_from_function_of_unequal_length(worker_pool):
    # TF#37112. Worker 0 has two batches and worker 1 has one. Step 1 averages all four rows: w = 0 + 2 * 3 = 6.
    # Step 2 has the rows of worker 0 alone: w = 6 + 2 * (8 - 6) = 10. Squared errors before the updates:
    # 1, 9, 4, 36 and then 1, 9, over six rows.
    results = worker_pool.run(train_on_datasets_from_function, rows_of_worker=[[1, 3, 7, 9], [2, 6]])
    assert_identical([result for result, _ in results])
    assert results[0][0] == {"w": 10.0, "loss": [10.0], "sharding": "FUNCTION"}
    for rank, (_, seen) in enumerate(results):
        assert seen == [[2, rank, 2], 2]
