"""When is a run the run of one device? Pure: compares what was seen, and gives a verdict on each name.

A sum of P terms taken in another order differs by at most (P - 1) * u * sum |term|, with u = 2**-53. The programs sum
over at most 13 rows times some 200 places of a picture: P < 3000, so 3e-13 of the sum of magnitudes, which may be ten
times the largest value. Over the 6 steps of a program a difference grows at most by 3 a step (rates of 0.02 and
momentum 0.9 on losses with curvature of order 1):

    3000 * 2**-53 * 10 * sum(3**k for k in range(6))  =  1.2e-9

`TOLERANCE` is that bound rounded down; no right run came within a factor of ten of it. A row that is weighted
wrongly shows as 1e-4 or more. What computes in single precision (TensorFlow has no other kernel, or Keras keeps the
state of a metric so) rounds by 2**-24, mixed precision by 2**-11; of their sums none has more than 78 terms and none
cancels, so that each step adds at most 78 * 2**-24 = 5e-6, over 6 steps that do not amplify 3e-5. In mixed precision
what is added up has at most 6 terms of order 1 and reaches the weights times a rate of 0.05:

    6 * 2**-11 * 6 * 0.05 * 10  =  9e-3
"""

import dataclasses

import numpy as np

from tests.conformance.known_differences import known

TOLERANCE = 1e-9
TOLERANCES = {"double": TOLERANCE, "single": 3e-5, "half": 9e-3}

LATER = ("evaluation", "predictions", "logs of outputs")
"""What not all places show: see `runs.fitted` and `score_programs`."""


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What became of a name at a place: equal, refused, differs, not run; or unjudged, wrong."""

    status: str
    text: str = ""


def verdict(place, family, name, expected, actual, precision="double"):
    """Returns the verdict on a name, from what was seen on one device and at the place."""
    entry = known(place, family, name)
    if entry and entry.kind == "not run":
        return Verdict("not run", entry.reason)
    if expected is None or actual is None:
        return Verdict("unjudged", "there is no recipe for it in tests/conformance")
    if "error" in expected:
        return Verdict("wrong", f"one device fails: {expected['error']}: {expected['message']}")
    if "error" in actual:
        return _refusal(entry, name, actual)
    difference = _difference_of_runs(expected, actual, TOLERANCES[precision])
    if entry and entry.kind == "refused":
        text = "is equal now" if not difference else f"is not refused: {difference}"
        return Verdict("wrong", f"listed as refused, but {text}")
    if entry and entry.kind == "differs":
        if not difference:
            return Verdict("wrong", "listed as a known difference, but it is equal now")
        rest = _difference_of_runs(
            _without(expected, entry.only), _without(actual, entry.only), TOLERANCES[precision]
        )
        if entry.only and rest:
            return Verdict("wrong", rest)
        return Verdict("differs", entry.reason)
    return Verdict("wrong", difference) if difference else Verdict("equal")


def same_elsewhere(differs, other, actual, precision):
    """Returns a verdict on a known difference: wrong where it is not the same in another layout of the replicas."""
    if "error" in other:
        return differs
    difference = _difference_of_runs(
        {k: v for k, v in other.items() if k != "saved"}, actual, TOLERANCES[precision]
    )
    text = f"not what as many replicas in one process compute: {difference}"
    return Verdict("wrong", text) if difference else differs


def alike_in_distribution(differs, expected, actual):
    """Returns a verdict on a known difference: wrong where the two are not samples of one distribution."""
    difference = improbable_difference(expected, actual)
    return Verdict("wrong", difference) if difference else differs


def _difference_of_runs(expected, actual, tolerance):
    """Says how two runs differ; how far a saved model is from itself must be nothing."""
    saved = actual.get("saved", {})
    expected = {key: value for key, value in expected.items() if key in actual or key not in LATER}
    actual = {key: value for key, value in actual.items() if key != "saved"}
    found = largest_difference(expected, actual, tolerance)
    return found or largest_difference(_nothing(saved), saved, tolerance, "saved")


def _without(seen, only):
    return {key: value for key, value in seen.items() if key != only.strip("/")}


def _nothing(values):
    if isinstance(values, dict):
        return {key: _nothing(value) for key, value in values.items()}
    return np.zeros_like(values)


def _refusal(entry, name, actual):
    text = f"{actual['error']}: {actual['message']}"
    if not entry or entry.kind != "refused":
        return Verdict("wrong", text)
    if not actual["ours"]:
        return Verdict("wrong", f"refused by somebody else: {text}")
    missing = [word for word in entry.words or (name,) if word not in actual["message"]]
    if missing:
        return Verdict("wrong", f"the refusal does not say {missing}: {text}")
    return Verdict("refused", entry.reason)


def largest_difference(expected, actual, tolerance=TOLERANCE, place=""):
    """Returns where two nested dictionaries of values differ most, as words; empty where they agree."""
    worst = max(_differences(expected, actual, place), default=(0.0, ""))
    return f"{worst[1]} by {worst[0]:.3g}" if worst[0] > tolerance else ""


def improbable_difference(expected, actual):
    """Returns where the means of two samples are further apart than five standard errors, as words; empty elsewhere.

    Of some 300 comparisons of means of 24 steps, none is so by chance in 99 runs of 100; and seeds are fixed.
    """
    for key, one in expected.items():
        one, other = np.asarray(one), np.asarray(actual[key])
        error = np.sqrt(one.var(ddof=1) / one.size + other.var(ddof=1) / other.size)
        if not abs(one.mean() - other.mean()) <= 5 * error + TOLERANCE:
            return f"{key} is {other.mean():.5g} instead of {one.mean():.5g}, with an error of {error:.2g}"
    return ""


def _differences(expected, actual, place):
    if isinstance(expected, dict):
        if not isinstance(actual, dict) or list(expected) != list(actual):
            yield np.inf, f"{place} has {sorted(actual)} instead of {sorted(expected)}"
            return
        for key in expected:
            yield from _differences(expected[key], actual[key], f"{place}/{key}".strip("/"))
    else:
        yield _difference(np.asarray(expected), np.asarray(actual)), place


def _difference(expected, actual):
    """Returns the largest difference relative to the largest magnitude, or to 1 where that is less."""
    if expected.shape != actual.shape:
        return np.inf
    if expected.dtype.kind not in "fiub":
        return 0.0 if np.array_equal(expected, actual) else np.inf
    expected, actual = expected.astype("float64"), actual.astype("float64")
    if not np.array_equal(np.isfinite(expected), np.isfinite(actual)):
        return np.inf
    finite = np.isfinite(expected)
    scale = max(1.0, np.abs(expected[finite]).max(initial=0.0))
    return float(np.abs(expected[finite] - actual[finite]).max(initial=0.0) / scale)
