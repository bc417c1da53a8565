"""Faults that people reported in public, on several workers. Names carry the case's id."""

import sys
import threading

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.multi_worker.agreement import assert_identical, linear_model, make_strategy, pairs
from tests.single_host import oracle
from tests.single_host.test_train_steps import Batches
from tfdist_ext.testing import start_processes


def tutorial(distributed):
    """The model of TensorFlow's multi-worker tutorial, with small images."""
    keras.utils.set_random_seed(1)
    with oracle.scope_of(make_strategy(distributed)):
        model = keras.Sequential(
            [
                keras.Input(shape=(8, 8)),
                keras.layers.Reshape(target_shape=(8, 8, 1)),
                keras.layers.Conv2D(8, 3, activation="relu"),
                keras.layers.Flatten(),
                keras.layers.Dense(16, activation="relu"),
                keras.layers.Dense(10),
            ]
        )
        model.compile(
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            optimizer=keras.optimizers.SGD(learning_rate=0.001),
            metrics=["accuracy"],
        )
    generator = np.random.default_rng(0)
    x, y = generator.random((32, 8, 8), "float32"), generator.integers(0, 10, 32)
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(32, seed=2).repeat().batch(16)
    return model.fit(dataset, epochs=3, steps_per_epoch=2, verbose=0).history


def test_M1_the_tutorial_trains_with_equal_logs(worker_pool):
    # K#20585, TF#72388. Stock fails in `reduce`.
    (expected,) = worker_pool.run(tutorial, num_workers=1, distributed=False)
    results = worker_pool.run(tutorial, distributed=True)
    assert_identical(results)
    # float32 logits of order 1 from sums of 16 rows: 2**-24 * 16 * a few layers.
    np.testing.assert_allclose(results[0]["loss"], expected["loss"], rtol=1e-5)
    assert results[0]["accuracy"] == expected["accuracy"]


def named_inputs(distributed):
    keras.config.set_floatx("float64")

    def make():
        inputs = {"a": keras.Input((3,), name="a"), "b": keras.Input((1,), name="b")}
        out = keras.layers.Dense(1)(keras.layers.Concatenate()([inputs["a"], inputs["b"]]))
        model = keras.Model(inputs, out)
        model.compile(keras.optimizers.SGD(0.1), "mse", metrics=["mae"])
        return model

    run = oracle.train(make_strategy(distributed), make, lambda: Batches(11, 4))
    del run["model"]
    return run


def test_M2_py_dataset_with_named_inputs(worker_pool):
    # K#20329.
    (expected,) = worker_pool.run(named_inputs, num_workers=1, distributed=False)
    results = worker_pool.run(named_inputs, distributed=True)
    assert_identical(results)
    oracle.assert_same_run(results[0], expected)


def train_and_end_when_told(path):
    """Worker 0 goes on after the training until a file is there."""
    strategy = make_strategy()
    model = linear_model(strategy)
    model.fit(pairs([1, 3], 2), verbose=0)
    sys.stdout.write("trained\n")
    sys.stdout.flush()
    if strategy.process_group.rank == 0:
        while not tf.io.gfile.exists(path):
            threading.Event().wait(0.01)
    return float(model.metrics[0].result())


def test_M4_a_worker_that_ends_first_disturbs_nobody(tmp_path):
    # TF#58434. Worker 1's process is gone while worker 0 still runs.
    with start_processes(train_and_end_when_told, num_workers=2, path=str(tmp_path / "told")) as group:
        group.wait_for("trained")
        assert group.processes[1].close() == 0
        (tmp_path / "told").touch()
        assert group.outcomes()[0].result == 5.0  # Mean of 1 and 9, from w = 0.
        assert group.close() == [0, 0]


def train_on_files(paths):
    strategy = make_strategy()
    parse = lambda text: (tf.ones([1]), tf.strings.to_number(text)[None])  # noqa: E731
    dataset = tf.data.TFRecordDataset(paths).map(parse).batch(2)
    model = linear_model(strategy)
    history = model.fit(dataset, verbose=0).history
    return {"w": model.get_weights()[0].item(), "loss": history["loss"]}


def test_M6_a_worker_with_fewer_batches_joins_with_zero_rows(worker_pool, tmp_path):
    # TF#37112. Stock waits 11 s, then "the tasks have crashed". Worker 0 reads targets 1, 3, 5 and worker 1 reads 3,
    # a row a step each: w = 0 + 2 * mean(1, 3) = 4, then 4 + 2 * (3 - 4) = 2, then 2 + 2 * (5 - 2) = 8.
    paths = []
    for number, targets in enumerate([[1, 3, 5], [3]]):
        paths.append(str(tmp_path / str(number)))
        with tf.io.TFRecordWriter(paths[-1]) as writer:
            for target in targets:
                writer.write(str(target).encode())
    results = worker_pool.run(train_on_files, paths=paths)
    assert_identical(results)
    # Squared errors before each update: 1 and 9, then 1, then 9; four rows.
    assert results[0] == {"w": 8.0, "loss": [5.0]}


