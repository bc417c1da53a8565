"""Whole programs of a user's own: kinds of models, of inputs and outputs, and of steps."""

import keras
import numpy as np
import tensorflow as tf

from tests.conformance import runs
from tests.conformance.inputs import ROWS, ids, normal, words

L = keras.layers
FEATURES, TARGET = normal(3), normal(1)


def _compiled(model, loss="mse", **arguments):
    model.compile(keras.optimizers.SGD(0.05, momentum=0.9), loss, jit_compile=False, **arguments)
    return model


def _rows(*kinds):
    return tuple(kind.rows(salt=str(index)) for index, kind in enumerate(kinds))


def _dense(inputs=FEATURES.shape, name=None):
    return keras.Sequential([keras.Input(inputs), L.Dense(4, activation="tanh"), L.Dense(1)], name=name)


def _functional():
    inputs = keras.Input(FEATURES.shape)
    hidden = L.Dense(4, activation="tanh")(inputs)
    return _compiled(keras.Model(inputs, L.Dense(1)(L.concatenate([hidden, inputs]))))


@keras.saving.register_keras_serializable("conformance")
class Subclassed(keras.Model):
    def __init__(self, **arguments):
        super().__init__(**arguments)
        self.hidden, self.last = L.Dense(4, activation="tanh"), L.Dense(1)

    def call(self, inputs):
        return self.last(self.hidden(inputs))


def _subclassed():
    model = Subclassed()
    model.build((None, *FEATURES.shape))
    return _compiled(model)


@keras.saving.register_keras_serializable("conformance")
class Penalized(Subclassed):
    """Adds the square of the gradient by the inputs to the loss: gradients of the second order."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            with tf.GradientTape() as inner:
                inner.watch(x)
                predictions = self(x, training=True)
            slopes = inner.gradient(predictions, x)
            loss = self.compute_loss(x, y, predictions)
            loss = loss + 0.1 * tf.reduce_mean(tf.reduce_sum(tf.square(slopes), axis=-1))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {"loss": loss}


def _penalized():
    model = Penalized()
    model.build((None, *FEATURES.shape))
    return _compiled(model)


def _nested():
    inputs = keras.Input(FEATURES.shape)
    inner = keras.Model(inputs, _dense()(inputs))
    outer = keras.Input(FEATURES.shape)
    return _compiled(keras.Model(outer, L.Dense(1)(L.concatenate([inner(outer), outer]))))


def _shared():
    one, other = keras.Input(FEATURES.shape, name="one"), keras.Input(FEATURES.shape, name="other")
    tower = keras.Sequential([keras.Input((3,)), L.Dense(4, activation="tanh"), L.Dense(1, use_bias=False)])
    return _compiled(keras.Model([one, other], L.subtract([tower(one), tower(other)])))


def _several(structure):
    def make():
        one, other = keras.Input((3,), name="one"), keras.Input((3,), name="other")
        first = L.Dense(1, name="first")(L.concatenate([one, other]))
        second = L.Dense(2, name="second")(one)
        if structure is dict:
            inputs, outputs = {"one": one, "other": other}, {"first": first, "second": second}
            return _compiled(keras.Model(inputs, outputs), {"first": "mse", "second": "mae"})
        return _compiled(keras.Model(structure([one, other]), structure([first, second])), ["mse", "mae"])

    def rows():
        one, other, first, second = _rows(FEATURES, FEATURES, TARGET, normal(2))
        if structure is dict:
            return {"one": one, "other": other}, {"first": first, "second": second}
        # Lists would be made into one tensor by tf.data.
        return (one, other), (first, second)

    return make, rows


@keras.saving.register_keras_serializable("conformance")
class Densified(L.Layer):
    """Ragged rows, padded and summed."""

    def call(self, inputs):
        return tf.reduce_sum(inputs.to_tensor() if isinstance(inputs, tf.RaggedTensor) else inputs, axis=1)


def _ragged():
    inputs = keras.Input((None, 3), ragged=True)
    return _compiled(keras.Model(inputs, L.Dense(1)(Densified()(inputs))))


def _ragged_rows():
    lengths = np.arange(ROWS) % 4 + 1
    values = normal(3).rows(int(lengths.sum()))
    return tf.RaggedTensor.from_row_lengths(values, lengths), TARGET.rows()


def _sparse():
    inputs = keras.Input((5,), sparse=True)
    return _compiled(keras.Model(inputs, L.Dense(1)(inputs)))


def _sparse_rows():
    dense = normal(5).rows() * (ids(5, below=2).rows() > 0)
    return tf.sparse.from_dense(dense), TARGET.rows()


def _strings():
    inputs = keras.Input((2,), dtype="string")
    looked_up = L.StringLookup(vocabulary=["red", "green", "blue"])(inputs)
    return _compiled(keras.Model(inputs, L.Dense(1)(L.Flatten()(L.Embedding(5, 2)(looked_up)))))


def _integers():
    inputs = keras.Input((3,), dtype="int64")
    return _compiled(keras.Model(inputs, L.Dense(1)(L.Flatten()(L.Embedding(5, 2)(inputs)))))


def _mixed():
    policy = keras.mixed_precision.dtype_policy()
    keras.mixed_precision.set_dtype_policy("mixed_float16")
    try:
        model = _dense()
    finally:
        keras.mixed_precision.set_dtype_policy(policy)
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.05), initial_scale=64.0)
    model.compile(optimizer, "mse", jit_compile=False)
    return model


def _weighted_rows():
    return *_rows(FEATURES, TARGET), np.linspace(0.1, 2.0, ROWS)


def _plain_rows():
    return _rows(FEATURES, TARGET)


MODELS = {
    "sequential model": (lambda: _compiled(_dense()), _plain_rows),
    "functional model": (_functional, _plain_rows),
    "subclassed model": (_subclassed, _plain_rows),
    "nested model": (_nested, _plain_rows),
    "shared layers": (_shared, lambda: (_rows(FEATURES, FEATURES), TARGET.rows())),
    "gradient penalty in a train_step": (_penalized, _plain_rows),
    "dict inputs and outputs": _several(dict),
    "list inputs and outputs": _several(list),
    "tuple inputs and outputs": _several(tuple),
    "ragged input": (_ragged, _ragged_rows),
    "sparse input": (_sparse, _sparse_rows),
    "string input": (_strings, lambda: (words(2).rows(), TARGET.rows())),
    "integer input": (_integers, lambda: (ids(3).rows(), TARGET.rows())),
    "mixed precision": (_mixed, _plain_rows),
    "sample weights": (lambda: _compiled(_dense(), weighted_metrics=["mae"]), _weighted_rows),
    "steps_per_execution": (lambda: _compiled(_dense(), steps_per_execution=2), _plain_rows),
}


def seen_of(place, item):
    """Returns what was seen of one of the models."""
    make, rows = MODELS[item]
    return runs.fitted(place, make, rows())[1]


def quantized(place, item):
    """Trains, quantizes to int8 and predicts."""
    model, seen = runs.fitted(place, lambda: _compiled(_dense()), _plain_rows(), saves=False)
    model.quantize("int8")
    seen["quantized"] = model.predict(runs.dataset_of(place, _plain_rows()), verbose=0)
    return seen
