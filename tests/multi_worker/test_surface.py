"""What of Keras and tf.distribute around a step works on several workers? Ids in the names."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.multi_worker.agreement import make_strategy
from tests.multi_worker.test_pipelines_of_replicas import PER_REPLICA, rows_of_pipeline
from tests.single_host import oracle
from tests.single_host.freed_programs import left_of_models
from tests.single_host.test_surface import OfRagged, functional_of_sparse, ragged, sparse


def rows_of_every_kind(distributed):
    keras.config.set_floatx("float64")
    strategy = make_strategy(distributed)
    runs, predictions = {}, {}
    for name, make_model, rows in (
        ("ragged", OfRagged, ragged()),
        ("sparse", functional_of_sparse, sparse()),
    ):

        def make(make_model=make_model):
            model = make_model()
            model.compile(keras.optimizers.SGD(0.01), "mse", metrics=["mae"])
            return model

        runs[name] = oracle.train(strategy, make, oracle.batched((rows, np.ones((5, 1))), 4))
        predictions[name] = runs[name].pop("model").predict(oracle.batched(rows, 4), verbose=0)
    return runs, predictions


def test_h1_h3_ragged_and_sparse_rows(worker_pool):
    ((expected, predicted),) = worker_pool.run(rows_of_every_kind, num_workers=1, distributed=False)
    for runs, predictions in worker_pool.run(rows_of_every_kind, num_workers=2, distributed=True):
        for name in expected:
            oracle.assert_same_run(runs[name], expected[name])
            np.testing.assert_allclose(predictions[name], predicted[name], rtol=0, atol=oracle.TOLERANCE)


def small_things():
    strategy = make_strategy()
    found = {}
    # H23: one replica a worker.
    distributed = strategy.distribute_datasets_from_function(rows_of_pipeline, PER_REPLICA)
    found["pipelines"] = [strategy.experimental_local_results(b)[0].numpy().tolist() for b in distributed]
    # H18: 1 + ... + 8, known and unknown length.
    data = tf.data.Dataset.range(1, 9)

    @tf.function
    def walk(batches):
        total = tf.zeros((), tf.int64)
        for batch in batches:
            total += strategy.reduce("SUM", strategy.run(tf.reduce_sum, args=(batch,)), axis=None)
        return total

    known = strategy.experimental_distribute_dataset(data.batch(3))
    unknown = strategy.experimental_distribute_dataset(data.filter(lambda row: row > 0).batch(3))
    found["totals"] = [int(walk(known)), int(walk(known)), int(walk(iter(unknown)))]
    with pytest.raises(RuntimeError, match="Open its iterator outside of the function"):
        walk(unknown)
    # H21: a number is this worker's.
    rank = strategy.extended.worker_index
    found["sums"] = [
        float(strategy.reduce("SUM", value, axis=None)) for value in (rank + 1, np.float32(rank + 1))
    ]
    found["nested"] = {
        k: float(v) for k, v in strategy.reduce("SUM", {"a": 1.5, "b": rank}, axis=None).items()
    }
    for value in (True, None, "text"):
        with pytest.raises(TypeError, match="takes what `strategy.run` returned"):
            strategy.reduce("SUM", value, axis=None)
    return found


def test_h18_h21_h23_on_two_workers(worker_pool):
    first, second = worker_pool.run(small_things, num_workers=2)
    # Worker 0 has two rows, worker 1 three: a second batch, in which the first takes part without rows.
    assert first.pop("pipelines") == [[0, 1], []]
    assert second.pop("pipelines") == [[100, 101], [102]]
    assert first == second == {"totals": [36, 36, 36], "sums": [3.0, 3.0], "nested": {"a": 3.0, "b": 1.0}}


def cropped(distributed):
    keras.config.set_floatx("float64")
    keras.utils.set_random_seed(5)
    strategy = make_strategy() if distributed else oracle.mirrored(2)
    with strategy.scope():
        layers = [keras.layers.RandomCrop(2, 2, seed=3), keras.layers.Flatten(), keras.layers.Dense(1)]
        model = keras.Sequential([keras.Input((4, 4, 1)), *layers])
        model.compile(keras.optimizers.SGD(0.1), "mse")
    images = np.random.default_rng(0).normal(size=(6, 4, 4, 1))
    model.fit(oracle.batched((images, images[:, 0, 0]), 4), verbose=0)
    return model.get_weights()


def test_h20_random_crop_is_that_of_one_process_with_as_many_replicas(worker_pool):
    (expected,) = worker_pool.run(cropped, num_workers=1, devices=2, distributed=False)
    for weights in worker_pool.run(cropped, num_workers=2, distributed=True):
        for one, other in zip(weights, expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=0, atol=oracle.TOLERANCE)


def models_that_are_deleted():
    return left_of_models(make_strategy())


def test_h15_models_are_freed_with_their_graphs(worker_pool):
    for left in worker_pool.run(models_that_are_deleted, num_workers=2, devices=2):
        assert left == (0, 0)
