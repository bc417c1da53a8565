"""Every step of tf.data, cut in a later pass: the rows of the run that was not cut, or an error that names the step."""

import re

import keras
import pytest
import tensorflow as tf

from tfdist_ext import errors
from tfdist_ext.checkpoint import EverySteps, TrainingCheckpointManager, TrainingState

Data = tf.data.Dataset
PASSES = 4


def shuffled(rows=12, seed=1, **arguments):
    return Data.range(rows).shuffle(rows, seed=seed, **arguments)


def three_of(x):
    return Data.range(3).map(lambda y: x * 10 + y)


def noisy(rows=12):
    generator = tf.random.Generator.from_seed(1)
    return Data.range(rows).map(lambda x: tf.cast(x, tf.float32) + generator.uniform([]))


def repeating_another():
    inner = shuffled(6)
    return Data.range(2).flat_map(lambda x: inner)


# Reshuffling under each kind of step, in batches of two.
PIPELINES = {
    "batch": lambda: shuffled(),
    "without reshuffling": lambda: shuffled(reshuffle_each_iteration=False),
    "repeat": lambda: shuffled(6).repeat(2),
    "repeat for ever": lambda: shuffled(6).repeat().take(12),
    "repeat below": lambda: Data.range(6).repeat(2).shuffle(12, seed=1),
    "cache": lambda: shuffled().cache(),
    "cache below": lambda: Data.range(12).cache().shuffle(12, seed=1),
    "cache of draws": lambda: noisy().cache(),
    "concatenate": lambda: shuffled(6).concatenate(Data.range(6, 12).shuffle(6, seed=2)),
    "shuffle": lambda: shuffled().shuffle(4, seed=2),
    "map": lambda: Data.range(12).shuffle(12).map(lambda x: x + 1),
    "parallel map": lambda: shuffled().map(lambda x: x + 1, num_parallel_calls=2),
    "operation with a seed": lambda: shuffled().map(
        lambda x: tf.cast(x, tf.float32) + tf.random.uniform([], seed=3)
    ),
    "generator": lambda: noisy(),
    "prefetch": lambda: shuffled().prefetch(8),
    "sample": lambda: Data.sample_from_datasets([shuffled(6, 3), Data.range(100, 106)], [0.5, 0.5], seed=4),
    "choose": lambda: Data.choose_from_datasets(
        [shuffled(6, 3), Data.range(100, 106)], Data.range(2).repeat(6)
    ),
    "interleave": lambda: shuffled(4).interleave(three_of, cycle_length=2),
    "parallel interleave": lambda: shuffled(4).interleave(three_of, cycle_length=2, num_parallel_calls=2),
    "shuffle within interleave": lambda: Data.range(4).interleave(
        lambda x: three_of(x).shuffle(3, seed=2), cycle_length=2
    ),
    "files, then rows": lambda: shuffled(4).flat_map(three_of).shuffle(12, seed=3).prefetch(2),
    "another dataset": repeating_another,
    "zip": lambda: Data.zip((shuffled(), shuffled(12, 2))).map(lambda a, b: a * 100 + b),
    "random": lambda: Data.random(seed=3).take(12).map(lambda x: x % 1000),
    "random anew": lambda: (
        Data.random(seed=3, rerandomize_each_iteration=True).take(12).map(lambda x: x % 1000)
    ),
    "window": lambda: shuffled().window(4).flat_map(lambda w: w.shuffle(4, seed=2)),
    "take": lambda: shuffled(24).take(12),
    "skip": lambda: shuffled(24).skip(12),
    "shard": lambda: shuffled(24).shard(2, 1),
    "filter": lambda: shuffled().filter(lambda x: x > 1),
    "scan": lambda: shuffled().scan(tf.constant(0, tf.int64), lambda s, x: (s + x, s + x)),
    "unique": lambda: shuffled().unique(),
    "unbatch": lambda: shuffled().batch(4).unbatch(),
    "rebatch": lambda: shuffled().batch(4).rebatch(3).unbatch(),
    "enumerate": lambda: shuffled().enumerate().map(lambda i, x: 100 * i + x),
    "take while": lambda: shuffled().take_while(lambda x: x > -1),
    "group by window": lambda: (
        shuffled().group_by_window(lambda x: x % 2, lambda k, w: w.batch(2), window_size=2).unbatch()
    ),
    "python function": lambda: shuffled().map(lambda x: tf.numpy_function(lambda v: v, [x], tf.int64)),
    "python generator": lambda: Data.from_generator(
        lambda: iter(range(12)), output_signature=tf.TensorSpec([], tf.int64)
    ),
}


def rows_of(make, folder, how="replay", stop=None):
    """Reads on from what a folder has, to a step or to the end."""
    keras.utils.set_random_seed(1)
    state = TrainingState(None, make().batch(2), counter=tf.Variable(0), input_position=how)
    checkpoints = TrainingCheckpointManager(
        state, folder, save=EverySteps(10**6), stop_on_sigterm=False, asynchronous=False
    )
    checkpoints.restore_or_initialize()
    rows = []
    for epoch in range(state.epoch, PASSES):
        state.epoch = epoch
        for batch in state.dataset:
            rows.append((epoch, batch.numpy().tolist()))
            state.step += 1
            if state.step == stop:
                checkpoints.save(wait=True)
                checkpoints.wait()
                return rows
    return rows


