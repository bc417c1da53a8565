"""A variable that something may know already stays where and what it is; the table says where variables are."""

import pytest

from tests.ps_training import identity_programs as programs


def test_f3_what_knows_a_variable_before_training_sees_it_trained(chief):
    """Functions, models, checkpoints and datasets made before `fit` see what the layers have after it."""
    result = chief(programs.identities)
    assert result.keys() == programs.KINDS.keys()
    for kind, (seen, right) in result.items():
        assert seen == pytest.approx(right, rel=1e-12), kind


def test_f3_h19_the_table_of_placement_is_where_the_variables_are(chief):
    """Adam keeps two slots for each variable. New variables lie largest first, 16 weights of 8 bytes on each ps."""
    result = chief(programs.places)
    for name, run in result.items():
        for variable, truth in run["truth"].items():
            assert run["rows"][variable] == truth, (name, variable)
        assert not [variable for variable in run["rows"] if variable.endswith(")")], name
    assert result["new"]["loads"] == [128, 128]
    assert sorted(result["known"]["loads"]) == [64, 192]
    assert result["shards"]["loads"] == [128, 128]


def test_h15_models_are_freed_with_their_graphs(chief):
    assert chief(programs.models_that_are_deleted) == (0, 0)
