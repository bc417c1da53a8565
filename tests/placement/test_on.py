"""A pinned block, function or layer has its variables and its operations on one device, and says so when it cannot."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdist_ext.placement import explain, on


def places(function, *args):
    """Returns the requested devices of each type of operation."""
    found = {}
    for row in explain(function, *args).operations:
        found.setdefault(row.kind, set()).add(row.requested)
    return found


def device_of(tensor):
    return tf.DeviceSpec.from_string(tensor.device).device_index


@pytest.mark.parametrize("way", ["block", "layer"])
def test_D1_a_layer_is_pinned_with_its_variables_and_its_MatMul(way):
    if way == "block":
        with on("CPU:1"):
            layer = keras.layers.Dense(3)
    else:
        layer = on("CPU:1")(keras.layers.Dense(3))
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2), layer])
    assert {variable.value.device[-5:] for variable in layer.variables} == {"CPU:1"}
    report = explain(tf.function(lambda x: model(x)), tf.ones([2, 4]), assigned=True)
    pinned = [
        row for row in report.operations if row.kind in ("MatMul", "BiasAdd", "AddV2") and row.requested
    ]
    assert {row.requested for row in pinned} == {row.assigned for row in pinned} == {"CPU:1"}
    assert sum(row.kind == "MatMul" for row in pinned) == 1
    assert not report.apart
    model.compile(optimizer="sgd", loss="mse")
    model.fit(np.ones([8, 4]), np.ones([8, 3]), verbose=0)


def test_a_layer_with_variables_elsewhere_is_refused():
    layer = keras.layers.Dense(3)
    layer.build((None, 4))
    with pytest.raises(ValueError, match="has variables that are not on CPU:1, such as 'dense/kernel'"):
        on("CPU:1")(layer)
    dropout = on("CPU:1")(keras.layers.Dropout(0.5))  # Its seed was made before.
    assert dropout(tf.ones([4]), training=True).shape == [4]


def test_variables_and_operations_through_control_flow_and_calls():
    @tf.function
    def called(x):
        return tf.sin(x)

    @on("CPU:2")
    def pinned(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = called(x)
            for _ in tf.range(3):
                y = tf.tanh(y)
            if tf.reduce_sum(y) > 0.0:
                y = tf.exp(y)
        return tape.gradient(y, x)

    def step(x):
        return tf.cos(pinned(called(x)))

    found = places(tf.function(step), tf.ones([2]))
    for kind in ("Tanh", "TanhGrad", "Exp", "StatelessIf", "Mul", "Cos"):
        # The gradient of a sine is a cosine, here; the other is outside, as is one of the sines.
        assert found[kind] == ({"", "CPU:2"} if kind == "Cos" else {"CPU:2"}), kind
    assert found["Sin"] == {"", "CPU:2"}
    assert np.allclose(tf.function(step)(tf.ones([2])), step(tf.ones([2])))


def test_variables_that_a_block_makes():
    with on("CPU:3"):
        made = tf.Variable([1.0])
        product = made * 2.0
    assert device_of(made) == device_of(product) == 3
    assert device_of(made * 2.0) == 0


def test_what_asks_for_another_device_inside_gets_it():
    @tf.function
    def function(x):
        with on("CPU:1"):
            x = tf.sin(x)
            with tf.device("CPU:2"):
                x = tf.exp(x)
            with on("CPU:3"):
                x = tf.tanh(x)
            return tf.cos(x)

    found = places(function, tf.ones([]))
    assert [found[kind] for kind in ("Sin", "Exp", "Tanh", "Cos")] == [
        {"CPU:1"},
        {"CPU:2"},
        {"CPU:3"},
        {"CPU:1"},
    ]


def test_a_tf_function_stays_one():
    function = tf.function(lambda x: tf.sin(x), input_signature=[tf.TensorSpec([2])])
    pinned = on("CPU:1")(function)
    assert places(pinned)["Sin"] == {"CPU:1"}
    pinned(tf.ones([2]))
    pinned(tf.zeros([2]))
    assert pinned.experimental_get_tracing_count() == 1


@pytest.mark.parametrize("mode", ["eager", "function", "compiled"])
def test_a_device_that_is_not_there_is_an_error_that_lists_those_there_are(mode):
    pinned = on("CPU:9")(lambda x: x + 1.0)
    if mode != "eager":
        pinned = tf.function(pinned, jit_compile=mode == "compiled")
    with pytest.raises(ValueError, match="no device 'CPU:9'; there are CPU:0, CPU:1, CPU:2, CPU:3"):
        pinned(tf.ones([]))
    with pytest.raises(ValueError, match="no device '/job:ps/task:0'"), on("/job:ps/task:0"):
        pass
    with pytest.raises(ValueError, match="no device 'CPU:9'"):
        on("CPU:9")(keras.layers.Dense(1))


def test_compiled_functions_run_pinned_code():
    compiled = tf.function(on("CPU:0")(lambda x: x + 1.0), jit_compile=True)
    assert float(compiled(tf.ones([]))) == 2.0


def test_a_failure_inside_leaves_nothing_pinned():
    with pytest.raises(KeyError), on("CPU:1"):
        layer = keras.layers.Dense(2)
        raise KeyError
    layer.build((None, 1))
    assert layer.kernel.value.device.endswith("CPU:0")
    assert keras.layers.Dense(2)(tf.ones([1, 1])).device.endswith("CPU:0")
