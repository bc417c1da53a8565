"""Classes and functions that programs use; those that a program names are printed with it."""

DEFINITIONS = {
    "MeanLoss": """
class MeanLoss(keras.layers.Layer):
    def call(self, x):
        self.add_loss(0.1 * keras.ops.mean(keras.ops.square(x)))
        return x
""",
    "SumLoss": """
class SumLoss(keras.layers.Layer):
    def call(self, x):
        self.add_loss(0.1 * keras.ops.sum(keras.ops.square(x)))
        return x
""",
    "Counting": """
class Counting(keras.layers.Layer):
    def build(self, shape):
        def state(name, dtype):
            return self.add_weight(name=name, shape=(), dtype=dtype, initializer="zeros", trainable=False)

        self.rows, self.steps, self.total = state("rows", "int64"), state("steps", "int64"), state("total", "float64")

    def call(self, x, training=False):
        if training:
            self.rows.assign(self.rows + keras.ops.cast(keras.ops.shape(x)[0], "int64"))
            self.steps.assign(self.steps + 1)
            self.total.assign(self.total + keras.ops.sum(x))
        return x
""",
    "MovingMean": """
class MovingMean(keras.layers.Layer):
    def build(self, shape):
        self.mean = self.add_weight(name="mean", shape=(shape[-1],), initializer="zeros", trainable=False)

    def call(self, x, training=False):
        outputs = x - self.mean
        if training:
            self.mean.assign(0.9 * self.mean + 0.1 * keras.ops.mean(x, axis=0))
        return outputs
""",
    "Loop": """
class Loop(keras.layers.Layer):
    def build(self, shape):
        self.scale = self.add_weight(name="scale", shape=(shape[-1],), initializer="ones")

    def call(self, x):
        return keras.ops.while_loop(
            lambda i, y: i < 3, lambda i, y: (i + 1, keras.ops.tanh(y * self.scale)), (0, x)
        )[1]
""",
    "doubled_gradient": """
@tf.custom_gradient
def doubled_gradient(x):
    return tf.tanh(x), lambda upstream: 2.0 * upstream
""",
    "root_of_mean": """
def root_of_mean(targets, outputs):
    return keras.ops.sqrt(keras.ops.mean(keras.ops.square(targets - outputs)) + 0.01)
""",
    "sum_over_four": """
def sum_over_four(targets, outputs):
    return keras.ops.sum(keras.ops.square(targets - outputs)) / 4.0
""",
    "in_batch_negatives": """
def in_batch_negatives(targets, outputs):
    scores = keras.ops.matmul(outputs, keras.ops.transpose(targets))
    return -keras.ops.diagonal(keras.ops.log_softmax(scores))
""",
    "mean_of_columns": """
def mean_of_columns(targets, outputs):
    return keras.ops.sqrt(keras.ops.mean(keras.ops.square(targets - outputs), axis=0) + 0.1)
""",
    "largest_error": """
def largest_error(targets, outputs):
    return keras.ops.max(keras.ops.abs(targets - outputs), axis=-1)
""",
    "RatioOfSums": """
class RatioOfSums(keras.losses.Loss):
    def __call__(self, y_true, y_pred, sample_weight=None):
        weight = 1.0 if sample_weight is None else keras.ops.reshape(sample_weight, (-1, 1))
        total = keras.ops.sum(weight * keras.ops.square(y_true - y_pred))
        return total / keras.ops.sum(weight * (1.0 + y_true) + 0.1)
""",
    "Rows": """
class Rows(keras.utils.PyDataset):
    def __init__(self, arrays, batch_size):
        super().__init__()
        self.arrays, self.batch_size = arrays, batch_size

    def __len__(self):
        return -(-len(self.arrays[1]) // self.batch_size)

    def __getitem__(self, index):
        part = slice(index * self.batch_size, (index + 1) * self.batch_size)
        return tuple(keras.tree.map_structure(lambda array: array[part], one) for one in self.arrays)
""",
}

_STEP = """
class OwnModel(keras.Model):
    def train_step(self, data):
        x, y, weight = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape() as tape:
            outputs = self(x, training=True)
            {loss}
        gradients = tape.gradient(loss, self.trainable_variables)
        {apply}
        return {{"loss": loss}}
"""
_APPLY = "self.optimizer.apply_gradients(zip(gradients, self.trainable_variables))"


def _step(loss, apply=_APPLY):
    return _STEP.format(loss=loss, apply=apply)


STEPS = {
    "compute_loss": _step("loss = self.compute_loss(x, y, outputs, weight)"),
    "mean by hand": _step("loss = tf.reduce_mean(tf.square(y - outputs))"),
    "sum over four by hand": _step("loss = tf.reduce_sum(tf.square(y - outputs)) / 4.0"),
    "ratio by hand": _step("loss = tf.reduce_sum(tf.square(y - outputs)) / tf.reduce_sum(1.0 + y)"),
    "Keras loss by hand": _step("loss = keras.losses.MeanSquaredError()(y, outputs, weight)"),
    "gradient penalty": _step(
        "with tf.GradientTape() as inner:\n"
        "                inner.watch(x)\n"
        "                score = tf.reduce_sum(self(x, training=True))\n"
        "            penalty = tf.reduce_mean(tf.square(inner.gradient(score, x)))\n"
        "            loss = tf.reduce_mean(tf.square(y - outputs)) + 0.1 * penalty"
    ),
    "clipped by hand": _step(
        "loss = tf.reduce_mean(tf.square(y - outputs))",
        "gradients = [tf.clip_by_norm(gradient, 0.1) for gradient in gradients]\n        " + _APPLY,
    ),
    "own compute_loss": """
class OwnModel(keras.Model):
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        loss = super().compute_loss(x, y, y_pred, sample_weight)
        return loss + 0.1 * keras.ops.mean(keras.ops.square(y_pred))
""",
}
