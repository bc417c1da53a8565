"""What is not the run of one device, and why? Everything that is not named here must be equal.

The page `docs/guides/what-is-equal.md` is written from these tables, and an entry that no longer holds fails.
"""

import dataclasses

from tests.conformance.recipes_images import NOISE, RANDOM_IMAGES, SINGLE_IMAGES

REPLICAS = ("mirrored 2", "mirrored 3", "workers")
SERVERS = ("rounds", "one at a time")
EVERYWHERE = (*REPLICAS, *SERVERS)
SUMMED = (*REPLICAS, "rounds")
"""Places where several replicas or batches make one step."""


@dataclasses.dataclass(frozen=True)
class Known:
    """One known difference.

    Attributes:
        kind: "refused", "differs", or "not run".
        reason: A sentence for the page.
        places: Where.
        words: What the error must say, where it is refused.
        only: Of what is compared, the part that may differ; everything where it is empty.
    """

    kind: str
    reason: str
    places: tuple[str, ...] = EVERYWHERE
    words: tuple[str, ...] = ()
    only: str = ""


def not_run(reason):
    return [Known("not run", reason)]


DRAWS = (
    "Every replica (or batch of a round) draws other random numbers, as every row of one device has its own: equal in "
    "distribution, repeatable, and the same numbers whatever processes the replicas are in."
)
PER_REPLICA = (
    "Mean and variance are those of each replica's rows, as in Keras' own distribution; `synchronized=True` takes "
    "them of all rows and is equal."
)

UNKNOWN_ROWS = "It is no mean and no sum over rows, and the workers of a round do not know each other's rows."
A_BATCH_OF_ITS_OWN = (
    "The workers of a round do not know each other's rows: each batch has its own mean and variance."
)
LOGS_OF_OUTPUTS = (
    "Weights and the total loss are equal. The logged loss of a single output is one that Keras averages over batches "
    "whatever their rows, and a round is several."
)

KNOWN = {
    "layers": {
        **{name: [Known("differs", DRAWS, SUMMED)] for name in (*NOISE, *RANDOM_IMAGES, *SINGLE_IMAGES)},
        "BatchNormalization": [Known("differs", PER_REPLICA, SUMMED)],
        "FlaxLayer": not_run("Needs the package flax, and Keras on JAX."),
        "InputSpec": not_run("No layer: it describes what a layer takes."),
        "JaxLayer": not_run("Needs the package jax."),
        "TorchModuleWrapper": not_run("Needs the package torch."),
        "SpectralNormalization": [
            Known(
                "refused",
                "It assigns a trainable variable in its forward pass.",
                words=("SpectralNormalization",),
            )
        ],
    },
    "losses": {
        name: [Known("refused", UNKNOWN_ROWS, ("rounds",), ("no mean and no sum",))]
        for name in ("Circle", "Dice", "Tversky")
    },
    "programs": {
        "BatchNormalization-synchronized": [Known("differs", A_BATCH_OF_ITS_OWN, ("rounds",))],
        **{
            f"{kind} inputs and outputs": [Known("differs", LOGS_OF_OUTPUTS, ("rounds",), only="history/")]
            for kind in ("dict", "list", "tuple")
        },
        "ops.associative_scan": not_run(
            "Keras 3.15 itself cannot build a model with it on one device: `as_list() is not defined on an unknown "
            "TensorShape`."
        ),
    },
    "callbacks": {
        "TensorBoard": not_run("Needs the package tensorboard."),
        "OrbaxCheckpoint": not_run("Needs the package orbax-checkpoint."),
    },
}


def known(place, family, name):
    """Returns the entry for a name at a place, or None where it has to be equal."""
    for entry in KNOWN.get(family, {}).get(name, []):
        if place in entry.places:
            return entry
    return None
