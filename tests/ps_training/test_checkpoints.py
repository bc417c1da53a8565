"""Training on parameter servers that is cut, and goes on from its checkpoint.

A second `fit` with a new model and a new strategy stands for a new process; tests/parameter_server has real ones.
"""

import numpy as np
import pytest

from tests.ps_training import checkpoint_programs
from tfdist_ext.checkpoint import verify_resume

# Policies under which the order of all events is known. One reader never has a stale set; with the clock bound 0, two
# workers' sets of one round are on one version, and the cut is between two rounds.
KNOWN_ORDERS = {
    "bounded 0": {"cut": 4},
    "clock 0, in order": {"cut": 2},
    "asynchronous": {"cut": 8, "reader": "one"},
}


@pytest.mark.parametrize("policy", KNOWN_ORDERS)
def test_c11_a_run_cut_in_two_is_the_whole_run_to_the_last_bit(chief, policy):
    """22 rows in 6 batches, reshuffled in each of 2 epochs, with Adam, dropout and batch normalization."""
    result = chief(checkpoint_programs.cut_in_two, policy=policy, **KNOWN_ORDERS[policy])
    expected, found = result["expected"], result["found"]
    for kind in ("weights", "optimizer"):
        assert all(map(np.array_equal, expected[kind], found[kind])), kind
    assert found["logs"] == expected["logs"]
    assert found["books"] == expected["books"]
    # The second run began in the middle.
    assert 0 < result["num_logs_after"] < len(expected["logs"])


@pytest.mark.parametrize(("before", "after"), [("chief", "chief_of_four"), ("chief_of_four", "chief")])
def test_c15_other_numbers_of_workers_lose_and_repeat_no_row(request, tmp_path, before, after):
    """24 rows one by one; cut after 9 with more in flight, then by 2 or 4 workers to the end of the second epoch."""
    arguments = {"policy": "asynchronous", "directory": str(tmp_path)}
    first = request.getfixturevalue(before)(checkpoint_programs.row_counts, cut=9, **arguments)
    assert first["counts"].sum() == 9
    second = request.getfixturevalue(after)(checkpoint_programs.row_counts, cut=0, **arguments)
    assert second["counts"].tolist() == [2.0] * 24
    assert second["iterations"] == 48


@pytest.mark.parametrize(
    ("kind", "steps_per_epoch", "cuts"),
    [
        ("chief", None, (9, 30)),
        ("function", None, (9, 40)),
        ("unknown", None, (9, 30)),
        ("repeated", 16, (20,)),
    ],
)
def test_c15_every_kind_of_input_goes_on_where_it_was(chief, tmp_path, kind, steps_per_epoch, cuts):
    """Two epochs of 24 rows, or one and a third of endless data in 2 x 16 steps; the counts tell who was used."""
    arguments = {"policy": "bounded 4", "directory": str(tmp_path), "kind": kind}
    for cut in [*cuts, 0]:
        result = chief(checkpoint_programs.row_counts, cut=cut, steps_per_epoch=steps_per_epoch, **arguments)
    if kind != "repeated":
        assert result["counts"].tolist() == [2.0] * 24
        assert result["iterations"] == 48
        return
    assert result["iterations"] == result["counts"].sum() == 32
    assert sorted(set(result["counts"].tolist())) == [1.0, 2.0]


def test_c15_workers_with_datasets_of_their_own_cannot_become_more(chief, chief_of_four, tmp_path):
    arguments = {"policy": "asynchronous", "directory": str(tmp_path), "kind": "function"}
    chief(checkpoint_programs.row_counts, cut=9, **arguments)
    result = chief_of_four(checkpoint_programs.row_counts, cut=0, lengths=(6, 6, 6, 6), **arguments)
    assert "of 2 workers, each with a dataset of its own, and here are 4" in result["error"]


def test_c15_a_custom_loop_of_scheduled_steps_goes_on_with_other_workers(chief, chief_of_four, tmp_path):
    """24 rows one by one: 10 steps by 2 workers, 14 by 4, with 3 scheduled ahead and so in flight at each save."""
    first = chief(checkpoint_programs.scheduled_steps, directory=str(tmp_path), steps=10)
    assert first["counts"].sum() == first["version"] == 10
    second = chief_of_four(checkpoint_programs.scheduled_steps, directory=str(tmp_path), steps=24)
    assert second["counts"].tolist() == [1.0] * 24
    assert second["version"] == 24


def test_c11_in_new_processes_the_cut_run_has_the_same_rows_logs_and_state():
    """Cut in the second epoch of 3 rounds; also the books, the leases and every random stream are compared."""
    report = verify_resume("tests.ps_training.resume_states:synchronous_state", k=5, n=3)
    assert report.is_exact, report.first_difference
    assert report.num_values > 30
