"""Faults that people reported in public, each with the right behaviour. Names carry the case's id."""

import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist_ext
from tests.single_host import oracle


def linear_model(optimizer, loss="mse", **arguments):
    model = keras.Sequential(
        [keras.Input((1,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")]
    )
    model.compile(optimizer, loss, **arguments)
    return model


def fit_linear(num_devices, optimizer, x, y, batch_size, loss="mse", **arguments):
    strategy = oracle.mirrored(num_devices)
    with strategy.scope():
        model = linear_model(optimizer(), loss, **arguments)
    data = oracle.batched((np.asarray(x, "float32")[:, None], np.asarray(y, "float32")[:, None]), batch_size)
    history = model.fit(data, verbose=0, shuffle=False).history
    return model, history


@pytest.mark.parametrize("num_devices", [1, 2, 4])
def test_S1_loss_and_weights_do_not_depend_on_replicas(num_devices):
    # K#19891. Dense(10) on one batch of 12 rows: the gradient of the mean over 12 rows and 10 outputs.
    generator = np.random.default_rng(0)
    x, y = generator.normal(size=(12, 5)).astype("float32"), generator.normal(size=(12, 10)).astype("float32")
    strategy = oracle.mirrored(num_devices)
    with strategy.scope():
        model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(10, kernel_initializer="zeros")])
        model.compile(keras.optimizers.SGD(1.0), "mse")
    data = oracle.batched((x, y), 12)
    assert model.evaluate(data, verbose=0) == pytest.approx(
        float(np.mean(y.astype("float64") ** 2)), abs=1e-6
    )
    model.fit(data, verbose=0)
    expected_kernel = 2 * x.astype("float64").T @ y / (12 * 10)  # From zero weights: -gradient of mse.
    np.testing.assert_allclose(model.get_weights()[0], expected_kernel, atol=1e-6)


def test_S2_ragged_last_batch_has_its_full_weight():
    # TF#36153. Batches [3,3,3,3] and [9]: w = 0 + 2*3 = 6, then 6 + 2*(9 - 6) = 12. Stock TensorFlow gives 9.
    model, history = fit_linear(2, lambda: keras.optimizers.SGD(1.0), [1] * 5, [3, 3, 3, 3, 9], 4)
    assert model.get_weights()[0].item() == 12.0
    # Loss of each batch before its update: 9 (four rows) and (9 - 6)^2 = 9 (one row).
    assert history["loss"] == [9.0]


def test_S3_only_batch_is_ragged():
    # K#19246. One batch of 3 rows: w = 2 * mean(3, 3, 6) = 8. Stock fails with an AddN shape error.
    model, _ = fit_linear(2, lambda: keras.optimizers.SGD(1.0), [1] * 3, [3, 3, 6], 4)
    assert model.get_weights()[0].item() == 8.0


def test_S4_empty_replica_with_a_loss_that_divides_by_its_size():
    # TF#36224. sum / size is 0 / 0 on the empty replica. Batches [1,1,1,1] then [5]: w = 2, then 2 + 2*(5-2) = 8.
    def sum_over_size(y, prediction):
        error = tf.square(y - prediction)
        return tf.reduce_sum(error) / tf.cast(tf.size(error), error.dtype)

    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")

        def call(self, x):
            return self.dense(x)

        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                loss = sum_over_size(y, self(x, training=True))
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
            self.loss_tracker.update_state(loss)
            return {"loss": self.loss_tracker.result(), "last_loss": loss}

    strategy = oracle.mirrored(2)
    with strategy.scope():
        model = Model()
        model.loss_tracker = keras.metrics.Mean(name="loss")
        model.compile(keras.optimizers.SGD(1.0))
    x, y = np.ones((5, 1), "float32"), np.array([[1], [1], [1], [1], [5]], "float32")
    history = model.fit(oracle.batched((x, y), 4), verbose=0).history
    assert model.get_weights()[0].item() == 8.0
    assert history["last_loss"] == [9.0]  # (5 - 2)^2, of the one row
    assert history["loss"] == [5.0]  # Mean of the two batches' losses: 1 and 9.


def test_S6_metrics_stay_finite_and_equal_over_2000_steps():
    # K#21467. All-integer sums below 2**24 are exact in float32, so the values must be equal to the last bit.
    model, history = fit_linear(
        2, lambda: keras.optimizers.SGD(0.0), [1] * 4001, [0, 1, 1, 1] * 1000 + [1], 2,
        loss="mse", metrics=[keras.metrics.BinaryAccuracy(name="accuracy"), "mae"],
    )  # fmt: skip
    # Predictions are 0: the labels 0 are right (1000 of 4001); |y - 0| has mean 3001 / 4001.
    assert history["accuracy"] == [pytest.approx(1000 / 4001, abs=1e-6)]
    assert history["mae"] == [pytest.approx(3001 / 4001, abs=1e-6)]
    assert int(model.optimizer.iterations) == 2001


def test_S7_integer_variable_with_mean_aggregation():
    # K#20700. A layer counts its calls: one a step, on however many replicas.
    class Counting(keras.layers.Layer):
        def build(self, shape):
            self.calls = self.add_weight(
                shape=(),
                dtype="int64",
                initializer="zeros",
                trainable=False,
                aggregation="mean",
                name="calls",
            )

        def call(self, x):
            self.calls.assign_add(1)
            return x

    strategy = oracle.mirrored(2)
    with strategy.scope():
        counting = Counting()
        model = keras.Sequential([keras.Input((1,)), counting, keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    model.fit(oracle.batched((np.ones((5, 1)), np.ones((5, 1))), 2), verbose=0)
    assert int(counting.calls.numpy()) == 3


def test_S8_gradient_accumulation_equals_one_device():
    # K#20582. Two batches of 2 rows accumulate: w = 0.5 * (2*mean(1,3) + 2*mean(5,7)) = 8 with lr 1.
    model, _ = fit_linear(
        2, lambda: keras.optimizers.SGD(1.0, gradient_accumulation_steps=2), [1] * 4, [1, 3, 5, 7], 2
    )
    assert model.get_weights()[0].item() == 8.0


@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_S9_overflow_on_one_replica_skips_the_step_everywhere(bad):
    # K#18666. Rows of batch 1: replica 1 sees the bad value. Batch 2 is fine: one applied step, scale halved once.
    strategy = oracle.mirrored(2)
    with strategy.scope():
        optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(1.0), initial_scale=64.0)
        model = linear_model(optimizer)
    x = np.array([[1], [bad], [1], [1]], "float32")
    y = np.array([[1], [1], [2], [4]], "float32")
    model.fit(oracle.batched((x, y), 2), verbose=0)
    assert model.get_weights()[0].item() == 6.0  # 2 * mean(2, 4), from batch 2 alone
    assert float(optimizer.dynamic_scale) == 32.0
    assert int(optimizer.iterations) == 1
    assert int(optimizer.step_counter) == 1


def test_S10_jit_compile_runs_without_xla_on_two_devices():
    # K#17187, K#21366.
    model, _ = fit_linear(2, lambda: keras.optimizers.SGD(1.0), [1] * 5, [3, 3, 3, 3, 9], 4, jit_compile=True)
    assert model.get_weights()[0].item() == 12.0


def test_S10_jit_compile_runs_on_one_device():
    model, _ = fit_linear(1, lambda: keras.optimizers.SGD(1.0), [1] * 5, [3, 3, 3, 3, 9], 4, jit_compile=True)
    assert model.get_weights()[0].item() == 12.0


def test_S11_repeated_embedding_rows_are_summed():
    # TF#53160. Ids 3,3,5 on replica 0 and 3,5,7 on replica 1; each id's row gets the sum of its gradients.
    ids = np.array([[3, 3, 5], [3, 5, 7]], "int32")
    strategy = oracle.mirrored(2)
    with strategy.scope():
        embedding = keras.layers.Embedding(10, 4, embeddings_initializer="zeros")
        model = keras.Sequential(
            [keras.Input((3,), dtype="int32"), embedding, keras.layers.Lambda(lambda e: e)]
        )
        model.compile(keras.optimizers.SGD(1.0), keras.losses.MeanSquaredError(reduction="sum"))
    target = np.ones((2, 3, 4), "float32")
    model.fit(oracle.batched((ids, target), 2), verbose=0)
    table = embedding.get_weights()[0]
    # The loss is a sum over rows and positions of the mean over 4 values: each occurrence adds 2 * 1 / 4.
    expected = np.zeros((10, 4))
    for index in ids.ravel():
        expected[index] += 0.5
    np.testing.assert_array_equal(table, expected)


def test_S13_clipping_sees_the_sum_over_replicas():
    # TF#33929. Replica gradients (3, 0) and (0, 4) sum to (3, 4), of norm 5; clipped to norm 1: (0.6, 0.8).
    strategy = oracle.mirrored(2)
    with strategy.scope():
        model = keras.Sequential(
            [keras.Input((2,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")]
        )
        model.compile(
            keras.optimizers.SGD(1.0, global_clipnorm=1.0), lambda y, p: -p[:, 0], jit_compile=False
        )
    # Mean over two rows of -x.w: each replica contributes x / 2.
    x = np.array([[6, 0], [0, 8]], "float32")
    model.fit(oracle.batched((x, np.zeros((2, 1), "float32")), 2), verbose=0)
    np.testing.assert_allclose(model.get_weights()[0].ravel(), [0.6, 0.8], rtol=1e-6)


def test_S14_two_strategies_in_one_process_and_back():
    # TF#62790. Models of five and of four variables.
    def make(strategy, layers):
        with strategy.scope():
            model = keras.Sequential([keras.Input((1,)), *layers])
            model.compile(keras.optimizers.SGD(0.1), "mse")
        return model

    data = oracle.batched((np.ones((4, 1), "float32"), np.ones((4, 1), "float32")), 4)
    first, second = oracle.mirrored(2), oracle.mirrored(2)
    five = make(first, [keras.layers.Dense(2), keras.layers.Dense(2), keras.layers.Dense(1, use_bias=False)])
    four = make(second, [keras.layers.Dense(2), keras.layers.Dense(1)])
    losses = [model.fit(data, verbose=0).history["loss"][0] for model in (five, four, five, four)]
    assert losses[2] < losses[0]
    assert losses[3] < losses[1]
    assert len(five.weights) == 5
    assert len(four.weights) == 4


def test_S16_class_instead_of_instance():
    # TF#33388.
    with pytest.raises(TypeError, match="instance, not a class.*ReductionToOneDevice\\(\\)"):
        tfdist_ext.MirroredStrategy(oracle.devices(2), cross_device_ops=tf.distribute.ReductionToOneDevice)


def custom_loop(strategy, make_step, batches):
    with strategy.scope():
        variable = keras.Variable(np.zeros((1, 1), "float32"), name="kernel")
        optimizer = keras.optimizers.SGD(1.0)
        optimizer.build([variable])
    loss_object = keras.losses.MeanSquaredError()
    step = make_step(variable, optimizer, loss_object)

    @tf.function
    def run(batch):
        return strategy.run(step, args=(batch,))

    for batch in strategy.experimental_distribute_dataset(batches):
        run(batch)
    return float(variable.numpy().item()), int(optimizer.iterations), run


def gradients_of(variable, loss_object, batch):
    x, y = batch
    with tf.GradientTape() as tape:
        loss = loss_object(y, tf.matmul(x, variable))
    return tape.gradient(loss, [variable.value])


LINEAR_DATA = (np.ones((5, 1), "float32"), np.array([[3], [3], [3], [3], [9]], "float32"))


def applies(variable, optimizer, loss_object):
    def step(batch):
        optimizer.apply_gradients(zip(gradients_of(variable, loss_object, batch), [variable], strict=True))

    return step


def applies_in_a_branch(variable, optimizer, loss_object):
    def step(batch):
        gradients = gradients_of(variable, loss_object, batch)
        tf.cond(
            tf.reduce_sum(batch[0]) > 0,
            lambda: optimizer.apply_gradients(zip(gradients, [variable], strict=True)) * 0 + 1,
            lambda: tf.constant(0, tf.int64),
        )

    return step


def test_S17_apply_in_a_nested_function_passed_to_run():
    # TF#27716. strategy.run takes a tf.function.
    def make_step(variable, optimizer, loss_object):
        @tf.function
        def step(batch):
            optimizer.apply_gradients(
                zip(gradients_of(variable, loss_object, batch), [variable], strict=True)
            )

        return step

    strategy = oracle.mirrored(2)
    # As in S2: the function knows the rows of a ragged batch too.
    weight, iterations, _ = custom_loop(strategy, make_step, oracle.batched(LINEAR_DATA, 4))
    assert (weight, iterations) == (12.0, 2)


def test_S17_apply_inside_cond_names_the_mistake():
    # TF#59487. Several local replicas cannot meet inside a branch.
    with pytest.raises(RuntimeError, match="apply_gradients.*tf.cond"):
        custom_loop(oracle.mirrored(2), applies_in_a_branch, oracle.batched(LINEAR_DATA, 4))


def test_S17_apply_inside_cond_works_on_one_local_replica():
    weight, iterations, _ = custom_loop(
        oracle.mirrored(1), applies_in_a_branch, oracle.batched(LINEAR_DATA, 4)
    )
    assert (weight, iterations) == (12.0, 2)


def test_S18_fifty_runs_on_fixed_shapes_trace_at_most_twice():
    # TF#34025.
    data = oracle.batched((np.ones((200, 1), "float32"), np.zeros((200, 1), "float32")), 4)
    _, iterations, run = custom_loop(oracle.mirrored(2), applies, data)
    assert iterations == 50
    assert run.experimental_get_tracing_count() <= 2


def test_S21_fit_and_custom_loop_agree_on_ragged_batches():
    # TF#45923. The oracle is S2: 12 on one device, also for the custom loop with a Keras loss object.
    weight, _, _ = custom_loop(oracle.mirrored(2), applies, oracle.batched(LINEAR_DATA, 4))
    model, _ = fit_linear(
        2, lambda: keras.optimizers.SGD(1.0), LINEAR_DATA[0].ravel(), LINEAR_DATA[1].ravel(), 4
    )
    assert weight == model.get_weights()[0].item() == 12.0


CROSS_DEVICE_OPS = {
    "default": lambda: None,
    "one_device": tf.distribute.ReductionToOneDevice,
    "hierarchical": tf.distribute.HierarchicalCopyAllReduce,
}


@pytest.mark.parametrize("choice", sorted(CROSS_DEVICE_OPS))
def test_S22_gather_and_fit_with_each_cross_device_choice(choice):
    # TF#62065.
    strategy = tfdist_ext.MirroredStrategy(oracle.devices(2), cross_device_ops=CROSS_DEVICE_OPS[choice]())

    @tf.function
    def gathered():
        local = strategy.run(
            lambda: tf.reshape(tf.distribute.get_replica_context().replica_id_in_sync_group, [1, 1])
        )
        return strategy.gather(local, axis=0)

    np.testing.assert_array_equal(gathered().numpy(), [[0], [1]])
    with strategy.scope():
        model = linear_model(keras.optimizers.SGD(1.0))
    model.fit(oracle.batched(LINEAR_DATA, 4), verbose=0)
    assert model.get_weights()[0].item() == 12.0


def dropout_masks(num_devices, seed, steps=2):
    keras.backend.clear_session()
    keras.utils.set_random_seed(seed)
    strategy = oracle.mirrored(num_devices)
    with strategy.scope():
        dropout = keras.layers.Dropout(0.5, seed=seed)
        dropout.build((None, 64))

    @tf.function
    def masks():
        return strategy.experimental_local_results(
            strategy.run(lambda: dropout(tf.ones((4, 64)), training=True) > 0)
        )

    return [np.stack([mask.numpy() for mask in masks()]) for _ in range(steps)]


def test_S24_dropout_masks_differ_between_replicas_and_repeat_under_a_seed():
    # K#20611. Stock TensorFlow draws the same mask on every replica.
    first, again, other_seed = dropout_masks(2, seed=1), dropout_masks(2, seed=1), dropout_masks(2, seed=2)
    for step in range(2):
        np.testing.assert_array_equal(first[step], again[step])
    masks = [first[0][0], first[0][1], first[1][0], first[1][1], other_seed[0][0]]
    for i, one in enumerate(masks):
        for other in masks[i + 1 :]:
            # Two independent fair masks of 256 bits agree on 128 +- 8 places; 200 is nine standard deviations away.
            assert np.sum(one == other) < 200


def test_S24_slot_zero_has_the_one_device_stream():
    np.testing.assert_array_equal(dropout_masks(4, seed=3)[1][0], dropout_masks(1, seed=3)[1][0])


@pytest.mark.parametrize("num_devices", [2, 4])
def test_K2_predict_keeps_rows_and_their_order(num_devices):
    # transformers#11265. Five rows in batches of 4.
    strategy = oracle.mirrored(num_devices)
    with strategy.scope():
        model = keras.Sequential(
            [keras.Input((1,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")]
        )
        model.compile("sgd", "mse")
    x = np.arange(5, dtype="float32")[:, None]
    np.testing.assert_array_equal(model.predict(x, batch_size=4, verbose=0), x)
    np.testing.assert_array_equal(model.predict_on_batch(x), x)
    x = np.arange(2, dtype="float32")[:, None]
    np.testing.assert_array_equal(model.predict(x, batch_size=4, verbose=0), x)


def test_no_warning_is_shown_for_a_plain_fit():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fit_linear(2, lambda: keras.optimizers.SGD(1.0), [1] * 5, [3, 3, 3, 3, 9], 4)


@pytest.mark.parametrize("num_devices", [1, 2])
def test_iterations_count_applied_steps_where_the_length_is_unknown(num_devices):
    # Keras alone counts 8 here: the counter moves on in the step that finds the data at its end.
    strategy = oracle.mirrored(num_devices)
    with strategy.scope():
        model = linear_model(keras.optimizers.SGD(0.1))
    data = oracle.batched((np.ones((6, 1), "float32"),) * 2, 2).filter(lambda x, y: True)
    model.fit(data, epochs=2, verbose=0, shuffle=False)
    assert int(model.optimizer.iterations) == 6


def test_optimizer_made_outside_the_scope_is_refused_with_the_fix():
    optimizer = keras.optimizers.SGD(0.1)
    with oracle.mirrored(2).scope(), pytest.raises(ValueError, match="inside `with strategy.scope"):
        linear_model(optimizer)


def test_compile_by_name_outside_the_scope():
    strategy = oracle.mirrored(2)
    with strategy.scope():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, kernel_initializer="zeros")])
    model.compile("sgd", "mse")
    model.fit(oracle.batched(LINEAR_DATA, 4), verbose=0, shuffle=False)
    assert int(model.optimizer.iterations) == 2