@pytest.mark.parametrize("name", PIPELINES)
def test_f20_a_cut_in_a_later_pass_is_followed_by_the_rows_of_the_run_that_was_not_cut(tmp_path, name):
    make = PIPELINES[name]
    whole = rows_of(make, tmp_path / "whole")
    # In the middle of the third pass, and at the end of the second.
    for cut in (len(whole) // 2 + 2, len(whole) // 2):
        folder = tmp_path / f"{cut}"
        assert rows_of(make, folder, stop=cut) + rows_of(make, folder) == whole
    # Cut twice.
    folder = tmp_path / f"{len(whole) // 2}"
    assert rows_of(make, folder) == whole[len(whole) // 2 :]


# Of these nothing is drawn anew for another pass, or there is none. The others are named.
EXACT_IN_AN_ITERATOR = ["without reshuffling", "random"]
CANNOT_BE_SAVED = [
    "operation with a seed", "generator", "cache of draws", "python function", "python generator",
    "shuffle within interleave",
]  # fmt: skip


@pytest.mark.parametrize("name", PIPELINES)
def test_f20_the_state_of_an_iterator_is_exact_or_the_step_is_named(tmp_path, name):
    make = PIPELINES[name]
    if name not in EXACT_IN_AN_ITERATOR:
        step = (
            r"(Shuffle|Random)Dataset draws a new order for each pass|FlatMapDataset refers to whole datasets"
        )
        if name in CANNOT_BE_SAVED:
            step += "|cannot be saved: "
        with pytest.raises(errors.CheckpointIncompleteError, match=step):
            rows_of(make, tmp_path, "iterator", stop=2)
        return
    whole = rows_of(make, tmp_path / "whole", "iterator")
    # One batch before the end of the first pass, and at the end of the second.
    for cut in (len(whole) // PASSES - 1, len(whole) // 2):
        folder = tmp_path / f"{cut}"
        assert rows_of(make, folder, "iterator", cut) + rows_of(make, folder, "iterator") == whole


@pytest.mark.parametrize("how", ["iterator", "replay"])
@pytest.mark.parametrize("cut", [2, 3, 8])
def test_f20_a_pass_without_an_end_goes_on(tmp_path, how, cut):
    def make():
        return shuffled(6).repeat().prefetch(4)

    whole = rows_of(make, tmp_path / "whole", how, stop=20)
    assert rows_of(make, tmp_path / "cut", how, cut) + rows_of(make, tmp_path / "cut", how, 20) == whole


def with_options(deterministic):
    options = tf.data.Options()
    options.deterministic = deterministic
    return Data.range(4).interleave(three_of, cycle_length=2, num_parallel_calls=2).with_options(options)


def without_a_seed(make):
    """Makes a pipeline in a program that has set no seed."""
    tf.random.set_seed(None)
    return make()


@pytest.mark.parametrize(
    "make, step",
    [
        (
            lambda: shuffled().map(lambda x: x, num_parallel_calls=2, deterministic=False),
            "ParallelMapDataset",
        ),
        (
            lambda: Data.range(4).interleave(three_of, num_parallel_calls=2, deterministic=False),
            "ParallelInterleaveDataset",
        ),
        (lambda: with_options(False), "ParallelInterleaveDataset"),
        (lambda: without_a_seed(lambda: Data.range(4).shuffle(4).map(lambda x: x)), "ShuffleDataset"),
        (lambda: without_a_seed(lambda: Data.range(4).shuffle(4).repeat(2).prefetch(1)), "ShuffleDataset"),
        (
            lambda: without_a_seed(lambda: Data.sample_from_datasets([Data.range(4), Data.range(4)])),
            "(Random|Map|DirectedInterleave)Dataset",
        ),
        (lambda: without_a_seed(lambda: Data.random().take(4)), "RandomDataset"),
        (
            lambda: without_a_seed(
                lambda: Data.range(4).flat_map(lambda x: Data.range(3).shuffle(3)).map(lambda x: x)
            ),
            "FlatMapDataset",
        ),
    ],
    ids=[
        "map",
        "interleave",
        "options",
        "shuffle, map",
        "shuffle, repeat",
        "sample",
        "random",
        "inner shuffle",
    ],
)
def test_f20_a_step_whose_order_differs_each_time_is_named(make, step):
    (piece,) = [one for one in TrainingState(None, make()).pieces() if one.name == "input"]
    assert not piece.captured
    assert re.search(step, piece.reason), piece.reason


def test_f20_steps_in_order_are_no_reason_to_refuse():
    (piece,) = [one for one in TrainingState(None, with_options(True)).pieces() if one.name == "input"]
    assert piece.captured
