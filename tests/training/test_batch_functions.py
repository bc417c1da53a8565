"""Is a function of a batch found to be what it is? NumPy functions whose kind is known by hand."""

import numpy as np
import pytest

from tfdist_ext.training.batch_functions import Kind, classify

COLUMN = ((None, 2), "float32")


def squares(targets, outputs):
    return np.square(targets - outputs)


def softmax_rows(targets, outputs):
    scores = np.exp(outputs @ targets.T)
    return -np.log(np.diagonal(scores) / scores.sum(axis=1))


FUNCTIONS = {
    Kind.ROWS: [
        lambda t, o: squares(t, o).mean(axis=1),
        squares,
        lambda t, o: np.abs(t - o).max(axis=1),
    ],
    Kind.MEAN: [
        lambda t, o: squares(t, o).mean(),
        lambda t, o: squares(t, o).mean() + np.abs(o).mean() + 3.0,
        # Finite for fractions only: what it is for other numbers says nothing.
        lambda t, o: -np.mean(t * np.log(np.where(o < 1, o, np.nan))),
    ],
    Kind.SUM: [
        lambda t, o: squares(t, o).sum(),
        lambda t, o: squares(t, o).sum() / 7,
        lambda t, o: np.count_nonzero(o > 0.5) + squares(t, o).sum(),
    ],
    Kind.NEITHER: [
        lambda t, o: squares(t, o).sum() / (1 + np.abs(o).sum()),
        lambda t, o: np.sqrt(squares(t, o).mean()),
        lambda t, o: squares(t, o).mean() + 1e-6 * squares(t, o).sum(),
        lambda t, o: squares(t, o).mean(axis=0),
        softmax_rows,
        lambda t, o: squares(t, o).max(),
    ],
}


@pytest.mark.parametrize(
    ("kind", "function"), [(kind, function) for kind, some in FUNCTIONS.items() for function in some]
)
def test_kind_of_a_function(kind, function):
    assert classify(function, [COLUMN, COLUMN]) is kind


def test_a_function_that_refuses_random_rows_is_of_no_kind():
    def refuses(targets, outputs):
        raise ValueError("not these")

    assert classify(refuses, [COLUMN, COLUMN]) is Kind.NEITHER


def test_integer_targets_are_drawn_as_classes():
    seen = set()

    def crossentropy(classes, outputs):
        seen.update(np.unique(classes))
        return -np.log(np.take_along_axis(outputs, classes[:, None], axis=1)[:, 0])

    with np.errstate(invalid="ignore"):
        assert classify(crossentropy, [((None,), "int64"), COLUMN]) is Kind.ROWS
    assert seen == {0, 1}


def test_a_function_that_takes_single_precision_only():
    def picky(targets, outputs):
        if outputs.dtype != np.float32:
            raise TypeError("float32, please")
        return squares(targets, outputs).mean()

    assert classify(picky, [COLUMN, COLUMN]) is Kind.MEAN
