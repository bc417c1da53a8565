"""Plans of functions respect what is fixed, and a placed function runs where its plan says, with the same bits."""

import random

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdist_ext.placement import Device as Processor
from tfdist_ext.placement import (
    InfeasiblePlacementError,
    Link,
    Machine,
    Plan,
    apply_plan,
    explain,
    on,
    plan,
)
from tfdist_ext.placement.assignment import assigned_devices, call_prefix

DEVICES = ("CPU:0", "CPU:1", "CPU:2", "CPU:3")


def flat(structure):
    return [part.numpy() for part in tf.nest.flatten(structure, expand_composites=True) if part is not None]


def same_bits(one, other):
    pairs = list(zip(flat(one), flat(other), strict=True))
    return all(np.array_equal(a, b) and a.dtype == b.dtype for a, b in pairs)


def everything():
    """A step with nested functions, a loop, both kinds of conditionals, and gradients through all of them."""
    generator = np.random.default_rng(3)
    weight = tf.Variable(generator.normal(size=[3, 3]).astype("float32"), name="weight")
    table = tf.Variable(generator.normal(size=[10, 3]).astype("float32"), name="table")

    @tf.function
    def product(x):
        return tf.matmul(x, weight)

    @tf.function
    def step(x, ids):
        with tf.GradientTape() as tape:
            x = product(x)
            for _ in tf.range(3):
                x = tf.tanh(product(x))
            x = tf.cond(tf.reduce_sum(x) > 0.0, lambda: x * 2.0, lambda: x - 1.0)
            if tf.reduce_sum(x) > 100.0:
                x = product(x)
            loss = tf.reduce_sum(tf.gather(table, ids)) * tf.reduce_sum(product(x) ** 2)
        return loss, tape.gradient(loss, [weight, table])

    return (
        step,
        [tf.constant(generator.normal(size=[4, 3]), tf.float32), tf.constant([1, 2, 2])],
        (weight, table),
    )


def scattered(function, args, seed):
    """Returns a plan that puts every operation that is free to go anywhere somewhere at random."""
    base = plan(function, args, devices=["CPU:0"])
    rng = random.Random(seed)
    report = explain(function, *args)
    free = {
        row.name
        for row in report.operations
        if row.kind not in ("Placeholder", "VarHandleOp", "Enter", "Exit")
        and "Variable" not in row.kind
        and "Resource" not in row.kind
    }
    devices = {name: rng.choice(DEVICES) if name in free else device for name, device in base.devices.items()}
    return Plan(**{**vars(base), "devices": devices, "method": "by chance"})


@pytest.fixture
def sums_as_written():
    """Keeps Grappler from adding in another order: it turns sums of sums on one device into one sum."""
    before = tf.config.optimizer.get_experimental_options()
    tf.config.optimizer.set_experimental_options({"arithmetic_optimization": False})
    yield
    tf.config.optimizer.set_experimental_options({"arithmetic_optimization": True, **before})


@pytest.mark.parametrize("seed", range(3))
def test_the_same_bits_wherever_the_operations_run(seed, sums_as_written):
    step, args, _ = everything()
    placed = apply_plan(step, scattered(step, args, seed))
    assert same_bits(placed(*args), step(*args))


def test_the_same_but_for_the_order_of_sums_with_every_optimizer_on():
    step, args, _ = everything()
    for one, other in zip(
        flat(apply_plan(step, scattered(step, args, 1))(*args)), flat(step(*args)), strict=True
    ):
        # Sums of a handful of float32, of the size of the largest of them: 8 roundings of 2**-24.
        np.testing.assert_allclose(one, other, rtol=0, atol=8 * 2.0**-24 * np.abs(other).max())


def test_every_operation_is_where_the_plan_says():
    step, args, _ = everything()
    wanted = scattered(step, args, seed=5)
    placed = apply_plan(step, wanted)
    prefix = call_prefix(placed.get_concrete_function(*args).graph)
    requested = {
        row.name.removeprefix(prefix): row.requested or row.device
        for row in explain(placed, *args).operations
        if row.name.startswith(prefix) and row.kind not in ("Enter", "Exit")
    }
    assert len(requested) > 100 and len(set(requested.values())) == 4
    assert requested == {name: wanted.devices[name] for name in requested}
    # What TensorFlow did with it, as far as it did not remove the operation.
    assigned = {name.removeprefix(prefix): device for name, device in assigned_devices(placed, args).items()}
    common = [name for name in requested if name in assigned]
    assert len(common) > 50
    assert {name: assigned[name] for name in common} == {name: requested[name] for name in common}


