"""How do the parts of a tried step make the whole?

Compares what two replicas would hand over with what one device gets from the rows of both. Plain NumPy.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from tfdist_ext.training import batch_functions
from tfdist_ext.training.batch_functions import Kind

# Rows of the two batches on which a step is tried.
ROWS = (3, 2)
# A gradient that is all rounding is compared with the others of its step.
_SMALL = 1e-3


class CannotTry(Exception):  # noqa: N818 - a signal, not an error
    """The step does something that a trial on one device cannot stand in for."""


@dataclasses.dataclass
class Verdict:
    """How the parts of a step combine; what is not named combines as Keras' own.

    Attributes:
        applications: For each application of gradients the kind of its loss.
        scalars: For each number that is fed to a mean or a sum, in order.
        updates: For each assigned variable, by id: "sum" of the changes, "add" up the new values, "first", "mean".
        logs: For each number among the logs, in order.
    """

    applications: list[Kind] = dataclasses.field(default_factory=list)
    scalars: list[Kind] = dataclasses.field(default_factory=list)
    updates: dict[int, str] = dataclasses.field(default_factory=dict)
    logs: list[Kind] = dataclasses.field(default_factory=list)

    @property
    def needs_whole_batch(self) -> bool:
        """True where no way of adding up gives the gradients of the whole batch, or the results of an evaluation."""
        results = [*self.scalars, *self.logs]
        is_evaluation = not self.applications
        strange = Kind.NEITHER in results or "neither" in self.updates.values()
        return Kind.NEITHER in self.applications or (is_evaluation and strange)

    @property
    def is_all_sums(self) -> bool:
        """True where every loss is a sum over rows."""
        return set(self.applications) == {Kind.SUM}

    def is_sum(self, application: int) -> bool:
        """Returns True where the loss of an application of gradients is a sum over rows."""
        return application < len(self.applications) and self.applications[application] is Kind.SUM

    def is_sum_in_metric(self, scalar: int) -> bool:
        """Returns True where a number that is fed to a mean or a sum is a sum over rows."""
        return scalar < len(self.scalars) and self.scalars[scalar] is Kind.SUM

    def kind_of_log(self, index: int) -> Kind | None:
        """Returns the kind of a logged number, or None where it is not known."""
        return self.logs[index] if index < len(self.logs) else None


def tolerance_of(dtypes) -> float:
    """Returns the relative rounding that gradients may show.

    Args:
        dtypes: Names of the dtypes in which the layers compute.
    """
    narrow = any("16" in dtype for dtype in dtypes)
    if narrow:
        return 0.05
    double = dtypes == {"float64"}
    return batch_functions.ROUNDINGS * float(np.finfo("float64" if double else "float32").eps)


def compare(one, other, whole, tolerance: float) -> Verdict:
    """Returns how two parts of a step combine.

    Args:
        one: What a replica with the first three rows left behind, a `step_trial.Trial`.
        other: What a replica with the last two rows did.
        whole: What one device did.
        tolerance: Relative rounding that the values may show.
    """
    verdict = Verdict()
    for gradients in zip(one.applications, other.applications, whole.applications, strict=True):
        verdict.applications.append(_kind_of_gradients(*gradients, tolerance))
    for values in zip(one.scalars, other.scalars, whole.scalars, strict=False):
        verdict.scalars.append(_kind_of_number(*values, tolerance))
    for values in zip(one.logs, other.logs, whole.logs, strict=False):
        verdict.logs.append(_kind_of_number(*values, tolerance))
    for key in one.updates.keys() & other.updates.keys() & whole.updates.keys():
        kind = _kind_of_update(one.updates[key], other.updates[key], whole.updates[key], tolerance)
        if kind is not None:
            verdict.updates[key] = kind
    return verdict


def _kind_of_gradients(one: dict, other: dict, whole: dict, tolerance: float) -> Kind:
    """Returns the kind of a loss by its gradients, which are weighted by the shares of the rows."""
    largest = max((float(np.max(np.abs(g), initial=0.0)) for g in whole.values()), default=0.0)
    shares = [rows / sum(ROWS) for rows in ROWS]
    errors = {Kind.MEAN: 0.0, Kind.SUM: 0.0}
    for key in one.keys() | other.keys() | whole.keys():
        a, b, together = (values.get(key, 0.0) for values in (one, other, whole))
        scale = max(float(np.max(np.abs(together), initial=0.0)), _SMALL * largest)
        if not np.all(np.isfinite(together)):
            raise CannotTry("its gradients on random rows are not finite")
        if scale == 0.0:
            continue
        # A variable may be narrower than what its layer computes in: the adapters of `enable_lora` are.
        rounding = max(tolerance, tolerance_of({np.asarray(together).dtype.name}))
        for kind, total in ((Kind.MEAN, a + b), (Kind.SUM, a / shares[0] + b / shares[1])):
            errors[kind] = max(errors[kind], float(np.max(np.abs(total - together))) / scale / rounding)
    return _best(errors, 1.0)


def _kind_of_number(one, other, whole, tolerance: float) -> Kind:
    scale = float(np.max(np.abs(whole), initial=0.0)) or 1.0
    mean = (ROWS[0] * one + ROWS[1] * other) / sum(ROWS)
    errors = {
        Kind.MEAN: float(np.max(np.abs(mean - whole), initial=0.0)) / scale,
        Kind.SUM: float(np.max(np.abs(one + other - whole), initial=0.0)) / scale,
    }
    return _best(errors, tolerance)


def _best(errors: dict, tolerance: float) -> Kind:
    kind = min(errors, key=lambda kind: (errors[kind], kind is not Kind.MEAN))
    if errors[Kind.MEAN] <= min(tolerance, 2 * errors[kind]):
        return Kind.MEAN
    return kind if errors[kind] <= tolerance else Kind.NEITHER


def _kind_of_update(one, other, whole, tolerance: float) -> str | None:
    """Returns how the values that replicas assign to a variable make that of one device; None where none does."""
    _, old, new = whole
    if old.dtype.kind not in "fiub" or old.shape != new.shape:
        return None
    old, new, a, b = (np.asarray(value, "float64") for value in (old, new, one[2], other[2]))
    change = max(
        float(np.max(np.abs(new - old), initial=0.0)), float(np.max(np.abs(new), initial=0.0)) * 1e-12
    )
    if change == 0.0 or not np.all(np.isfinite(new)):
        return None
    ways = {
        "same": a + (b - a) / 2 if np.array_equal(a, b) else None,
        "mean": (ROWS[0] * a + ROWS[1] * b) / sum(ROWS),
        "sum": a + b - old,
        "add": a + b,
    }
    for way, value in ways.items():
        if value is not None and float(np.max(np.abs(value - new), initial=0.0)) <= tolerance * change:
            return way
    return "neither"


def same(one, other) -> bool:
    """Returns True where two runs on the same rows gave the same gradients."""
    return all(
        all(np.allclose(a[key], b[key], rtol=1e-5, atol=1e-12) for key in a)
        for a, b in zip(one.applications, other.applications, strict=True)
    )
