"""A training script that is killed again and again: `torture_train FOLDER EPOCHS`, on every task of a cluster.

Weight i of its first layer counts how often row i was trained on, exactly; its second part has dropout on shuffled
rows, and comes out the same bit for bit only if every step was done once and in its order. Under parameter servers,
where the order of updates is nobody's, only the first is compared.
"""

from __future__ import annotations

import json
import os
import pathlib
import sys

NUM_ROWS, BATCH = 48, 4
STEP_SECONDS = 0.02


def _note_pid(folder: pathlib.Path, task: str) -> None:
    """Before TensorFlow is imported: also a task that is starting may be killed."""
    path = folder / "pids" / task
    path.with_suffix(".new").write_text(str(os.getpid()))
    path.with_suffix(".new").rename(path)


def main() -> None:
    """Trains to the end, from the newest checkpoint."""
    folder, epochs = pathlib.Path(sys.argv[1]), int(sys.argv[2])
    config = json.loads(os.environ["TF_CONFIG"])
    task = f"{config['task']['type']}-{config['task']['index']}"
    _note_pid(folder, task)
    _train(folder, epochs, task, "ps" in config["cluster"])


def _train(folder: pathlib.Path, epochs: int, task: str, has_servers: bool) -> None:
    import time

    import keras
    import numpy as np
    import tensorflow as tf

    import tfdist_ext
    from tfdist_ext import events
    from tfdist_ext.checkpoint import EverySteps, LatestN, TrainingCheckpointManager, TrainingState

    keras.utils.set_random_seed(1)
    # Tasks that serve do not come back from here.
    strategy = (
        tfdist_ext.ParameterServerStrategy() if has_servers else tfdist_ext.MultiWorkerMirroredStrategy()
    )
    leads = task in ("chief-0", "worker-0") if not has_servers else True
    with strategy.scope():
        inputs = keras.Input((NUM_ROWS,))
        counted = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros", name="counts")(inputs)
        # Nothing flows back from here into the counts.
        hidden = keras.layers.Dropout(0.25)(keras.layers.Dense(16, activation="tanh")(inputs))
        outputs = keras.layers.Dense(1)(hidden)
        model = keras.Model(inputs, [counted, outputs])
        # The mean over a batch of 4 takes back the rate of 4: each row adds 1.
        model.compile(keras.optimizers.SGD(4.0), [_minus_output, _small_error])
    rows = np.eye(NUM_ROWS, dtype="float32")
    targets = np.sin(np.arange(NUM_ROWS, dtype="float32"))[:, None]
    dataset = (
        tf.data.Dataset.from_tensor_slices((rows, (targets, targets))).shuffle(NUM_ROWS, seed=3).batch(BATCH)
    )
    marks = open(folder / "marks", "a", buffering=1)  # noqa: SIM115 - open to the end of the process

    def note(name, fields):
        if leads and name in ("checkpoint_begun", "checkpoint_committed"):
            marks.write(f"{name} {fields['step']}\n")

    class Pace(keras.callbacks.Callback):
        def state_dict(self):
            return {}

        def load_state_dict(self, state):
            pass

        def on_epoch_end(self, epoch, logs=None):
            # Every row once in each epoch so far: not only at the end, where a loss and a repetition even out.
            counts = model.get_layer("counts").get_weights()[0][:, 0]
            if leads and not np.all(counts == epoch + 1):
                (folder / "wrong_epochs").open("a").write(f"{epoch} {counts.tolist()}\n")

        def on_train_batch_end(self, batch, logs=None):
            time.sleep(STEP_SECONDS)
            if leads:
                marks.write(f"step {batch}\n")

    events.subscribe(note)
    state = TrainingState(model, dataset)
    checkpoints = TrainingCheckpointManager(
        state, folder / "checkpoints", save=EverySteps(3), keep=LatestN(3)
    )
    model.fit(state.dataset, epochs=epochs, verbose=0, callbacks=[checkpoints.keras_callback(), Pace()])
    if leads:
        weights = {variable.path: variable.numpy().tobytes().hex() for variable in model.weights}
        counts = model.get_layer("counts").get_weights()[0][:, 0].tolist()
        (folder / "result.json").write_text(json.dumps({"counts": counts, "weights": weights}))


def _minus_output(target, prediction):
    return -prediction[:, 0] + 0 * target[:, 0]


def _small_error(target, prediction):
    return 0.01 * (prediction[:, 0] - target[:, 0]) ** 2


if __name__ == "__main__":
    main()