def test_variables_captures_gradients_and_signature_are_kept():
    scale = tf.constant(3.0)
    weight = tf.Variable([1.0, 2.0])

    @tf.function(input_signature=[tf.TensorSpec([None, 2]), tf.TensorSpec([])])
    def step(x, bias):
        """Scales."""
        return scale * x * weight + bias

    placed = apply_plan(step, plan(step))
    x, bias = tf.constant([[1.0, 2.0]]), tf.constant(1.0)
    with tf.GradientTape(persistent=True) as tape:
        tape.watch([x, bias])
        y, z = step(x, bias), placed(x, bias=bias)
    assert same_bits(y, z)
    for source in (x, bias, weight):
        assert same_bits(tape.gradient(y, source), tape.gradient(z, source))
    concrete = placed.get_concrete_function()
    assert [variable is weight for variable in concrete.variables] == [True]
    assert placed.input_signature == step.input_signature
    assert placed.__name__ == "step" and placed.__doc__ == "Scales."
    # Another batch is the same function; another structure is refused by TensorFlow, as it was.
    assert placed(tf.ones([5, 2]), bias).shape == [5, 2]
    assert placed.experimental_get_tracing_count() == 1
    with pytest.raises(TypeError):
        placed(x)


def test_effects_happen_once_a_call():
    total = tf.Variable(0.0)

    @tf.function
    def add(x):
        total.assign_add(x)
        return total.read_value()

    placed = apply_plan(add, plan(add, [tf.constant(1.0)]))
    assert [float(placed(tf.constant(2.0))) for _ in range(3)] == [2.0, 4.0, 6.0]


def test_a_keras_training_step():
    def build():
        keras.utils.set_random_seed(3)
        model = keras.Sequential(
            [keras.Input((4,)), keras.layers.Dense(8, activation="tanh"), keras.layers.Dropout(0.5),
             keras.layers.BatchNormalization(), keras.layers.Dense(1)]
        )  # fmt: skip
        optimizer = keras.optimizers.Adam(0.01)
        optimizer.build(model.trainable_variables)

        @tf.function
        def step(x, y):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((model(x, training=True) - y) ** 2)
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
            return loss

        return model, step

    x, y = tf.random.stateless_normal([16, 4], [1, 2]), tf.random.stateless_normal([16, 1], [3, 4])
    model, step = build()
    wanted = [float(step(x, y)) for _ in range(4)]
    other_model, other_step = build()
    placed = apply_plan(other_step, scattered(other_step, [x, y], seed=1))
    assert [float(placed(x, y)) for _ in range(4)] == wanted
    assert all(
        np.array_equal(a, b) for a, b in zip(model.get_weights(), other_model.get_weights(), strict=True)
    )


def test_a_python_function_and_a_method():
    class Doubler:
        def __init__(self):
            self.factor = tf.Variable(2.0)

        @tf.function
        def double(self, x):
            return self.factor * x

    doubler = Doubler()
    placed = apply_plan(doubler.double, plan(doubler.double, [tf.constant(4.0)]))
    assert float(placed(tf.constant(4.0))) == 8.0

    def power(x, n):
        return x**n

    args = [tf.constant(3.0), 2]
    assert float(apply_plan(power, plan(power, args))(*args)) == 9.0


def test_compiled_functions_stay_in_one_piece():
    with tf.device("CPU:2"):
        weight = tf.Variable([2.0, 3.0])

    @tf.function(jit_compile=True)
    def compiled(x):
        with tf.device("CPU:1"):  # The compiler asks nobody.
            return tf.sin(x) * tf.exp(x)

    @tf.function(jit_compile=True)
    def with_variable(x):
        return x * weight

    def step(x):
        y = tf.cos(compiled(x))
        with tf.device("CPU:2"):
            return with_variable(y)

    x = tf.constant([0.5, 1.0])
    report = explain(step, x)
    assert {row.device for row in report.operations if row.kind in ("Sin", "Exp")} == {"CPU:0"}
    made = plan(step, [x], devices=["CPU:0", "CPU:1", "CPU:2"])
    inside = {name: device for name, device in made.devices.items() if "PartitionedCall" in name}
    assert set(inside.values()) == {"CPU:0", "CPU:2"}
    np.testing.assert_array_equal(apply_plan(step, made)(x), tf.function(step)(x))


