"""Training whose workers somebody else takes for a while goes on where it was; nothing is lost."""

from tests.ps_training import interrupting_programs as programs

_STEPS = {"synchronous": 24}


def test_f2_what_is_on_its_way_survives_whoever_takes_the_workers(chief):
    """24 rows twice, each moving its own weight by 1; a batch of zeros moves nothing and counts as a step."""
    result = chief(programs.while_training)
    for name, run in result.items():
        extra = {"a batch": 4, "itself": 4 * 3}.get(name, 0)
        assert run["counts"] == [2.0] * 24, name
        assert run["steps"] == _STEPS.get(name, 48) + extra, name
        assert run["epochs"] == 2, name
        if name not in ("itself", "a batch"):
            assert run["dropped"] == 0, name
            assert run["applied"] == 48, name


def test_f2_evaluation_goes_on_after_a_prediction_within_it(chief):
    """Row i predicts i + 1. A batch's loss is minus the sum of its two, and counts for two of 24 rows."""
    result = chief(programs.within_evaluation)
    assert result["seen"] == [[float(i) for i in range(1, 25)]] * 2
    assert result["loss"] == -2 * sum(range(1, 25)) / 24


def test_f2_what_was_scheduled_survives_an_evaluation_and_another_coordinator(chief):
    result = chief(programs.between_schedule_and_join)
    assert result["counts"] == [2.0] * 24
    assert result["steps"] == result["results"] == 48


def test_h12_books_and_parameter_servers_agree_after_an_interrupt(chief):
    """Each row moves its own weight by 1: their sum is what was applied, and 24 more after another `fit`."""
    result = chief(programs.interrupted)
    for where, run in result.items():
        assert run["error"] == "KeyboardInterrupt", where
        books, steps, counts = run["between"]
        assert books == steps == counts >= 2 + 2, (where, run)
        assert run["after"] == [books + 24] * 3, (where, run)


def test_g12_a_connection_to_the_only_ps_that_breaks_costs_no_step(chief_of_four):
    """24 rows, two of them twice; the ps itself says whether a step was applied when the call for it failed."""
    for when, run in chief_of_four(programs.broken_connections).items():
        assert run["error"] == "", when
        assert run["counts"] == [2.0, 2.0] + [1.0] * 22, when
        assert run["steps"] == run["books"] == 26 and run["batches"] == 24, when


def test_g12_a_connection_that_breaks_with_several_ps_is_a_typed_error(chief):
    for when, run in chief(programs.broken_connections).items():
        assert run["error"].startswith("ParameterServerLostError") and "checkpoint" in run["error"], when
        assert run["steps"] == run["books"] == sum(run["counts"]), when
