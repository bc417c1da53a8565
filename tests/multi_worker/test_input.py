"""Who reads which row? Disjoint parts of each global batch, in the order of one device, none lost or read twice.

Rows are numbers. The one-device order of a dataset is the dataset itself, iterated in the test process.
"""

import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.multi_worker.agreement import assert_identical, linear_model, logged, make_strategy, pairs
from tests.single_host import oracle

NUM_ROWS, BATCH_SIZE = 22, 6  # Four batches; the last has 4 rows.
AUTO_SHARD = tf.data.experimental.AutoShardPolicy


def with_policy(dataset, policy):
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = policy
    return dataset.with_options(options)


def generated():
    return tf.data.Dataset.from_generator(
        lambda: iter(range(NUM_ROWS)), output_signature=tf.TensorSpec([], tf.int64)
    )


rows = lambda: tf.data.Dataset.range(NUM_ROWS)  # noqa: E731
DATASETS = {
    "plain": lambda: rows().batch(BATCH_SIZE),
    "from_tensor_slices": lambda: tf.data.Dataset.from_tensor_slices(np.arange(NUM_ROWS)).batch(BATCH_SIZE),
    "one_row_last": lambda: tf.data.Dataset.range(13).batch(BATCH_SIZE),
    "fewer_rows_than_replicas": lambda: tf.data.Dataset.range(3).batch(BATCH_SIZE),
    "drop_remainder": lambda: rows().batch(BATCH_SIZE, drop_remainder=True),
    "seeded_shuffle": lambda: rows().shuffle(NUM_ROWS, seed=5).batch(BATCH_SIZE),
    "seeded_shuffle_once": lambda: (
        rows().shuffle(9, seed=5, reshuffle_each_iteration=False).batch(BATCH_SIZE)
    ),
    "unseeded_shuffle": lambda: rows().shuffle(NUM_ROWS).batch(BATCH_SIZE),
    "unseeded_shuffle_and_repeat": lambda: rows().shuffle(NUM_ROWS).batch(BATCH_SIZE).repeat(2),
    "unknown_length": lambda: tf.data.Dataset.range(33).filter(lambda row: row % 3 > 0).batch(BATCH_SIZE),
    "generated": lambda: generated().batch(BATCH_SIZE),
    "off": lambda: with_policy(rows().batch(BATCH_SIZE), AUTO_SHARD.OFF),
}


def read(name, num_epochs=2, seed=None):
    """Returns for each epoch, step and local replica the rows, and what was decided."""
    if seed is not None:
        keras.utils.set_random_seed(seed)
    strategy = make_strategy()
    distributed = strategy.experimental_distribute_dataset(DATASETS[name]())
    return [steps_of(distributed, strategy) for _ in range(num_epochs)], distributed.sharding.policy


def steps_of(distributed, strategy):
    """Returns for each step and local replica the rows."""
    return [
        [part.numpy().tolist() for part in strategy.experimental_local_results(batch)]
        for batch in distributed
    ]


def flat(nested):
    """Returns the rows of one epoch of one worker."""
    return list(itertools.chain.from_iterable(itertools.chain.from_iterable(nested)))


def global_batches(results):
    """Returns the epochs of all workers as lists of steps; a step lists the rows of its slots, in slot order."""
    epochs = [epochs for epochs, _ in results]
    assert len({len(worker[0]) for worker in epochs}) == 1  # All workers take the same number of steps.
    return [
        [
            [parts[local] for local in range(len(workers[0])) for parts in workers]
            for workers in zip(*epoch_of_workers, strict=True)
        ]
        for epoch_of_workers in zip(*epochs, strict=True)
    ]


def joined(steps):
    return [list(itertools.chain.from_iterable(slots)) for slots in steps]


@pytest.mark.parametrize("layout", [(2, 2), (3, 1)])
@pytest.mark.parametrize(
    "name",
    ["plain", "one_row_last", "fewer_rows_than_replicas", "drop_remainder", "seeded_shuffle", "seeded_shuffle_once",
     "unknown_length", "generated"],
)  # fmt: skip
def test_batches_are_those_of_one_device(worker_pool, name, layout):
    num_workers, devices = layout
    results = worker_pool.run(read, num_workers=num_workers, devices=devices, name=name)
    assert {policy for _, policy in results} == {"DATA"}
    dataset = DATASETS[name]()
    expected = [[batch.numpy().tolist() for batch in dataset] for _ in range(2)]
    found = global_batches(results)
    assert [joined(steps) for steps in found] == expected
    for slots in itertools.chain.from_iterable(found):
        sizes = [len(part) for part in slots]
        assert max(sizes) - min(sizes) <= 1  # As even as whole rows allow.


