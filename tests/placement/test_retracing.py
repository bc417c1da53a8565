"""A function that is traced again is stopped, with the argument to blame."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdist_ext.placement import RetracingError, no_retracing


def test_the_argument_that_differs_is_named_with_both_specs():
    step = no_retracing(tf.function(lambda x, rate: x * rate))
    assert step(tf.ones([2]), rate=2.0).numpy().tolist() == [2.0, 2.0]
    assert step(np.zeros([2], "float32"), 2.0).numpy().tolist() == [0.0, 0.0]
    with pytest.raises(RetracingError, match=r"argument `rate` was 2.0 and is 3.0. Try tensors") as failure:
        step(tf.ones([2]), 3.0)
    assert failure.value.arguments == ("rate",)
    with pytest.raises(RetracingError, match=r"`x` was .*shape=\(2,\).* and is .*shape=\(3,\)") as failure:
        step(tf.ones([3]), 2.0)
    assert failure.value.arguments == ("x",)


def test_it_fails_before_anything_runs():
    total = tf.Variable(0.0)
    step = no_retracing(tf.function(lambda x: total.assign_add(tf.reduce_sum(x))))
    step(tf.ones([2]))
    with pytest.raises(RetracingError):
        step(tf.ones([3]))
    assert float(total) == 2.0


def test_parts_of_structures_are_told_apart():
    step = no_retracing(lambda batch: batch["a"] + batch["b"])
    step({"a": tf.ones([2]), "b": tf.ones([2])})
    with pytest.raises(RetracingError) as failure:
        step({"a": tf.ones([2]), "b": tf.ones([2], tf.float32)[:1]})
    assert failure.value.arguments == ("batch['b']",)


def test_as_many_traces_as_are_allowed():
    step = no_retracing(tf.function(lambda x: x + 1.0), max_traces=2)
    for size in (4, 3, 4, 3):
        step(tf.ones([size]))
    # Compared to the most similar of those before: both differ in x alone.
    with pytest.raises(RetracingError, match="traced 3 times"):
        step(tf.ones([5]))


def test_a_function_that_makes_variables_is_traced_twice_at_first_and_that_counts_once():
    made = []

    @no_retracing
    def step(x):
        if not made:
            made.append(tf.Variable(2.0))
        return made[0] * x

    assert [float(step(tf.constant(value))) for value in (1.0, 2.0, 3.0)] == [2.0, 4.0, 6.0]


def test_a_block_watches_a_function_that_others_call():
    @tf.function
    def step(x):
        return x + 1.0

    step(tf.ones([2]))
    with no_retracing(step):
        step(tf.zeros([2]))
    with pytest.raises(RetracingError, match=r"step was traced 2 times: argument `x` was .*2.* and is .*7"):
        with no_retracing(step):
            step(tf.zeros([7]))
    with pytest.raises(KeyError), no_retracing(step):
        step(tf.zeros([9]))
        raise KeyError


def test_a_spec_that_covers_all_sizes_is_one_trace():
    step = no_retracing(tf.function(lambda x: x + 1.0, input_signature=[tf.TensorSpec([None])]))
    for size in range(1, 5):
        assert step(tf.ones([size])).shape == [size]


def test_keras_layers_under_guard():
    layer = keras.layers.Dense(2)
    step = no_retracing(tf.function(lambda x: layer(x)))
    step(tf.ones([3, 4]))
    step(tf.zeros([3, 4]))


def test_arguments_are_checked():
    with pytest.raises(ValueError, match="Argument `max_traces` must be at least 1; received 0"):
        no_retracing(lambda: None, max_traces=0)
    with pytest.raises(TypeError, match="Argument `function` must be a tf.function or a Python function"):
        no_retracing(tf.function(lambda: tf.constant(1)).get_concrete_function())
