"""The second implementation: floats summed by TensorFlow's own collectives. The values are those of the ring."""

import json

import numpy as np
import pytest
import tensorflow as tf

import tfdist_ext
from tests.multi_worker.agreement import assert_identical, linear_model, make_strategy, pairs
from tfdist_ext.strategies import tensorflow_collectives


def embedding_step(strategy):
    """Two workers touch rows 3, 3, 5 and 3, 5, 7 of a table of zeros; the loss is a sum."""
    import keras

    with strategy.scope():
        embedding = keras.layers.Embedding(10, 4, embeddings_initializer="zeros")
        model = keras.Sequential([keras.Input((3,), dtype="int32"), embedding])
        model.compile(keras.optimizers.SGD(1.0), keras.losses.MeanSquaredError(reduction="sum"))
    ids = np.array([[3, 3, 5], [3, 5, 7]], "int32")
    model.fit(tf.data.Dataset.from_tensor_slices((ids, np.ones((2, 3, 4), "float32"))).batch(2), verbose=0)
    return embedding.get_weights()[0]


def train_with_tensorflow_collectives():
    strategy = make_strategy(all_reduce="tensorflow")
    model = linear_model(strategy, metrics=["mae"])
    history = model.fit(pairs([3, 3, 3, 3, 9], 4), verbose=0).history
    prediction = model.predict(np.arange(5, dtype="float32")[:, None], batch_size=4, verbose=0)
    # G5: a second strategy of the process, which shares the links of the first.
    second = linear_model(make_strategy(all_reduce="tensorflow"))
    second.fit(pairs([3, 3, 3, 3, 9], 4), verbose=0)
    weights = [model.get_weights()[0].item(), second.get_weights()[0].item()]
    return weights, history, prediction, embedding_step(strategy)


def test_g5_ragged_batches_sparse_gradients_and_two_strategies_over_tensorflow_collectives(worker_pool):
    # Once started, TensorFlow's collective runtime stays with its process: these are not used again.
    results = worker_pool.run(train_with_tensorflow_collectives, num_workers=2, fresh=True)
    assert_identical(results)
    weights, history, prediction, table = results[0]
    assert weights == [12.0, 12.0]  # Case S2: 0 + 2 * 3, then 6 + 2 * (9 - 6).
    assert history == {"loss": [9.0], "mae": [3.0]}  # |3 - 0| in four rows and |9 - 6| in one
    np.testing.assert_array_equal(prediction.ravel(), 12.0 * np.arange(5))
    expected = np.zeros((10, 4))
    for row, occurrences in {3: 3, 5: 2, 7: 1}.items():
        expected[row] = 0.5 * occurrences  # Each occurrence adds 2 * 1 / 4.
    np.testing.assert_array_equal(table, expected)


REMOTE = {"worker": ["192.0.2.1:2222", "192.0.2.2:2222"]}


@pytest.mark.parametrize("secret", [None, "correct horse battery"])
def test_g6_gradients_leave_the_machine_in_clear_only_if_asked_to(monkeypatch, secret):
    config = json.dumps({"cluster": REMOTE, "task": {"type": "worker", "index": 0}})
    monkeypatch.setenv("TF_CONFIG", config)
    with pytest.raises(
        tfdist_ext.AuthenticationError, match='neither encrypt.*`insecure=True`.*all_reduce="ring"'
    ):
        make_strategy(all_reduce="tensorflow", cluster_secret=secret)


def test_g6_on_this_machine_the_secret_is_said_to_protect_links_alone(caplog):
    addresses = ["127.0.0.1:2222", "127.0.0.1:2223"]
    task = tfdist_ext.cluster.Task("worker", 0)
    cluster = tfdist_ext.cluster.ClusterSpecification.from_jobs({"worker": addresses}, task=task)
    tensorflow_collectives.check_open(cluster, "correct horse battery", insecure=False)
    assert "protects the links of this package, and not the gradients" in caplog.text


def make_it_too_late():
    tf.constant(1.0) + 1.0
    try:
        make_strategy(all_reduce="tensorflow")
    except RuntimeError as error:
        return str(error)
    return None


def test_M10_an_op_before_the_strategy_is_named_where_tensorflow_minds(worker_pool):
    # TF#30551. With the ring it is harmless (test_start.py).
    for message in worker_pool.run(make_it_too_late, num_workers=2, fresh=True):
        assert "Make the strategy first" in message
