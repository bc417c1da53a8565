"""How do many layers share one trace? A model with a branch for each, which do not touch each other."""

import zlib

import keras
import numpy as np

from tests.conformance.inputs import ROWS, normal

WIDTH = 2
"""Columns of the output that a branch has."""


def model_of(recipes, *metrics, optimizer=None):
    """Returns a compiled model with one branch for each recipe: two columns of its output.

    The loss is the mean over columns, times their number: a branch trains as it would alone.
    """
    inputs, outputs = {}, []
    for name, recipe in recipes.items():
        # What is drawn for a branch is the same in whatever model it stands.
        keras.utils.set_random_seed(zlib.crc32(name.encode()))
        for kind in recipe.inputs:
            if kind.name not in inputs:
                inputs[kind.name] = keras.Input(kind.shape, dtype=kind.dtype, name=kind.name)
        outputs.append(_branch(name, recipe, [inputs[kind.name] for kind in recipe.inputs]))
    joined = outputs[0] if len(outputs) == 1 else keras.ops.concatenate(outputs, axis=-1)
    model = keras.Model(inputs, joined)
    optimizer = optimizer or keras.optimizers.SGD(0.02, momentum=0.9)
    model.compile(optimizer, "mse", float(len(recipes)), list(metrics), jit_compile=False)
    return model


def _branch(name, recipe, inputs):
    tensors = [_stem(f"{name}__stem{index}", tensor, recipe) for index, tensor in enumerate(inputs)]
    layer = recipe.make(name=name)
    if recipe.adapt:
        layer.adapt(recipe.inputs[0].rows())
    found = recipe.apply(layer, tensors)
    if len(found.shape) > 2:
        found = keras.layers.Flatten(name=f"{name}__flatten")(found)
    if len(found.shape) < 2:
        found = keras.layers.Reshape((1,), name=f"{name}__column")(found)
    return keras.layers.Dense(WIDTH, name=f"{name}__head")(
        squashed(keras.ops.cast(found, keras.config.floatx()))
    )


def squashed(x):
    """Returns features whose squares sum to order 1, whatever the layer gives: 255 for images, or many of them."""
    return (keras.ops.tanh(x / 100.0) + keras.ops.tanh(x / 2.0)) / x.shape[-1] ** 0.5


def _stem(name, tensor, recipe):
    if not recipe.stem or not keras.backend.is_float_dtype(tensor.dtype):
        return tensor
    return keras.layers.Dense(tensor.shape[-1], name=name)(tensor)


def arrays_of(recipes, rows=ROWS):
    """Returns inputs by name, and targets."""
    inputs = {kind.name: kind.rows(rows) for recipe in recipes.values() for kind in recipe.inputs}
    return inputs, np.concatenate([normal(WIDTH).rows(rows, name) for name in recipes], axis=-1)


def item_of(path):
    """Returns the branch that a variable belongs to, from its path."""
    return path.split("/")[0].split("__")[0]
