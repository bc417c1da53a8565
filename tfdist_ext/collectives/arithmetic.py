"""In which precision are values summed?

float16 and bfloat16 are added in float32 and rounded to their own type once, at the end: a sum of n values
then has the error of one rounding instead of n - 1. Other types are added as they are; integers wrap around,
as in NumPy. The order of the additions is fixed, so the same inputs give the same bits in every run, and one
task's result is sent to (or computed in the same order by) all the others, so all ranks hold the same bits.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
_REDUCIBLE = tuple(np.dtype(name) for name in ("float16", "float32", "float64", "int32", "int64")) + (
    BFLOAT16,
)
_INTEGERS = (np.dtype("int32"), np.dtype("int64"))
REDUCTIONS = ("sum", "mean")


def check_reduction(dtype: np.dtype, reduction: str) -> None:
    """Refuses what cannot be reduced.

    Raises:
        TypeError: If values of `dtype` cannot be summed here.
        ValueError: If the reduction is unknown, or is the mean of integers.
    """
    if dtype not in _REDUCIBLE:
        names = ", ".join(known.name for known in _REDUCIBLE)
        raise TypeError(f"An all-reduce needs a dtype of {names} in native byte order; received {dtype}.")
    if reduction not in REDUCTIONS:
        raise ValueError(f"Argument `reduction` must be one of {REDUCTIONS}; received {reduction!r}.")
    if reduction == "mean" and dtype in _INTEGERS:
        raise ValueError(
            "The mean of integers is no integer. Reduce with 'sum', or convert to a float dtype."
        )


def quietly():
    """Returns a context without NumPy's warnings: infinities and NaN are for loss scaling to judge, not for us."""
    return np.errstate(over="ignore", invalid="ignore")


def accumulator_dtype(dtype: np.dtype) -> np.dtype:
    """The type in which values of `dtype` are added."""
    return np.dtype("float32") if dtype in (BFLOAT16, np.dtype("float16")) else dtype
