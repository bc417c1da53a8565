"""Recipes for optimizers and schedules."""

import keras

from tests.conformance.inputs import normal

optimizers, schedules = keras.optimizers, keras.optimizers.schedules


@keras.saving.register_keras_serializable("conformance")
class SignDescent(keras.optimizers.Optimizer):
    """An optimizer of a user's own, with a state of its own."""

    def build(self, variables):
        super().build(variables)
        self.means = self.add_optimizer_variables(variables, "mean")

    def update_step(self, gradient, variable, learning_rate):
        mean = self.means[self._get_variable_index(variable)]
        self.assign(mean, 0.9 * mean + 0.1 * gradient)
        # Neither sign nor root: a rounding is not made larger.
        step = keras.ops.tanh(mean * 10.0) * keras.ops.cast(learning_rate, variable.dtype)
        self.assign_sub(variable, step)


@keras.saving.register_keras_serializable("conformance")
class Halving(keras.optimizers.schedules.LearningRateSchedule):
    """A schedule of a user's own."""

    def __call__(self, step):
        return 0.1 / (1.0 + keras.ops.cast(step, "float64"))

    def get_config(self):
        return {}


def _two():
    return optimizers.OptimizerMap(optimizers.SGD(0.05, momentum=0.9), {".*bias": optimizers.Adam(0.01)})


OPTIMIZERS = {
    "Adadelta": lambda: optimizers.Adadelta(0.5),
    "Adafactor": lambda: optimizers.Adafactor(0.05),
    "Adagrad": lambda: optimizers.Adagrad(0.05),
    "Adam": lambda: optimizers.Adam(0.05),
    "AdamW": lambda: optimizers.AdamW(0.05),
    "Adamax": lambda: optimizers.Adamax(0.05),
    "Ftrl": lambda: optimizers.Ftrl(0.05),
    "Lamb": lambda: optimizers.Lamb(0.05),
    "Lion": lambda: optimizers.Lion(0.01),
    "LossScaleOptimizer": lambda: optimizers.LossScaleOptimizer(
        optimizers.Adam(0.05), dynamic_growth_steps=3
    ),
    "MultiOptimizer": lambda: optimizers.MultiOptimizer(_two()),
    "Muon": lambda: optimizers.Muon(0.05),
    "Nadam": lambda: optimizers.Nadam(0.05),
    "Optimizer": lambda: SignDescent(0.05),
    "OptimizerMap": lambda: optimizers.MultiOptimizer(_two()),
    "RMSprop": lambda: optimizers.RMSprop(0.01, momentum=0.5, centered=True),
    "SGD": lambda: optimizers.SGD(0.05, momentum=0.9, nesterov=True),
    "ScheduleFreeAdamW": lambda: optimizers.ScheduleFreeAdamW(0.05),
}
SCHEDULES = {
    "CosineDecay": lambda: schedules.CosineDecay(0.1, 4, warmup_target=0.2, warmup_steps=2),
    "CosineDecayRestarts": lambda: schedules.CosineDecayRestarts(0.1, 3),
    "ExponentialDecay": lambda: schedules.ExponentialDecay(0.1, 2, 0.5, staircase=True),
    "InverseTimeDecay": lambda: schedules.InverseTimeDecay(0.1, 2, 0.5),
    "LearningRateSchedule": Halving,
    "PiecewiseConstantDecay": lambda: schedules.PiecewiseConstantDecay([1, 3], [0.1, 0.05, 0.01]),
    "PolynomialDecay": lambda: schedules.PolynomialDecay(0.1, 4),
}
FEATURES = normal(3)


def network(optimizer, metrics=()):
    layers = [keras.Input(FEATURES.shape), keras.layers.Dense(4, activation="tanh"), keras.layers.Dense(1)]
    model = keras.Sequential(layers)
    model.compile(optimizer, "mse", metrics=list(metrics), jit_compile=False)
    # ScheduleFreeAdamW that `fit` builds starts from zeros on one device, which is a fault of Keras.
    optimizer.build(model.trainable_variables)
    return model


def rows():
    return FEATURES.rows(), normal(1).rows(salt="target")
