"""Programs whose loss, state, optimizer or collectives are a user's own; run on one device and on many."""

import keras
import tensorflow as tf

from tests.single_host import oracle

MeanSquaredError = keras.losses.MeanSquaredError


# --- losses given to compile -----------------------------------------------------------------------
def in_batch_negatives(targets, outputs):
    """Each row's positive is its own target, its negatives are the other rows' targets: a value for each row."""
    scores = keras.ops.matmul(outputs, keras.ops.transpose(targets))
    return -keras.ops.diagonal(keras.ops.log_softmax(scores))


def root_of_mean(targets, outputs):
    return keras.ops.sqrt(keras.ops.mean(keras.ops.square(targets - outputs)))


def mean_over_rows_first(targets, outputs):
    return keras.ops.sqrt(keras.ops.mean(keras.ops.square(targets - outputs), axis=0) + 0.1)


def correlation(targets, outputs):
    """One minus Pearson's correlation, centred over the batch."""
    a, b = targets - keras.ops.mean(targets, axis=0), outputs - keras.ops.mean(outputs, axis=0)
    return 1 - keras.ops.sum(a * b) / keras.ops.sqrt(keras.ops.sum(a * a) * keras.ops.sum(b * b) + 1e-3)


def sum_over_batch_size(targets, outputs):
    """Divided by the global batch size, as in TensorFlow's tutorials: a sum over rows."""
    return keras.ops.sum(keras.ops.square(targets - outputs)) / 4.0


class RatioOfSums(keras.losses.Loss):
    """A loss with a `__call__` of its own, which knows what to do with weights."""

    def __call__(self, y_true, y_pred, sample_weight=None):
        weight = 1.0 if sample_weight is None else keras.ops.reshape(sample_weight, (-1, 1))
        total = keras.ops.sum(weight * keras.ops.square(y_true - y_pred))
        return total / keras.ops.sum(weight * (1.0 + y_true))


COMPILED_LOSSES = {
    "Dice": keras.losses.Dice,
    "Tversky": keras.losses.Tversky,
    "sum over the batch size": lambda: sum_over_batch_size,
    "in-batch negatives": lambda: in_batch_negatives,
    "root of the mean": lambda: root_of_mean,
    "mean over rows first": lambda: mean_over_rows_first,
    "correlation": lambda: correlation,
    "own __call__": RatioOfSums,
    "Dice, summed": lambda: keras.losses.Dice(reduction="sum"),
}


def fractions(rows=13):
    """Returns inputs of three columns and targets of two between 0 and 1."""
    x, _ = oracle.regression_data(rows)
    return x, 1 / (1 + abs(x[:, :2]))


def compiled(loss, **arguments):
    layers = [keras.layers.Dense(4, activation="tanh"), keras.layers.Dense(2, activation="sigmoid")]
    model = keras.Sequential([keras.Input((3,)), *layers])
    model.compile(keras.optimizers.SGD(0.1), loss, **arguments)
    return model


# --- a train_step by hand --------------------------------------------------------------------------
class Counting(keras.layers.Layer):
    """Counts rows and steps, keeps a total and an average of what passes through."""

    def build(self, shape):
        def state(name, dtype=None, shape=()):
            return self.add_weight(name=name, shape=shape, dtype=dtype, initializer="zeros", trainable=False)

        self.rows, self.last_rows = state("rows", "int64"), state("last_rows", "int64")
        self.steps, self.float_steps = state("steps", "int32"), state("float_steps", "float32")
        self.total, self.average = state("total", shape=(3,)), state("average", shape=(3,))

    def call(self, x):
        rows = tf.shape(x, out_type=tf.int64)[0]
        self.rows.assign_add(rows)
        self.last_rows.assign(rows)
        self.steps.assign_add(1)
        self.float_steps.assign_add(1.0)
        self.total.assign_add(tf.reduce_sum(x, axis=0))
        self.average.assign(0.9 * self.average + 0.1 * tf.reduce_mean(x, axis=0))
        return x


