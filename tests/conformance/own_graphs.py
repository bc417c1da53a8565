"""Layers of a user's own that read their weights in graphs inside of the step's."""

import keras
import tensorflow as tf

from tests.conformance.inputs import ids, normal
from tests.conformance.recipes import Branch


@keras.saving.register_keras_serializable("conformance")
class _Matrix(keras.layers.Layer):
    """A matrix that a subclass reads in an inner graph."""

    def build(self, shape):
        self.matrix = self.add_weight(shape=(shape[-1], shape[-1]), initializer="orthogonal", name="matrix")

    def compute_output_shape(self, shape):
        return shape

    def step(self, x):
        return keras.ops.tanh(keras.ops.matmul(x, self.matrix))


def _registered(call):
    """Returns a layer that computes `call`."""
    own = type(f"Of{call.__name__}", (_Matrix,), {"call": call, "__module__": __name__})
    return keras.saving.register_keras_serializable("conformance")(own)


@_registered
def while_loop(self, x):
    return keras.ops.while_loop(lambda i, _: i < 3, lambda i, h: (i + 1, self.step(h)), (0, x))[1]


@_registered
def fori_loop(self, x):
    return keras.ops.fori_loop(0, 3, lambda i, h: self.step(h), x)


@_registered
def cond(self, x):
    # All replicas take the same branch: the condition is on the weights.
    return keras.ops.cond(keras.ops.sum(self.matrix) > 0, lambda: self.step(x), lambda: self.step(-2.0 * x))


@_registered
def switch(self, x):
    number = keras.ops.cast(keras.ops.sum(self.matrix) > 0, "int32")
    return keras.ops.switch(number, [self.step, lambda y: self.step(2.0 * y)], x)


@_registered
def scan(self, x):
    parts = keras.ops.stack([x, 2.0 * x, x])
    return keras.ops.scan(lambda h, part: (self.step(h + part), h), x, parts)[0]


@_registered
def mapped(self, x):
    return keras.ops.map(lambda row: self.step(row[None])[0], x)


@_registered
def vectorized_map(self, x):
    return keras.ops.vectorized_map(lambda row: self.step(row[None])[0], x)


@_registered
def remat(self, x):
    return keras.remat(self.step)(x)


@_registered
def custom_gradient(self, x):
    @tf.custom_gradient
    def doubled_backwards(value):
        return tf.identity(value), lambda upstream: 2.0 * upstream

    return doubled_backwards(self.step(x))


@_registered
def nested_function(self, x):
    inner = tf.function(self.step)
    return tf.function(lambda value: inner(inner(value)))(x)


@_registered
def gradient_as_output(self, x):
    """The gradient of a function of the row by the row: training takes the second."""
    with tf.GradientTape() as tape:
        tape.watch(x)
        found = tf.reduce_sum(tf.square(self.step(x)), axis=-1)
    return tape.gradient(found, x)


def _with_lora(layer, tensors):
    """Keras saves the sum of kernel and adapters and begins new ones where it loads; they are of single precision."""
    layer(tensors[0])
    layer.enable_lora(2)
    return layer(tensors[0])


def _of(layer):
    return Branch(lambda name: layer(name=name))


GRAPHS = {
    "ops.while_loop": _of(while_loop),
    "ops.fori_loop": _of(fori_loop),
    "ops.cond": _of(cond),
    "ops.switch": _of(switch),
    "ops.scan": _of(scan),
    "ops.map": _of(mapped),
    "ops.vectorized_map": _of(vectorized_map),
    "keras.remat": _of(remat),
    "tf.custom_gradient": _of(custom_gradient),
    "nested-tf.function": _of(nested_function),
    "gradient-of-a-gradient": _of(gradient_as_output),
    "BatchNormalization-synchronized": Branch(
        lambda name: keras.layers.BatchNormalization(synchronized=True, name=name)
    ),
    "LoRA-Dense": Branch(
        lambda name: keras.layers.Dense(3, name=name), apply=_with_lora, is_saved_as_it_is=False, single=True
    ),
    "LoRA-Embedding": Branch(
        lambda name: keras.layers.Embedding(5, 3, name=name),
        (ids(4),),
        apply=_with_lora,
        is_saved_as_it_is=False,
        single=True,
    ),
    "LoRA-EinsumDense": Branch(
        lambda name: keras.layers.EinsumDense("abc,cd->abd", (6, 4), name=name),
        (normal(6, 4),),
        apply=_with_lora,
        is_saved_as_it_is=False,
        single=True,
    ),
}
