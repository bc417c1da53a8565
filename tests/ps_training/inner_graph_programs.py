"""Runs on the chief: models that read their weights inside loops, branches and functions of TensorFlow."""

import contextlib
import warnings

import keras
import numpy as np
import tensorflow as tf

from tests.ps_training import models
from tests.single_host import oracle
from tfdist_ext.training.pulled import Pulled


@keras.saving.register_keras_serializable(package="tests")
class _Weighted(keras.layers.Layer):
    """A layer with a matrix and a bias that a subclass reads in an inner graph."""

    def build(self, input_shape):
        width = input_shape[-1]
        self.matrix = self.add_weight(shape=(width, width), name="matrix", initializer="orthogonal")
        self.bias = self.add_weight(shape=(width,), name="bias", initializer="zeros")

    def step(self, x):
        return keras.ops.tanh(keras.ops.matmul(x, self.matrix) + self.bias)


class WhileLoop(_Weighted):
    def call(self, x):
        return tf.while_loop(lambda i, _: i < 3, lambda i, h: (i + 1, self.step(h)), (0, x))[1]


class Cond(_Weighted):
    def call(self, x):
        return tf.cond(tf.reduce_sum(x) > 0, lambda: self.step(x), lambda: self.step(-2.0 * x))


class KerasWhileLoop(_Weighted):
    def call(self, x):
        return keras.ops.while_loop(lambda i, _: i < 3, lambda i, h: (i + 1, self.step(h)), (0, x))[1]


class KerasCond(_Weighted):
    def call(self, x):
        return keras.ops.cond(keras.ops.sum(x) > 0, lambda: self.step(x), lambda: self.step(-2.0 * x))


class Scan(_Weighted):
    def call(self, x):
        carried, _ = keras.ops.scan(
            lambda h, part: (self.step(h + part), h), x, keras.ops.stack([x, 2.0 * x, x])
        )
        return carried


class SwitchCase(_Weighted):
    def call(self, x):
        branches = [lambda: self.step(x), lambda: self.step(2.0 * x), lambda: self.step(-x)]
        return tf.switch_case(tf.shape(x)[0] % 3, branches)


class Mapped(_Weighted):
    def call(self, x):
        return tf.map_fn(lambda row: self.step(row[None])[0], x)


class Vectorized(_Weighted):
    def call(self, x):
        return tf.vectorized_map(lambda row: self.step(row[None])[0], x)


class NestedLoops(_Weighted):
    def call(self, x):
        def outer(i, h):
            return i + 1, tf.cond(i > 0, lambda: inner(h), lambda: self.step(h))

        def inner(h):
            return tf.while_loop(lambda j, _: j < 2, lambda j, g: (j + 1, self.step(g)), (0, h))[1]

        return tf.while_loop(lambda i, _: i < 2, outer, (0, x))[1]


class OwnFunction(_Weighted):
    @tf.function
    def call(self, x):
        return self.step(x)


class Rematerialized(_Weighted):
    def call(self, x):
        return tf.recompute_grad(self.step)(x)


class OwnGradient(_Weighted):
    def call(self, x):
        @tf.custom_gradient
        def doubled_backwards(value):
            return value, lambda upstream: 2.0 * upstream

        return tf.cond(tf.reduce_sum(x) > 0, lambda: doubled_backwards(self.step(x)), lambda: self.step(x))


class Cell(keras.layers.Layer):
    """A recurrent cell of one's own, with a gate under a condition."""

    state_size = output_size = 3

    def build(self, input_shape):
        self.kernel = self.add_weight(shape=(input_shape[-1], 3), name="kernel", initializer="orthogonal")
        self.own = self.add_weight(shape=(3, 3), name="own", initializer="orthogonal")

    def call(self, x, states):
        new = keras.ops.tanh(keras.ops.matmul(x, self.kernel) + keras.ops.matmul(states[0], self.own))
        return new, [new]


NAMED = {
    "lstm": lambda: keras.layers.LSTM(3),
    "gru": lambda: keras.layers.GRU(3),
    "simple": lambda: keras.layers.SimpleRNN(3),
    "while": WhileLoop, "cond": Cond, "keras while": KerasWhileLoop, "keras cond": KerasCond, "scan": Scan,
}  # fmt: skip
OTHERS = {
    "own cell": lambda: keras.layers.RNN(Cell()),
    "dropout": lambda: keras.layers.LSTM(3, dropout=0.3, recurrent_dropout=0.3),
    "switch": SwitchCase, "map": Mapped, "vectorized": Vectorized, "nested": NestedLoops,
    "own function": OwnFunction, "rematerialized": Rematerialized, "own gradient": OwnGradient,
}  # fmt: skip

