"""Who writes, who reads, and what if not all come: public cases of checkpoints with several processes."""

import functools
import os
import time

import keras
import numpy as np
import tensorflow as tf

import tfdist_ext
from tests.checkpoint import jobs
from tests.multi_worker.agreement import facts_of, logged
from tfdist_ext import errors
from tfdist_ext.checkpoint import EverySteps, LatestN, TrainingCheckpointManager, TrainingState

ROWS = 24


def counting_model(strategy):
    """Returns y = w x from w = 0, whose weight i is how often row i was trained on."""
    with strategy.scope():
        layer = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
        model = keras.Sequential([keras.Input((ROWS,)), layer])
        # The loss of row i is -w_i: its gradient is -1, and the mean over the rows is taken back by the rate.
        model.compile(
            keras.optimizers.SGD(4.0), lambda target, prediction: -prediction[:, 0] + 0 * target[:, 0]
        )
    return model


def rows_once():
    """Returns batches of 4 of the rows of the unit matrix, in an order that differs in each pass."""
    rows = np.eye(ROWS, dtype="float32")
    dataset = tf.data.Dataset.from_tensor_slices((rows, np.zeros((ROWS, 1), "float32")))
    return dataset.shuffle(ROWS, seed=3).batch(4)


def count_rows(directory, epochs, interrupt=None, directory_of_worker=None):
    """Trains with checkpoints after each step; returns how often each row was trained on, and what was logged."""
    strategy = tfdist_ext.MultiWorkerMirroredStrategy()
    if directory_of_worker:
        directory = directory_of_worker[strategy.process_group.rank]
    keras.utils.set_random_seed(1)
    checkpoints = jobs.manager(directory, counting_model(strategy), rows_once(), keep=LatestN(2))
    seen = jobs.Seen()
    with logged() as lines:
        jobs.fit(checkpoints, seen, *([jobs.Interrupt(steps=interrupt)] if interrupt else []), epochs=epochs)
    counts = checkpoints.state.model.get_weights()[0][:, 0]
    return {"counts": counts, "epochs": seen.epochs, "batches": seen.batches, "lines": lines}


def test_c12_all_workers_save_to_one_path(worker_pool, tmp_path):
    worker_pool.run(count_rows, num_workers=2, directory=str(tmp_path), epochs=1)
    (first, second) = sorted(os.listdir(tmp_path))
    assert first.startswith("checkpoint-0000000005-") and second.startswith("checkpoint-0000000006-")
    # The chief's variables, and what each worker has of its own.
    assert sorted(os.listdir(tmp_path / second)) == [
        "manifest.json",
        "state.data-00000-of-00001",
        "state.index",
        "worker-00000.json",
        "worker-00001.json",
    ]
    directory = tfdist_ext.checkpoint.directory.CheckpointDirectory(tmp_path)
    assert [directory.check(record, deep=True) for record in directory.records()] == [None, None]


def test_c15_another_number_of_workers_reads_each_row_once(worker_pool, tmp_path):
    # 6 batches a pass; each part ends in the middle of one, and its last step is lost.
    for num_workers, interrupt in [(3, 4), (4, 5), (2, None), (1, None)]:
        results = worker_pool.run(
            count_rows, num_workers=num_workers, directory=str(tmp_path), epochs=2 if num_workers > 1 else 3,
            interrupt=interrupt,
        )  # fmt: skip
        for result in results[1:]:
            np.testing.assert_array_equal(result["counts"], results[0]["counts"])
        if num_workers == 4:
            assert results[0]["batches"][0] == 3
            assert results[0]["counts"].sum() == 32  # 3 + 5 steps of 4 rows.
    np.testing.assert_array_equal(results[0]["counts"], np.full(ROWS, 3.0))


