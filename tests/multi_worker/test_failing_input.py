"""What do the other workers hear when one worker's input fails, and is a user's own error left alone?"""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.multi_worker.agreement import facts_of, linear_model, make_strategy

FAILS_AT = 24


def rows_that_fail(rank):
    """40 rows of one number; on worker 1 the source raises at row 24."""

    def rows():
        for row in range(40):
            if rank == 1 and row == FAILS_AT:
                raise RuntimeError("the disk of worker 1 is full of sand")
            yield np.float32([row])

    signature = tf.TensorSpec([1], tf.float32)
    return tf.data.Dataset.from_generator(rows, output_signature=signature).batch(4)


def with_targets(dataset):
    return dataset.map(lambda x: (x, x))


def read_all(strategy, distributed):
    return sum(len(strategy.experimental_local_results(batch)[0]) for batch in distributed)


WAYS = {
    "fit": lambda s, m, d: m.fit(with_targets(d), verbose=0),
    "evaluate": lambda s, m, d: m.evaluate(with_targets(d), verbose=0),
    "predict": lambda s, m, d: m.predict(d, verbose=0),
    "loop": lambda s, m, d: read_all(s, s.experimental_distribute_dataset(d)),
    "loop over a dataset of a function": lambda s, m, d: read_all(
        s, s.distribute_datasets_from_function(lambda context: d)
    ),
}


def heard():
    strategy = make_strategy()
    rank = strategy.extended.worker_index
    facts = {}
    for way, run in WAYS.items():
        model = linear_model(strategy, lambda: keras.optimizers.SGD(1e-6))
        try:
            run(strategy, model, rows_that_fail(rank))
        except Exception as error:  # noqa: BLE001 - what it is, is what is tested
            facts[way] = {
                "type": type(error).__name__,
                "message": str(error),
                "task": getattr(error, "task", ""),
            }
    # The group is whole: the next dataset is read by both.
    healthy = tf.data.Dataset.from_tensor_slices(np.ones((8, 1), "float32")).filter(lambda row: True).batch(4)
    return facts, read_all(strategy, strategy.experimental_distribute_dataset(healthy))


def test_f21_a_peer_whose_input_fails_is_named_with_its_words(worker_pool):
    (first, rows), (second, other_rows) = worker_pool.run(heard, num_workers=2)
    assert first.keys() == second.keys() == WAYS.keys()
    for way in WAYS:
        assert first[way]["type"] == "PeerInputError", (way, first[way])
        assert first[way]["task"] == "worker:1"
        assert "worker:1 no longer reads the dataset that worker:0 is reading" in first[way]["message"]
        assert "the disk of worker 1 is full of sand" in first[way]["message"]
        assert "the disk of worker 1 is full of sand" in second[way]["message"]
    assert rows == other_rows == 4  # Two batches of four, half of each here.


def fit_several_steps_at_once():
    strategy = make_strategy()
    model = linear_model(strategy, lambda: keras.optimizers.SGD(1e-6), steps_per_execution=2)
    try:
        model.fit(with_targets(rows_that_fail(strategy.extended.worker_index)), verbose=0)
    except Exception as error:  # noqa: BLE001 - what it is, is what is tested
        return str(error)
    return "ended well"


def test_f21_several_steps_an_execution(worker_pool):
    # The batch that fails is asked for while the step before it runs, so that the group is not used again.
    for heard_by in worker_pool.run(fit_several_steps_at_once, num_workers=2):
        assert "the disk of worker 1 is full of sand" in heard_by


def leave_early():
    strategy = make_strategy()
    data = tf.data.Dataset.from_tensor_slices(np.ones((40, 1), "float32")).filter(lambda row: True).batch(4)
    iterator = iter(strategy.experimental_distribute_dataset(data))
    next(iterator)
    if strategy.extended.worker_index == 1:
        del iterator
        return None
    try:
        for _ in iterator:
            pass
    except Exception as error:  # noqa: BLE001 - what it is, is what is tested
        return facts_of(error)
    return "ended well"


def test_f21_a_peer_that_leaves_the_loop_is_not_the_end_of_the_data(worker_pool):
    first, _ = worker_pool.run(leave_early, num_workers=2)
    assert first["type"] == "PeerInputError" and first["task"] == "worker:1"
    assert "it left the loop over it" in first["message"]


def assertion_after_streams_that_were_left():
    # Each epoch of a dataset of unknown length leaves a stream behind that nobody reads to its end.
    strategy = make_strategy()
    model = linear_model(strategy)
    pairs = tf.data.Dataset.from_tensor_slices((np.ones((64, 1), "float32"),) * 2).filter(lambda x, y: True)
    model.fit(pairs.batch(4), epochs=2, steps_per_epoch=3, verbose=0)

    @tf.function
    def step():
        strategy.run(lambda: tf.debugging.assert_equal(1, 2, message="my own check"))

    with pytest.raises(tf.errors.InvalidArgumentError, match="my own check") as eager:
        strategy.run(lambda: tf.debugging.assert_equal(1, 2, message="my own check"))
    with pytest.raises(tf.errors.InvalidArgumentError, match="my own check") as traced:
        step()
    return [type(caught.value).__name__ for caught in (eager, traced)]


def test_g4_a_users_own_error_stays_what_it_is(worker_pool):
    results = worker_pool.run(assertion_after_streams_that_were_left, num_workers=2)
    assert results == [["InvalidArgumentError"] * 2] * 2
