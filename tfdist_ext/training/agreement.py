"""Do all workers train the same model, on rows in the same order?"""

from __future__ import annotations

import hashlib
import json
import re

import numpy as np

from tfdist_ext import compat, errors
from tfdist_ext.strategies import groups

_NUMBER = re.compile(r"_\d+(?=/|$)")


def variable_specs(model) -> list[list]:
    """Returns `[path, shape, dtype]` of every variable of a model, in order.

    Keras numbers the layers of a process (`dense_1`); a task that made another model before, or that was
    restarted, counts differently. So the numbers are left out.
    """
    return [[_NUMBER.sub("", v.path), list(v.shape), str(v.dtype)] for v in model.variables]


def check_model(strategy, model) -> None:
    """Compares the variables of the model on all workers.

    Runs on: every worker, at the first train function of a model.

    Args:
        strategy: The strategy.
        model: Keras model.

    Raises:
        ConfigurationMismatchError: Two workers built different models; names both and the first difference.
    """
    group = strategy.extended.process_group
    if group is None or group.size == 1:
        return
    specs = json.dumps(variable_specs(model))
    digests = group.all_gather_bytes(hashlib.sha256(specs.encode()).digest(), name="model/digest")
    if len(set(digests)) == 1:
        return
    everyone = [
        json.loads(answer) for answer in group.all_gather_bytes(specs.encode(), name="model/variables")
    ]
    other = next(rank for rank in range(1, group.size) if everyone[rank] != everyone[0])
    raise _difference(group.task_names, other, everyone[0], everyone[other])


def _difference(task_names, other, first_specs, other_specs):
    tasks = (task_names[0], task_names[other])
    if len(first_specs) != len(other_specs):
        message = f"{tasks[0]} has {len(first_specs)} variables and {tasks[1]} has {len(other_specs)}"
        values = (str(len(first_specs)), str(len(other_specs)))
    else:
        index = next(
            i for i, pair in enumerate(zip(first_specs, other_specs, strict=True)) if pair[0] != pair[1]
        )
        values = (str(first_specs[index]), str(other_specs[index]))
        message = f"variable {index} is {values[0]} on {tasks[0]} and {values[1]} on {tasks[1]}"
    return errors.ConfigurationMismatchError(
        f"The workers built different models: {message}. Build the model from the same code and arguments on every "
        "task.",
        field="model_variables",
        tasks=tasks,
        values=values,
    )


def install() -> None:
    """Makes Keras' own shuffles (NumPy and PyDataset input) follow the chief where several workers train."""
    compat.replace_keras_shuffles(shuffled_as_on_chief, agreed_permutation_seed)


def shuffled_as_on_chief(indices: list, shuffle) -> None:
    """Shuffles a list in place as the chief does.

    Args:
        indices: List to shuffle; every worker has the same.
        shuffle: The shuffle of the standard library; called on every worker, so that its generator moves on.
    """
    shuffle(indices)
    group = groups.current_group()
    if group is None:
        return
    payload = json.dumps(indices).encode() if group.rank == 0 else b""
    indices[:] = json.loads(group.all_gather_bytes(payload, name="input/shuffle", stream="input/shuffle")[0])


def agreed_permutation_seed():
    """Returns a fresh seed pair that the chief drew, or None where one process trains."""
    group = groups.current_group()
    if group is None:
        return None

    def draw():
        own = np.random.SeedSequence().generate_state(2).astype(np.int64)
        return group.broadcast(own, name="input/permutation", stream="input/permutation")

    return draw
