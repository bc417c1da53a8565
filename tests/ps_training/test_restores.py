"""Variables of parameter servers are written, read and copied where they are, and fit any other strategy."""

import numpy as np
import pytest

from tests.ps_training import restore_programs


@pytest.fixture
def run(chief, chief_of_four, worker_pool):
    """Runs `carried` on a cluster with 2 ps, with 1 ps, with 3 ps, or on none."""

    def run_there(place, **arguments):
        if place in ("two ps", "one ps"):
            there = chief if place == "two ps" else chief_of_four
            return there(restore_programs.carried, where="ps", **arguments)
        if place == "three ps":
            # For good: a process has one cluster.
            more = {"where": "ps", "cluster": [1, 3], "num_workers": 1, "fresh": True}
        else:
            more = {"where": place, "num_workers": 1, "devices": 2}
        return worker_pool.run(restore_programs.carried, **arguments, **more)[0]

    return run_there


# Where the state goes next, and into how many shards each variable is split there.
JOURNEY = [
    ("two ps", 3),
    ("one ps", 1),
    ("three ps", 2),
    ("one", 1),
    ("two ps", 2),
    ("mirrored", 1),
    ("one ps", 3),
]


def test_c2_c17_p16_state_moves_between_strategies_and_shards_to_the_last_bit(run, tmp_path):
    """Everywhere into a model whose layers and optimizer have no variables before the restore."""
    expected = None
    for number, (place, shards) in enumerate(JOURNEY):
        source = None if number == 0 else f"{number - 1}"
        result = run(place, directory=str(tmp_path), source=source, target=f"{number}", shards=shards)
        if expected is None:
            expected = result["values"]
            # Each ps wrote its own part, and the chief the description.
            assert sum(name.startswith("state.data-") for name in result["files"]) >= 3
            # Weights, statistics, slots, counters, metrics and the state of dropout.
            assert len(expected) > 20
        assert [len(name) > 0 for name, _ in result["values"]] == [True] * len(expected)
        for (name, value), (_, other) in zip(expected, result["values"], strict=True):
            assert np.array_equal(value, other), (place, shards, name)
    assert any(np.any(value) for name, value in expected if "velocity" in name)


def test_c17_what_does_not_fit_is_named_before_anything_is_changed(run, chief, tmp_path):
    run("two ps", directory=str(tmp_path), source=None, target="here", shards=2)
    message = chief(restore_programs.mismatched, directory=str(tmp_path), source="here")
    # Dense(8) of 12 inputs against Dense(9), with both slots of Adam.
    assert message.count("[12, 8] in the checkpoint, float32[12, 9] in the program") == 3


def test_a_ps_that_does_not_see_the_directory_is_read_a_bounded_part_at_a_time(chief):
    result = chief(restore_programs.through_the_chief)
    for (name, value), (_, other) in zip(result["expected"], result["found"], strict=True):
        assert np.array_equal(value, other), name
    assert result["names"] == result["files"]
    assert len(result["pieces"]) > 3
    for device, num_bytes, num_tensors in result["pieces"]:
        assert device == "/device:CPU:0"
        assert num_bytes <= 200 or num_tensors == 1


def test_a_copy_is_one_call_a_ps_and_what_is_changed_later_is_not_in_it(chief):
    result = chief(restore_programs.copied_while_training_goes_on)
    assert result["changed"]
    assert result["calls"] == 2
    assert result["slices"] > 0
    for (name, value), (_, other) in zip(result["before"], result["restored"], strict=True):
        assert np.array_equal(value, other), name
