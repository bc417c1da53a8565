"""Reports say what was worked out by hand: operations, bytes, arithmetic, and where TensorFlow puts things."""

import dataclasses
import json

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdist_ext.placement import Device, Link, Machine, explain
from tfdist_ext.placement.report import Suggestion


def two_towers():
    """Two towers of 8 features to 16, one on each device, joined on the first."""
    with tf.device("CPU:0"):
        left = tf.Variable(tf.ones([8, 16]), name="left")
    with tf.device("CPU:1"):
        right = tf.Variable(tf.ones([8, 16]), name="right")

    @tf.function
    def towers(x):
        with tf.device("CPU:0"):
            a = tf.nn.relu(tf.matmul(x, left))
        with tf.device("CPU:1"):
            b = tf.nn.relu(tf.matmul(x, right))
        with tf.device("CPU:0"):
            return tf.concat([a, b], axis=1)

    return towers, (left, right)


def crossing(report):
    return {
        (one.producer, one.source, one.destination): (one.num_bytes, one.dtype, one.sparse)
        for one in report.transfers
    }


def row(report, device):
    return next(row for row in report.devices if row.device == device)


def test_D6_two_towers_and_a_concat_counted_by_hand():
    towers, _ = two_towers()
    report = explain(towers, tf.ones([4, 8]))
    # What crosses: x, 4 x 8 float32, to the second tower; its result, 4 x 16 float32, back to the concat.
    assert crossing(report) == {
        ("x", "CPU:0", "CPU:1"): (4 * 8 * 4, "float32", False),
        ("Relu_1", "CPU:1", "CPU:0"): (4 * 16 * 4, "float32", False),
    }
    assert report.cut_bytes == 128 + 256
    # CPU:1 has the variable, its ReadVariableOp, MatMul and Relu. CPU:0 the same four, x, the concat with the constant
    # of its axis, and the function's results: Identity, NoOp.
    assert row(report, "CPU:1").num_operations == 4
    assert row(report, "CPU:0").num_operations == 4 + 1 + 2 + 2
    # A product of [4, 8] and [8, 16] takes 2 * 4 * 8 * 16; Relu one for each of 4 x 16.
    assert row(report, "CPU:1").flops == 1024 + 64
    assert row(report, "CPU:0").flops == 1024 + 64
    assert (row(report, "CPU:0").variable_bytes, row(report, "CPU:1").variable_bytes) == (512, 512)
    # CPU:1 at its fullest: variable 512, what was read of it 512, x 128, product 256. Then Relu adds 256 when 640 of x
    # and the read value are gone.
    assert row(report, "CPU:1").peak_bytes == 512 + 512 + 128 + 256


def test_D4_a_report_without_logs_from_tensorflow(capfd):
    towers, _ = two_towers()
    text = str(explain(towers, tf.ones([4, 8])))
    assert "Relu_1:0 float32 dense, for concat" in text and "CPU:1 -> CPU:0" in text
    assert len(text.splitlines()) <= 60
    written = "".join(capfd.readouterr())
    assert "/device:CPU" not in written and "WARNING" not in written
    # And in a notebook, for which the arrows of the text are no tags.
    assert "CPU:1 -&gt; CPU:0: Relu_1:0" in explain(towers, tf.ones([4, 8]))._repr_html_()


def test_a_tensor_that_two_operations_on_a_device_take_crosses_once():
    def function(x):
        y = tf.exp(x)
        with tf.device("CPU:1"):
            return tf.sin(y) + tf.cos(y)

    report = explain(function, tf.ones([10]))
    # 10 float32 there; the sum, 10 float32, back to the result, which is on the default device.
    assert crossing(report) == {
        ("Exp", "CPU:0", "CPU:1"): (40, "float32", False),
        ("add", "CPU:1", "CPU:0"): (40, "float32", False),
    }
    assert next(one for one in report.transfers if one.producer == "Exp").consumers == ("Sin", "Cos")


