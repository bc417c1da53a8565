"""A network with two heads: which digit is it, and what did the image look like?

Both training loops use it. Its loss has a part of each head, and is no loss that `model.compile` would know.
"""

import keras
import tensorflow as tf

from tfdist_ext.data.digits import NUM_IMAGES, load_digits

BATCH_SIZE = 32
STEPS_PER_EPOCH = -(-NUM_IMAGES["train"] // BATCH_SIZE)  # 45: the last batch has 29 rows.
IMAGE_WEIGHT = 5.0


def make_model():
    """Returns a network from images to the logits of digits, and to images drawn again from 24 numbers."""
    layers = keras.layers
    images = keras.Input((8, 8, 1))
    x = layers.Conv2D(16, 3, padding="same", activation="relu")(images)
    x = layers.MaxPooling2D()(x)
    code = layers.Dense(24, activation="relu")(layers.Flatten()(x))
    drawn = layers.Dense(64, activation="sigmoid")(layers.Dense(64, activation="relu")(code))
    return keras.Model(images, [layers.Dense(10)(code), layers.Reshape((8, 8, 1))(drawn)])


def make_optimizer(model):
    """Returns the optimizer of both loops, with its variables: a step may not be the first to make them."""
    optimizer = keras.optimizers.Adam(0.006)
    optimizer.build(model.trainable_variables)
    return optimizer


def losses_of_rows(model, images, labels):
    """Returns the loss of each row, `[rows]`: cross-entropy of the digit, and weighted squared error of the pixels."""
    images = tf.cast(images, model.compute_dtype)
    logits, drawn = model(images, training=True)
    digit = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
    return digit + IMAGE_WEIGHT * tf.reduce_mean(tf.square(drawn - images), axis=[1, 2, 3])


def training_data():
    """Returns batches of the training images, in another order each epoch, the same order in each run."""
    return load_digits("train", BATCH_SIZE, shuffle_seed=1)


def evaluate(model):
    """Returns the share of test images whose digit is right, and the root mean square error of their pixels."""
    right = pixels = 0.0
    for images, labels in load_digits("test", 360):
        images = tf.cast(images, model.compute_dtype)
        logits, drawn = model(images, training=False)
        right += float(tf.reduce_sum(tf.cast(tf.argmax(logits, axis=-1) == labels, tf.float32)))
        pixels += float(tf.reduce_mean(tf.square(drawn - images)))
    return {"test_accuracy": right / NUM_IMAGES["test"], "test_pixel_error": pixels**0.5}


class MeanOfEpoch:
    """The mean of the losses of an epoch's steps; a checkpoint keeps it, so that an epoch that is cut has one too."""

    def __init__(self):
        self._losses = []

    def add(self, loss):
        """Adds a step."""
        self._losses.append(float(loss))

    def take(self):
        """Returns the mean, and begins anew."""
        losses, self._losses = self._losses, []
        return sum(losses) / len(losses)

    def state_dict(self):
        """Returns plain data to save."""
        return {"losses": self._losses}

    def load_state_dict(self, state):
        """Takes over what was saved."""
        self._losses = list(state["losses"])
