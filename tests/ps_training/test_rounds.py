"""F19: in a round of several batches every loss is that of one device on all their rows, whatever it is."""

import numpy as np

from tests.ps_training import round_programs as programs
from tests.single_host import oracle


def _assert_small(differences):
    assert differences and {k: d for k, d in differences.items() if not d <= oracle.TOLERANCE} == {}


def test_f19_compiled_losses_and_metrics_of_any_kind_in_rounds(chief):
    _assert_small(chief(programs.compiled_losses))


def test_f19_mixtures_of_means_sums_and_masks_in_rounds(chief):
    _assert_small(chief(programs.mixtures))


def test_the_logged_loss_of_a_ragged_round_whose_loss_has_a_denominator_of_its_own(chief):
    """The last round has two rows and one: sets count by their denominators, the loss of a step by its rows."""
    _assert_small(chief(programs.masked_losses))


def test_no_gradient_flows_through_an_assignment(chief):
    """What a layer reads behind its own assignment is a constant to the tape, as on one device."""
    assert chief(programs.read_after_assignment) <= oracle.TOLERANCE


def test_f19_steps_by_hand_of_any_kind_in_rounds(chief):
    _assert_small(chief(programs.steps_by_hand))


def test_f19_tables_whole_and_sharded_in_rounds(chief):
    _assert_small(chief(programs.tables))


def test_f19_a_custom_loop_in_rounds(chief):
    assert chief(programs.custom_loop) <= oracle.TOLERANCE


def test_f19_batches_that_the_chief_sends_in_rounds(chief):
    assert chief(programs.fed_by_the_chief) <= oracle.TOLERANCE


def test_f19_both_halves_draw_the_same_random_numbers(chief):
    one, other = chief(programs.dropped_units)
    for a, b in zip(one, other, strict=True):
        np.testing.assert_array_equal(a, b)


def test_f19_late_sets_are_refused_in_words(chief_of_four):
    """With four workers and one backup a round has three sets, and one of an older version may fill a place in it."""
    words = chief_of_four(programs.refusal)
    assert "`dice`" in words and "max_staleness=0" in words


def test_f19_a_second_half_that_is_lost_is_computed_again(chief):
    """11 rows in rounds of two batches of two, two epochs: 12 second halves, and those of two steps once more."""
    difference, num_calls = chief(programs.broken_second_halves)
    assert difference <= oracle.TOLERANCE and num_calls > 12
