"""What do the contestants of `benchmarks.parameter_server` train, and for how long?"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import keras
import numpy as np
import tensorflow as tf

BATCH_SIZE = 32
# Inputs and widths of Dense layers, each of which has a kernel and a bias.
DENSE_MODELS = {
    "0.5MB 6 variables": (128, [512, 112, 10]),
    "8MB 6 variables": (784, [1024, 1100, 64]),
    "8MB 200 variables": (141, [141] * 100),
}
EMBEDDING_WIDTH = 32
IDS_PER_BATCH = 512
# Many different batches, so that the rows of a large table are not all in the caches of the processor.
NUM_ID_BATCHES = 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class Size:
    """How much is measured.

    Attributes:
        num_rounds: Turns of each contestant.
        turn_seconds: How long a turn takes, about.
        warm_up_steps: Updates before the first turn.
        dense_models: Which models.
        table_rows: Rows of the small and of the large embedding table.
        sleep_seconds: What a worker computes for, with delays.
        slow_seconds: The same of the slow worker.
        turn_with_delays_seconds: How long a turn with delays takes, about.
    """

    num_rounds: int = 5
    turn_seconds: float = 2.0
    warm_up_steps: int = 20
    dense_models: tuple[str, ...] = tuple(DENSE_MODELS)
    table_rows: tuple[int, int] = (10_000, 1_000_000)
    sleep_seconds: float = 0.050
    slow_seconds: float = 0.500
    turn_with_delays_seconds: float = 3.0


QUICK = Size(
    num_rounds=1,
    turn_seconds=0.1,
    warm_up_steps=4,
    dense_models=("0.5MB 6 variables",),
    table_rows=(4_000, 40_000),
    sleep_seconds=0.005,
    slow_seconds=0.030,
    turn_with_delays_seconds=0.2,
)


def endless(*batches: np.ndarray) -> Callable[[], tf.data.Dataset]:
    """Returns a function that makes a dataset of arrays `[batches, rows, ...]`, again and again."""
    # Without arguments, even with defaults: TensorFlow's coordinator would ask for them.
    return lambda: tf.data.Dataset.from_tensor_slices(batches).repeat()


def dense_model(num_inputs: int, widths: list[int]) -> keras.Model:
    """Returns Dense layers one after another, with SGD."""
    layers = [keras.layers.Dense(width, activation="tanh") for width in widths]
    model = keras.Sequential([keras.Input((num_inputs,)), *layers])
    # Workers compile nothing under TensorFlow's own coordinator, so nobody does.
    model.compile(keras.optimizers.SGD(0.01), "mse", jit_compile=False)
    return model


def megabytes_of(num_inputs: int, widths: list[int]) -> float:
    """Returns the size of `dense_model`'s variables in float32."""
    sizes = [num_inputs, *widths]
    return 4e-6 * sum((before + 1) * width for before, width in zip(sizes, widths, strict=False))


def table_model(num_rows: int) -> keras.Model:
    """Returns an embedding table and one Dense layer, with Adagrad, which updates the touched rows only."""
    model = keras.Sequential(
        [
            keras.Input((1,), dtype="int64"),
            keras.layers.Embedding(num_rows, EMBEDDING_WIDTH),
            keras.layers.Flatten(),
            keras.layers.Dense(1),
        ]
    )
    model.compile(keras.optimizers.Adagrad(0.01), "mse", jit_compile=False)
    return model


def draw_ids(num_rows: int, smallest_rows: int) -> np.ndarray:
    """Draws `[batches, ids]` row numbers: for every table as many different ones in a batch, spread over all of it."""
    generator = np.random.default_rng(2)
    ids = generator.integers(smallest_rows, size=(NUM_ID_BATCHES, IDS_PER_BATCH))
    return ids * (num_rows // smallest_rows)
