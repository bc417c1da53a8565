"""Programs for `verify_resume`: everything that can make a resumed run differ, in one model."""

import keras
import numpy as np
import tensorflow as tf

import tfdist_ext
from tfdist_ext.checkpoint import TrainingState

ROWS, BATCH = 42, 4  # The last batch of a pass is ragged.


class Jitter(keras.layers.Layer):
    """Adds noise from a `tf.random.Generator` of its own: augmentation with state."""

    def __init__(self, generator=None):
        super().__init__()
        self.generator = generator or tf.random.Generator.from_seed(5)

    def call(self, inputs, training=False):
        if not training:
            return inputs
        return inputs + tf.cast(0.1 * self.generator.normal([3]), inputs.dtype)


def dataset(seed=3):
    """Returns a shuffled dataset of 11 batches whose order differs in each pass."""
    x = np.random.RandomState(0).randn(ROWS, 3).astype("float32")
    return (
        tf.data.Dataset.from_tensor_slices((x, x.sum(1, keepdims=True))).shuffle(ROWS, seed=seed).batch(BATCH)
    )


def model(jitter=True):
    """Returns a compiled model; see the module."""
    schedule = keras.optimizers.schedules.CosineDecay(0.001, 60, warmup_target=0.05, warmup_steps=10)
    inner = keras.optimizers.Adam(
        schedule, gradient_accumulation_steps=2, use_ema=True, ema_overwrite_frequency=9
    )
    layers = [
        keras.Input((3,)),
        *([Jitter()] if jitter else []),
        keras.layers.Dense(8, activation="tanh"),
        keras.layers.BatchNormalization(),
        keras.layers.Dropout(0.3),
        keras.layers.Dense(1, dtype="float32"),
    ]
    built = keras.Sequential(layers)
    # The scale grows every 3 good steps: the counter is in the middle at most cuts.
    built.compile(
        keras.optimizers.LossScaleOptimizer(inner, initial_scale=64.0, dynamic_growth_steps=3),
        "mse",
        metrics=["mae"],
    )
    return built


def one_device():
    """No strategy."""
    keras.utils.set_random_seed(1)
    keras.mixed_precision.set_dtype_policy("mixed_float16")
    return TrainingState(model(), dataset())


def two_devices():
    """Two logical CPU devices."""
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    keras.utils.set_random_seed(1)
    keras.mixed_precision.set_dtype_policy("mixed_float16")
    with tfdist_ext.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
        return TrainingState(model(), dataset())


def two_workers():
    """Two processes, and gradients of which one in ten is sent."""
    keras.utils.set_random_seed(1)
    compression = tfdist_ext.TopK(fraction=0.1, min_elements=8)
    with tfdist_ext.MultiWorkerMirroredStrategy(compression=compression).scope():
        built = keras.Sequential(
            [
                keras.Input((3,)),
                keras.layers.Dense(8, activation="tanh"),
                keras.layers.Dropout(0.3),
                keras.layers.Dense(1),
            ]
        )
        built.compile(keras.optimizers.Adam(0.05), "mse", metrics=["mae"])
        return TrainingState(built, dataset())


def noise_in_the_pipeline():
    """A generator that the dataset's map draws from, ahead of training."""
    keras.utils.set_random_seed(1)
    generator = tf.random.Generator.from_seed(7)
    noisy = dataset().map(lambda x, y: (x + generator.normal([3]), y)).prefetch(4)
    built = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    built.compile("sgd", "mse")
    return TrainingState(built, noisy)


def unknown_length():
    """Data whose end is found by reading on: Keras learns the number of batches in the first epoch."""
    keras.utils.set_random_seed(1)
    built = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    built.compile("sgd", "mse")
    return TrainingState(built, dataset().filter(lambda x, y: True))


def forgets_its_random_state():
    """A run that cannot be resumed exactly: what it draws from is hidden from the state."""
    keras.utils.set_random_seed(1)
    draws = np.random.default_rng(3)
    built = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    built.compile("sgd", "mse")

    class Kick(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            built.layers[0].bias.assign_add([draws.normal()])

    state = TrainingState(built, dataset())
    original = built.fit
    built.fit = lambda *args, callbacks, **kwargs: original(*args, callbacks=[Kick(), *callbacks], **kwargs)
    return state


def custom_loop():
    """A loop without Keras' fit."""
    keras.utils.set_random_seed(1)
    built = keras.Sequential(
        [keras.Input((3,)), keras.layers.Dense(4), keras.layers.Dropout(0.5), keras.layers.Dense(1)]
    )
    optimizer = keras.optimizers.Adam(0.05)
    state = TrainingState(built, dataset(), optimizer=optimizer)

    @tf.function
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(built(x, training=True) - y))
        optimizer.apply(tape.gradient(loss, built.trainable_variables), built.trainable_variables)
        return loss

    def train(state, checkpoints):
        checkpoints.restore_or_initialize()
        for epoch in range(state.epoch, 1000):
            state.epoch = epoch
            for x, y in state.dataset:
                step(x, y)
                checkpoints.save_if_due(state.step + 1)

    return state, train
