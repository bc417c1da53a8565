"""Runs on the chief: optimizers that scale losses, that consist of others, or that do more than Keras' own."""

import keras
import numpy as np
import tensorflow as tf

import tfdist_ext
from tests.ps_training import models
from tests.single_host import oracle


def _counting(optimizer):
    """Returns a model of one weight whose gradient is -1 in each step of one row."""
    layer = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
    model = keras.Sequential([keras.Input((1,)), layer])
    model.compile(optimizer, models.MinusOutput(reduction="sum"))
    return model


def _ones(rows=12):
    return models.batched((np.ones((rows, 1), "float32"), np.zeros((rows, 1), "float32")), 1)


def _scaled(growth_steps, inner=1.0):
    return keras.optimizers.LossScaleOptimizer(
        keras.optimizers.SGD(inner), initial_scale=2.0**15, dynamic_growth_steps=growth_steps
    )


def counted(cluster):
    """Returns the weight after 12 steps by name of what scales the loss, and the scale at the end."""
    compensation = tfdist_ext.DelayCompensation(0.04)
    runs = {
        "growing": ("bounded 4", lambda: _scaled(1), {}),
        "growing, sequential": ("bounded 0", lambda: _scaled(1), {}),
        "growing, asynchronous": ("asynchronous", lambda: _scaled(1), {}),
        "growing, pushes of two": ("bounded 4", lambda: _scaled(1), {"push_every_steps": 2}),
        "growing, copies": ("bounded 4", lambda: _scaled(2), {"fetch_every_steps": 3}),
        "compensated": ("bounded 4", lambda: _scaled(2000), {"delay_compensation": compensation}),
        "compensated, not scaled": (
            "bounded 4", lambda: keras.optimizers.SGD(1.0), {"delay_compensation": compensation},
        ),
        "factor": ("bounded 4", lambda: keras.optimizers.SGD(1.0, loss_scale_factor=2.0**10), {}),
    }  # fmt: skip
    results = {}
    for name, (policy, optimizer, arguments) in runs.items():
        models.in_single_precision()
        placed = models.strategy(cluster, policy, **arguments)
        with placed.scope():
            model = _counting(optimizer())
        model.fit(_ones(), verbose=0)
        scale = getattr(model.optimizer, "dynamic_scale", None)
        results[name] = [float(model.get_weights()[0][0, 0]), None if scale is None else float(scale.numpy())]
    return results


def overflowing(cluster):
    """Trains on rows of which the fifth is infinite, under sequential SGD, on one device, and with old sets."""
    x = np.ones((12, 1), "float32")
    x[4] = np.inf

    def trained(placed):
        models.in_single_precision()
        with placed.scope():
            model = _counting(_scaled(3))
        model.fit(models.batched((x, np.zeros((12, 1), "float32")), 1), verbose=0)
        return [float(model.get_weights()[0][0, 0]), float(model.optimizer.dynamic_scale.numpy())]

    alone = trained(tf.distribute.get_strategy())
    return {"alone": alone, "sequential": trained(models.strategy(cluster, "bounded 0")),
            "old": trained(models.strategy(cluster, "bounded 4"))}  # fmt: skip


def compensated_by_one(cluster):
    """Trains w of w^2/2 with gradients one step old, compensated, with and without a scaled loss."""
    from tests.ps_training.programs import PatientStaleness

    results = []
    for optimizer in (
        lambda: keras.optimizers.SGD(0.5), lambda: _scaled(2, 0.5),
        lambda: keras.optimizers.SGD(0.5, loss_scale_factor=1024.0),
    ):  # fmt: skip
        models.in_double_precision()
        compensation = tfdist_ext.DelayCompensation(1.0)
        placed = models.strategy(cluster, PatientStaleness(1), delay_compensation=compensation)
        with placed.scope():
            model = models.weight_only()
            model.compile(optimizer(), models.half_square)
        ones, weights = np.ones((8, 1)), models.Weights()
        model.fit(models.batched((ones, ones), 1), verbose=0, callbacks=[weights])
        results.append(weights.seen)
    return results


class Lookahead(keras.optimizers.SGD):
    """Follows its own fast steps every second step."""

    def build(self, variables):
        if not self.built:
            self.slow = [self.add_variable_from_reference(v, "slow") for v in variables]
        super().build(variables)

    def apply(self, grads, trainable_variables=None):
        super().apply([g - keras.ops.mean(g) if len(g.shape) > 1 else g for g in grads], trainable_variables)
        for variable, slow in zip(trainable_variables or self._trainable_variables, self.slow, strict=True):
            slow.assign(slow + 0.5 * (variable - slow))
            variable.assign(keras.ops.where(self.iterations % 2 == 0, slow, variable))


