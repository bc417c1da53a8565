"""Recipes for what a Dense layer's kernel is given: regularizers, constraints and initializers."""

import dataclasses

import keras

from tests.conformance.inputs import normal
from tests.conformance.recipes import Branch


def _kernel(**arguments):
    return Branch(lambda name: keras.layers.Dense(4, **arguments, name=name))


@keras.saving.register_keras_serializable("conformance")
class Quartic(keras.regularizers.Regularizer):
    """A regularizer of a user's own."""

    def __call__(self, x):
        return 0.1 * keras.ops.sum(keras.ops.square(keras.ops.square(x)))

    def get_config(self):
        return {}


@keras.saving.register_keras_serializable("conformance")
class SingleOrthogonal(keras.regularizers.Regularizer):
    """Keras' orthogonal regularizer, which multiplies by a matrix of single precision."""

    def __call__(self, x):
        loss = keras.regularizers.OrthogonalRegularizer(0.1)(keras.ops.cast(x, "float32"))
        return keras.ops.cast(loss, x.dtype)

    def get_config(self):
        return {}


@keras.saving.register_keras_serializable("conformance")
class Clipped(keras.constraints.Constraint):
    """A constraint of a user's own."""

    def __call__(self, w):
        return keras.ops.clip(w, -0.3, 0.3)


@keras.saving.register_keras_serializable("conformance")
class Ramp(keras.initializers.Initializer):
    """An initializer of a user's own."""

    def __call__(self, shape, dtype=None):
        size = shape[0] * shape[1]
        return keras.ops.reshape(keras.ops.arange(size, dtype=dtype) / size, shape)


R, C, I = keras.regularizers, keras.constraints, keras.initializers  # noqa: E741
REGULARIZERS = {
    "L1": _kernel(kernel_regularizer=R.L1(0.1)),
    "L1L2": _kernel(kernel_regularizer=R.L1L2(0.1, 0.1), bias_regularizer=R.L1L2(0.1, 0.1)),
    "L2": _kernel(kernel_regularizer=R.L2(0.1), activity_regularizer=R.L2(0.1)),
    "OrthogonalRegularizer": dataclasses.replace(_kernel(kernel_regularizer=SingleOrthogonal()), single=True),
    "Regularizer": _kernel(kernel_regularizer=Quartic()),
}
CONSTRAINTS = {
    "Constraint": _kernel(kernel_constraint=Clipped()),
    "MaxNorm": _kernel(kernel_constraint=C.MaxNorm(0.5)),
    "MinMaxNorm": _kernel(kernel_constraint=C.MinMaxNorm(0.5, 0.7)),
    "NonNeg": _kernel(kernel_constraint=C.NonNeg()),
    "UnitNorm": _kernel(kernel_constraint=C.UnitNorm()),
}
INITIALIZERS = {
    **{
        name: _kernel(kernel_initializer=getattr(I, name)())
        for name in (
            "GlorotNormal",
            "GlorotUniform",
            "HeNormal",
            "HeUniform",
            "Identity",
            "LecunNormal",
            "LecunUniform",
            "Ones",
            "Orthogonal",
            "RandomNormal",
            "RandomUniform",
            "TruncatedNormal",
            "VarianceScaling",
            "Zeros",
        )
    },
    "Constant": _kernel(kernel_initializer=I.Constant(0.3)),
    "Initializer": _kernel(kernel_initializer=Ramp()),
    "STFT": Branch(
        lambda name: keras.layers.Conv1D(5, 8, kernel_initializer=I.STFT(), name=name), (normal(16, 1),)
    ),
}
