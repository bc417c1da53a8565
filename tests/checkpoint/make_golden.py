"""How was the golden checkpoint made? Run once; it does not overwrite."""

import pathlib
import random
import sys

import keras
import numpy as np
import tensorflow as tf

from tfdist_ext.checkpoint import EverySteps, TrainingCheckpointManager, TrainingState

FOLDER = pathlib.Path(__file__).parent / "golden"


class Tally:
    """State of the user's."""

    def __init__(self):
        self.counts = np.zeros(2, np.int64)

    def state_dict(self):
        return {"counts": self.counts}

    def load_state_dict(self, state):
        self.counts = state["counts"]


def job(tally):
    """Returns a state whose values can be worked out by hand: y = w x + b, momentum 1/2, batches of 2 of 8 rows."""
    layers = [
        keras.Input((1,)),
        keras.layers.Dense(1, kernel_initializer="zeros"),
        keras.layers.Dropout(1e-9, seed=11),  # Draws, and drops nothing.
    ]
    model = keras.Sequential(layers)
    model.compile(
        keras.optimizers.SGD(0.25, momentum=0.5),
        lambda target, prediction: prediction[:, 0] + 0 * target[:, 0],
    )
    data = tf.data.Dataset.from_tensor_slices((np.ones((8, 1), "float32"), np.ones((8, 1), "float32")))
    return TrainingState(model, data.shuffle(8, seed=2).batch(2), tally=tally)


def main() -> None:
    """Makes it."""
    if any(path.is_dir() for path in FOLDER.iterdir()):
        sys.exit(f"{FOLDER} has a checkpoint, and is never made again.")
    keras.utils.set_random_seed(3)
    tally = Tally()
    state = job(tally)
    checkpoints = TrainingCheckpointManager(state, FOLDER, save=EverySteps(7))

    class Count(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            tally.counts += [1, batch]
            if tally.counts[0] == 8:
                checkpoints.wait()
                random.seed(0)
                sys.exit()

    state.model.fit(state.dataset, epochs=3, verbose=0, callbacks=[checkpoints.keras_callback(), Count()])


if __name__ == "__main__":
    main()