def test_c14_workers_that_do_not_see_the_chiefs_directory(worker_pool, tmp_path):
    places = [str(tmp_path / name) for name in ("chief", "other")]
    first = worker_pool.run(count_rows, directory="", epochs=2, interrupt=9, directory_of_worker=places)
    assert first[0]["counts"].sum() == 36
    # The chief wrote everybody's part.
    assert not os.path.exists(places[1])
    newest = sorted(os.listdir(places[0]))[-1]
    assert {"worker-00000.json", "worker-00001.json"} < set(os.listdir(os.path.join(places[0], newest)))
    second = worker_pool.run(count_rows, directory="", epochs=2, directory_of_worker=places)
    for result in second:
        assert result["batches"] == [2, 3, 4, 5]
        np.testing.assert_array_equal(result["counts"], np.full(ROWS, 2.0))


def restore_damaged(directory):
    strategy = tfdist_ext.MultiWorkerMirroredStrategy()
    checkpoints = jobs.manager(directory, counting_model(strategy), rows_once())
    try:
        checkpoints.restore_or_initialize()
    except errors.CheckpointError as error:
        return facts_of(error)
    return None


def test_c14_a_missing_file_is_named_on_every_worker(worker_pool, tmp_path):
    worker_pool.run(count_rows, directory=str(tmp_path), epochs=1)
    for folder in tmp_path.iterdir():
        (folder / "worker-00001.json").unlink()
    facts = worker_pool.run(restore_damaged, directory=str(tmp_path))
    for fact in facts:
        assert fact["type"] == "CheckpointCorruptError"
        assert f"None of the checkpoints in {tmp_path} is intact" in fact["message"]
        assert "worker-00001.json is missing" in fact["message"]


def chief_saves_alone(directory, joined):
    strategy = tfdist_ext.MultiWorkerMirroredStrategy(
        communication_options=tf.distribute.experimental.CommunicationOptions(timeout_seconds=3.0)
    )
    checkpoints = jobs.manager(directory, counting_model(strategy), rows_once())
    if joined:
        checkpoints.restore_or_initialize()
    started = time.monotonic()
    facts = None
    if strategy.process_group.rank == 0:
        try:
            checkpoints.save(1, wait=True)
        except errors.TfdistError as error:
            facts = facts_of(error)
    seconds = time.monotonic() - started
    strategy.process_group.barrier("the end", timeout_seconds=60)
    return facts, seconds


def test_c13_the_chief_alone_saves_and_is_told_at_once(worker_pool, tmp_path):
    (facts, seconds), _ = worker_pool.run(chief_saves_alone, directory=str(tmp_path), joined=False)
    assert facts["type"] == "CheckpointError" and seconds < 1
    assert "`restore_or_initialize()` on every worker before the first save" in facts["message"]


def test_c13_a_worker_that_does_not_come_is_named_after_the_deadline(worker_pool, tmp_path):
    (facts, seconds), _ = worker_pool.run(
        chief_saves_alone, directory=str(tmp_path), joined=True, timeout_seconds=60
    )
    assert facts["type"] == "CollectiveTimeoutError" and facts["task"] == "worker:1"
    assert "checkpoint of step 1 written" in facts["message"]
    assert seconds < 30
    assert not [name for name in os.listdir(tmp_path) if name.startswith("checkpoint-")]


def clocks_differ(directory):
    """Saves by a clock that the chief alone is asked."""
    strategy = tfdist_ext.MultiWorkerMirroredStrategy()
    seconds = tfdist_ext.checkpoint.EverySeconds(0.2 if strategy.process_group.rank == 0 else 1e6)
    checkpoints = jobs.manager(
        directory, counting_model(strategy), rows_once(), save=seconds, keep=LatestN(99)
    )
    jobs.fit(checkpoints, epochs=20)
    return checkpoints.statistics["num_saves"]


def test_workers_whose_clocks_differ_save_at_the_same_steps(worker_pool, tmp_path):
    counts = worker_pool.run(clocks_differ, directory=str(tmp_path))
    assert counts[0] == counts[1] == len(os.listdir(tmp_path)) >= 2


