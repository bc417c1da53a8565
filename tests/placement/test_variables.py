"""Variables lie where the rule says, and no placement is much better."""

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfdist_ext.placement import PlacementRow, PlacementTable, largest_first

SIZES = st.dictionaries(st.text("abcdefgh", min_size=1, max_size=3), st.integers(0, 40), max_size=7)


def loads_of(sizes, placed, num_tasks):
    loads = [0] * num_tasks
    for name, task in placed.items():
        loads[task] += sizes[name]
    return loads


def best_makespan(sizes, num_tasks):
    """Tries every placement."""
    placements = itertools.product(range(num_tasks), repeat=len(sizes))
    return min(max(loads_of(sizes, dict(zip(sizes, tasks, strict=True)), num_tasks)) for tasks in placements)


@given(SIZES, st.integers(1, 3))
def test_within_grahams_bound_of_the_best_placement(sizes, num_tasks):
    placed = largest_first(sizes, num_tasks)
    assert list(placed) == list(sizes)
    assert set(placed.values()) <= set(range(num_tasks))
    bound = (4 / 3 - 1 / (3 * num_tasks)) * best_makespan(sizes, num_tasks)
    assert max(loads_of(sizes, placed, num_tasks)) <= bound + 1e-9
    assert largest_first(dict(sizes), num_tasks) == placed


def test_grahams_own_worst_case_is_reached():
    # m = 2: 3, 3, 2, 2, 2 can be split 6 + 6; largest first gives 7 + 5, and 7 = (4/3 - 1/6) 6.
    placed = largest_first({"a": 3, "b": 3, "c": 2, "d": 2, "e": 2}, 2)
    assert placed == {"a": 0, "b": 1, "c": 0, "d": 1, "e": 0}


def test_equal_sizes_are_dealt_in_the_order_of_appearance():
    assert largest_first({"z": 4, "a": 4, "m": 4, "b": 4}, 3) == {"z": 0, "a": 1, "m": 2, "b": 0}


def test_what_is_there_already_counts():
    # 10 | 0: b (7) to task 1, a (5) to task 1 (7 < 10), c (2) to task 0 (10 < 12).
    assert largest_first({"a": 5, "b": 7, "c": 2}, 2, occupied=[10, 0]) == {"a": 1, "b": 1, "c": 0}


def test_slots_count_with_their_variable():
    table = PlacementTable.largest_first({"a": 10, "b": 8, "c": 8}, 2, slot_bytes={"b": 16})
    # Loads 24 (b), 10 (a), 8 (c): b alone on task 0.
    assert [row.task for row in table.rows] == [1, 0, 1]
    assert table.totals == (24, 18)
    assert table.imbalance == pytest.approx(24 / 21, rel=1e-15)


def test_the_table_reads_well_and_is_json():
    rows = (
        PlacementRow(variable="embedding", num_bytes=1_000_000, slot_bytes=2_000_000, task=1),
        PlacementRow(variable="b", num_bytes=4, task=0),
    )
    table = PlacementTable(rows, 3)
    assert str(table).splitlines() == [
        "variable       bytes  slot bytes  task",
        "embedding  1,000,000   2,000,000  ps:1",
        "b                  4           0  ps:0",
        "total              4           0  ps:0",
        "total      1,000,000   2,000,000  ps:1",
        "total              0           0  ps:2",
        "imbalance 3.00 (fullest / mean)",
    ]
    written = json.loads(table.to_json())
    assert written["totals"] == [4, 3_000_000, 0]
    assert written["imbalance"] == pytest.approx(3_000_000 * 3 / 3_000_004)
    assert written["rows"][0] == {
        "variable": "embedding",
        "num_bytes": 1_000_000,
        "slot_bytes": 2_000_000,
        "task": 1,
    }


def test_nothing_is_balanced():
    assert PlacementTable((), 2).imbalance == 1.0


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (lambda: largest_first({"a": 1}, 0), "`num_tasks` must be at least 1; received 0"),
        (lambda: largest_first({"a": 1}, 2, [0]), "one entry for each of 2 tasks; received 1"),
        (lambda: largest_first({"a": -1}, 2), "received -1 for 'a'"),
        (lambda: PlacementTable((PlacementRow(variable="a", num_bytes=1, task=2),), 2), "only 2 ps"),
        (lambda: PlacementTable((PlacementRow(variable="a", num_bytes=1, task=0),) * 2, 1), "twice"),
    ],
)
def test_wrong_arguments(wrong, text):
    with pytest.raises(ValueError, match=text):
        wrong()
