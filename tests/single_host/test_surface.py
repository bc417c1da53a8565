"""What of Keras and tf.distribute around a step is as on one device, or refused in one sentence? Ids in the names."""

import glob

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist_ext
from tests.single_host import oracle

pytestmark = pytest.mark.usefixtures("float64")
layers = keras.layers


def linear(name="linear"):
    model = keras.Sequential([keras.Input((3,)), layers.Dense(1)], name=name)
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return model


def in_scope(strategy, make=linear):
    with strategy.scope():
        return make()


# --- what rows may be ------------------------------------------------------------------------------
class OfRagged(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(1)

    def call(self, rows):
        return self.dense(rows.to_tensor(shape=[None, 3]))


class OfSparse(OfRagged):
    def call(self, rows):
        return self.dense(tf.ensure_shape(tf.sparse.to_dense(rows), [None, 3]))


class OfParts(keras.Model):
    """Has no `call`: its steps know the part."""

    def __init__(self):
        super().__init__()
        self.part = keras.Sequential([keras.Input((3,)), layers.Dense(1)])

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            outputs = self.part(x)
            loss = self.compute_loss(x, y, outputs)
        variables = self.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return self.compute_metrics(x, y, outputs)

    def test_step(self, data):
        x, y = data
        outputs = self.part(x)
        self.compute_loss(x, y, outputs)
        return self.compute_metrics(x, y, outputs)


def functional_of_sparse():
    inputs = keras.Input((3,), sparse=True)
    return keras.Model(inputs, layers.Dense(1)(inputs))


def ragged():
    return tf.ragged.constant([[1.0, 2.0], [3.0], [4.0, 5.0, 6.0], [1.0], [2.0]], dtype="float64")


def sparse():
    return tf.sparse.from_dense(np.arange(15.0).reshape(5, 3) / 10)


ROWS = {
    "ragged, subclassed": (OfRagged, ragged),
    "sparse, subclassed": (OfSparse, sparse),
    "sparse, functional": (functional_of_sparse, sparse),
    "parts without call": (OfParts, lambda: np.arange(15.0).reshape(5, 3) / 10),
}


@pytest.mark.parametrize("kind", sorted(ROWS))
def test_h1_h3_rows_of_every_kind_train_evaluate_and_predict(kind):
    # 5 rows in batches of 4: the last leaves a replica without rows. R2Score makes its variables on the way.
    make_model, rows = ROWS[kind][0], ROWS[kind][1]()

    def make():
        model = make_model()
        model.compile(keras.optimizers.SGD(0.01), "mse", metrics=["mae", keras.metrics.R2Score()])
        return model

    data = oracle.batched((rows, np.ones((5, 1))), 4)
    expected, actual = oracle.train(None, make, data), oracle.train(oracle.mirrored(2), make, data)
    oracle.assert_same_run(actual, expected)
    if kind != "parts without call":
        inputs = oracle.batched(rows, 4)
        predicted = [run["model"].predict(inputs, verbose=0) for run in (actual, expected)]
        np.testing.assert_allclose(*predicted, rtol=0, atol=oracle.TOLERANCE)


def test_h20_random_crop_trains():
    with oracle.mirrored(2).scope():
        model = keras.Sequential(
            [keras.Input((4, 4, 1)), layers.RandomCrop(2, 2), layers.Flatten(), layers.Dense(1)]
        )
        model.compile("sgd", "mse")
    # Cropping rows that are all ones leaves ones: the loss of the first step is known from the weights.
    kernel, _ = model.get_weights()
    history = model.fit(np.ones((5, 4, 4, 1)), np.zeros((5, 1)), batch_size=5, verbose=0).history
    np.testing.assert_allclose(history["loss"], np.sum(kernel) ** 2, rtol=1e-12)


# --- datasets in functions -------------------------------------------------------------------------
@pytest.mark.parametrize("replicas", [1, 3])
@pytest.mark.parametrize("way", ["argument", "captured", "iterator", "optional", "shuffled"])
def test_h18_a_distributed_dataset_is_walked_in_a_function(way, replicas):
    strategy = oracle.mirrored(replicas)
    data = tf.data.Dataset.from_tensor_slices(np.arange(1.0, 9.0))  # 1 + ... + 8 = 36, in three batches.
    data = data.shuffle(8) if way == "shuffled" else data
    distributed = strategy.experimental_distribute_dataset(data.batch(3))
    seen = tf.Variable(0)

    def sum_of(batch):
        return strategy.reduce("SUM", strategy.run(tf.reduce_sum, args=(batch,)), axis=None)

    @tf.function
    def walk(batches):
        total = tf.zeros((), "float64")
        for batch in distributed if way == "captured" else batches:
            total += sum_of(batch)
            seen.assign_add(1)
        return total

    @tf.function
    def walk_optionals(iterator):
        total = tf.zeros((), "float64")
        for _ in tf.range(4):
            batch = iterator.get_next_as_optional()
            if batch.has_value():
                total += sum_of(batch.get_value())
                seen.assign_add(1)
        return total

    for passes in (1, 2):
        if way == "optional":
            total = walk_optionals(iter(distributed))
        else:
            total = walk(iter(distributed) if way == "iterator" else distributed)
        assert (float(total), int(seen)) == (36.0, 3 * passes)


@pytest.mark.parametrize("way", [iter, enumerate, lambda data: zip(data, data, strict=True)])
def test_h18_ways_that_a_function_cannot_walk_are_named(way):
    distributed = oracle.mirrored(2).experimental_distribute_dataset(tf.data.Dataset.range(4).batch(2))

    @tf.function(autograph=False)
    def walk():
        for _ in way(distributed):
            pass

    with pytest.raises(RuntimeError, match="Write `for batch in dataset`"):
        walk()


# --- what belongs together -------------------------------------------------------------------------
def stock():
    return tf.distribute.MirroredStrategy(oracle.devices(2))


OTHERS = {
    "1": lambda: oracle.mirrored(1),
    "2": lambda: oracle.mirrored(2),
    "4": lambda: oracle.mirrored(4),
    "stock": stock,
}


@pytest.mark.parametrize("other", sorted(OTHERS))
def test_f18_datasets_of_other_strategies_are_refused(other):
    x, y = oracle.regression_data(rows=10)
    strategy, stranger = oracle.mirrored(2), OTHERS[other]()
    model = in_scope(strategy)
    pairs = stranger.experimental_distribute_dataset(oracle.batched((x, y), 4))
    inputs = stranger.experimental_distribute_dataset(oracle.batched(x, 4))
    calls = (
        lambda: model.fit(pairs, verbose=0),
        lambda: model.evaluate(pairs, verbose=0),
        lambda: model.predict(inputs, verbose=0),
        lambda: model.fit(x, y, validation_data=pairs, verbose=0),
    )
    for call in calls:
        with pytest.raises(
            ValueError, match="of 2 replicas, and its dataset was distributed by the `Mirrored"
        ):
            call()
    own = strategy.experimental_distribute_dataset(oracle.batched(x, 4))
    assert model.predict(own, verbose=0).shape == (10, 1)


def test_f18_a_model_of_no_strategy_or_of_stocks_refuses_our_datasets():
    x, y = oracle.regression_data(rows=8)
    pairs = oracle.mirrored(2).experimental_distribute_dataset(oracle.batched((x, y), 4))
    for model in (linear(), in_scope(stock())):
        with pytest.raises(
            ValueError, match="its dataset was distributed by the `MirroredStrategy` of 2 replicas"
        ):
            model.fit(pairs, verbose=0)


@pytest.mark.parametrize("replicas", [1, 4])
def test_f18_batches_of_other_strategies_are_refused_in_loops(replicas):
    batch = next(iter(oracle.mirrored(2).experimental_distribute_dataset(tf.data.Dataset.range(4).batch(4))))
    with pytest.raises(ValueError, match=f"over 2 replicas .* the strategy has {replicas} "):
        oracle.mirrored(replicas).run(tf.reduce_sum, args=(batch,))


def test_h2_class_weights_of_a_distributed_dataset():
    strategy = oracle.mirrored(2)
    model = in_scope(strategy)
    data = strategy.experimental_distribute_dataset(oracle.batched(oracle.regression_data(rows=8), 4))
    with pytest.raises(ValueError, match="`class_weight` needs a dataset that is not distributed yet"):
        model.fit(data, class_weight={0: 1.0, 1: 2.0}, verbose=0)


def test_h24_scopes_of_others_are_named():
    x, y = oracle.regression_data(rows=4)
    strategy, other = oracle.mirrored(2), oracle.mirrored(4)
    model = in_scope(strategy)
    for scope in (other, stock()):
        with scope.scope():
            for call in (
                lambda: model.fit(x, y, verbose=0),
                lambda: model.evaluate(x, y, verbose=0),
                lambda: model.predict(x, verbose=0),
                lambda: model.compile("sgd", "mse"),
            ):
                with pytest.raises(
                    ValueError, match="belongs to the `MirroredStrategy` of 2 replicas, and you"
                ):
                    call()
    unscoped = keras.Sequential([keras.Input((3,)), layers.Dense(1)])
    with (
        strategy.scope(),
        pytest.raises(ValueError, match="made outside the scope of the `MirroredStrategy`"),
    ):
        unscoped.compile("sgd", "mse")
    with other.scope():
        metric = keras.metrics.MeanAbsoluteError()
    with strategy.scope():
        late = keras.Sequential([keras.Input((3,)), layers.Dense(1)])
        with pytest.raises(ValueError, match="metric `mean_absolute_error` was made in the scope of another"):
            late.compile("sgd", "mse", metrics=[metric])


# --- values and devices ----------------------------------------------------------------------------
def test_h21_plain_values_are_reduced_as_in_stock_or_refused():
    strategy = oracle.mirrored(2)
    for value in (1, 1.5, True, [1.0, 2.0], {"a": 1}, np.float64(3)):
        assert strategy.reduce("MEAN", value, axis=None) == value
        with pytest.raises(ValueError, match="which no replica returned"):
            strategy.reduce("SUM", value, axis=None)
    for value in (None, "text", {"a": None}):
        with pytest.raises(TypeError, match="takes what `strategy.run` returned"):
            strategy.reduce("SUM", value, axis=None)


@pytest.mark.parametrize(
    "devices", [["CPU:7"], ["GPU:0"], ["GPU:0", "GPU:1"], ["/device:CPU:9"], ["nothing"], [3]]
)
def test_g14_devices_that_are_not_there(devices):
    with pytest.raises(ValueError, match="this process does not have. It has CPU:0, CPU:1, CPU:2, CPU:3"):
        tfdist_ext.MirroredStrategy(devices)


def test_g14_logical_devices_are_devices():
    logical = tf.config.list_logical_devices("CPU")[1:3]
    strategy = tfdist_ext.MirroredStrategy(logical)
    assert [device[-5:] for device in strategy.extended.worker_devices] == ["CPU:1", "CPU:2"]
    with pytest.raises(ValueError, match="twice"):
        tfdist_ext.MirroredStrategy(["CPU:0", "/device:CPU:0"])
    with pytest.raises(ValueError, match="must be a list"):
        tfdist_ext.MirroredStrategy("CPU:0")


# --- Keras around a step ---------------------------------------------------------------------------
class Summarized(layers.Layer):
    def call(self, x):
        with tf.summary.experimental.summary_scope("mean", "summary") as (tag, _):
            tf.summary.write(tag, tf.reduce_mean(x), step=tf.constant(1, tf.int64))
        return x


def tags_of(folder):
    events = (
        tf.compat.v1.Event.FromString(record.numpy())
        for file in sorted(glob.glob(f"{folder}/*tfevents*"))
        for record in tf.data.TFRecordDataset(file)
    )
    return [value.tag for event in events for value in event.summary.value]


def test_h5_summaries_have_the_tags_of_one_device(tmp_path):
    for name, strategy in (("one", None), ("two", oracle.mirrored(2))):
        keras.backend.clear_session()
        with oracle.scope_of(strategy):
            model = keras.Sequential(
                [keras.Input((3,)), Summarized(name="summarized"), layers.Dense(1)], name="model"
            )
            model.compile("sgd", "mse")
        with tf.summary.create_file_writer(str(tmp_path / name)).as_default():
            model.fit(oracle.batched(oracle.regression_data(rows=5), 4), verbose=0)
    # One a step, whatever number Keras gives the model.
    tags = tags_of(tmp_path / "one")
    assert tags_of(tmp_path / "two") == tags and len(tags) == 2
    assert all(tag.endswith("/mean") and "cond" not in tag for tag in tags)


def test_h26_jit_compile_is_no_error(caplog):
    data = oracle.batched(oracle.regression_data(rows=5), 4)

    def make():
        model = keras.Sequential([keras.Input((3,)), layers.Dense(1)])
        model.compile("sgd", "mse", jit_compile=True)
        return model

    run = oracle.train(oracle.mirrored(2), make, data)
    # XLA may contract a multiplication and an addition: one rounding more or less for each term.
    oracle.assert_same_run(run, oracle.train(None, make, data))
    assert run["model"].jit_compile is False and "no effect on 2 replicas" in caplog.text


def test_h27_a_model_that_was_never_called_predicts_and_evaluates_on_a_batch():
    # Ones times a kernel of ones: 3, and (3 - 0)**2 = 9.
    class Ones(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = layers.Dense(2, use_bias=False, kernel_initializer="ones")

        def call(self, x):
            return self.dense(x)

    with oracle.mirrored(2).scope():
        model = Ones()
        model.compile(loss="mse", metrics=["mse"])
    x = np.ones((3, 3))
    assert model.predict_on_batch(x).tolist() == [[3.0, 3.0]] * 3
    assert model.test_on_batch(x, np.zeros((3, 2))) == [9.0, 9.0]
    assert model.train_on_batch(x, np.zeros((3, 2))) == [9.0, 9.0]


def test_h27_prediction_moves_a_seed_generator_on():
    class AlwaysDropping(layers.Layer):
        def __init__(self):
            super().__init__()
            self.generator = keras.random.SeedGenerator(3)

        def call(self, x):
            return keras.random.dropout(x, 0.5, seed=self.generator)

    def predictions(strategy, batch_size):
        with oracle.scope_of(strategy):
            model = keras.Sequential([keras.Input((20,)), AlwaysDropping()])
        outputs = [model.predict(np.ones((5, 20)), batch_size=batch_size, verbose=0) for _ in range(2)]
        return outputs, model.layers[0].generator.state.numpy().tolist()

    outputs, state = predictions(oracle.mirrored(2), 4)  # The second batch leaves a replica without rows.
    assert np.any(outputs[0] != outputs[1])
    assert state == predictions(None, 4)[1]


def test_h27_ragged_outputs_are_predicted():
    class Doubled(keras.Model):
        def call(self, rows):
            return 2.0 * rows

    with oracle.mirrored(2).scope():
        model = Doubled()
    predicted = model.predict(oracle.batched(ragged(), 4), verbose=0)
    assert [list(row) for row in predicted] == [[2.0 * x for x in row] for row in ragged().to_list()]


def _one_step_outside(strategy, make, sparse):
    keras.utils.set_random_seed(3)
    with oracle.scope_of(strategy):
        table = keras.Variable(np.arange(12.0).reshape(4, 3), name="table")
        bias = keras.Variable(np.ones(3), name="bias")
        optimizer = make()
        loss = keras.losses.MeanSquaredError()(np.ones((4, 1)), np.zeros((4, 1)))
        gradient = (
            tf.IndexedSlices(tf.ones((2, 3), tf.float64), [0, 2], (4, 3)) if sparse else np.ones((4, 3))
        )
        for _ in range(2):
            optimizer.apply([gradient, None], [table, bias])
        optimizer.apply_gradients([(gradient, table), (np.full(3, 0.5), bias)])
    return {
        "weights": [table.numpy(), bias.numpy(), loss.numpy()],
        "optimizer": [v.numpy() for v in optimizer.variables],
    }


@pytest.mark.parametrize(
    ("make", "sparse"),
    [
        (lambda: keras.optimizers.SGD(0.1, momentum=0.9), True),
        (lambda: keras.optimizers.Adam(0.1, clipnorm=0.5), True),
        (lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=4.0), True),
        # Keras cannot divide sparse gradients by the factor.
        (lambda: keras.optimizers.SGD(0.1, loss_scale_factor=4.0), False),
        (lambda: keras.optimizers.Adam(0.1, clipnorm=0.5), False),
    ],
    ids=["momentum", "adam", "loss scale", "factor", "adam, dense"],
)
def test_what_runs_outside_of_replicas_is_whole(make, sparse):
    """In a scope and in no replica a loss is not divided, and gradients are applied as they are."""
    expected = _one_step_outside(None, make, sparse)
    actual = _one_step_outside(oracle.mirrored(2), make, sparse)
    assert oracle.largest_difference(actual, expected) <= oracle.TOLERANCE
