"""What does each process of `tfdist-ext demo` run? Plain Keras on the handwritten digits.

The comparison first: a few steps in float64 from the same initial weights, the last of them on a batch with
fewer rows. Then the training itself, in float32. Only the chief writes. `examples/digits` is a shorter
program to start your own from.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import pathlib
import statistics

import keras
import numpy as np

import tfdist_ext
from tfdist_ext.cluster import resolve
from tfdist_ext.data.digits import load_digits
from tfdist_ext.launch.step_times import StepTimes

BATCH_SIZE = 32
STEPS_AN_EPOCH = 45  # 44 batches of 32 rows and one of 29.
COMPARED_STEPS = 5
SEED = 20


def make_model(num_steps: int) -> keras.Model:
    """Builds and compiles a small convolutional network, from the same initial weights each time."""
    keras.utils.set_random_seed(SEED)
    layers = keras.layers
    model = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(32, 3, padding="same", activation="relu"),
            layers.Conv2D(32, 3, padding="same", activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(64, activation="relu"),
            layers.Dense(10),
        ]
    )
    rate = keras.optimizers.schedules.CosineDecay(0.03, num_steps)
    model.compile(
        optimizer=keras.optimizers.SGD(rate, momentum=0.9, nesterov=True),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


def compared_weights(scope: contextlib.AbstractContextManager) -> list[np.ndarray]:
    """Trains a few steps in float64 and returns the weights."""
    keras.config.set_floatx("float64")
    with scope:
        model = make_model(COMPARED_STEPS)
    batches = load_digits("train", BATCH_SIZE, shuffle_seed=SEED)
    model.fit(batches.skip(STEPS_AN_EPOCH - COMPARED_STEPS), shuffle=False, verbose=0)
    keras.config.set_floatx("float32")
    keras.backend.clear_session()
    return model.get_weights()


def train(
    scope: contextlib.AbstractContextManager, epochs: int, verbose: int
) -> tuple[list[np.ndarray], dict[str, float]]:
    """Trains in float32, and returns the weights and the numbers of the report."""
    with scope:
        model = make_model(epochs * STEPS_AN_EPOCH)
    times = StepTimes()
    batches = load_digits("train", BATCH_SIZE, shuffle_seed=SEED)
    # The data set shuffles already.
    history = model.fit(batches, epochs=epochs, shuffle=False, verbose=verbose, callbacks=[times])
    _, accuracy = model.evaluate(load_digits("test", BATCH_SIZE), verbose=0)
    return model.get_weights(), {
        "steps": int(model.optimizer.iterations.numpy()),
        "median_step_seconds": statistics.median(times.seconds),
        "final_loss": float(history.history["loss"][-1]),
        "test_accuracy": float(accuracy),
    }


def main() -> None:
    """Runs as one process: of a cluster if TF_CONFIG says so, else alone and without any strategy."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=pathlib.Path, required=True, help="name of the files, without ending")
    parser.add_argument("--epochs", type=int, required=True)
    arguments = parser.parse_args()
    cluster = resolve()
    strategy = tfdist_ext.MultiWorkerMirroredStrategy() if cluster.members else None

    def scope():
        return strategy.scope() if strategy else contextlib.nullcontext()

    float64 = compared_weights(scope())
    float32, numbers = train(scope(), arguments.epochs, verbose=2 if cluster.is_chief else 0)
    if cluster.is_chief:
        weights = {f"float32/{index}": array for index, array in enumerate(float32)}
        weights |= {f"float64/{index}": array for index, array in enumerate(float64)}
        np.savez(arguments.out.with_suffix(".npz"), allow_pickle=False, **weights)
        arguments.out.with_suffix(".json").write_text(json.dumps(numbers))


if __name__ == "__main__":
    main()