class StepByHand(keras.Model):
    """A `train_step` around one function of `(model, x, y)`; logs the loss and its mean."""

    def __init__(self, loss_of, counts=False):
        super().__init__()
        layers = [keras.layers.Dense(4, activation="tanh"), keras.layers.Dropout(0.0), keras.layers.Dense(1)]
        self.net = keras.Sequential([keras.Input((3,)), *([Counting()] if counts else []), *layers])
        self.keys = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        self.loss_of = loss_of
        self.tracker = keras.metrics.Mean(name="loss")

    def build(self, shape):
        self.built = True

    def call(self, x):
        return self.net(x) + self.keys(x)

    @property
    def metrics(self):
        return [self.tracker]

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.loss_of(self, x, y)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        self.tracker.update_state(loss)
        return {"loss": self.tracker.result(), "raw": loss}

    def test_step(self, data):
        return {"zero": tf.zeros((), "float64")}


STEP_LOSSES = {
    "rows' losses over the batch size": lambda m, x, y: (
        tf.reduce_sum(MeanSquaredError(reduction="none")(y, m(x))) * (1.0 / 4)
    ),
    "sum over the batch size": lambda m, x, y: tf.reduce_sum(tf.square(y - m(x))) / 4.0,
    "mean": lambda m, x, y: tf.reduce_mean(tf.square(y - m(x))),
    "ratio of sums": lambda m, x, y: tf.reduce_sum(tf.square(y - m(x))) / tf.reduce_sum(1.0 + tf.abs(m(x))),
    "root of the mean": lambda m, x, y: tf.sqrt(tf.reduce_mean(tf.square(y - m(x)))),
    "mean and sum": lambda m, x, y: MeanSquaredError()(y, m(x)) + 0.01 * tf.reduce_sum(tf.square(m(x))),
    "Keras' sum": lambda m, x, y: 0.01 * MeanSquaredError(reduction="sum")(y, m(x)),
    "Keras' Dice": lambda m, x, y: keras.losses.Dice()(tf.abs(y), tf.abs(m(x))),
}


def by_hand(loss_of, counts=False, **arguments):
    model = StepByHand(loss_of, counts)
    model.build((None, 3))
    model.compile(keras.optimizers.SGD(0.1), "mse", **arguments)
    return model


