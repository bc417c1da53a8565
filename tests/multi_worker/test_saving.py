"""What is on disk, and who may read alone, after all workers have called the same thing?"""

import os

import keras
import numpy as np

from tests.multi_worker.agreement import assert_identical, linear_model, make_strategy, pairs
from tests.single_host import oracle


def save_from_every_worker(directory, times):
    strategy = make_strategy()
    keras.utils.set_random_seed(5)
    with strategy.scope():
        # Large enough that writing takes a while.
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(200_000), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    model.fit(oracle.batched(oracle.regression_data(rows=4), 4), verbose=0)
    for _ in range(times):
        strategy.process_group.barrier("all save now")
        model.save(os.path.join(directory, "model.keras"))
        model.save_weights(os.path.join(directory, "model.weights.h5"))
    strategy.process_group.barrier("all have saved")
    loaded = keras.models.load_model(os.path.join(directory, "model.keras"))
    weights = loaded.get_weights()
    loaded.load_weights(os.path.join(directory, "model.weights.h5"))
    return [model.get_weights(), weights, loaded.get_weights()]


def test_all_workers_save_to_one_path(worker_pool, tmp_path):
    results = worker_pool.run(save_from_every_worker, num_workers=3, directory=str(tmp_path), times=5)
    assert_identical(results)
    kept, saved, saved_weights = results[0]
    assert_identical([kept, saved, saved_weights])
    assert sorted(os.listdir(tmp_path)) == ["model.keras", "model.weights.h5"]


def checkpoint_from_every_worker(directory):
    model = linear_model(make_strategy(), lambda: keras.optimizers.SGD(0.25))
    best = keras.callbacks.ModelCheckpoint(os.path.join(directory, "best.keras"), "loss", save_best_only=True)
    every = keras.callbacks.ModelCheckpoint(
        os.path.join(directory, "{epoch}.weights.h5"), save_weights_only=True
    )
    model.fit(pairs([4, 4], 2), epochs=3, callbacks=[best, every], verbose=0)
    return model.get_weights()[0].item()


def test_model_checkpoint_of_all_workers_leaves_valid_files(worker_pool, tmp_path):
    # w = 2, 3, 3.5: each step goes half of the way to 4.
    assert worker_pool.run(checkpoint_from_every_worker, directory=str(tmp_path)) == [3.5, 3.5]
    names = ["1.weights.h5", "2.weights.h5", "3.weights.h5", "best.keras"]
    assert sorted(os.listdir(tmp_path)) == names
    model = keras.models.load_model(tmp_path / "best.keras")
    assert model.get_weights()[0].item() == 3.5
    for epoch, w in [(1, 2.0), (2, 3.0), (3, 3.5)]:
        model.load_weights(tmp_path / f"{epoch}.weights.h5")
        assert model.get_weights()[0].item() == w


def chief_reads_alone(directory):
    strategy = make_strategy()
    model = linear_model(strategy, metrics=["mae"])
    model.fit(pairs([1, 3, 5], 2), verbose=0)
    if strategy.process_group.rank > 0:
        return None
    path = os.path.join(directory, "chief.keras")
    model.save(path)
    return {
        "loss": float(model.metrics[0].result()),
        "results": {name: float(value) for name, value in model.get_metrics_result().items()},
        "iterations": int(model.optimizer.iterations),
        "saved": keras.models.load_model(path).get_weights()[0].item(),
    }


def test_the_chief_alone_reads_metrics_and_saves(worker_pool, tmp_path):
    # Stock blocks for ever. Batches [1, 3] and [5]: w = 4, then 4 + 2 * (5 - 4) = 6. Squared errors 1, 9, 1.
    results = worker_pool.run(chief_reads_alone, directory=str(tmp_path), timeout_seconds=30)
    assert results[1] is None
    assert results[0] == {
        "loss": float(np.float32(11 / 3)),
        "results": {"loss": float(np.float32(11 / 3)), "mae": float(np.float32(5 / 3))},
        "iterations": 2,
        "saved": 6.0,
    }