_SEQUENCES = ("lstm", "gru", "simple", "own cell", "dropout")


def _model(kinds):
    layers = keras.layers
    sequence = keras.Input((4, 3))
    flat = layers.Lambda(lambda x: x[:, 1])(sequence)
    outputs = []
    for name, make in kinds.items():
        layer = make()
        layer.name = name.replace(" ", "_")
        outputs.append(layer(sequence if name in _SEQUENCES else flat))
    model = keras.Model(sequence, layers.Dense(1)(layers.Concatenate()(outputs)))
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return model


def against_one_device(cluster, group):
    """Trains one model of all kinds under sequential SGD and on one device; returns differences and moves by weight."""
    kinds = {"named": NAMED, "others": OTHERS}[group]
    generator = np.random.default_rng(3)
    rows = generator.normal(size=(8, 4, 3)), generator.normal(size=(8, 1))

    def trained(placed):
        models.in_double_precision()
        with placed.scope():
            model = _model(kinds)
        before = [np.array(w) for w in model.get_weights()]
        model.fit(models.batched(rows, 2), epochs=1, verbose=0)
        pairs = zip(before, map(np.array, model.get_weights()), strict=True)
        return dict(zip([v.path for v in model.weights], pairs, strict=True))

    distributed, alone = trained(models.strategy(cluster, "bounded 0")), trained(tf.distribute.get_strategy())
    return {
        path: {
            "difference": float(np.abs(distributed[path][1] - new).max()),
            "moved": float(np.abs(new - old).max()),
        }
        for path, (old, new) in alone.items()
    }


_ROWS = np.random.default_rng(4).normal(size=(8, 3)), np.random.default_rng(5).normal(size=(8, 1))


def _dense_behind(layer, features=3, **input_arguments):
    inputs = keras.Input((features,), **input_arguments)
    model = keras.Model(inputs, keras.layers.Dense(1)(layer(inputs)))
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return model


def _weights_after(placed, make_model, use_model):
    models.in_double_precision()
    with placed.scope():
        model = make_model()
    use_model(model)
    return [np.array(w) for w in model.get_weights()]


def traced_again(cluster):
    """Trains, evaluates and predicts with a layer whose `call` is a tf.function, on data of two types."""

    def use(model):
        model.fit(models.batched(_ROWS, 2), verbose=0)
        model.evaluate(models.batched(_ROWS, 2), verbose=0)
        model.predict(models.batched(_ROWS[0], 2), verbose=0)
        model.fit(models.batched(_ROWS, 2).map(lambda x, y: (x, y, y * y)), verbose=0)

    results = [
        _weights_after(placed, lambda: _dense_behind(OwnFunction()), use)
        for placed in (models.strategy(cluster, "bounded 0"), tf.distribute.get_strategy())
    ]
    return [float(np.abs(one - other).max()) for one, other in zip(*results, strict=True)]


class TableInALoop(keras.layers.Layer):
    """Looks up rows of a table that is so large that only rows travel, inside a loop."""

    def build(self, input_shape):
        self.table = keras.layers.Embedding(20_000, 3)
        self.table.build((None,))

    def call(self, ids):
        def add(i, total):
            return i + 1, total + tf.tanh(self.table(ids[:, i])) * tf.cast(i + 1, total.dtype)

        start = tf.zeros((tf.shape(ids)[0], 3), tf.float64)
        invariants = tf.TensorShape([]), tf.TensorShape([None, 3])
        return tf.while_loop(lambda i, _: i < 2, add, (0, start), shape_invariants=invariants)[1]


