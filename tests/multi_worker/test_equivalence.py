"""Is a run of 2 or 3 processes the run of one device? float64, ragged batches, everything compared.

Layouts are (workers, devices of each). The layouts of one process are in tests/single_host.
"""

import functools

import keras
import numpy as np
import pytest

from tests.multi_worker.agreement import assert_identical, make_strategy, train
from tests.single_host import oracle
from tests.single_host.test_equivalence import (
    BATCH_NORM_TOLERANCE,
    OPTIMIZERS,
    dense_model,
    sequence_data,
    sgd,
)
from tests.single_host.test_train_steps import ComputeLossInLogs, run_gan

# The last of four batches has one row, so that all replicas but one are empty.
ROWS, BATCH_SIZE = 13, 4


def data(rows=ROWS, batch_size=BATCH_SIZE):
    return oracle.batched(oracle.regression_data(rows), batch_size)


def optimizer(name, distributed):
    return train(distributed, lambda: dense_model(OPTIMIZERS[name]), data())


def loss_reduction(name, distributed):
    x, y = oracle.regression_data(ROWS)
    weighted = oracle.batched((x, y, np.linspace(0.1, 2.0, ROWS)), BATCH_SIZE)

    def make():
        loss = keras.losses.MeanSquaredError(reduction=name)
        return dense_model(lambda: keras.optimizers.SGD(0.02), loss, weighted_metrics=["mse"])

    return train(distributed, make, weighted)


def masked_lstm_with_embedding(distributed):
    # Ids repeat within a row, over the rows of a replica and over replicas. Rows have different lengths.
    def make():
        model = keras.Sequential(
            [
                keras.Input((6,), dtype="int32"),
                keras.layers.Embedding(10, 4, mask_zero=True),
                keras.layers.LSTM(3, return_sequences=True),
                keras.layers.Dense(1),
            ]
        )
        model.compile(sgd(), "mse", weighted_metrics=["mae"])
        return model

    return train(distributed, make, oracle.batched(sequence_data(rows=9), 4))


class DenseEmbedding(keras.layers.Embedding):
    """The same table, looked up so that its gradient is dense."""

    def call(self, ids):
        return keras.ops.matmul(keras.ops.one_hot(ids, self.input_dim), self.embeddings)


def sparse_gradients(distributed):
    # No mask, so that empty replicas skip the model and send no row. The oracle is the dense path: of a repeated id
    # Keras alone squares each occurrence, where Adagrad means the square of their sum.
    def make():
        embedding = (keras.layers.Embedding if distributed else DenseEmbedding)(10, 4, name="embedding")
        model = keras.Sequential([keras.Input((6,), dtype="int32"), embedding, keras.layers.Dense(1)])
        model.compile(keras.optimizers.Adagrad(0.1), "mse")
        return model

    return train(distributed, make, oracle.batched(sequence_data(rows=9), 4))


def synchronized_batch_norm(distributed):
    def make():
        layers = [
            keras.layers.Dense(4),
            keras.layers.BatchNormalization(synchronized=True),
            keras.layers.Dense(1),
        ]
        model = keras.Sequential([keras.Input((3,)), *layers])
        model.compile(sgd(), "mse")
        return model

    return train(distributed, make, data())


def steps_per_execution(distributed):
    return train(distributed, lambda: dense_model(sgd, steps_per_execution=3 if distributed else 1), data())


def run_eagerly(distributed):
    return train(distributed, lambda: dense_model(sgd, run_eagerly=distributed), data())


def custom_train_step(distributed):
    def make():
        model = ComputeLossInLogs()
        model.build((None, 3))
        model.compile(keras.optimizers.Adam(0.01), loss="mse")
        return model

    return train(distributed, make, data())


def repeated_data_with_steps_per_epoch(distributed):
    # 3 epochs of 3 steps out of a stream of 4-batch passes: epochs begin in the middle of a pass.
    repeated = lambda: data().repeat()  # noqa: E731
    keras.config.set_floatx("float64")
    keras.utils.set_random_seed(11)
    with oracle.scope_of(make_strategy(distributed)):
        model = dense_model(sgd)
    history = model.fit(repeated(), epochs=3, steps_per_epoch=3, verbose=0).history
    evaluation = model.evaluate(repeated(), steps=5, verbose=0, return_dict=True)
    return {"weights": model.get_weights(), "optimizer": [], "history": history, "evaluation": evaluation}


