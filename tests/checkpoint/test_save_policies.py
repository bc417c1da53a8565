"""When a checkpoint is due: values by hand, and the budget as a property."""

import dataclasses
import math

import hypothesis
import pytest
from hypothesis import strategies as st

from tfdist_ext.checkpoint.save_policies import (
    EverySeconds,
    EverySteps,
    OverheadBudget,
    SaveProgress,
    SaveUnion,
    young_daly_seconds,
)


def saved_steps(policy, steps, **fields):
    """Which of these steps a trainer that obeys the policy saves; a step takes one second."""
    progress = SaveProgress(step=0, **fields)
    saved = []
    for step in steps:
        progress = dataclasses.replace(progress, step=step, seconds=float(step))
        if policy.is_due(progress):
            saved.append(step)
            progress = dataclasses.replace(
                progress, last_saved_step=step, last_saved_seconds=progress.seconds
            )
    return saved


@pytest.mark.parametrize(
    ("policy", "steps", "expected"),
    [
        (EverySteps(3), range(1, 11), [3, 6, 9]),
        (EverySteps(1), range(1, 4), [1, 2, 3]),
        # Four steps a call: 4 passes 3, 8 passes 6, 12 is one; each multiple counts once.
        (EverySteps(3), range(4, 20, 4), [4, 8, 12, 16]),
        (EverySteps(10), range(4, 40, 4), [12, 20, 32]),
        (EverySeconds(4.0), range(1, 14), [4, 8, 12]),
        # 5 and 10 are multiples of 5; 3, 8 and 13 are three seconds after the save before them.
        (EverySteps(5) | EverySeconds(3.0), range(1, 14), [3, 5, 8, 10, 13]),
    ],
)
def test_due_steps(policy, steps, expected):
    assert saved_steps(policy, steps) == expected


def test_resuming_goes_on_with_the_same_multiples():
    assert saved_steps(EverySteps(500), range(751, 2001), last_saved_step=750) == [1000, 1500, 2000]


def test_a_step_is_not_saved_twice():
    now = SaveProgress(step=500, last_saved_step=500, seconds=1e6)
    assert (EverySteps(500) | EverySeconds(1.0) | OverheadBudget()).is_due(now) is None


def test_a_directory_of_a_longer_run_does_not_stop_saving():
    assert saved_steps(EverySteps(5), range(1, 11), last_saved_step=5000) == [5, 10]
    assert SaveProgress(step=7, last_saved_step=5000).steps_since_save == 7


@pytest.mark.parametrize(
    ("policy", "progress", "reason"),
    [
        (EverySteps(500), SaveProgress(step=500), "step 500 is a multiple of 500"),
        (EverySteps(500), SaveProgress(step=502), "step 502 passed 500, a multiple of 500"),
        (
            EverySeconds(600),
            SaveProgress(step=1, seconds=601.5),
            "601.5 s have passed since the last save, at least 600",
        ),
        (OverheadBudget(), SaveProgress(step=20), "after 20 steps the cost of a save is measured"),
    ],
)
def test_reasons_read_as_half_a_sentence(policy, progress, reason):
    assert policy.is_due(progress) == reason


def test_only_steps_are_decided_without_a_clock():
    assert not EverySteps(5).needs_clock
    assert EverySeconds(5).needs_clock and OverheadBudget().needs_clock
    assert not (EverySteps(5) | EverySteps(7)).needs_clock
    assert (EverySteps(5) | EverySeconds(7)).needs_clock


def test_unions_are_flat_and_take_a_users_own_policy():
    class AtNight:
        needs_clock = True

        def is_due(self, progress):
            return "it is night"

    union = EverySteps(2) | EverySeconds(9) | AtNight()
    assert isinstance(union, SaveUnion) and len(union.policies) == 3
    assert union.is_due(SaveProgress(step=1)) == "it is night"
    for other in (500, EverySteps):
        with pytest.raises(TypeError, match="unsupported operand"):
            EverySteps(2) | other


