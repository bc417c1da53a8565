"""A training job that is killed in mid-epoch, and ends with the bits of the one that was not.

It has what makes resuming hard: data in another order each epoch, dropout, batch normalization, a learning rate that
falls step by step, averaged weights, and moments of Adam. The lines after `# tfdist_ext:` are all that differs from
plain Keras.
"""

import hashlib
import json
import os
import pathlib
import signal

import keras
import tensorflow as tf

# tfdist_ext:
import tfdist_ext
from tfdist_ext.checkpoint import EverySteps, LatestN, TrainingCheckpointManager, TrainingState
from tfdist_ext.data.digits import NUM_IMAGES, load_digits

BATCH_SIZE = 32  # Of all workers together.
NUM_ROWS = NUM_IMAGES["train"]
STEPS_PER_EPOCH = -(-NUM_ROWS // BATCH_SIZE)  # 45: the last batch has 29 rows.
EPOCHS = 3
SAVE_EVERY_STEPS = 20


class RowCounter(keras.layers.Layer):
    """Passes images on, and counts how often training saw each row. The counts are saved like any other variable."""

    def build(self, input_shape):
        """Makes the counts."""
        # The counts of all replicas add up.
        self.counts = self.add_weight(
            shape=(NUM_ROWS,), initializer="zeros", trainable=False, aggregation="sum", name="counts"
        )

    def call(self, images, rows, training=False):
        """Returns the images."""
        if training:
            self.counts.assign_add(keras.ops.sum(keras.ops.one_hot(rows, NUM_ROWS), axis=0))
        return images


def make_model():
    """Builds and compiles the network; its inputs are an image and the number of its row."""
    layers = keras.layers
    image, row = keras.Input((8, 8, 1), name="image"), keras.Input((), dtype="int64", name="row")
    x = RowCounter(name="row_counter")(image, row)
    x = layers.Conv2D(16, 3, padding="same", activation="relu")(x)
    x = layers.BatchNormalization(momentum=0.9)(x)
    x = layers.MaxPooling2D()(x)
    x = layers.Dropout(0.3)(layers.Flatten()(x))
    model = keras.Model({"image": image, "row": row}, layers.Dense(10)(x))
    rate = keras.optimizers.schedules.CosineDecay(0.01, decay_steps=EPOCHS * STEPS_PER_EPOCH)
    model.compile(
        optimizer=keras.optimizers.Adam(rate, use_ema=True, ema_momentum=0.95),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


def make_dataset(split, shuffle_seed=None):
    """Returns batches of `({"image": ..., "row": ...}, label)`, in another order each epoch if there is a seed."""
    dataset = tf.data.Dataset.zip(tf.data.Dataset.range(NUM_IMAGES[split]), load_digits(split))
    if shuffle_seed is not None:
        dataset = dataset.shuffle(NUM_IMAGES[split], seed=shuffle_seed)
    return dataset.map(lambda row, digit: ({"image": digit[0], "row": row}, digit[1])).batch(BATCH_SIZE)


def make_state():
    """Returns model and data as a state that can be saved; `verify_resume` calls this function too."""
    keras.utils.set_random_seed(1)
    # tfdist_ext: on one device without TF_CONFIG.
    strategy = tfdist_ext.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model = make_model()
    # tfdist_ext: finds optimizer, metrics, seeds and random streams by itself, and counts what is read.
    return TrainingState(model, make_dataset("train", shuffle_seed=1))


class Diary(keras.callbacks.Callback):
    """Says where training goes on, and notes the loss of each step in a file.

    Args:
        state: The training state.
        path: JSON lines `[start, step, loss]`; None for no file.
    """

    def __init__(self, state, path=None):
        super().__init__()
        self._state, self._path = state, path

    def state_dict(self):
        """Has nothing to save: what was done twice stands in the file twice."""
        return {}

    def load_state_dict(self, state):
        """Has nothing to restore."""

    def on_train_begin(self, logs=None):
        """Comes after the restore."""
        print(f"start {start_number()}: goes on after step {self._state.step}", flush=True)

    def on_train_batch_end(self, batch, logs=None):
        """Notes the loss, as Keras reports it: the mean of the epoch so far."""
        if self._path is not None:
            line = json.dumps([start_number(), int(self.model.optimizer.iterations), float(logs["loss"])])
            with open(self._path, "a") as file:
                file.write(f"{line}\n")


class KillAt(keras.callbacks.Callback):
    """Kills this process after a step: no exception, no signal handler, no last words.

    Args:
        step: The step.
    """

    def __init__(self, step):
        super().__init__()
        self._step = step

    def on_train_batch_end(self, batch, logs=None):
        """Kills."""
        if int(self.model.optimizer.iterations) == self._step:
            print(f"killed after step {self._step}", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)


def start_number():
    """Returns how often the job was started before: `tfdist-ext run --max-restarts` says so."""
    return int(os.environ.get("TFDIST_RESTART_COUNT", "0"))


def train(directory, kill_at_steps=(), losses_path=None):
    """Trains to the end, from the newest checkpoint if there is one.

    Args:
        directory: For the checkpoints.
        kill_at_steps: The first start is killed after the first of these steps, the second after the second; starts
            after that are left alone. On several workers the last one is killed.
        losses_path: File for the loss of each step; the first worker writes it.

    Returns:
        Digests of weights and optimizer, counts of the rows, and test results.
    """
    state = make_state()
    model, resolver = state.model, state.strategy.cluster_resolver
    task, num_tasks = (resolver.task_id or 0), len(resolver.cluster_spec().as_dict().get("worker", [""]))
    # tfdist_ext: saves behind training, and restores on its own where a checkpoint is found.
    checkpoints = TrainingCheckpointManager(
        state, pathlib.Path(directory), save=EverySteps(SAVE_EVERY_STEPS), keep=LatestN(3)
    )
    callbacks = [checkpoints.keras_callback(), Diary(state, losses_path if task == 0 else None)]
    if start_number() < len(kill_at_steps) and task == num_tasks - 1:
        callbacks.append(KillAt(kill_at_steps[start_number()]))
    # tfdist_ext: `state.dataset` begins with the first unread batch.
    model.fit(state.dataset, epochs=EPOCHS, shuffle=False, verbose=0, callbacks=callbacks)
    counts = model.get_layer("row_counter").counts.numpy()
    return {
        "weights": digest(model.weights),
        "optimizer": digest(model.optimizer.variables),
        "steps": int(model.optimizer.iterations),
        "times_seen": [int(counts.min()), int(counts.max())],
        "test_accuracy": model.evaluate(make_dataset("test"), verbose=0, return_dict=True)["accuracy"],
    }


def digest(variables):
    """Returns a hash of every bit of some variables."""
    bits = hashlib.sha256()
    for variable in variables:
        bits.update(keras.ops.convert_to_numpy(variable).tobytes())
    return bits.hexdigest()[:16]
