"""All names at all places: many minutes, with `pytest -m sweep tests/conformance`."""

import pytest

from tests.conformance import sweep

pytestmark = pytest.mark.sweep


def test_every_name_is_equal_refused_by_name_or_known_to_differ():
    verdicts = sweep.verdicts_of(sweep.run_all(log=print))
    assert not sweep.faults_of(verdicts)