measured = st.builds(
    SaveProgress,
    step=st.integers(1, 10**7),
    seconds_per_step=st.floats(1e-4, 100.0),
    blocking_seconds=st.floats(0.0, 100.0),
    persist_seconds=st.one_of(st.none(), st.floats(0.0, 1000.0)),
)


@hypothesis.given(measured, st.floats(1e-3, 1.0))
def test_the_budget_is_kept_by_the_smallest_interval(progress, fraction):
    steps = OverheadBudget(fraction).interval_steps(progress)

    def allowed(steps, slack):
        seconds = steps * progress.seconds_per_step
        return (
            steps >= 1
            and progress.blocking_seconds <= fraction * seconds * slack
            and (progress.persist_seconds or 0.0) <= seconds * slack
        )

    # Three roundings of 2**-53 each.
    assert allowed(steps, 1 + 1e-15)
    assert not allowed(steps - 1, 1 - 1e-15)


def test_the_budget_follows_the_measurements():
    budget = OverheadBudget(fraction=0.03)
    progress = SaveProgress(step=10_000, seconds_per_step=0.1, blocking_seconds=0.3)
    # 0.3 s are 3 % of 10 s, which are 100 steps; of 5 s if a save costs half.
    assert budget.interval_steps(progress) in (100, 101)
    assert budget.interval_steps(dataclasses.replace(progress, blocking_seconds=0.15)) in (50, 51)
    # Writing takes 64 s, 640 steps of 0.1 s.
    assert budget.interval_steps(dataclasses.replace(progress, persist_seconds=64.0)) == 640
    assert budget.interval_steps(dataclasses.replace(progress, seconds_per_step=None)) == 20
    assert budget.interval_steps(dataclasses.replace(progress, seconds_per_step=0.0)) == 20


def test_a_save_does_not_begin_before_the_last_one_is_committed():
    progress = SaveProgress(
        step=900,
        last_saved_step=100,
        seconds=50.0,
        seconds_per_step=0.1,
        blocking_seconds=0.0,
        persist_seconds=64.0,
    )
    # 800 steps were made, but in 50 s: faster than their median, and 14 s before the write is done.
    assert OverheadBudget().is_due(progress) is None
    assert OverheadBudget().is_due(dataclasses.replace(progress, seconds=64.0))


def test_young_and_daly():
    # sqrt(2 * 2 s * 86,400 s) = sqrt(345,600 s^2).
    assert young_daly_seconds(2.0, 86_400.0) == pytest.approx(587.8775, abs=1e-4)
    assert young_daly_seconds(0.5, 1.0) == 1.0


@hypothesis.given(st.floats(0.01, 100.0), st.floats(100.0, 1e7), st.floats(0.1, 10.0))
def test_no_other_interval_loses_less(cost, between_failures, factor):
    def lost(interval):
        return cost / interval + interval / (2 * between_failures)

    best = young_daly_seconds(cost, between_failures)
    assert lost(best) <= lost(best * factor) * (1 + 1e-12)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: EverySteps(0), "`n` must be a whole number of at least 1; received 0. Try `EverySteps"),
        (lambda: EverySteps(True), "received True"),
        (lambda: EverySteps(2.5), "received 2.5"),
        (lambda: EverySeconds(-1.0), "`seconds` must be a finite number above 0; received -1.0"),
        (lambda: EverySeconds(math.nan), "received nan"),
        (lambda: OverheadBudget(0.0), "`fraction`.*received 0.0"),
        (lambda: OverheadBudget(steps_before_measured=0), "`steps_before_measured`.*received 0"),
        (lambda: SaveProgress(step=1, blocking_seconds=math.inf), "`blocking_seconds`.*received inf"),
        (lambda: young_daly_seconds(1.0, math.inf), "`mean_time_between_failures_seconds`.*received inf"),
    ],
)
def test_refusals_name_the_argument_and_the_value(make, message):
    with pytest.raises(ValueError, match=message):
        make()
