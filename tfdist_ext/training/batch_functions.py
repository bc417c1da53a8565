"""Is a function of a batch a mean over its rows, a sum over them, or neither?

It is tried, not read: on two random batches and on both together. What is true of random rows to rounding is taken for
true of all. A name or a class says nothing: a user's function may be called `mse` and divide by what it likes.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator

import numpy as np

# Rows of the two batches: unequal, so that a mean of means shows.
_ROWS = (3, 2)
_UNKNOWN_SIZE = 3
# A sum of some tens of terms in another order differs by some tens of roundings; what is no mean by a hundredth.
ROUNDINGS = 2**12


class Kind(enum.Enum):
    """How the values of a function on parts of a batch make its value on the whole."""

    ROWS = "one value for each row, from that row alone"
    MEAN = "the mean of the parts' values, weighted by rows"
    SUM = "the sum of the parts' values"
    NEITHER = "not made of the parts' values"


def classify(function: Callable, arguments: list) -> Kind:
    """Tries `function` on random batches.

    Args:
        function: Takes NumPy arrays, returns a NumPy array: a number, or one value for each row. What it raises on
            random numbers counts as "not known".
        arguments: `(shape, dtype)` of each argument; the first dimension is that of the rows, None is unknown.

    Returns:
        The kind; `Kind.NEITHER` where nothing could be found out.
    """
    doubles = [(shape, "float64" if np.dtype(dtype).kind == "f" else dtype) for shape, dtype in arguments]
    # In double precision small parts show that are no mean; not every function takes it.
    kinds = _kinds(function, doubles) or _kinds(function, arguments)
    return kinds.pop() if len(kinds) == 1 else Kind.NEITHER


def _kinds(function, arguments) -> set[Kind]:
    kinds = set()
    for first, second in _batches(arguments):
        try:
            kind = _compare(function, first, second)
        except Exception:  # Whatever a user's function does with rows that make no sense to it.
            continue
        if kind is not None:
            kinds.add(kind)
    return kinds


def _batches(arguments) -> Iterator[tuple[list, list]]:
    """Yields pairs of batches: targets as classes, as fractions, as any numbers."""
    for targets, outputs in (("classes", "fractions"), ("fractions", "fractions"), ("numbers", "numbers")):
        generator = np.random.default_rng(7)
        kinds = [targets, *[outputs] * (len(arguments) - 1)]
        first, second = (
            [
                draw(generator, kind, shape, dtype, rows)
                for kind, (shape, dtype) in zip(kinds, arguments, strict=True)
            ]
            for rows in _ROWS
        )
        yield first, second


def draw(generator, kind: str, shape, dtype, rows: int):
    """Returns a random array of some rows.

    Args:
        generator: `np.random.Generator`.
        kind: "classes", "fractions" between 0.1 and 0.9, or "numbers".
        shape: Its shape; the first dimension is that of the rows, None is unknown.
        dtype: Its dtype; integers are always classes, 0 or 1.
        rows: Number of rows.
    """
    size = [rows, *(_UNKNOWN_SIZE if length is None else length for length in shape[1:])]
    dtype = np.dtype(dtype)
    if kind == "classes" or dtype.kind in "iub":
        return generator.integers(0, 2, size).astype(dtype)
    if kind == "fractions":
        return generator.uniform(0.1, 0.9, size).astype(dtype)
    return generator.normal(size=size).astype(dtype)


def _compare(function, first, second) -> Kind | None:
    """Returns the kind as one pair of batches shows it; None where the values are not finite."""
    one, other = np.asarray(function(*first)), np.asarray(function(*second))
    whole = np.asarray(function(*[np.concatenate(pair) for pair in zip(first, second, strict=True)]))
    if not all(np.all(np.isfinite(value)) for value in (one, other, whole)):
        return None
    tolerance = ROUNDINGS * np.finfo(whole.dtype).eps if whole.dtype.kind == "f" else 0.0
    scale = max(float(np.max(np.abs(value), initial=0.0)) for value in (one, other, whole))

    def equal(expected) -> bool:
        return bool(np.all(np.abs(expected - whole) <= tolerance * scale))

    if whole.ndim:
        rows = sum(_ROWS)
        by_row = whole.shape[0] == rows and one.shape[0] == _ROWS[0] and one.shape[1:] == whole.shape[1:]
        return Kind.ROWS if by_row and equal(np.concatenate([one, other])) else Kind.NEITHER
    if scale == 0.0:
        return None
    mean = equal((_ROWS[0] * one + _ROWS[1] * other) / sum(_ROWS))
    if mean and equal(one + other):
        return None
    return Kind.MEAN if mean else Kind.SUM if equal(one + other) else Kind.NEITHER
