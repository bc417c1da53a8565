"""Losses, states and pipelines of a user's own on parameter servers: one device's, or refused by name."""

from tests.ps_training import kind_programs as programs
from tests.single_host import oracle


def test_f9_what_a_layer_counts_in_rounds(chief):
    """12 rows in 6 batches, two a round: 3 steps."""
    assert chief(programs.counted_states) == {"rows": 12.0, "steps": 3.0, "float_steps": 3.0}


def test_f19_any_loss_where_a_batch_is_a_step(chief):
    for name, found in chief(programs.losses).items():
        assert found <= oracle.TOLERANCE, name


def test_f8_rows_of_pipelines_without_order_are_applied_once(chief):
    for name, counts in chief(programs.unordered_rows).items():
        assert counts == [1.0] * 12, name
