"""Recipes for losses and metrics: an output, its activation, and what it is compared with."""

import keras

from tests.conformance.inputs import classes, ids, labels, normal, positive, signs
from tests.conformance.recipes import Output

REAL = Output("linear", normal(2))
POSITIVE = Output("softplus", positive(2))
SHARES = Output("sigmoid", positive(2))
BINARY = Output("sigmoid", ids(2, below=2))
CLASSES = Output("softmax", classes(3), (3,))
SPARSE = Output("softmax", ids(below=3), (3,))
SIGNS = Output("linear", signs(2))
PAIRS = Output("linear", ids(below=2))
LETTERS = Output("linear", labels(2, below=4), (6, 4))
ROUNDED = Output("hard_sigmoid", ids(2, below=2))
# TensorFlow finds the k largest of single precision only.
SINGLE_CLASSES = Output("softmax", classes(3), (3,), "float32")
SINGLE_SPARSE = Output("softmax", ids(below=3), (3,), "float32")


@keras.saving.register_keras_serializable("conformance")
class CubicLoss(keras.losses.Loss):
    """A loss of a user's own."""

    def call(self, y_true, y_pred):
        return keras.ops.mean(keras.ops.abs(y_true - y_pred) ** 3, axis=-1)


@keras.saving.register_keras_serializable("conformance")
def cubic(y_true, y_pred):
    """Returns the loss of each row."""
    return keras.ops.mean(keras.ops.abs(y_true - y_pred) ** 3, axis=-1)


class MeanOfOutputs(keras.metrics.Mean):
    """The weighted mean of what the model says."""

    def update_state(self, y_true, y_pred, sample_weight=None):
        return super().update_state(y_pred, sample_weight)


class SumOfOutputs(keras.metrics.Sum):
    """The weighted sum of what the model says."""

    def update_state(self, y_true, y_pred, sample_weight=None):
        return super().update_state(y_pred, sample_weight)


class CountedMetric(keras.metrics.Metric):
    """A metric of a user's own: the sum of squares and the number of values."""

    def __init__(self, **arguments):
        super().__init__(**arguments)
        self.total = self.add_weight(initializer="zeros", name="total")
        self.count = self.add_weight(initializer="zeros", name="count")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.total.assign_add(keras.ops.sum(keras.ops.square(y_pred)))
        self.count.assign_add(keras.ops.cast(keras.ops.size(y_pred), self.dtype))

    def result(self):
        return self.total / self.count


_L = keras.losses
LOSSES = {
    "BinaryCrossentropy": (_L.BinaryCrossentropy, BINARY),
    "BinaryFocalCrossentropy": (_L.BinaryFocalCrossentropy, BINARY),
    "CTC": (_L.CTC, LETTERS),
    "CategoricalCrossentropy": (_L.CategoricalCrossentropy, CLASSES),
    "CategoricalFocalCrossentropy": (_L.CategoricalFocalCrossentropy, CLASSES),
    "CategoricalGeneralizedCrossEntropy": (_L.CategoricalGeneralizedCrossEntropy, SPARSE),
    "CategoricalHinge": (_L.CategoricalHinge, CLASSES),
    # With the default of 80 its exponents are of order 100, and roundings grow by as much.
    "Circle": (lambda: _L.Circle(gamma=2.0), PAIRS),
    "CosineSimilarity": (_L.CosineSimilarity, REAL),
    "Dice": (_L.Dice, SHARES),
    "Hinge": (_L.Hinge, SIGNS),
    "Huber": (_L.Huber, REAL),
    "KLDivergence": (_L.KLDivergence, CLASSES),
    "LogCosh": (_L.LogCosh, REAL),
    "Loss": (CubicLoss, REAL),
    "MeanAbsoluteError": (_L.MeanAbsoluteError, REAL),
    "MeanAbsolutePercentageError": (_L.MeanAbsolutePercentageError, SHARES),
    "MeanSquaredError": (_L.MeanSquaredError, REAL),
    "MeanSquaredLogarithmicError": (_L.MeanSquaredLogarithmicError, POSITIVE),
    "Poisson": (_L.Poisson, POSITIVE),
    "SparseCategoricalCrossentropy": (_L.SparseCategoricalCrossentropy, SPARSE),
    "SquaredHinge": (_L.SquaredHinge, SIGNS),
    "Tversky": (_L.Tversky, SHARES),
}