class OwnComputeLoss(keras.Model):
    """Keras' own `train_step` around a `compute_loss` of the user's: a sum over rows."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1)

    def call(self, x):
        return self.dense(x)

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return 0.1 * tf.reduce_sum(tf.square(y - y_pred))


class SumsUp(keras.layers.Layer):
    """Adds a loss that is a sum over rows."""

    def call(self, x):
        self.add_loss(0.1 * tf.reduce_sum(tf.square(x)))
        return x


# --- optimizers ------------------------------------------------------------------------------------
class TwoOptimizers(keras.Model):
    """One step with two optimizers; `scaled` says which losses pass through `scale_loss`."""

    def __init__(self, scaled):
        super().__init__()
        self.one = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        self.other = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        self.scaled = scaled

    def build(self, shape):
        self.built = True

    def call(self, x):
        return self.one(x) + self.other(x)

    def compile(self, *args, **kwargs):
        super().compile(*args, **kwargs)
        self.first, self.second = keras.optimizers.SGD(0.1), keras.optimizers.Adam(0.01)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape(persistent=True) as tape:
            outputs = self(x)
            losses = [MeanSquaredError()(y, outputs), tf.reduce_mean(tf.abs(y - outputs))]
            if self.scaled == "one loss for both":
                losses = [self.first.scale_loss(losses[0])] * 2
            if self.scaled in ("the first", "each"):
                losses[0] = self.first.scale_loss(losses[0])
            if self.scaled in ("the second", "each"):
                losses[1] = self.second.scale_loss(losses[1])
        for loss, optimizer, part in zip(
            losses, (self.first, self.second), (self.one, self.other), strict=True
        ):
            variables = part.trainable_variables
            optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return {"zero": tf.zeros((), "float64")}

    def test_step(self, data):
        return {"zero": tf.zeros((), "float64")}


def two_optimizers(scaled):
    model = TwoOptimizers(scaled)
    model.build((None, 3))
    model.compile("sgd", "mse")
    return model


class NormalizedInApply(keras.optimizers.SGD):
    """What it does to gradients is not linear: it is for their sum."""

    def apply(self, grads, trainable_variables=None):
        super().apply([g / (1.0 + tf.norm(g)) for g in grads], trainable_variables)


class NormalizedInPairs(keras.optimizers.SGD):
    def apply_gradients(self, grads_and_vars):
        return super().apply_gradients([(g / (1.0 + tf.norm(g)), v) for g, v in grads_and_vars])


def multi_optimizer(kernels):
    others = keras.optimizers.Adam(0.01)
    return keras.optimizers.MultiOptimizer(lambda variable: kernels if "kernel" in variable.path else others)


OWN_OPTIMIZERS = {
    "MultiOptimizer": lambda: multi_optimizer(keras.optimizers.SGD(0.1)),
    "MultiOptimizer that clips and accumulates": lambda: multi_optimizer(
        keras.optimizers.SGD(0.1, global_clipnorm=0.05, gradient_accumulation_steps=2)
    ),
    "own apply": lambda: NormalizedInApply(0.1),
    "own apply_gradients": lambda: NormalizedInPairs(0.1),
    "own apply under a loss scale": lambda: keras.optimizers.LossScaleOptimizer(NormalizedInApply(0.1)),
    "own apply in a MultiOptimizer": lambda: multi_optimizer(NormalizedInApply(0.1)),
}


def with_optimizer(make):
    layers = [keras.layers.Dense(4, activation="tanh"), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((3,)), *layers])
    model.compile(make(), "mse")
    return model


# --- collectives of the replica context ------------------------------------------------------------
def _context():
    return tf.distribute.get_replica_context()


def _contrastive(model, x, gather):
    queries, keys = model.net(x), model.keys(x)
    scores = tf.matmul(queries, gather(keys), transpose_b=True)
    return tf.reduce_mean(tf.reduce_logsumexp(scores, axis=1) - tf.reduce_sum(queries * keys, axis=1))


COLLECTIVES = {
    "all_gather of negatives": lambda m, x, y: _contrastive(m, x, lambda k: _context().all_gather(k, axis=0)),
    "all_gather, loss scaled": lambda m, x, y: m.optimizer.scale_loss(
        _contrastive(m, x, lambda k: _context().all_gather(k, axis=0))
    ),
    "all_gather along columns": lambda m, x, y: _contrastive(
        m, x, lambda k: tf.transpose(_context().all_gather(tf.transpose(k), axis=-1))
    ),
    "all_gather of both sides": lambda m, x, y: (
        tf.reduce_mean(tf.square(_context().all_gather(m(x), 0) - _context().all_gather(y, 0)))
        + tf.reduce_mean(m.net(x) - y)
    ),
    "all_reduce of a sum": lambda m, x, y: (
        tf.reduce_mean(tf.square(y - m(x)))
        / (1.0 + _context().all_reduce("SUM", tf.reduce_sum(tf.abs(m(x)))))
    ),
    "all_reduce of a mean": lambda m, x, y: (
        tf.reduce_mean(tf.square(y - m(x)))
        / (1.0 + _context().all_reduce("MEAN", tf.reduce_mean(tf.abs(m(x)))))
    ),
}


def with_collective(loss_of):
    class Step(StepByHand):
        def train_step(self, data):
            super().train_step(data)
            return {"zero": tf.zeros((), "float64")}

    model = Step(loss_of)
    model.build((None, 3))
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return model


class MovingMean(keras.layers.Layer):
    """Subtracts a moving mean that it has just assigned; on one device no gradient flows through the assignment."""

    def build(self, shape):
        self.mean = self.add_weight(shape=(shape[-1],), initializer="zeros", trainable=False)

    def call(self, x, training=False):
        if training:
            self.mean.assign(0.9 * self.mean + 0.1 * keras.ops.mean(x, axis=0))
        return x - self.mean