class Legacy(keras.optimizers.Adam):
    """Halves gradients in `apply_gradients`."""

    def apply_gradients(self, grads_and_vars):
        pairs = [(g * 0.5, v) for g, v in grads_and_vars]
        super().apply_gradients(pairs)
        for _, variable in pairs:
            variable.assign(0.99 * variable)


class Wrapping(keras.optimizers.Optimizer):
    """Hands gradients to an optimizer of its own."""

    def __init__(self, inner):
        super().__init__(learning_rate=0.0)
        self.inner = inner

    def build(self, variables):
        self.inner.build(variables)
        super().build(variables)

    @property
    def variables(self):
        return [*self._variables, *self.inner.variables]

    def apply(self, grads, trainable_variables=None):
        self.inner.apply(grads, trainable_variables)
        self._iterations.assign_add(1)


def _multi(**arguments):
    mapped = keras.optimizers.OptimizerMap(
        keras.optimizers.SGD(0.1), {"dense.*/bias": keras.optimizers.Adam(0.05)}
    )
    return keras.optimizers.MultiOptimizer(mapped, **arguments)


OWN = {
    "multi": _multi,
    "multi, scaled": lambda: _multi(loss_scale_factor=256.0),
    "lookahead": lambda: Lookahead(0.1),
    "legacy": lambda: Legacy(0.05),
    "wrapping": lambda: Wrapping(keras.optimizers.Adam(0.05)),
    "wrapped": lambda: keras.optimizers.LossScaleOptimizer(Lookahead(0.1)),
}


class OwnStep(keras.Model):
    """Calls `apply_gradients`, which Keras' own step does not."""

    def __init__(self):
        super().__init__()
        self.first, self.second = (
            keras.layers.Dense(4, activation="tanh", name="dense_a"),
            keras.layers.Dense(1),
        )

    def build(self, shape):
        self.first.build(shape)
        self.second.build((None, 4))

    def call(self, x):
        return self.second(self.first(x))

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(self(x) - y))
            scaled = self.optimizer.scale_loss(loss)
        gradients = tape.gradient(scaled, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {"loss": loss}


def of_their_own(cluster):
    """Returns by optimizer the largest difference from one device, of weights and of the optimizer's variables."""
    data = oracle.regression_data(12)
    shards = tf.distribute.experimental.partitioners.FixedShardsPartitioner(2)

    def trained(placed, optimizer):
        models.in_double_precision()
        with placed.scope():
            model = OwnStep()
            model.compile(optimizer())
        model.fit(models.batched(data, 3), epochs=2, verbose=0)
        moved = [*model.get_weights(), *[np.asarray(v.numpy()) for v in model.optimizer.variables]]
        return moved, int(model.optimizer.iterations.numpy())

    results = {}
    for name, optimizer in OWN.items():
        alone, steps = trained(tf.distribute.get_strategy(), optimizer)
        for partitioner in (None, shards) if name == "multi" else (None,):
            distributed, others = trained(models.strategy(cluster, "bounded 0", partitioner), optimizer)
            difference = max(float(np.abs(a - b).max()) for a, b in zip(alone, distributed, strict=True))
            results[name if partitioner is None else f"{name}, shards"] = [difference, steps == others == 8]
    return results


def one_for_two_models(cluster):
    """Trains two models of the same layers, and two of other layers, with one optimizer; returns what came."""

    def trained(placed, shares):
        models.in_double_precision()
        with placed.scope():
            inputs, optimizer = keras.Input((3,)), _multi()
            first, second = keras.layers.Dense(1), keras.layers.Dense(1)
            one = keras.Model(inputs, first(inputs))
            two = keras.Model(inputs, 2.0 * (first if shares else second)(inputs))
            for model in (one, two):
                model.compile(optimizer, "mse")
        before = [np.array(w) for w in two.get_weights()]
        one.fit(models.batched(oracle.regression_data(12), 3), verbose=0)
        try:
            two.fit(models.batched(oracle.regression_data(12), 3), verbose=0)
        except Exception as error:
            same = all(np.array_equal(a, b) for a, b in zip(before, two.get_weights(), strict=True))
            return f"{type(error).__name__} {str(error)[:300]} {'nothing trained' if same else 'trained'}"
        return [np.ravel(w).tolist() for w in two.get_weights()]

    return {
        shares: [trained(models.strategy(cluster, "bounded 0"), shares == "shared"),
                 trained(tf.distribute.get_strategy(), shares == "shared")]
        for shares in ("shared", "apart")
    }  # fmt: skip
