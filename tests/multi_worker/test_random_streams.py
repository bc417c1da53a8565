"""Are random streams those of the slot, whatever process computes it?"""

import keras
import numpy as np
import tensorflow as tf

from tests.multi_worker.agreement import assert_identical, make_strategy
from tests.single_host import oracle


def train_with_dropout(seed=9):
    keras.config.set_floatx("float64")
    keras.utils.set_random_seed(seed)
    with make_strategy().scope():
        layers = [
            keras.layers.Dense(16),
            keras.layers.Dropout(0.4),
            keras.layers.GaussianNoise(0.1, seed=2),
            keras.layers.Dense(1),
        ]
        model = keras.Sequential([keras.Input((3,)), *layers])
        model.compile(keras.optimizers.SGD(0.05), "mse")
    data = oracle.batched(oracle.regression_data(rows=14), 4)
    history = model.fit(data, epochs=2, verbose=0, shuffle=False).history
    return {"weights": model.get_weights(), "history": history}


def test_dropout_is_the_same_for_1x4_2x2_and_4x1(worker_pool):
    runs = []
    for num_workers, devices in [(1, 4), (2, 2), (4, 1)]:
        results = worker_pool.run(train_with_dropout, num_workers=num_workers, devices=devices)
        assert_identical(results)
        runs.append(results[0])
    for run in runs[1:]:
        for one, other in zip(run["weights"], runs[0]["weights"], strict=True):
            np.testing.assert_allclose(one, other, rtol=0, atol=oracle.TOLERANCE)
    again, other_seed = (worker_pool.run(train_with_dropout, devices=2, seed=seed)[0] for seed in (9, 10))
    assert_identical([runs[1], again])
    assert any(
        np.any(one != other) for one, other in zip(again["weights"], other_seed["weights"], strict=True)
    )


def dropout_masks():
    keras.utils.set_random_seed(4)
    strategy = make_strategy()
    with strategy.scope():
        dropout = keras.layers.Dropout(0.5)
        dropout.build((None, 256))

    @tf.function
    def masks():
        mask = strategy.run(lambda: dropout(tf.ones((1, 256)), training=True) > 0)
        return strategy.gather(mask, axis=0)

    return np.concatenate([masks().numpy() for _ in range(2)])


def test_dropout_masks_differ_between_workers_and_steps(worker_pool):
    results = worker_pool.run(dropout_masks)
    assert_identical(results)
    masks = results[0]
    assert masks.shape == (4, 256)  # Two steps of two workers.
    for index, one in enumerate(masks):
        for other in masks[index + 1 :]:
            # Two independent fair masks of 256 bits agree on 128 +- 8 places; 200 is nine standard deviations away.
            assert np.sum(one == other) < 200


def initial_weights():
    with make_strategy().scope():
        layer = keras.layers.Dense(4)
        layer.build((None, 3))
    own = np.random.random()
    return layer.get_weights(), own


def test_unseeded_workers_start_from_the_chiefs_weights(worker_pool):
    results = worker_pool.run(initial_weights)
    assert_identical([weights for weights, _ in results])
    assert results[0][1] != results[1][1]  # They are really unseeded.
