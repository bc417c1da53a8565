"""A training script as a user writes it, the same on every task of the cluster: `python train.py DIR [lose-ps]`."""

import importlib.util
import json
import os
import pathlib
import signal
import sys
import threading

import keras
import numpy as np
import tensorflow as tf

import tfdist_ext

DIRECTORY = pathlib.Path(sys.argv[1])
TASK = tfdist_ext.cluster.resolve().task


def say(text):
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def await_file(path):
    for _ in range(3000):
        if path.exists():
            return path
        threading.Event().wait(0.02)
    raise TimeoutError(f"no {path}")


if TASK.type == "evaluator":
    # It trains nothing and makes no strategy: it looks at what the chief saves.
    await_file(DIRECTORY / "done")
    model = keras.models.load_model(DIRECTORY / "whole-3.keras")
    say(f"evaluates {model.get_weights()[0].tolist()}")
    sys.exit()

(DIRECTORY / f"{TASK.type}-{TASK.index}.pid").write_text(str(os.getpid()))
strategy = tfdist_ext.ParameterServerStrategy(update_policy=tfdist_ext.BoundedStaleness(0))
with strategy.scope():
    model = keras.Sequential([keras.layers.Input((1,)), keras.layers.Dense(1, use_bias=False)])
    model.layers[0].set_weights([np.zeros((1, 1))])
    model.compile(keras.optimizers.SGD(0.5), "mse", metrics=["mae"])
# One batch for each step: y = 3 x at x = 1 leads from w to w + 2 rate (3 - w).
data = tf.data.Dataset.from_tensor_slices(
    (np.ones((4, 1), np.float32), np.full((4, 1), 3, np.float32))
).batch(2)


class LosePs(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if batch == 5:
            os.kill(int((DIRECTORY / "ps-0.pid").read_text()), signal.SIGKILL)


if "lose-ps" in sys.argv:
    model.fit(data.repeat(), steps_per_epoch=10**6, verbose=0, callbacks=[LosePs()])
# TensorBoard is a package of its own, which TensorFlow does without.
has_board = importlib.util.find_spec("tensorboard") is not None
board = [keras.callbacks.TensorBoard(str(DIRECTORY / "board"), update_freq=1)] if has_board else []
history = model.fit(
    data,
    epochs=3,
    validation_data=data,
    verbose=2,
    callbacks=[
        keras.callbacks.ModelCheckpoint(str(DIRECTORY / "whole-{epoch}.keras")),
        keras.callbacks.ModelCheckpoint(str(DIRECTORY / "{epoch}.weights.h5"), save_weights_only=True),
        keras.callbacks.EarlyStopping("val_loss", patience=5),
        keras.callbacks.LearningRateScheduler(lambda epoch: [0.25, 0.125, 0.0625][epoch]),
        *board,
        keras.callbacks.CSVLogger(str(DIRECTORY / "log.csv")),
    ],
)
model.save(DIRECTORY / "after.keras")
facts = {
    "weight": model.get_weights()[0].item(),
    "iterations": int(model.optimizer.iterations),
    "history": {name: [float(value) for value in values] for name, values in history.history.items()},
    "has_board": has_board,
    "files": sorted(path.name for path in DIRECTORY.iterdir()),
    "loaded": [
        keras.models.load_model(DIRECTORY / name, compile=False).get_weights()[0].item()
        for name in ("whole-1.keras", "whole-2.keras", "whole-3.keras", "after.keras")
    ],
}
say("facts " + json.dumps(facts))
(DIRECTORY / "done").touch()
