"""What a report says is held against what runs."""

import pytest
import tensorflow as tf

from tfdist_ext.placement import explain, on

X = [[1.0, 2.0], [3.0, 4.0]]


def device_of(report, part):
    return {row.device for row in report.operations if part in row.name}


def ran_on(tensor):
    return "CPU:" + tensor.device.rpartition(":")[2]


def body_with_a_pin(x):
    with tf.device("CPU:1"):
        y = tf.matmul(x, x)
    return tf.tanh(y)


def body_with_on(x):
    return tf.tanh(on("CPU:2")(lambda x: tf.matmul(x, x))(x))


def body_with_a_loop(x):
    for _ in tf.range(2):
        with tf.device("CPU:1"):
            x = tf.matmul(x, x)
    return x


def body_with_a_branch(x):
    with tf.device("CPU:3"):
        return tf.cond(x[0, 0] > 0.0, lambda: tf.matmul(x, x), lambda: x)


def body_with_a_function(x):
    return tf.function(body_with_a_pin)(x)


def body_with_a_gradient(x):
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = body_with_a_pin(x)
    return tape.gradient(y, x)


def body_with_a_device_that_is_not_there(x):
    with tf.device("/job:nowhere/task:0/device:CPU:0"):
        return tf.matmul(x, x)


BODIES = [value for name, value in list(globals().items()) if name.startswith("body_")]


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_f22_pins_inside_a_compiled_function_are_shown_as_ignored(body):
    """XLA compiles the whole function for the default device, where its result then is."""
    compiled = tf.function(body, jit_compile=True)
    report = explain(compiled, tf.constant(X))
    assert {row.device for row in report.operations} == {"CPU:0"} == {ran_on(compiled(tf.constant(X)))}
    assert report.cut_bytes == 0
    assert any("MatMul is requested on" in line and "compiled" in line for line in report.not_honoured)


def test_f22_a_compiled_function_that_is_called_on_a_device_runs_there_whole():
    compiled = tf.function(body_with_a_pin, jit_compile=True)

    @tf.function
    def outer(x):
        with tf.device("CPU:2"):
            return compiled(x)

    report = explain(outer, tf.constant(X))
    assert device_of(report, "MatMul") == device_of(report, "Tanh") == {"CPU:2"}
    assert any("MatMul is requested on CPU:1" in line for line in report.not_honoured)


@pytest.mark.parametrize("is_nested", [False, True])
def test_f22_a_variable_of_another_device_in_a_compiled_function_is_refused_as_xla_refuses_it(is_nested):
    with tf.device("CPU:1"):
        variable = tf.Variable(X, name="far")
    function = compiled = tf.function(lambda x: tf.matmul(x, variable), jit_compile=True)
    if is_nested:
        function = tf.function(lambda x: compiled(x) + 1.0)
    with pytest.raises(tf.errors.InvalidArgumentError, match="from device"):
        function(tf.constant(X))
    with pytest.raises(
        ValueError, match="variable far is on CPU:1, but the function that takes it is compiled"
    ):
        explain(function, tf.constant(X))


@pytest.mark.parametrize(
    "device",
    [
        "/job:nowhere/task:0/device:CPU:0",
        "/job:ps/task:3",
        "/job:localhost/task:1/device:CPU:0",
        "/job:localhost/replica:1/task:0/device:CPU:0",
        "/job:worker/replica:0/task:0/device:GPU:0",
    ],
)
def test_f22_a_task_that_does_not_exist_is_refused_by_name(device):
    @tf.function
    def function(x):
        with tf.device(device):
            return tf.matmul(x, x)

    with pytest.raises(tf.errors.InvalidArgumentError, match="Cannot assign a device"):
        function(tf.constant(X))
    with pytest.raises(ValueError, match=r"'MatMul' is requested on /job.* does not exist.*there are CPU:0"):
        explain(function, tf.constant(X))


def test_f22_without_soft_placement_a_device_that_does_not_exist_is_refused():
    @tf.function
    def function(x):
        with tf.device("CPU:9"):
            return tf.matmul(x, x)

    assert "CPU:9, which is not there" in explain(function, tf.constant(X)).not_honoured[0]
    tf.config.set_soft_device_placement(False)
    try:
        with pytest.raises(ValueError, match="requested on CPU:9, which does not exist"):
            explain(function, tf.constant(X))
    finally:
        tf.config.set_soft_device_placement(True)