def test_a_while_loop_counts_every_turn():
    def function(x):
        def body(i, y):
            with tf.device("CPU:1"):
                product = tf.matmul(y, y)
            return i + 1, product

        return tf.while_loop(lambda i, y: i < 5, body, [tf.constant(0), x])[1]

    report = explain(function, tf.ones([3, 3]))
    flops = {row.device: row.flops for row in report.devices}
    # 5 products of [3, 3] and [3, 3]: 5 * 2 * 27.
    assert flops["CPU:1"] == 270
    # In each of 5 turns 36 bytes go there and 36 come back.
    assert crossing(report) == {
        ("while/enter_3", "CPU:0", "CPU:1"): (180, "float32", False),
        ("while/body/while/MatMul", "CPU:1", "CPU:0"): (180, "float32", False),
    }
    assert not report.notes


@pytest.mark.parametrize(
    ("turns", "loop"),
    [
        (3, lambda x: tf.while_loop(lambda i, y: i < 7, lambda i, y: (i + 3, y * 2.0), [tf.constant(0), x])),
        (4, lambda x: tf.while_loop(lambda i, y: i >= 1, lambda i, y: (i // 2, y * 2.0), [tf.constant(8), x])),
        (2, lambda x: tf.while_loop(lambda i, y: True, lambda i, y: (i, y * 2.0), [1, x], maximum_iterations=2)),
        (None, lambda x: tf.while_loop(lambda y: tf.reduce_sum(y) < 99.0, lambda y: y * 2.0, [x])),
    ],
)  # fmt: skip
def test_turns_of_a_loop(turns, loop):
    report = explain(lambda x: loop(x)[-1], tf.ones([4]))
    # The product takes one for each of 4 elements in each turn; the counter's own arithmetic is on scalars.
    name = next(one.name for one in report.operations if one.name.endswith("/mul"))
    start, finish = report.schedule.start[name], report.schedule.finish[name]
    once = 2e-6 + (16 + 16 + 4) / 1e10
    assert finish - start == pytest.approx((turns or 1) * once)
    assert any("turns of while are not known" in note for note in report.notes) == (turns is None)


def test_the_loop_of_a_gradient_turns_as_often_as_the_loop():
    weight = tf.Variable(2.0)

    def function(x):
        with tf.GradientTape() as tape:
            y = tf.while_loop(lambda i, y: i < 6, lambda i, y: (i + 1, y * weight), [0, x])[1]
        return tape.gradient(y, weight)

    report = explain(function, tf.ones([]))
    assert sum(one.kind in ("While", "StatelessWhile") for one in report.operations) == 2
    assert not report.notes


def test_the_loop_of_a_recurrent_layer_turns_once_for_each_of_its_steps():
    layer = keras.layers.LSTM(5)
    report = explain(tf.function(lambda x: layer(x)), tf.ones([2, 7, 6]))
    assert not report.notes
    # Products with the state, [2, 5] by [5, 20], and with the input, [2, 6] by [6, 20], in each of 7 turns, and once
    # before, where Keras learns the shape of what comes out.
    assert sum(row.kind == "MatMul" for row in report.operations) == 4
    products = 8 * 2 * (2 * 5 * 20 + 2 * 6 * 20)
    assert products <= sum(row.flops for row in report.devices) < 1.5 * products


def table_step(dense: bool):
    with tf.device("CPU:1"):
        table = tf.Variable(tf.ones([1000, 4]), name="table")

    def step(ids):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.gather(table, ids) ** 2)
        gradient = tape.gradient(loss, table)
        if dense:
            table.assign_sub(tf.convert_to_tensor(gradient))
        else:
            table.scatter_sub(gradient)

    return step


def test_the_gradient_of_a_gather_stays_sparse():
    report = explain(table_step(dense=False), tf.constant([1, 2, 3]))
    sparse = {one: size for one, (size, _, is_sparse) in crossing(report).items() if is_sparse}
    # Back to the table go 3 rows of 4 float32 and their 3 numbers, int32.
    assert sorted(sparse.values()) == [12, 48]
    assert all((source, to) == ("CPU:0", "CPU:1") for _, source, to in sparse)
    dense = {producer: size for (producer, _, _), (size, _, flag) in crossing(report).items() if not flag}
    # There go the numbers of the rows for the gather, here come the rows.
    assert dense == {"ids": 12, "Gather": 48}
    assert not any("sparse" in one.text for one in report.suggestions)


def test_a_gradient_made_dense_is_found_and_what_that_costs():
    link = Link(latency_seconds=0, bytes_per_second=1e6)
    devices = [Device(name="CPU:0", bytes_per_second=1e12), Device(name="CPU:1", bytes_per_second=1e12)]
    report = explain(
        table_step(dense=True), tf.constant([1, 2, 3]), machine=Machine(devices=devices, link=link)
    )
    whole = next(size for size, _, _ in crossing(report).values() if size == 1000 * 4 * 4)
    suggestion = next(one for one in report.suggestions if "sparse" in one.text)
    # The table, 16,000 bytes, need not cross; 3 rows and their numbers, 60 bytes, and 4 for the number of rows do.
    assert suggestion.gain_seconds == pytest.approx((whole - 64) / 1e6, rel=1e-3)


def test_D1_a_layer_built_on_a_device_runs_elsewhere_and_the_report_says_so():
    with tf.device("CPU:1"):
        layer = keras.layers.Dense(3, name="dense")
        layer.build((None, 4))
    report = explain(tf.function(lambda x: layer(x)), tf.ones([2, 4]))
    # Keras names what a layer does beside its variables: building took the name "dense".
    sentence = "variable dense/kernel is on CPU:1; dense_1/MatMul takes it, is unplaced, and runs on CPU:0"
    assert report.device_of("variable dense/kernel") == "CPU:1"
    assert sentence in report.apart
    assert sentence in str(report)
    assert "dense_1/MatMul" in report.unplaced


def test_D5_requested_and_assigned_device():
    def function(x):
        with tf.device("CPU:1"):
            y = tf.tanh(x)
        with tf.device("CPU:3"):
            z = tf.sin(y)
        return tf.cos(z)

    report = explain(function, tf.ones([2, 2]), assigned=True)
    rows = {one.kind: (one.requested, one.assigned) for one in report.operations}
    assert rows["Tanh"] == ("CPU:1", "CPU:1")
    assert rows["Sin"] == ("CPU:3", "CPU:3")
    assert rows["Cos"] == ("", "CPU:0")
    assert explain(function, tf.ones([2, 2])).operations[1].assigned is None


def test_a_device_that_is_not_there_is_reported():
    def function(x):
        with tf.device("CPU:9"):
            return tf.tanh(x)

    report = explain(function, tf.ones([2]), assigned=True)
    assert report.not_honoured == (
        "Tanh is requested on CPU:9, which is not there, and runs on CPU:0; there are CPU:0, CPU:1, CPU:2, CPU:3",
    )
    assert next(one for one in report.operations if one.name == "Tanh").assigned == "CPU:0"


def test_an_operation_cannot_leave_its_variable():
    with tf.device("CPU:1"):
        total = tf.Variable(tf.zeros([2]), name="total")

    def function(x):
        with tf.device("CPU:2"):
            total.assign_add(x)

    report = explain(function, tf.ones([2]))
    assert report.colocations[0] == (
        "AssignAddVariableOp is requested on CPU:2, but uses variable total and must be on CPU:1"
    )
    assert report.device_of("AssignAddVariableOp") == "CPU:1"


def test_slots_are_counted_beside_their_variables():
    layer = keras.layers.Dense(3, name="dense")
    layer.build((None, 4))
    optimizer = keras.optimizers.Adam()
    optimizer.build(layer.trainable_variables)

    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(layer(x))
        optimizer.apply_gradients(
            zip(tape.gradient(loss, layer.trainable_variables), layer.trainable_variables, strict=True)
        )

    here = row(explain(step, tf.ones([2, 4])), "CPU:0")
    # Kernel 4 x 3 and bias 3, float32: 60 bytes, with two slots each. Step (int64) and learning rate are none.
    assert here.slot_bytes == 2 * 60
    assert here.variable_bytes == 60 + 8 + 4


def test_nested_functions_and_branches_are_looked_into():
    @tf.function
    def inner(x):
        with tf.device("CPU:2"):
            return tf.exp(x)

    def function(x):
        return tf.cond(tf.reduce_sum(x) > 0.0, lambda: inner(x), lambda: tf.sin(x))

    report = explain(function, tf.ones([3]))
    exp = next(one for one in report.operations if one.kind == "Exp")
    assert exp.name.startswith("cond/branch_0/") and exp.device == "CPU:2"
    assert sum(one.kind == "Sin" and one.name.startswith("cond/branch_1/") for one in report.operations) == 1


def test_unknown_sizes_are_said_and_a_batch_can_be_assumed():
    function = tf.function(lambda x: tf.matmul(x, tf.ones([8, 2])))
    spec = tf.TensorSpec([None, 8])
    assert "no known size" in explain(function, spec).notes[0]
    report = explain(function, spec, assume_batch=10)
    assert not report.notes
    assert row(report, "CPU:0").flops >= 2 * 10 * 8 * 2


def test_moving_to_the_data_is_suggested_with_its_gain():
    with tf.device("CPU:1"):
        table = tf.Variable(tf.ones([100, 10]), name="table")

    def function(x):
        return tf.matmul(x, table)

    link = Link(latency_seconds=1e-3, bytes_per_second=1e6)
    machine = Machine(devices=[Device(name="CPU:0"), Device(name="CPU:1")], link=link)
    report = explain(function, tf.ones([1, 100]), machine=machine)
    best = report.suggestions[0]
    assert best.text.startswith("move MatMul from CPU:0 to CPU:1")
    # The table, 4000 bytes, took 5 ms to cross. Now x crosses, 400 bytes in 1.4 ms, and 40 bytes come back in 1.04.
    assert best.gain_seconds == pytest.approx(5e-3 - 1.4e-3 - 1.04e-3, abs=1e-5)
    assert not any(one.text.startswith("move x ") for one in report.suggestions)


def test_measured_beside_predicted():
    report = explain(lambda x: x + 1.0, tf.ones([4]), measure=True)
    assert 0 < report.measured_seconds < 5
    with pytest.raises(ValueError, match="Argument `measure` needs example arguments with values"):
        explain(lambda x: x + 1.0, tf.TensorSpec([4]), measure=True)


def test_a_report_of_anything_fits_on_a_screen():
    towers, _ = two_towers()
    made = explain(towers, tf.ones([4, 8]))
    many = {
        name: ("sentence",) * 100
        for name in ("apart", "soft_placement", "not_honoured", "colocations", "notes")
    }
    full = dataclasses.replace(
        made, transfers=made.transfers * 50, devices=made.devices * 50, unplaced=("Sin",) * 100,
        suggestions=(Suggestion(text="try", gain_seconds=1.0),) * 100, **many,
    )  # fmt: skip
    lines = str(full).splitlines()
    assert len(lines) <= 60
    assert (
        "  and 90 more" in lines and "  and 97 more" in lines
    )  # 100 tensors and 10 shown, 100 sentences and 3.


def test_json_holds_everything():
    towers, _ = two_towers()
    report = explain(towers, np.ones([4, 8], "float32"))
    read = json.loads(report.to_json())
    assert read["function"] == "towers"
    assert sum(one["num_bytes"] for one in read["transfers"]) == report.cut_bytes == 384
    assert read["schedule"]["seconds"] == report.predicted_seconds


def test_a_function_it_must_be():
    with pytest.raises(TypeError, match="Argument `function` must be a tf.function"):
        explain(3)
    with pytest.raises(KeyError, match="no operation 'nothing'"):
        explain(lambda x: x, tf.ones([1])).device_of("nothing")