def train_on_batch(distributed):
    # Every worker gives the whole global batch: 5 rows, then 1, which leaves replicas empty.
    keras.config.set_floatx("float64")
    keras.utils.set_random_seed(11)
    with oracle.scope_of(make_strategy(distributed)):
        model = dense_model(sgd)
    x, y = oracle.regression_data(rows=5)
    logs = [model.train_on_batch(x[:rows], y[:rows], return_dict=True) for rows in (5, 5, 1)]
    history = {name: [log[name] for log in logs] for name in logs[0]}
    evaluation = {**model.test_on_batch(x, y, return_dict=True), "predicted": model.predict_on_batch(x)}
    return {"weights": model.get_weights(), "optimizer": [], "history": history, "evaluation": evaluation}


CASES = {
    **{name: functools.partial(optimizer, name) for name in OPTIMIZERS},
    **{
        f"loss_{name}": functools.partial(loss_reduction, name) for name in ("sum", "mean_with_sample_weight")
    },
    "masked_lstm_with_embedding": masked_lstm_with_embedding,
    "sparse_gradients": sparse_gradients,
    "synchronized_batch_norm": synchronized_batch_norm,
    "steps_per_execution": steps_per_execution,
    "run_eagerly": run_eagerly,
    "custom_train_step": custom_train_step,
    "repeated_data_with_steps_per_epoch": repeated_data_with_steps_per_epoch,
    "train_on_batch": train_on_batch,
}


def run_case(name, distributed):
    return CASES[name](distributed)


@pytest.fixture(scope="module")
def one_device(worker_pool):
    """Returns a function of a case that gives its run without any strategy."""
    return functools.cache(
        lambda name: worker_pool.run(run_case, num_workers=1, name=name, distributed=False)[0]
    )


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("sgd_momentum", (2, 1)),
        ("adam", (2, 2)),
        ("adamw", (3, 1)),
        ("rmsprop", (2, 1)),
        ("adagrad", (3, 1)),
        ("lamb", (2, 2)),
        ("global_clipnorm", (3, 1)),
        ("accumulation", (2, 2)),
        ("loss_sum", (2, 2)),
        ("loss_mean_with_sample_weight", (3, 1)),
        ("masked_lstm_with_embedding", (2, 1)),
        ("masked_lstm_with_embedding", (2, 2)),
        ("sparse_gradients", (3, 1)),
        ("synchronized_batch_norm", (2, 2)),
        ("synchronized_batch_norm", (3, 1)),
        ("steps_per_execution", (2, 1)),
        ("run_eagerly", (2, 2)),
        ("custom_train_step", (2, 2)),
        ("repeated_data_with_steps_per_epoch", (2, 1)),
        ("train_on_batch", (2, 2)),
    ],
)
def test_run_equals_one_device(worker_pool, one_device, name, layout):
    num_workers, devices = layout
    results = worker_pool.run(run_case, num_workers=num_workers, devices=devices, name=name, distributed=True)
    assert_identical(results)
    tolerance = BATCH_NORM_TOLERANCE if name == "synchronized_batch_norm" else oracle.TOLERANCE
    oracle.assert_same_run(results[0], one_device(name), tolerance)


def gan(distributed):
    keras.config.set_floatx("float64")
    return run_gan(make_strategy(distributed))


def test_gan_with_two_optimizers_equals_one_device(worker_pool):
    (expected,) = worker_pool.run(gan, num_workers=1, distributed=False)
    results = worker_pool.run(gan, num_workers=3, distributed=True)
    assert_identical(results)
    weights, history, iterations = results[0]
    assert iterations == expected[2] == [8, 8]  # Two epochs of four batches, for either optimizer.
    for one, other in zip(weights, expected[0], strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=oracle.TOLERANCE)
    for name, values in expected[1].items():
        np.testing.assert_allclose(history[name], values, rtol=0, atol=oracle.TOLERANCE, err_msg=name)


def mixed_precision(distributed):
    def make():
        keras.mixed_precision.set_global_policy("mixed_float16")
        layers = [keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(1, dtype="float32")]
        model = keras.Sequential([keras.Input((3,)), *layers])
        model.compile(keras.optimizers.SGD(0.1), "mse")
        return model

    arrays = tuple(array.astype("float32") for array in oracle.regression_data(ROWS))
    run = oracle.train(make_strategy(distributed), make, oracle.batched(arrays, BATCH_SIZE))
    run["scale"] = float(run.pop("model").optimizer.dynamic_scale.numpy())
    return run


def test_mixed_precision_equals_one_device(worker_pool):
    (expected,) = worker_pool.run(mixed_precision, num_workers=1, distributed=False)
    results = worker_pool.run(mixed_precision, num_workers=2, distributed=True)
    assert_identical(results)
    # Activations are float16, 2**-11 relative, and weights move by at most 0.1 * gradient in each of 8 steps.
    oracle.assert_same_run(results[0], expected, tolerance=8 * 0.1 * 2**-11)
    assert results[0]["scale"] == 2.0**15
