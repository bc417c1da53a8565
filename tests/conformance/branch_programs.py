"""A program whose items are branches of one model."""

import dataclasses

import keras
import numpy as np

from tests.conformance import branches, runs


@keras.saving.register_keras_serializable("conformance")
class BranchLosses(keras.metrics.Metric):
    """The mean squared error of each branch."""

    def __init__(self, names, width=branches.WIDTH, name="branches", **arguments):
        super().__init__(name=name, **arguments)
        self.names, self.width = list(names), width
        self.total = self.add_weight(shape=(len(self.names),), initializer="zeros", name="total")
        self.count = self.add_weight(initializer="zeros", name="count")

    def update_state(self, y_true, y_pred, sample_weight=None):
        errors = keras.ops.square(keras.ops.cast(y_true, self.dtype) - keras.ops.cast(y_pred, self.dtype))
        errors = keras.ops.mean(keras.ops.reshape(errors, (-1, len(self.names), self.width)), axis=-1)
        weights = keras.ops.ones_like(errors[:, 0])
        if sample_weight is not None:
            weights = keras.ops.reshape(keras.ops.cast(sample_weight, self.dtype), (-1,))
        self.total.assign_add(keras.ops.sum(errors * weights[:, None], axis=0))
        self.count.assign_add(keras.ops.sum(weights))

    def result(self):
        return {name: self.total[index] / self.count for index, name in enumerate(self.names)}

    def get_config(self):
        return {**super().get_config(), "names": self.names, "width": self.width}


@dataclasses.dataclass(frozen=True)
class Branches:
    """Many recipes in one model."""

    family: str
    recipes: dict
    saves: bool = True
    items_a_group: int = 20
    floatx: str = "float64"

    @property
    def items(self):
        return tuple(self.recipes)

    def precision(self, name):
        """Says in which precision a branch computes."""
        return "single" if self.recipes[name].single or self.floatx == "float32" else "double"

    def run(self, place, items):
        keras.config.set_floatx(self.floatx)
        recipes = {name: self.recipes[name] for name in items}

        def make():
            return branches.model_of(recipes, BranchLosses(items))

        _, seen = runs.fitted(place, make, branches.arrays_of(recipes), evaluates=False, saves=self.saves)
        return {name: self._of_item(seen, name, index) for index, name in enumerate(items)}

    def _of_item(self, seen, name, index):
        columns = slice(index * branches.WIDTH, (index + 1) * branches.WIDTH)
        found = {key: own(seen[key], name) for key in ("initial", "weights", "optimizer")}
        found["history"] = seen["history"][name]
        if "predictions" in seen:
            found["predictions"] = seen["predictions"][:, columns]
        if "saved" in seen:
            found["saved"] = saved_of(seen["saved"], name, lambda values: values[:, columns])
            if not self.recipes[name].is_saved_as_it_is:
                del found["saved"]["outside"], found["saved"]["inside"]
        return found


def saved_of(saved, name, predictions_of):
    """Returns how far one item of a model is from itself after loading."""
    found = {key: own(saved[key], name) for key in ("outside", "inside")}
    predictions = {
        key: predictions_of(value) for key, value in saved.items() if key.startswith("predictions")
    }
    return {**found, **predictions}


def own(values, name):
    """Returns the values of one branch in their order: the names of layers inside of it are counted on."""
    own = [(path, value) for path, value in values.items() if branches.item_of(path) == name]
    return {f"{index} {path.split('/')[0]}": np.asarray(value) for index, (path, value) in enumerate(own)}
