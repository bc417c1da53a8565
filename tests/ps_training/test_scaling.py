"""Scaled losses, compensated delays, and optimizers that are more than Keras' own."""

import numpy as np
import pytest

from tests.ps_training import scaling_programs as programs
from tests.single_host.oracle import TOLERANCE


@pytest.fixture(scope="module")
def counted(chief):
    return chief(programs.counted)


def test_f6_each_set_is_unscaled_by_the_scale_it_was_computed_with(counted):
    """12 steps of minus the gradient, which is -1. With a growth in each step the scale doubles 12 times (or 6)."""
    start = 2.0**15
    assert counted["growing"] == [12.0, start * 2**12]
    assert counted["growing, sequential"] == [12.0, start * 2**12]
    assert counted["growing, asynchronous"] == [12.0, start * 2**12]
    assert counted["growing, pushes of two"] == [12.0, start * 2**6]
    assert counted["growing, copies"] == [12.0, start * 2**6]
    assert counted["factor"] == [12.0, None]


def test_f6_a_step_that_is_not_finite_is_left_out_and_halves_the_scale_once(chief):
    """11 rows of 12 count: steps 1-4 double once (after 3), 5 halves, 6-12 double twice."""
    result = chief(programs.overflowing)
    assert result["alone"] == [11.0, 2.0**15 * 2 / 2 * 4]
    assert result["sequential"] == result["alone"]
    # Which scale the infinite row was computed with is a matter of time; it halves that one, once.
    weight, scale = result["old"]
    assert weight == 11.0
    assert scale in [2.0**power for power in range(15, 19)]


def test_f7_compensation_sees_gradients_that_are_not_scaled(chief, counted):
    """A step is 1 - 0.04 * (w - w_old), which is 1 - 0.04 * 4 at least with sets that are 4 steps of 1 old."""
    for name in ("compensated", "compensated, not scaled"):
        assert 12 * 0.84 <= counted[name][0] <= 12.0, name
    plain, scaled, factor = chief(programs.compensated_by_one)
    assert scaled == plain and factor == plain


def test_h4_optimizers_that_override_apply_train_as_on_one_device(chief):
    result = chief(programs.of_their_own)
    assert result.keys() == {*programs.OWN, "multi, shards"}
    for name, (difference, counts) in result.items():
        assert difference < TOLERANCE, (name, difference)
        assert counts, name


def test_h4_one_optimizer_of_two_models_works_or_is_refused_as_on_one_device(chief):
    result = chief(programs.one_for_two_models)
    for distributed, alone in zip(*result["shared"], strict=True):
        np.testing.assert_allclose(distributed, alone, rtol=0, atol=TOLERANCE)
    for text in result["apart"]:
        assert "nothing trained" in text, text
