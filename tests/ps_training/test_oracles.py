"""Training on parameter servers against runs whose result is known: one device, two replicas, and sums done by hand."""

import numpy as np
import pytest

from tests.ps_training import programs
from tests.single_host import oracle


def assert_same(actual, expected, tolerance):
    for name in ("weights", "optimizer"):
        for one, other in zip(actual[name], expected[name], strict=True):
            np.testing.assert_allclose(one, other, rtol=0, atol=tolerance)
    for part in ("history", "evaluation"):
        assert actual.get(part, {}).keys() == expected.get(part, {}).keys()
        for name, values in expected.get(part, {}).items():
            np.testing.assert_allclose(actual[part][name], values, rtol=0, atol=tolerance, err_msg=name)


def test_bounded_staleness_0_is_the_one_device_run(chief):
    """22 rows in batches of 4, the last one of 2; normalization, dropout, Adam and metrics included."""
    result = chief(
        programs.against_one_device,
        policy="bounded 0",
        randomness=True,
        batch_size=4,
        one_device_batch_size=4,
    )
    assert_same(result["distributed"], result["alone"], oracle.TOLERANCE)
    np.testing.assert_allclose(
        result["distributed"]["prediction"], result["alone"]["prediction"], rtol=0, atol=oracle.TOLERANCE
    )
    assert result["statistics"]["applied"] == 3 * 6
    assert result["statistics"]["ages"] == {"0": 18}


def test_p3_synchronous_is_the_one_device_run_on_the_batches_of_a_round(chief):
    """Two batches of 4 make one of 8; the last round has 4 + 2 rows, so that sets of unequal size are averaged."""
    result = chief(
        programs.against_one_device,
        policy="synchronous",
        randomness=False,
        batch_size=4,
        one_device_batch_size=8,
    )
    assert_same(result["distributed"], result["alone"], oracle.TOLERANCE)
    assert result["statistics"]["ages"] == {"0": 18}


def test_p3_synchronous_equals_all_reduce_with_normalization_and_dropout(chief, worker_pool):
    """Each worker's dropout mask is that of the replica with its sub-batch."""
    actual = chief(programs.synchronous_with_randomness)
    (expected,) = worker_pool.run(programs.mirrored_with_randomness, num_workers=1, devices=2)
    assert_same(actual, expected, oracle.TOLERANCE)


def test_an_asynchronous_trajectory_is_the_one_computed_by_hand(chief):
    """W' = w - 0.5 * gradient(w one step ago), the gradient of w^2/2 being w; the first step has no older w.

    1, 1 - 1/2 = 1/2, 1/2 - 1/2 = 0, 0 - 1/4, -1/4 - 0, -1/4 + 1/8, -1/8 + 1/8, 0 + 1/16, 1/16 + 0: all of them exact
    in binary.
    """
    result = chief(programs.delayed_by_one)
    assert result["weights"] == [0.5, 0.0, -0.25, -0.25, -0.125, 0.0, 0.0625, 0.0625]
    assert result["ages"] == {"0": 1, "1": 7}


def test_damping_scales_the_learning_rate_of_stale_sets(chief):
    """Stale sets count half: w' = w - 0.25 * w one step ago, after a first full step."""
    result = chief(programs.delayed_by_one, damping=0.5)
    expected, before, now = [], 1.0, 0.5
    expected.append(now)
    for _ in range(7):
        before, now = now, now - 0.25 * before
        expected.append(now)
    assert result["weights"] == expected


@pytest.mark.parametrize("strength", [0.0, 1.0])
def test_delay_compensation_on_a_quadratic(chief, strength):
    """With g = w_old the corrected gradient is g + strength * g * g * (w - w_old).

    At w_old = 1, w = 1/2 and strength 1 that is exactly the gradient at w.
    """
    result = chief(programs.delayed_by_one, compensation=strength)
    expected, before, now = [0.5], 1.0, 0.5
    for _ in range(7):
        gradient = before + strength * before * before * (now - before)
        before, now = now, now - 0.5 * gradient
        expected.append(now)
    assert result["weights"] == expected
    if strength == 1.0:
        assert result["weights"][1] == 0.25


def test_a_push_of_two_batches_applies_the_sum_of_their_gradients(chief):
    """Gradient of x^2 w^2 / 2 is x^2 w. Shard i holds every other batch, and a set is two neighbours of one shard."""
    result = chief(programs.two_batches_a_push)
    x = np.arange(1.0, 9.0) / 8
    w, expected = 1.0, []
    for first, second in ((0, 2), (1, 3), (4, 6), (5, 7)):
        w -= 0.25 * (x[first] ** 2 * w + x[second] ** 2 * w)
        expected.append(w)
    np.testing.assert_allclose(result["weights"], expected, rtol=0, atol=4 * 2**-53)
    assert result["iterations"] == 4


def test_cached_variables_are_fetched_every_three_steps_and_counted_as_stale(chief):
    """24 batches need 8 fetches of the model; with two workers the third batch on a copy is at least 2 steps old."""
    result = chief(programs.cached_for_three_steps)
    assert result["iterations"] == result["statistics"]["applied"] == 24
    assert 8 * result["model_bytes"] <= result["statistics"]["bytes_pulled"] < 12 * result["model_bytes"]
    ages = {int(age): count for age, count in result["statistics"]["ages"].items()}
    assert max(ages) <= 8
    assert sum(count for age, count in ages.items() if age >= 2) >= 8


def test_bfloat16_halves_the_bytes_and_rounds_by_no_more_than_8_bits(chief):
    """bfloat16 keeps 8 bits: relative rounding 2^-9 of weights and of gradients.

    12 steps of rate 0.1 move a weight by 0.1 * 12 * |g| at most, |g| < 4 here; what rounding changes in g is below
    2^-8 * (|g| + curvature * |w|), curvature < 4 and |w| < 2: 1.2 * 12 / 256 < 0.06.
    """
    whole = chief(programs.in_half_the_bytes, wire_dtype=None)
    short = chief(programs.in_half_the_bytes, wire_dtype="bfloat16")
    pulled = short["statistics"]["bytes_pulled"] / whole["statistics"]["bytes_pulled"]
    assert 0.5 <= pulled < 0.65  # Metrics and counters travel whole.
    differences = [np.abs(a - b).max() for a, b in zip(short["weights"], whole["weights"], strict=True)]
    assert 0 < max(differences) < 0.06


def test_steps_per_epoch_early_stops_and_steps_per_execution_count_applied_steps(chief):
    """First 2 x 5 steps; then 6 rounds of 12 batches, stopped after the third; then 6 rounds in executions of 4."""
    result = chief(programs.fit_twice_with_steps)
    assert result == {"epochs": 2, "after_steps": 10, "after_stop": 13, "after_execution": 19}
