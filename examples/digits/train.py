"""Trains a small network on handwritten digits: on one device, or on as many as TF_CONFIG names.

The lines after `# tfdist_ext:` are all that differs from plain Keras.
"""

import keras

# tfdist_ext:
import tfdist_ext
from tfdist_ext.data.digits import load_digits

BATCH_SIZE = 32  # Of all workers together.


def make_model():
    """Builds and compiles the network."""
    layers = keras.layers
    model = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(32, 3, padding="same", activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(64, activation="relu"),
            layers.Dense(10),
        ]
    )
    model.compile(
        optimizer=keras.optimizers.Adam(0.002),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


def train(epochs):
    """Trains, and returns loss and accuracy on the test split.

    Args:
        epochs: Passes over the 1,437 training images.
    """
    keras.utils.set_random_seed(1)
    # tfdist_ext: the class is tf.distribute's, by name and by arguments.
    strategy = tfdist_ext.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model = make_model()
    images = load_digits("train", BATCH_SIZE, shuffle_seed=1)
    model.fit(images, epochs=epochs, shuffle=False, verbose=2)
    return model.evaluate(load_digits("test", BATCH_SIZE), verbose=0, return_dict=True)
