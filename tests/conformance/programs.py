"""All programs, by name."""

from tests.conformance import (
    recipes_images,
    recipes_layers,
    recipes_optimizers,
    recipes_scores,
    recipes_weights,
)
from tests.conformance.branch_programs import Branches
from tests.conformance.fit_programs import Effects, Optimizers
from tests.conformance.recipes_callbacks import CALLBACKS
from tests.conformance.score_programs import Losses, Metrics

PROGRAMS = {
    "layers": Branches("layers", recipes_layers.PLAIN),
    "layers of sequences": Branches("layers", recipes_layers.SEQUENTIAL),
    "layers that prepare": Branches("layers", recipes_layers.PREPARING),
    "layers of images": Branches("layers", recipes_images.IMAGES),
    "noise": Branches("layers", recipes_images.NOISE),
    "random images": Branches("layers", recipes_images.RANDOM_IMAGES, saves=False),
    "losses": Losses("losses", recipes_scores.LOSSES),
    "metrics": Metrics("metrics", recipes_scores.METRICS, recipes_scores.OUTPUTS),
    "optimizers": Optimizers("optimizers", recipes_optimizers.OPTIMIZERS),
    "schedules": Optimizers("schedules", recipes_optimizers.SCHEDULES, saves=False),
    "regularizers": Branches("regularizers", recipes_weights.REGULARIZERS),
    "constraints": Branches("constraints", recipes_weights.CONSTRAINTS),
    "initializers": Branches("initializers", recipes_weights.INITIALIZERS),
    "callbacks": Effects("callbacks", CALLBACKS),
}
