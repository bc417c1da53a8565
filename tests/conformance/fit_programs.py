"""Programs whose items have a model and a fit each."""

import dataclasses
from collections.abc import Callable

import keras

from tests.conformance import recipes_optimizers, runs


def each(items, run):
    """Returns what was seen of each item, or its error."""
    found = {}
    for item in items:
        try:
            found[item] = run(item)
        except Exception as error:
            found[item] = runs.error_of(error)
    return found


@dataclasses.dataclass(frozen=True)
class Optimizers:
    """A tiny network for each optimizer."""

    family: str
    recipes: dict[str, Callable]
    items_a_group: int = 20
    saves: bool = True

    @property
    def items(self):
        return tuple(self.recipes)

    def run(self, place, items):
        return each(items, lambda item: self._seen(place, item))

    def _seen(self, place, item):
        def make():
            made = self.recipes[item]()
            schedule = isinstance(made, keras.optimizers.schedules.LearningRateSchedule)
            return recipes_optimizers.network(keras.optimizers.SGD(made) if schedule else made)

        return runs.fitted(place, make, recipes_optimizers.rows(), saves=self.saves)[1]


@dataclasses.dataclass(frozen=True)
class Alone:
    """Programs of which each is a function of the place and its own name."""

    family: str
    recipes: dict[str, Callable]
    precisions: dict[str, str] = dataclasses.field(default_factory=dict)
    items_a_group: int = 20

    @property
    def items(self):
        return tuple(self.recipes)

    def precision(self, name):
        """Says in which precision a program computes."""
        return self.precisions.get(name, "double")

    def run(self, place, items):
        return each(items, lambda item: self.recipes[item](place, item))


@dataclasses.dataclass(frozen=True)
class Effects:
    """What each callback did, beside the weights."""

    family: str
    recipes: dict[str, Callable]
    items_a_group: int = 20

    @property
    def items(self):
        return tuple(self.recipes)

    def run(self, place, items):
        return each(items, lambda item: self.recipes[item](place))