def table_in_a_loop(cluster):
    """Trains a table that is read in a loop, whole and in shards, and on one device."""
    shards = tf.distribute.experimental.partitioners.FixedShardsPartitioner(2)
    ids = np.arange(16).reshape(8, 2) * 7 % 100

    def use(model):
        model.fit(models.batched((ids, _ROWS[1]), 2), verbose=0)

    def make():
        return _dense_behind(TableInALoop(), features=2, dtype="int64")

    whole, sharded, alone = (
        _weights_after(placed(), make, use)
        for placed in (
            lambda: models.strategy(cluster, "bounded 0"),
            lambda: models.strategy(cluster, "bounded 0", shards),
            tf.distribute.get_strategy,
        )
    )
    return {
        "whole": max(float(np.abs(one - other).max()) for one, other in zip(whole, alone, strict=True)),
        "sharded": max(float(np.abs(one - other).max()) for one, other in zip(sharded, alone, strict=True)),
    }


class Unused(_Weighted):
    """Has a bias that it does not use."""

    def call(self, x):
        return keras.ops.tanh(keras.ops.matmul(x, self.matrix))


class Counting(_Weighted):
    """Assigns a variable inside a loop."""

    def build(self, input_shape):
        super().build(input_shape)
        self.count = self.add_weight(shape=(), name="count", initializer="zeros", trainable=False)

    def call(self, x):
        def body(i, h):
            self.count.assign_add(1.0)
            return i + 1, self.step(h)

        return tf.while_loop(lambda i, _: i < 3, body, (0, x))[1]


@contextlib.contextmanager
def _losing_the_gradient_of(name):
    watched = Pulled.watched_value
    Pulled.watched_value = lambda self, v: self.value(v) if v.name == name else watched(self, v)
    try:
        yield
    finally:
        Pulled.watched_value = watched


def warnings_of_two_replicas():
    """Returns what MirroredStrategy on two devices warns of a bias that is not used."""
    models.in_double_precision()
    with oracle.mirrored(2).scope():
        model = _dense_behind(Unused(name="unused"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.fit(models.batched(_ROWS, 2), epochs=2, verbose=0)
    return [str(one.message) for one in caught if "Gradients do not exist" in str(one.message)]


def missing_gradients(cluster):
    """Returns what is said of variables without a gradient, and of what cannot leave an inner graph."""
    placed = models.strategy(cluster, "bounded 0")

    def said(layer):
        models.in_double_precision()
        with placed.scope():
            model = _dense_behind(layer)
        before = model.get_weights()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                model.fit(models.batched(_ROWS, 2), epochs=2, verbose=0)
                model.evaluate(models.batched(_ROWS, 2), verbose=0)
                error = ""
            except Exception as raised:
                error = f"{type(raised).__name__}: {raised}"
        moved = any(
            (np.array(a) != np.array(b)).any() for a, b in zip(before, model.get_weights(), strict=True)
        )
        warned = [str(one.message) for one in caught if "Gradients do not exist" in str(one.message)]
        return {"warned": warned, "error": error, "moved": moved}

    results = {"unused": said(Unused(name="unused")), "counting": said(Counting(name="counting"))}
    with _losing_the_gradient_of("matrix"):
        results["lost"] = said(WhileLoop(name="lost"))
    return results


def states_of_rows(cluster):
    """Trains a stateful GRU under sequential SGD and on one device, and returns what other policies and loops say."""
    rows = np.random.default_rng(6).normal(size=(8, 3, 3)), _ROWS[1]

    def make():
        inputs = keras.Input(batch_shape=(2, 3, 3))
        layer = keras.layers.GRU(2, stateful=True, name="stateful")
        model = keras.Model(inputs, keras.layers.Dense(1)(layer(inputs)))
        model.compile(keras.optimizers.SGD(0.1), "mse")
        return model

    def fit(model):
        model.fit(models.batched(rows, 2), epochs=2, verbose=0)

    def text_of_error(policy, use):
        try:
            _weights_after(models.strategy(cluster, policy), make, use)
        except Exception as error:
            return str(error)
        return "no error"

    distributed = _weights_after(models.strategy(cluster, "bounded 0"), make, fit)
    alone = _weights_after(tf.distribute.get_strategy(), make, fit)
    return {
        "differences": [
            float(np.abs(one - other).max()) for one, other in zip(distributed, alone, strict=True)
        ],
        "synchronous": text_of_error("synchronous", fit),
        "evaluate": text_of_error(
            "bounded 0", lambda model: model.evaluate(models.batched(rows, 2), verbose=0)
        ),
        "predict": text_of_error(
            "bounded 0", lambda model: model.predict(models.batched(rows[0], 2), verbose=0)
        ),
    }
