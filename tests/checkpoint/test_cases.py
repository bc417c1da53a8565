"""Public bug reports about checkpoints, each with the right behaviour; one process, one or two devices."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist_ext
from tests.checkpoint import jobs
from tfdist_ext.checkpoint import EverySteps, TrainingCheckpointManager, TrainingState


def mirrored():
    return tfdist_ext.MirroredStrategy(["CPU:0", "CPU:1"])


def scoped(strategy, make=jobs.network):
    if strategy is None:
        return make()
    with strategy.scope():
        return make()


STRATEGIES = {
    "none": lambda: None,
    "ours": mirrored,
    "stock": lambda: tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]),
    "one device": lambda: tf.distribute.OneDeviceStrategy("CPU:1"),
}


@pytest.mark.parametrize("before", ["none", "ours", "stock"])
def test_c1_c2_from_any_strategy_into_any_other(tmp_path, before):
    first = jobs.manager(tmp_path, scoped(STRATEGIES[before]()), save=EverySteps(5))
    assert jobs.fit(first, jobs.Interrupt(before_batch=5)) is None
    saved = jobs.values(first.state)
    for make_strategy in STRATEGIES.values():
        keras.backend.clear_session()
        second = jobs.manager(tmp_path, scoped(make_strategy()))
        restored = second.restore_or_initialize()
        assert (restored.step, restored.epoch, restored.batch) == (5, 0, 5)
        jobs.assert_equal(saved, jobs.values(second.state))
        assert int(second.state.model.optimizer.iterations.numpy()) == 5


def local_rows(strategy, batch):
    return np.concatenate([part.numpy() for part in strategy.experimental_local_results(batch)]).tolist()


def test_c3_a_distributed_iterator_in_a_stock_checkpoint_goes_on_with_the_first_unseen_row(tmp_path):
    strategy = mirrored()
    dataset = strategy.experimental_distribute_dataset(tf.data.Dataset.range(24).batch(4))
    iterator = iter(dataset)
    assert [local_rows(strategy, next(iterator)) for _ in range(2)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    tf.train.Checkpoint(iterator=iterator).write(str(tmp_path / "iterator"))
    next(iterator)
    again = iter(dataset)
    tf.train.Checkpoint(iterator=again).read(str(tmp_path / "iterator")).assert_consumed()
    assert local_rows(strategy, next(again)) == [8, 9, 10, 11]


@pytest.mark.parametrize("how", ["replay", "iterator"])
def test_c4_rows_that_were_prefetched_and_not_used_are_not_lost(tmp_path, how):
    def epochs(steps):
        """Returns the rows of each batch that a loop over two passes takes, at most so many."""
        strategy = mirrored()
        dataset = tf.data.Dataset.range(24).shuffle(24, seed=5).batch(4).prefetch(4)
        state = TrainingState(
            None, strategy.experimental_distribute_dataset(dataset), strategy=strategy, input_position=how
        )
        checkpoints = TrainingCheckpointManager(state, tmp_path / how, save=EverySteps(1))
        checkpoints.restore_or_initialize()
        rows = []
        for epoch in range(state.epoch, 2):
            state.epoch = epoch
            for batch in state.dataset:
                rows.append(local_rows(strategy, batch))
                checkpoints.save_if_due(state.step + 1)
                if len(rows) == steps:
                    checkpoints.wait()
                    return rows
        checkpoints.wait()
        return rows

    parts = [epochs(2), epochs(5), epochs(100)]
    assert [len(part) for part in parts] == [2, 5, 5]
    first, second = np.concatenate(parts)[:6].ravel(), np.concatenate(parts)[6:].ravel()
    assert sorted(first) == sorted(second) == list(range(24))
    if how == "replay":
        # Without a cut the second pass has this order.
        reference = tf.data.Dataset.range(24).shuffle(24, seed=5).batch(4)
        assert [list(reference.unbatch().as_numpy_iterator()) for _ in range(2)] == [
            list(first),
            list(second),
        ]


def test_c6_an_epoch_goes_on_with_its_next_batch_and_shows_all_its_steps(tmp_path, capsys):
    assert jobs.fit(jobs.manager(tmp_path), jobs.Interrupt(steps=18)) is None
    seen = jobs.Seen()
    again = jobs.manager(tmp_path)
    again.state.model.fit(again.state.dataset, epochs=3, verbose=1, callbacks=[again.keras_callback(), seen])
    # The step that was interrupted had not been saved: epoch 2 had 7 of its 10 batches.
    assert seen.epochs == [1, 2]
    assert seen.batches == [*range(7, 10), *range(10)]
    shown = capsys.readouterr().out
    assert "8/10" in shown and "10/10" in shown and "/20" not in shown and "Epoch 2/3" in shown


def test_c7_the_second_run_does_the_epochs_that_are_left(tmp_path):
    assert jobs.fit(jobs.manager(tmp_path, save=EverySteps(10)), jobs.Interrupt(epochs=5), epochs=10) is None
    seen = jobs.Seen()
    history = jobs.fit(jobs.manager(tmp_path), seen, epochs=10)
    assert seen.epochs == [4, 5, 6, 7, 8, 9]
    assert len(history["loss"]) == 10
    # There is nothing left for a third.
    third = jobs.Seen()
    assert jobs.fit(jobs.manager(tmp_path), third, epochs=10) == history
    assert third.epochs == []


def scaled():
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.01), 64.0, dynamic_growth_steps=4)
    return jobs.network(optimizer)


def test_c10_loss_scale_and_its_counter(tmp_path):
    assert jobs.fit(jobs.manager(tmp_path, scaled()), jobs.Interrupt(steps=8)) is None
    again = jobs.manager(tmp_path, scaled())
    again.restore_or_initialize()
    optimizer = again.state.model.optimizer
    # 7 good steps: doubled after 4, and 3 counted since.
    assert float(optimizer.dynamic_scale) == 128.0
    assert int(optimizer.step_counter) == 3


def test_c11_the_curve_of_a_run_cut_in_three(tmp_path):
    whole = jobs.fit(jobs.manager(tmp_path / "whole"), keras.callbacks.ReduceLROnPlateau("loss", patience=1))
    for steps in (4, 13):
        keras.backend.clear_session()
        keras.utils.set_random_seed(7)
        plateau = keras.callbacks.ReduceLROnPlateau("loss", patience=1)
        assert jobs.fit(jobs.manager(tmp_path / "cut"), plateau, jobs.Interrupt(steps=steps)) is None
    plateau = keras.callbacks.ReduceLROnPlateau("loss", patience=1)
    assert jobs.fit(jobs.manager(tmp_path / "cut"), plateau) == whole


def test_c17_an_optimizer_that_is_not_built_yet(tmp_path):
    first = jobs.manager(tmp_path)
    assert jobs.fit(first, jobs.Interrupt(steps=4)) is None
    model = jobs.network()
    assert not model.optimizer.built
    second = jobs.manager(tmp_path, model)
    second.restore_or_initialize()
    assert model.optimizer.built and int(model.optimizer.iterations) == 3
    # Strict both ways: another optimizer has other slots.
    with pytest.raises(tfdist_ext.errors.CheckpointMismatchError) as caught:
        jobs.manager(tmp_path, jobs.network("sgd")).restore_or_initialize()
    assert "only in the checkpoint: model/optimizer/_variables/2" in str(caught.value)


def test_stock_tensorflow_reads_what_was_saved(tmp_path):
    first = jobs.manager(tmp_path, save=EverySteps(3))
    assert jobs.fit(first, jobs.Interrupt(steps=4)) is None
    model = jobs.network()
    (record,) = first.directory.records()
    tf.train.Checkpoint(model=model).restore(f"{record.path}/state").expect_partial()
    restored = jobs.manager(tmp_path)
    restored.restore_or_initialize()
    for expected, found in zip(restored.state.model.weights, model.weights, strict=True):
        np.testing.assert_array_equal(found, expected)
