"""All programs, by name."""

from tests.conformance import (
    own_models,
    recipes_images,
    recipes_layers,
    recipes_optimizers,
    recipes_scores,
    recipes_weights,
)
from tests.conformance.branch_programs import Branches
from tests.conformance.draws import Draws
from tests.conformance.fit_programs import Alone, Effects, Optimizers
from tests.conformance.own_graphs import GRAPHS
from tests.conformance.recipes_callbacks import CALLBACKS
from tests.conformance.resuming import resumed
from tests.conformance.score_programs import Losses, Metrics

PROGRAMS = {
    "layers": Branches("layers", recipes_layers.PLAIN),
    "layers of sequences": Branches("layers", recipes_layers.SEQUENTIAL),
    "layers that prepare": Branches("layers", recipes_layers.PREPARING),
    "layers of images": Branches("layers", recipes_images.IMAGES),
    "noise": Branches("layers", recipes_images.NOISE),
    "draws": Draws("layers", {**recipes_images.NOISE, **recipes_images.RANDOM_IMAGES}),
    "draws in single precision": Draws("layers", recipes_images.SINGLE_IMAGES, floatx="float32"),
    "losses": Losses("losses", recipes_scores.LOSSES, in_single_precision=("CTC",)),
    "metrics": Metrics("metrics", recipes_scores.METRICS, recipes_scores.OUTPUTS),
    "optimizers": Optimizers("optimizers", recipes_optimizers.OPTIMIZERS),
    "schedules": Optimizers("schedules", recipes_optimizers.SCHEDULES, saves=False),
    "regularizers": Branches("regularizers", recipes_weights.REGULARIZERS),
    "constraints": Branches("constraints", recipes_weights.CONSTRAINTS),
    "initializers": Branches("initializers", recipes_weights.INITIALIZERS),
    "inner graphs": Branches("programs", GRAPHS),
    "models": Alone(
        "programs",
        {
            **dict.fromkeys(own_models.MODELS, own_models.seen_of),
            "int8 after training": own_models.quantized,
            "resume in mid-epoch": resumed,
        },
        {"mixed precision": "half", "int8 after training": "half"},
    ),
    "callbacks": Effects("callbacks", CALLBACKS),
}
