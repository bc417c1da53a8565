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
    """

    kind: str
    reason: str
    places: tuple[str, ...] = EVERYWHERE
    words: tuple[str, ...] = ()


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
