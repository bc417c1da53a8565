"""How do the gradients of two parts make those of the whole? Plain NumPy."""

import numpy as np

from tfdist_ext.training.batch_functions import Kind
from tfdist_ext.training.step_trial import Trial
from tfdist_ext.training.step_verdict import ROWS, compare, tolerance_of


def kind_of(part_of_row, dtype="float64"):
    """Returns the kind of a loss whose gradient is the mean of its rows', as replicas hand it over."""
    rows = np.random.default_rng(0).uniform(0.1, 1.0, size=(sum(ROWS), 8))
    parts = rows[: ROWS[0]], rows[ROWS[0] :]
    trials = [Trial(applications=[{1: part_of_row(part).astype(dtype)}]) for part in (*parts, rows)]
    return compare(*trials, tolerance_of({"float64"})).applications


def test_a_mean_is_one_also_in_a_variable_that_is_narrower_than_its_layer():
    """Adapters of LoRA are of single precision in a layer of double: 2**-24 is no fault."""

    def mean(rows):
        return rows.sum(axis=0) / sum(ROWS)

    assert kind_of(mean) == [Kind.MEAN]
    assert kind_of(mean, "float32") == [Kind.MEAN]


def test_a_ratio_is_neither_in_any_precision():
    def ratio(rows):
        return np.sqrt(rows.sum(axis=0)) / sum(ROWS)

    assert kind_of(ratio) == [Kind.NEITHER]
    assert kind_of(ratio, "float32") == [Kind.NEITHER]