OUTPUTS = {
    "real": (REAL, "mse"),
    "positive": (POSITIVE, "mse"),
    "binary": (BINARY, "binary_crossentropy"),
    "class": (CLASSES, "categorical_crossentropy"),
    "sparse": (SPARSE, "sparse_categorical_crossentropy"),
    "sign": (SIGNS, "hinge"),
    "rounded": (ROUNDED, "mse"),
    "single_class": (SINGLE_CLASSES, "categorical_crossentropy"),
    "single_sparse": (SINGLE_SPARSE, "sparse_categorical_crossentropy"),
}
_M = keras.metrics
METRICS = {
    "AUC": (_M.AUC, "binary"),
    "Accuracy": (_M.Accuracy, "rounded"),
    "BinaryAccuracy": (_M.BinaryAccuracy, "binary"),
    "BinaryCrossentropy": (_M.BinaryCrossentropy, "binary"),
    "BinaryIoU": (_M.BinaryIoU, "binary"),
    "CategoricalAccuracy": (_M.CategoricalAccuracy, "class"),
    "CategoricalCrossentropy": (_M.CategoricalCrossentropy, "class"),
    "CategoricalHinge": (_M.CategoricalHinge, "class"),
    "ConcordanceCorrelation": (_M.ConcordanceCorrelation, "real"),
    "CosineSimilarity": (_M.CosineSimilarity, "real"),
    "F1Score": (lambda name: _M.F1Score(average="macro", name=name), "class"),
    "FBetaScore": (lambda name: _M.FBetaScore(average="micro", beta=2.0, name=name), "class"),
    "FalseNegatives": (_M.FalseNegatives, "binary"),
    "FalsePositives": (_M.FalsePositives, "binary"),
    "Hinge": (_M.Hinge, "sign"),
    "IoU": (lambda name: _M.IoU(3, [0, 2], sparse_y_pred=False, name=name), "sparse"),
    "KLDivergence": (_M.KLDivergence, "class"),
    "LogCoshError": (_M.LogCoshError, "real"),
    "Mean": (MeanOfOutputs, "real"),
    "MeanAbsoluteError": (_M.MeanAbsoluteError, "real"),
    "MeanAbsolutePercentageError": (_M.MeanAbsolutePercentageError, "positive"),
    "MeanIoU": (lambda name: _M.MeanIoU(3, sparse_y_pred=False, name=name), "sparse"),
    "MeanMetricWrapper": (lambda name: _M.MeanMetricWrapper(cubic, name=name), "real"),
    "MeanSquaredError": (_M.MeanSquaredError, "real"),
    "MeanSquaredLogarithmicError": (_M.MeanSquaredLogarithmicError, "positive"),
    "Metric": (CountedMetric, "real"),
    "OneHotIoU": (lambda name: _M.OneHotIoU(3, [0, 1], name=name), "class"),
    "OneHotMeanIoU": (lambda name: _M.OneHotMeanIoU(3, name=name), "class"),
    "PearsonCorrelation": (_M.PearsonCorrelation, "real"),
    "Poisson": (_M.Poisson, "positive"),
    "Precision": (_M.Precision, "binary"),
    "PrecisionAtRecall": (lambda name: _M.PrecisionAtRecall(0.5, name=name), "binary"),
    "R2Score": (_M.R2Score, "real"),
    "Recall": (_M.Recall, "binary"),
    "RecallAtPrecision": (lambda name: _M.RecallAtPrecision(0.5, name=name), "binary"),
    "RootMeanSquaredError": (_M.RootMeanSquaredError, "real"),
    "SensitivityAtSpecificity": (lambda name: _M.SensitivityAtSpecificity(0.5, name=name), "binary"),
    "SparseCategoricalAccuracy": (_M.SparseCategoricalAccuracy, "sparse"),
    "SparseCategoricalCrossentropy": (_M.SparseCategoricalCrossentropy, "sparse"),
    "SparseTopKCategoricalAccuracy": (
        lambda name: _M.SparseTopKCategoricalAccuracy(2, name=name),
        "single_sparse",
    ),
    "SpecificityAtSensitivity": (lambda name: _M.SpecificityAtSensitivity(0.5, name=name), "binary"),
    "SquaredHinge": (_M.SquaredHinge, "sign"),
    "Sum": (SumOfOutputs, "real"),
    "TopKCategoricalAccuracy": (lambda name: _M.TopKCategoricalAccuracy(2, name=name), "single_class"),
    "TrueNegatives": (_M.TrueNegatives, "binary"),
    "TruePositives": (_M.TruePositives, "binary"),
}