def test_a_plan_has_the_last_word():
    @on("CPU:1")
    def pinned(x):
        return tf.sin(x)

    def function(x):
        with tf.device("CPU:2"):
            return tf.exp(pinned(x))

    base = plan(function, [tf.ones([2])])
    elsewhere = Plan(**{**vars(base), "devices": {**base.devices, "Sin": "CPU:3", "Exp": "CPU:0"}})
    rows = {
        row.kind: row.requested for row in explain(apply_plan(function, elsewhere), tf.ones([2])).operations
    }
    assert (rows["Sin"], rows["Exp"]) == ("CPU:3", "CPU:0")


def test_devices_that_are_not_there_are_refused():
    function = tf.function(lambda x: x + 1.0)
    with pytest.raises(ValueError, match="no device 'CPU:7'; there are CPU:0, CPU:1, CPU:2, CPU:3"):
        plan(function, [tf.ones([])], devices=["CPU:0", "CPU:7"])
    wanted = plan(function, [tf.ones([])])
    elsewhere = Plan(**{**vars(wanted), "devices": dict.fromkeys(wanted.devices, "CPU:7")})
    with pytest.raises(ValueError, match="no device 'CPU:7'"):
        apply_plan(function, elsewhere)


def test_a_plan_of_another_function_is_refused():
    wanted = plan(lambda x: x + 1.0, [tf.ones([])])
    with pytest.raises(ValueError, match="has nothing for the operation 'Sin"):
        apply_plan(tf.function(tf.sin), wanted)(tf.ones([]))
    concrete = tf.function(tf.sin).get_concrete_function(tf.ones([]))
    with pytest.raises(TypeError, match="which can be traced again; received"):
        apply_plan(concrete, wanted)


def test_variables_are_fixed_points_of_a_plan():
    with tf.device("CPU:2"):
        table = tf.Variable(tf.ones([1000, 100]), name="table")

    def lookup(ids):
        return tf.reduce_sum(tf.gather(table, ids))

    made = plan(lookup, [tf.constant([1, 2])], devices=["CPU:0", "CPU:2"])
    assert made.devices["variable table"] == made.devices["Gather"] == "CPU:2"
    with pytest.raises(ValueError, match="variable table is on CPU:2, which is not among the devices"):
        plan(lookup, [tf.constant([1, 2])], devices=["CPU:0", "CPU:1"])


def test_memory_that_does_not_suffice_names_device_and_shortfall():
    with pytest.raises(InfeasiblePlacementError) as failure:
        plan(lambda x: x + 1.0, [tf.ones([1000])], devices=["CPU:0"], memory_bytes={"CPU:0": 5000})
    # x and the sum, 4000 bytes each, live at once, with the constant of 4: 8004 of 5000.
    assert (failure.value.device, failure.value.missing_bytes) == ("CPU:0", 3004)


def test_work_is_split_where_links_are_fast_and_kept_together_where_they_are_slow():
    def towers(x):
        a, b = x, x
        for _ in range(3):
            a, b = tf.matmul(a, a), tf.matmul(b, b)
        return a + b

    args = [tf.TensorSpec([200, 200])]
    # A product takes 2 * 200^3 = 16 million: 0.3 ms. A tensor has 160,000 bytes.
    fast = {("CPU:0", "CPU:1"): Link(latency_seconds=1e-5, bytes_per_second=1e10)}
    fast[("CPU:1", "CPU:0")] = fast[("CPU:0", "CPU:1")]
    slow = dict.fromkeys(fast, Link(latency_seconds=1.0))
    split = plan(towers, args, devices=["CPU:0", "CPU:1"], links=fast)
    products = {device for name, device in split.devices.items() if name.startswith("MatMul")}
    assert products == {"CPU:0", "CPU:1"}
    assert split.cut_bytes == 2 * 160_000
    together = plan(towers, args, devices=["CPU:0", "CPU:1"], links=slow)
    assert together.cut_bytes == 0
    # Two chains of three products and a sum, beside each other: 3 of them, there and back.
    assert split.predicted_seconds < 0.6 * together.predicted_seconds


def test_one_way_to_say_which_machine():
    machine = Machine(devices=[Processor(name="CPU:0")])
    with pytest.raises(ValueError, match="`machine` must not be given together with"):
        plan(lambda x: x, [tf.ones([])], devices=["CPU:0"], machine=machine)
    assert set(plan(lambda x: x + 1.0, [tf.ones([])], machine=machine).devices.values()) == {"CPU:0"}
