"""Are the random numbers of many replicas distributed as those of one device? Two moments of what a layer gives."""

import dataclasses
import zlib

import keras
import numpy as np
import tensorflow as tf

from tests.conformance.branch_programs import BranchLosses

ROWS, STEPS = 12, 24


@dataclasses.dataclass(frozen=True)
class Draws:
    """Random layers as branches of a model without weights, on the same rows in every step.

    Each branch gives a weighted mean and the root of the mean square of a row. What is seen of it are the means of
    their squares over the rows, one for each step.
    """

    family: str
    recipes: dict
    items_a_group: int = 40
    floatx: str = "float64"
    statistical: bool = True

    @property
    def items(self):
        return tuple(self.recipes)

    def precision(self, name):
        """Says in which precision a branch computes."""
        return "single" if self.floatx == "float32" else "double"

    def run(self, place, items):
        keras.config.set_floatx(self.floatx)
        keras.backend.clear_session()
        keras.utils.set_random_seed(5)
        recipes = {name: self.recipes[name] for name in items}
        with place.scope(place.make()):
            model = _model(recipes)
        inputs = {kind.name: kind.rows(ROWS) for recipe in recipes.values() for kind in recipe.inputs}
        data = tf.data.Dataset.from_tensor_slices((inputs, np.zeros((ROWS, 2 * len(items)))))
        history = model.fit(data.batch(ROWS // place.batches_a_step), epochs=STEPS, verbose=0).history
        return {
            name: {moment: np.asarray(history[f"{name} {moment}"]) for moment in ("mean", "size")}
            for name in items
        }


def _model(recipes):
    inputs, outputs = {}, []
    for name, recipe in recipes.items():
        # What is drawn for a branch is the same in whatever model it stands.
        keras.utils.set_random_seed(zlib.crc32(name.encode()))
        for kind in recipe.inputs:
            if kind.name not in inputs:
                inputs[kind.name] = keras.Input(kind.shape, dtype=kind.dtype, name=kind.name)
        found = recipe.apply(recipe.make(name=name), [inputs[kind.name] for kind in recipe.inputs])
        found = keras.layers.Flatten(name=f"{name}__flatten")(keras.ops.cast(found, keras.config.floatx()))
        scale = 255.0 if recipe.inputs[0].kind == "images" else 1.0
        # Weights from 0 to 2: what only turns a picture shows too.
        ramp = keras.ops.linspace(0.0, 2.0, found.shape[-1], dtype=found.dtype)
        mean = keras.ops.mean(found * ramp, axis=-1, keepdims=True) / scale
        size = keras.ops.sqrt(keras.ops.mean(keras.ops.square(found), axis=-1, keepdims=True)) / scale
        outputs += [mean, size]
    model = keras.Model(inputs, keras.ops.concatenate(outputs, axis=-1))
    names = [f"{name} {moment}" for name in recipes for moment in ("mean", "size")]
    model.compile("sgd", "mse", metrics=[BranchLosses(names, width=1)], jit_compile=False)
    return model