def stock_loop(directory, steps):
    """Trains with TensorFlow's own strategy; returns the sum that a SUM variable has counted."""
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    numbers = tf.data.Dataset.range(40, output_type=tf.int32).shuffle(40, seed=3).batch(4)
    dataset = strategy.experimental_distribute_dataset(numbers)
    with strategy.scope():
        total = tf.Variable(
            0.0, trainable=False, aggregation=tf.VariableAggregation.SUM,
            synchronization=tf.VariableSynchronization.ON_READ,
        )  # fmt: skip
    state = TrainingState(None, dataset, strategy=strategy, total=total)
    checkpoints = TrainingCheckpointManager(state, directory, save=EverySteps(1), stop_on_sigterm=False)
    checkpoints.restore_or_initialize()

    @tf.function
    def step(batch):
        strategy.run(lambda x: total.assign_add(tf.cast(tf.reduce_sum(x), tf.float32)), (batch,))

    for epoch in range(state.epoch, 2):
        state.epoch = epoch
        for batch in state.dataset:
            step(batch)
            checkpoints.save_if_due(state.step + 1)
            if state.step == steps:
                return None
    with strategy.scope():
        return float(total.numpy())


def test_stock_workers_save_and_resume_within_an_epoch(tmp_path):
    # 0 + ... + 39, twice. In processes of their own: a stock strategy cannot be made anew in a process.
    for steps, expected in [(13, None), (99, 1560)]:
        with tfdist_ext.testing.WorkerPool() as pool:
            results = pool.run(stock_loop, num_workers=2, directory=str(tmp_path), steps=steps)
        assert results == [expected, expected]


def sum_in_a_loop(directory, steps, distributed=True):
    """Adds to metrics and to a variable in a custom loop with saves.

    Returns:
        What they are after the restore, after `steps`, and after one more step that another restore undoes.
    """
    strategy = (
        tfdist_ext.MultiWorkerMirroredStrategy() if distributed else tfdist_ext.MirroredStrategy(["CPU:0"])
    )
    with strategy.scope():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        model.mean_row = keras.metrics.Mean(name="mean_row")
        of_no_model = keras.metrics.Mean(name="of_no_model")
        rows_seen = tf.Variable(
            0.0,
            trainable=False,
            synchronization=tf.VariableSynchronization.ON_READ,
            aggregation=tf.VariableAggregation.SUM,
        )

    def one_step(rows):
        model.mean_row.update_state(rows)
        of_no_model.update_state(-rows)
        rows_seen.assign_add(tf.cast(tf.size(rows), tf.float32))

    def values():
        return float(model.mean_row.result()), float(of_no_model.result()), float(rows_seen.read_value())

    step = tf.function(lambda rows: strategy.run(one_step, args=(rows,)))
    dataset = strategy.experimental_distribute_dataset(
        tf.data.Dataset.range(1, 37, output_type=tf.float32).batch(6)
    )
    state = TrainingState(model, dataset, rows_seen=rows_seen, of_no_model=of_no_model)
    checkpoints = TrainingCheckpointManager(state, directory, save=EverySteps(1))
    checkpoints.restore_or_initialize()
    found = [values()]
    for rows in state.dataset:
        if state.step == steps:
            found.append(values())
            step(rows)
            break
        step(rows)
        checkpoints.save_if_due(state.step + 1)
    # Here the replicas hold parts already, unlike after a start.
    checkpoints.restore_or_initialize()
    return [*found, values()]


def test_what_replicas_hold_parts_of_is_saved_and_restored_whole(worker_pool, tmp_path):
    # Rows 1, 2, ... in batches of six: n rows with the mean (n + 1) / 2, its negative, and their number.
    zero, two, three, four, five = [
        ((n + 1) / 2, -(n + 1) / 2, float(n)) if n else (0.0, 0.0, 0.0) for n in (0, 12, 18, 24, 30)
    ]
    run = functools.partial(worker_pool.run, sum_in_a_loop, directory=str(tmp_path))
    assert run(num_workers=2, devices=2, steps=2) == [[zero, two, two]] * 2
    # Another number of workers and replicas goes on: three workers, one device, and several again.
    assert run(num_workers=3, steps=3) == [[two, three, three]] * 3
    assert run(num_workers=1, steps=4, distributed=False) == [[three, four, four]]
    assert run(num_workers=2, devices=2, steps=5) == [[four, five, five]] * 2
