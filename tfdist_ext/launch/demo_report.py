"""Are the two runs of the demo equal, and is the model good? Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

# Two workers add the rows of a batch in another order than one device. A sum of P terms then differs by at
# most (P - 1) * 2**-53 * sum(|terms|): here P = 32 rows x 64 pixels and the terms of a gradient sum to order
# 1, so by some 2e-13, of which a step takes a small part (the learning rate). A row that is weighted wrongly
# moves a weight by 1e-4 and more.
TOLERANCE = 1e-12
MIN_ACCURACY = 0.97


def max_abs_difference(one: Sequence[np.ndarray], other: Sequence[np.ndarray]) -> float | None:
    """Compares two lists of weights.

    Args:
        one: Arrays.
        other: Arrays.

    Returns:
        The largest absolute difference; None if the shapes differ or something is not finite.

    Example:
        >>> max_abs_difference([np.zeros(2)], [np.array([0.0, -0.5])])
        0.5
    """
    if not one or [array.shape for array in one] != [array.shape for array in other]:
        return None
    # NumPy's max hands a NaN on, in every place; Python's does not.
    largest = float(np.max([np.max(np.abs(a - b), initial=0.0) for a, b in zip(one, other, strict=True)]))
    return largest if math.isfinite(largest) else None


def compare(one: Mapping[str, np.ndarray], other: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Judges the weights of two runs.

    Args:
        one: Arrays named `float64/0`, `float64/1`, ... (after the few compared steps) and `float32/0`, ...
            (after the training).
        other: Those of the other run.

    Returns:
        The `equivalence` of the report.
    """

    def difference(dtype: str) -> float | None:
        names = sorted(name for name in one if name.startswith(dtype))
        if names != sorted(name for name in other if name.startswith(dtype)):
            return None
        return max_abs_difference([one[name] for name in names], [other[name] for name in names])

    found = difference("float64")
    return {
        "equal": found is not None and found <= TOLERANCE,
        "max_abs_weight_difference": found,
        "tolerance": TOLERANCE,
        "float32_max_abs_weight_difference": difference("float32"),
    }


def complaints(report: Mapping[str, Any]) -> list[str]:
    """Lists what the demo should have shown and did not.

    Args:
        report: The report.

    Returns:
        Sentences; none if all is well.
    """
    found = [] if report["equivalence"]["equal"] else ["The two runs are not equal."]
    for run in report["runs"]:
        # Written so that a NaN is a complaint too.
        if not run["test_accuracy"] > MIN_ACCURACY:
            accuracy = f"The accuracy of the run on {run['name']} is {run['test_accuracy']:.4f}"
            found.append(f"{accuracy}, not above {MIN_ACCURACY}. More epochs may help.")
    return found


def as_text(report: Mapping[str, Any]) -> str:
    """Shows a report.

    Args:
        report: The report.

    Returns:
        The table and the verdict.
    """
    rows = [
        f"{run['name']:<12}{run['steps']:>7}{1000 * run['median_step_seconds']:>18.2f}"
        f"{run['final_loss']:>12.4f}{run['test_accuracy']:>15.4f}"
        for run in report["runs"]
    ]
    header = f"{'run':<12}{'steps':>7}{'median step (ms)':>18}{'final loss':>12}{'test accuracy':>15}"
    verdict = report["equivalence"]
    lines = [
        header,
        *rows,
        "",
        "Largest difference of any weight between the runs:",
        f"  {_number(verdict['max_abs_weight_difference'])} after the steps in float64 "
        f"(tolerance {verdict['tolerance']:.0e})",
        f"  {_number(verdict['float32_max_abs_weight_difference'])} after the training in float32, "
        "where rounding adds up",
        f"Verdict: {'equal' if verdict['equal'] else 'NOT equal'}",
    ]
    return "\n".join(lines)


def _number(value: float | None) -> str:
    return "not comparable" if value is None else f"{value:.2e}"