def stop_early():
    """The validation rows differ between workers; each worker alone would stop at another epoch."""
    strategy = make_strategy()
    rank = strategy.process_group.rank
    model = linear_model(strategy, lambda: keras.optimizers.SGD(0.25))
    # Worker 0's validation loss rises from the first epoch on, worker 1's falls in every epoch.
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    validation = pairs([[0.0, 0.0], [6.0, 6.0]][rank], 2).with_options(options)
    stopping = keras.callbacks.EarlyStopping("val_loss", patience=0, restore_best_weights=True)
    plateau = keras.callbacks.ReduceLROnPlateau("val_loss", factor=0.5, patience=0, min_delta=0.0)
    history = model.fit(
        pairs([4, 4, 4, 4], 4),
        epochs=12,
        validation_data=validation,
        callbacks=[stopping, plateau],
        verbose=0,
    ).history
    return {"history": history, "stopped": stopping.stopped_epoch, "w": model.get_weights()[0].item()}


def test_M17_early_stopping_acts_on_one_value_everywhere(worker_pool):
    # HybridBackend#88. w goes 2, 3, ... to 4. The mean of w**2 and (w - 6)**2 is least at w = 3: epochs 1 and 2 have
    # (4 + 16) / 2 = 10 and (9 + 9) / 2 = 9; epoch 3, with w = 3.5, has (12.25 + 6.25) / 2 = 9.25 and stops all.
    results = worker_pool.run(stop_early)
    assert_identical(results)
    assert results[0]["history"]["val_loss"] == [10.0, 9.0, 9.25]
    assert results[0]["stopped"] == 2 and results[0]["w"] == 3.0


def predict(rows, batch_size):
    strategy = make_strategy()
    with strategy.scope():
        layer = keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")
        model = keras.Sequential([keras.Input((1,)), layer])
        model.compile("sgd", "mse")
    x = np.arange(rows, dtype="float32")[:, None]
    dataset = tf.data.Dataset.from_tensor_slices(x).batch(batch_size)
    return [
        model.predict(x, batch_size=batch_size, verbose=0),
        model.predict(dataset, verbose=0),
        model.predict_on_batch(x),
    ]


@pytest.mark.parametrize("rows", [5, 1])
@pytest.mark.parametrize("layout", [(2, 1), (2, 2)])
def test_K2_predict_keeps_rows_and_their_order(worker_pool, rows, layout):
    # transformers#11265. On every worker, also where replicas are empty.
    num_workers, devices = layout
    results = worker_pool.run(predict, num_workers=num_workers, devices=devices, rows=rows, batch_size=4)
    assert_identical(results)
    for outputs in results[0]:
        np.testing.assert_array_equal(outputs, np.arange(rows, dtype="float32")[:, None])


def overflow_on_one_worker():
    strategy = make_strategy()
    model = linear_model(
        strategy, lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(1.0), initial_scale=64.0)
    )
    optimizer = model.optimizer
    x, y = np.array([[1], [np.nan], [1], [1]], "float32"), np.array([[1], [1], [2], [4]], "float32")
    model.fit(oracle.batched((x, y), 2), verbose=0)
    scale = float(optimizer.dynamic_scale.numpy())
    return [model.get_weights()[0].item(), scale, int(optimizer.iterations), int(optimizer.step_counter)]


def test_S9_a_nan_on_one_worker_skips_the_step_on_all(worker_pool):
    # K#18666. Worker 1 has the NaN of batch 1. Batch 2 alone is applied: w = 2 * mean(2, 4) = 6; 64 is halved once.
    assert worker_pool.run(overflow_on_one_worker) == [[6.0, 32.0, 1, 1]] * 2


def embedding_table():
    ids = np.array([[3, 3, 5], [3, 5, 7], [7, 7, 7]], "int32")
    with make_strategy().scope():
        embedding = keras.layers.Embedding(10, 2, embeddings_initializer="zeros")
        model = keras.Sequential([keras.Input((3,), dtype="int32"), embedding])
        model.compile(keras.optimizers.SGD(1.0), keras.losses.MeanSquaredError(reduction="sum"))
    model.fit(oracle.batched((ids, np.ones((3, 3, 2), "float32")), 3), verbose=0)
    return embedding.get_weights()[0][:, 0].tolist()


def test_S11_repeated_embedding_rows_of_all_workers_are_summed(worker_pool):
    # TF#53160. Each occurrence of an id adds 2 * 1 / 2 = 1: id 3 thrice, 5 twice, 7 four times.
    assert worker_pool.run(embedding_table) == [[0, 0, 0, 3, 0, 2, 0, 4, 0, 0]] * 2


def two_strategies():
    data = pairs([3, 5], 2)
    models = [linear_model(make_strategy()) for _ in range(2)]
    for model in (models[0], models[1], models[0]):
        model.fit(data, verbose=0)
    return [model.get_weights()[0].item() for model in models] + [
        [int(model.optimizer.iterations) for model in models]
    ]


def test_S14_two_strategies_in_one_process_and_back(worker_pool):
    # TF#62790. w = 2 * mean(3, 5) = 8, and back: 8 + 2 * (4 - 8) = 0.
    assert worker_pool.run(two_strategies) == [[0.0, 8.0, [2, 1]]] * 2