def test_I2_rows_of_from_tensor_slices_are_disjoint_and_complete(worker_pool):
    # TF#56513.
    results = worker_pool.run(read, name="from_tensor_slices", num_epochs=1)
    own = [set(flat(epochs[0])) for epochs, _ in results]
    assert not own[0] & own[1] and own[0] | own[1] == set(range(NUM_ROWS))


@pytest.mark.parametrize("name", ["unseeded_shuffle", "unseeded_shuffle_and_repeat"])
def test_workers_agree_on_an_unseeded_shuffle(worker_pool, name):
    results = worker_pool.run(read, num_workers=3, name=name)
    orders = [list(itertools.chain.from_iterable(joined(steps))) for steps in global_batches(results)]
    passes = [order[start : start + NUM_ROWS] for order in orders for start in range(0, len(order), NUM_ROWS)]
    for one in passes:
        assert sorted(one) == list(range(NUM_ROWS))
    # Each pass has an order of its own: two of 22! orders are equal by chance once in 10**21.
    assert len({tuple(one) for one in passes}) == len(passes)


def test_a_global_seed_gives_one_order_to_all_workers(worker_pool):
    results = worker_pool.run(read, name="unseeded_shuffle", seed=8)
    again = worker_pool.run(read, name="unseeded_shuffle", seed=8)
    assert_identical([results, again])
    for steps in global_batches(results):
        assert sorted(itertools.chain.from_iterable(joined(steps))) == list(range(NUM_ROWS))


def test_off_gives_every_worker_all_rows(worker_pool):
    for epochs, policy in worker_pool.run(read, name="off"):
        assert policy == "OFF"
        for steps in epochs:
            assert list(itertools.chain.from_iterable(joined(steps))) == list(range(NUM_ROWS))


# --- Files ------------------------------------------------------------------------------------------------------


def write_files(directory, rows_of_files):
    paths = []
    for number, rows in enumerate(rows_of_files):
        paths.append(str(directory / f"{number}.tfrecord"))
        with tf.io.TFRecordWriter(paths[-1]) as writer:
            for row in rows:
                writer.write(str(row).encode())
    return paths


def read_files(paths, policy, listed=False):
    strategy = make_strategy()
    # list_files shuffles its names without a seed, as most input pipelines do.
    names = tf.data.Dataset.list_files(paths) if listed else paths
    dataset = tf.data.TFRecordDataset(names).map(lambda text: tf.strings.to_number(text, tf.int64)).batch(4)
    with logged() as lines:
        try:
            distributed = strategy.experimental_distribute_dataset(with_policy(dataset, AUTO_SHARD[policy]))
        except ValueError as error:
            return str(error)
    notices = [line for line in lines if "Input is divided" in line]
    return [steps_of(distributed, strategy)], distributed.sharding.policy, notices


FILES = [range(0, 3), range(3, 11), range(11, 13), range(13, 20)]


@pytest.mark.parametrize(("policy", "listed"), [("AUTO", False), ("FILE", True)])
def test_files_are_divided_and_each_row_is_read_once(worker_pool, tmp_path, policy, listed):
    # The files are of unequal length, so one worker joins the last steps with zero rows.
    paths = write_files(tmp_path, FILES)
    results = worker_pool.run(read_files, paths=paths, policy=policy, listed=listed)
    assert [found for _, found, _ in results] == ["FILE"] * 2
    own = [flat(epochs[0]) for epochs, *_ in results]
    assert sorted(own[0] + own[1]) == list(range(20))
    assert all(sum(set(file) <= set(worker) for worker in own) == 1 for file in FILES)
    assert len(results[0][0][0]) == len(results[1][0][0])


def test_I1_one_file_falls_back_to_rows_with_a_notice(worker_pool, tmp_path):
    # TF#36846.
    paths = write_files(tmp_path, [range(10)])
    results = worker_pool.run(read_files, paths=paths, policy="AUTO")
    (steps,) = global_batches([result[:2] for result in results])
    assert joined(steps) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    for _, policy, notices in results:
        assert policy == "DATA" and len(notices) == 1 and "by rows (DATA)" in notices[0]


def test_I1_policy_file_with_one_file_is_the_same_error_on_all_workers(worker_pool, tmp_path):
    paths = write_files(tmp_path, [range(10)])
    results = worker_pool.run(read_files, paths=paths, policy="FILE")
    assert_identical(results)
    assert "auto_shard_policy=FILE cannot divide this dataset over 2 workers" in results[0]
    assert "set auto_shard_policy to DATA" in results[0]


