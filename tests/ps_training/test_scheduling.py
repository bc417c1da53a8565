"""A scheduled step gets the arguments it was scheduled with."""

import pytest

from tests.ps_training import scheduling_programs as programs


def test_f4_each_step_gets_its_own_arguments(chief):
    """1 + 10 + 100, in whatever form the numbers come; a round of two workers has the mean of two equal gradients."""
    result = chief(programs.sums)
    assert result.keys() == {*programs.KINDS, "synchronous"}
    for kind, total in result.items():
        assert total == pytest.approx(111.0, rel=0, abs=1e-9), kind
