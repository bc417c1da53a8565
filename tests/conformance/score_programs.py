"""Programs whose items are losses, each with an output of its own, or metrics of shared outputs."""

import dataclasses
import zlib

import keras

from tests.conformance import branch_programs, runs
from tests.conformance.inputs import normal

FEATURES = normal(3)


def _outputs(inputs, wanted):
    """Returns an output for each name -> Output."""
    made = {}
    for name, output in wanted.items():
        keras.utils.set_random_seed(zlib.crc32(name.encode()))
        size = 1
        for length in output.shape:
            size *= length
        found = keras.layers.Dense(size, name=f"{name}__dense")(inputs)
        if len(output.shape) > 1:
            found = keras.layers.Reshape(output.shape, name=f"{name}__shape")(found)
        found = keras.layers.Activation(output.activation, name=f"{name}__activation")(found)
        if output.activation == "hard_sigmoid":
            found = keras.ops.round(found)
        found = keras.ops.cast(found, output.dtype)
        made[name] = keras.layers.Identity(dtype=output.dtype, name=name)(found)
    return made


def _arrays(wanted):
    targets = {name: output.target.rows(salt=name) for name, output in wanted.items()}
    return FEATURES.rows(), targets


@dataclasses.dataclass(frozen=True)
class Losses:
    """An output for each loss."""

    family: str
    recipes: dict
    items_a_group: int = 30
    in_single_precision: tuple[str, ...] = ()

    @property
    def items(self):
        return tuple(self.recipes)

    def precision(self, name):
        """Says in which precision a loss computes."""
        return "single" if name in self.in_single_precision else "double"

    def run(self, place, items):
        wanted = {name: self.recipes[name][1] for name in items}

        def make():
            inputs = keras.Input(FEATURES.shape)
            model = keras.Model(inputs, _outputs(inputs, wanted))
            losses = {name: self.recipes[name][0]() for name in items}
            model.compile(keras.optimizers.SGD(0.02, momentum=0.9), losses, jit_compile=False)
            return model

        _, seen = runs.fitted(place, make, _arrays(wanted))
        if place.batches_a_step > 1:
            # What Keras logs for one of several outputs is averaged over batches, whatever their rows.
            del seen["history"]
        return {name: self._of_item(seen, name) for name in items}

    def _of_item(self, seen, name):
        found = {key: branch_programs.own(seen[key], name) for key in ("initial", "weights", "optimizer")}
        for key, title in (("history", "logs of outputs"), ("evaluation", "evaluation")):
            if key in seen:
                found[title] = seen[key].get(f"{name}_loss", seen[key]["loss"])
        if "predictions" in seen:
            found["predictions"] = seen["predictions"][name]
        if "saved" in seen:
            found["saved"] = branch_programs.saved_of(seen["saved"], name, lambda values: values[name])
        return found


@dataclasses.dataclass(frozen=True)
class Metrics:
    """Many metrics of a few outputs."""

    family: str
    recipes: dict
    outputs: dict
    items_a_group: int = 60

    @property
    def items(self):
        return tuple(self.recipes)

    def run(self, place, items):
        wanted = {name: output for name, (output, _) in self.outputs.items()}

        def make():
            inputs = keras.Input(FEATURES.shape)
            model = keras.Model(inputs, _outputs(inputs, wanted))
            metrics = {
                output: [
                    self.recipes[item][0](name=item) for item in items if self.recipes[item][1] == output
                ]
                for output in wanted
            }
            losses = {name: loss for name, (_, loss) in self.outputs.items()}
            model.compile(keras.optimizers.SGD(0.1), losses, metrics=metrics, jit_compile=False)
            return model

        _, seen = runs.fitted(place, make, _arrays(wanted), saves=False)
        return {
            item: {
                key: seen[key][f"{self.recipes[item][1]}_{item}"]
                for key in ("history", "evaluation")
                if key in seen
            }
            for item in items
        }