def read_digits(data_dir):
    from tfdist_ext.data.uci_digits import UciDigits

    builder = UciDigits(data_dir=data_dir)
    builder.download_and_prepare()
    strategy = make_strategy()
    dataset = builder.as_dataset(split="test", as_supervised=True).enumerate()
    distributed = strategy.experimental_distribute_dataset(dataset.map(lambda number, _: number).batch(64))
    return [steps_of(distributed, strategy)], builder.info.splits["test"].num_shards


def test_I6_a_split_of_one_shard_is_divided_over_three_workers(worker_pool, tmp_path):
    # TFDS#1405.
    results = worker_pool.run(read_digits, num_workers=3, data_dir=str(tmp_path))
    assert {num_shards for _, num_shards in results} == {1}
    assert list(itertools.chain.from_iterable(joined(global_batches(results)[0]))) == list(range(360))


# --- What reaches the model in fit ------------------------------------------------------------------------------


class RowRecorder(keras.layers.Layer):
    """Notes the rows that the model computes, one list a step."""

    def __init__(self, seen, **arguments):
        super().__init__(**arguments)
        object.__setattr__(self, "seen", seen)  # Not a list for Keras to track.

    def call(self, x):
        tf.numpy_function(lambda values: self.seen.append(values[:, 0].astype(int).tolist()), [x], [])
        return x


class Batches(keras.utils.PyDataset):
    def __len__(self):
        return -(-NUM_ROWS // BATCH_SIZE)

    def __getitem__(self, index):
        first, end = index * BATCH_SIZE, min(NUM_ROWS, (index + 1) * BATCH_SIZE)
        rows = np.arange(first, end, dtype="float32")[:, None]
        return rows, rows


def rows_in_fit(kind, distributed=True, seed=None):
    if seed is not None:
        keras.utils.set_random_seed(seed)
    seen = []
    with oracle.scope_of(make_strategy(distributed)):
        model = keras.Sequential([keras.Input((1,)), RowRecorder(seen), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.0), "mse")
    if kind == "py_dataset":
        model.fit(Batches(), epochs=2, shuffle=True, verbose=0)
    else:
        x = np.arange(NUM_ROWS, dtype="float32")[:, None]
        model.fit(x, x, batch_size=BATCH_SIZE, epochs=2, shuffle=True, verbose=0)
    return seen


@pytest.mark.parametrize("kind", ["numpy", "py_dataset"])
def test_shuffles_of_keras_under_a_seed_follow_one_device(worker_pool, kind):
    (expected,) = worker_pool.run(rows_in_fit, num_workers=1, kind=kind, distributed=False, seed=3)
    results = worker_pool.run(rows_in_fit, kind=kind, seed=3)
    assert [one + other for one, other in zip(*results, strict=True)] == expected


@pytest.mark.parametrize("kind", ["numpy", "py_dataset"])
def test_workers_agree_on_unseeded_shuffles_of_keras(worker_pool, kind):
    results = worker_pool.run(rows_in_fit, num_workers=3, kind=kind)
    steps = [list(itertools.chain(*parts)) for parts in zip(*results, strict=True)]
    for epoch in (steps[:4], steps[4:]):
        assert sorted(itertools.chain(*epoch)) == list(range(NUM_ROWS))
    assert steps[:4] != steps[4:]


def alone_after_training_together():
    """One worker trains a model of its own, which no strategy holds, on shuffled NumPy input."""
    strategy = make_strategy()
    linear_model(strategy).fit(pairs([1, 3], 2), verbose=0)
    if strategy.process_group.rank > 0:
        return None
    model = linear_model(None)
    x = np.ones((4, 1), "float32")
    return model.fit(x, 2 * x, batch_size=4, shuffle=True, verbose=0).history["loss"]


def warnings_of_a_plain_fit():
    strategy = make_strategy()
    with logged() as lines:
        linear_model(None).fit(pairs([1, 3], 2), verbose=0)
    return strategy.num_replicas_in_sync, [line for line in lines if "belongs to no strategy" in line]


def test_a_model_outside_of_the_strategy_is_named(worker_pool):
    # Fresh processes: the notice is given once in each.
    for num_replicas, lines in worker_pool.run(warnings_of_a_plain_fit, fresh=True):
        assert num_replicas == 2
        assert len(lines) == 1
        assert "strategy.scope()" in lines[0]


def test_a_model_outside_of_the_strategy_shuffles_alone(worker_pool):
    assert worker_pool.run(alone_after_training_together, timeout_seconds=20) == [[4.0], None]
