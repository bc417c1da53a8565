"""Stops in the midst of an epoch and goes on from a checkpoint; one device is never stopped."""

import os

import keras
import numpy as np

from tests.conformance import branches, recipes_layers, runs
from tests.conformance.branch_programs import BranchLosses
from tests.ps_training.checkpoint_programs import trained

# No Embedding: where an id is repeated Adam differs from one device, which README says.
BRANCHES = ("Dense", "LSTM", "Normalization", "Conv2D", "StringLookup")
STEPS = 4
"""Of six: the second epoch has begun."""


def resumed(place, item):
    """Returns weights, optimizer and logs of a run of two epochs."""
    found = {**recipes_layers.PLAIN, **recipes_layers.SEQUENTIAL, **recipes_layers.PREPARING}
    recipes = {name: found[name] for name in BRANCHES}

    def make():
        keras.backend.clear_session()
        keras.utils.set_random_seed(11)
        with place.scope(place.make()):
            model = branches.model_of(recipes, BranchLosses(recipes), optimizer=keras.optimizers.Adam(0.05))
        return model, runs.dataset_of(place, branches.arrays_of(recipes))

    folder = os.path.join(place.folder, "checkpoints")
    before = [] if place.make() is None else trained(make, folder, STEPS, epochs=runs.EPOCHS)[1]
    model, after, _ = trained(make, folder, epochs=runs.EPOCHS)
    logs = np.concatenate([*before, *after])
    return {"weights": runs.variables_of(model), "optimizer": runs.optimizer_of(model), "logs": logs}
