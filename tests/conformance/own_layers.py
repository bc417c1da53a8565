"""Layers of a user's own: subclasses of what is abstract, and calls with graphs inside."""

import tempfile

import keras
import tensorflow as tf


def registered(cls):
    return keras.saving.register_keras_serializable("conformance")(cls)


@keras.saving.register_keras_serializable("conformance")
def squared(x):
    return keras.ops.square(x)


@registered
class Scale(keras.layers.Layer):
    """A weight for each feature."""

    def build(self, shape):
        self.scale = self.add_weight(shape=(shape[-1],), initializer="ones")

    def call(self, inputs):
        return inputs * self.scale


@registered
class Wrapped(keras.layers.Wrapper):
    """What the layer inside returns, squashed."""

    def call(self, inputs):
        return keras.ops.tanh(self.layer(inputs))


@registered
class Cell(keras.layers.Layer):
    """A cell of a user's own."""

    def __init__(self, units, **arguments):
        super().__init__(**arguments)
        self.units = self.state_size = units

    def build(self, shape):
        self.kernel = self.add_weight(shape=(shape[-1], self.units), initializer="glorot_uniform")
        self.recurrent = self.add_weight(shape=(self.units, self.units), initializer="orthogonal")

    def call(self, inputs, states):
        output = keras.ops.tanh(inputs @ self.kernel + states[0] @ self.recurrent)
        return output, [output]

    def get_config(self):
        return {**super().get_config(), "units": self.units}


def saved_model_layer(name):
    """Returns a layer that is loaded from a SavedModel, which holds no trainable variable."""

    class Doubling(tf.Module):
        @tf.function(input_signature=[tf.TensorSpec([None, 4], tf.float64)])
        def serve(self, x):
            return 2.0 * tf.tanh(x)

    folder = tempfile.mkdtemp()
    tf.saved_model.save(Doubling(), folder)
    return keras.layers.TFSMLayer(folder, call_endpoint="serve", name=name)
