"""Do workers read the same rows in the same order, or hear that they do not? F8 and programs of its kind."""

import random

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.multi_worker.agreement import linear_model, make_strategy

ROWS = list(range(64))


def slowly(rank):
    """Returns the identity, which takes longer for some rows than for others, and for others on each worker."""

    def identity(row):
        size = ((row * 7 + rank * 3) % 5) * 60 + 1
        work = tf.reduce_sum(tf.matmul(tf.ones([size, size]), tf.ones([size, size])))
        return row + tf.cast(0 * work, tf.int64)

    return identity


def parallel(dataset, rank, **arguments):
    return dataset.map(slowly(rank), num_parallel_calls=8, **arguments)


def of_option(rank):
    options = tf.data.Options()
    options.deterministic = False
    return parallel(tf.data.Dataset.range(64), rank).with_options(options)


def block(rank, **arguments):
    return lambda index: parallel(tf.data.Dataset.range(index * 8, index * 8 + 8), rank, **arguments)


PIPELINES = {
    "map": lambda rank: parallel(tf.data.Dataset.range(64), rank, deterministic=False),
    "option": of_option,
    "interleave": lambda rank: tf.data.Dataset.range(8).interleave(
        block(rank), cycle_length=4, num_parallel_calls=4, deterministic=False
    ),
    "sloppy interleave": lambda rank: tf.data.Dataset.range(8).apply(
        tf.data.experimental.parallel_interleave(block(rank), cycle_length=4, sloppy=True)
    ),
    "unseeded shuffle before": lambda rank: parallel(
        tf.data.Dataset.range(64).shuffle(64), rank, deterministic=False
    ),
    "in a function": lambda rank: tf.data.Dataset.range(8).flat_map(block(rank, deterministic=False)),
    "batches in parallel": lambda rank: parallel(
        tf.data.Dataset.range(64).batch(2, num_parallel_calls=4, deterministic=False).unbatch(),
        rank,
        deterministic=False,
    ),
    "unknown length": lambda rank: parallel(tf.data.Dataset.range(64), rank, deterministic=False).filter(
        lambda row: row >= 0
    ),
}


def rows_read():
    strategy = make_strategy()
    rank = strategy.extended.worker_index
    return {
        name: [
            int(row)
            for batch in strategy.experimental_distribute_dataset(make(rank).batch(4))
            for row in strategy.experimental_local_results(batch)[0].numpy()
        ]
        for name, make in PIPELINES.items()
    }


def test_f8_each_row_once_though_the_pipeline_keeps_no_order(worker_pool):
    results = worker_pool.run(rows_read, num_workers=2)
    for name in PIPELINES:
        assert sorted(results[0][name] + results[1][name]) == ROWS, name
        assert len(results[0][name]) == 32


def own_order(rank):
    rows = list(ROWS)
    random.Random(rank).shuffle(rows)
    return np.array(rows, "float32")[:, None]


def generated(rank):
    signature = (tf.TensorSpec([1], tf.float32),) * 2
    rows = own_order(rank)
    return tf.data.Dataset.from_generator(lambda: zip(rows, rows, strict=True), output_signature=signature)


SOURCES = {
    "a generator that shuffles": lambda model, rank: model.fit(generated(rank).batch(4), verbose=0),
    "arrays in another order": lambda model, rank: model.fit(
        tf.data.Dataset.from_tensor_slices((own_order(rank),) * 2).batch(4), verbose=0
    ),
    "evaluate": lambda model, rank: model.evaluate(generated(rank).batch(4), verbose=0),
    "a batch that is given whole": lambda model, rank: model.train_on_batch(
        own_order(rank)[:4], own_order(rank)[:4]
    ),
}


def refusals():
    strategy = make_strategy()
    rank = strategy.extended.worker_index
    messages = {}
    for name, run in SOURCES.items():
        model = linear_model(strategy, lambda: keras.optimizers.SGD(1e-6))
        with pytest.raises(tf.errors.InvalidArgumentError) as caught:
            run(model, rank)
        messages[name] = (caught.value.message, int(model.optimizer.iterations.numpy()))
    model = linear_model(strategy, lambda: keras.optimizers.SGD(1e-6))
    model.fit(generated(0).batch(4), verbose=0)  # The same order on both.
    return messages, int(model.optimizer.iterations.numpy())


def test_f8_an_order_that_differs_is_an_error_in_the_first_step(worker_pool):
    for messages, steps in worker_pool.run(refusals, num_workers=2):
        for name, (message, applied) in messages.items():
            assert "The workers read different rows where they should read the same" in message, name
            assert applied == 0, name
        assert steps == 16
