"""What each policy does to rows, late sets and counters, seen through `fit` and custom loops."""

import numpy as np
import pytest

from tests.ps_training import models, programs

WITHOUT_DROPS = ["synchronous", "bounded 0", "bounded 1", "bounded 4", "clock 1", "asynchronous"]


@pytest.mark.parametrize("policy", WITHOUT_DROPS)
def test_p10_uneven_shards_of_7_and_3_rows_apply_every_row_once(chief, policy):
    """Each row moves its own weight by 1. The epoch ends by itself, and so does the next one."""
    result = chief(programs.rows_applied, policy=policy, lengths=[7, 3], epochs=2)
    assert result["counts"].tolist() == [2.0] * 10
    # 7 rounds of Synchronous, the last 4 of one set, or one step for each of the 10 rows.
    assert result["iterations"] == 2 * (7 if policy == "synchronous" else 10)
    assert result["epochs"] == 2


@pytest.mark.parametrize("policy", ["one backup", "bounded 1, drop"])
def test_requeued_drops_lose_no_row(chief, policy):
    result = chief(programs.rows_applied, policy=policy, lengths=[6, 6], requeue=True)
    assert result["counts"].tolist() == [1.0] * 12
    assert result["statistics"]["applied"] == 12


def test_dropped_rows_are_those_that_are_missing(chief):
    result = chief(programs.rows_applied, policy="one backup", lengths=[6, 6])
    missing = int(np.sum(result["counts"] == 0))
    assert set(result["counts"].tolist()) <= {0.0, 1.0}
    assert missing == result["statistics"]["dropped"] > 0
    assert result["statistics"]["applied"] + result["statistics"]["dropped"] == 12
    assert result["iterations"] == result["statistics"]["applied"]


def test_p2_a_hundred_scheduled_steps_count_a_hundred(chief):
    """Adam's own counter, and the schedule that follows it: the rate drops after step 50."""
    result = chief(programs.scheduled_steps)
    assert result["iterations"] == 100
    assert result["rate"] == pytest.approx(0.001)
    assert result["done"] and len(result["losses"]) == 100
    assert np.mean(result["losses"][-10:]) < np.mean(result["losses"][:10])


def test_p2_tensorflows_own_coordinator_counts_a_hundred_as_well(chief):
    result = chief(programs.scheduled_steps, stock=True)
    assert result["iterations"] == 100
    assert result["rate"] == pytest.approx(0.001)


def test_p4_updates_are_rounds_and_nothing_stale_is_applied(chief_of_four):
    """4 workers of 6 rows each, one of them slow: 6 rounds of 4 sets, all of the present version."""
    result = chief_of_four(programs.with_a_slow_worker, policy="synchronous", steps=6, slow_seconds=0.1)
    assert result["iterations"] == len(result["applied"]) == 6
    assert all([one[1] for one in step] == [0, 0, 0, 0] for step in result["applied"])
    assert result["counts"].tolist() == [1.0] * 24
    assert result["dropped"] == []


def test_p5_a_quorum_of_3_of_4_drops_the_late_set_and_says_whose_and_when(chief_of_four):
    # Long enough for the other three to make all their rounds meanwhile, on a busy machine too.
    result = chief_of_four(programs.with_a_slow_worker, policy="one backup", steps=6, slow_seconds=1.0)
    first = result["applied"][0]
    assert sorted(worker for worker, _, _ in first) == [0, 1, 2]
    assert len(result["dropped"]) == result["statistics"]["dropped"] >= 1
    assert {drop["worker"] for drop in result["dropped"]} == {3}
    assert all(drop["base_version"] < drop["version"] for drop in result["dropped"])
    assert all(drop["reason"] for drop in result["dropped"])
    assert result["workers"]["3"]["dropped"] == result["statistics"]["dropped"]
    assert all(staleness == 0 for step in result["applied"] for _, staleness, _ in step)
    assert int(np.sum(result["counts"] == 0)) == result["statistics"]["dropped"]


def test_p6_backup_workers_compute_on_data_of_their_own(chief_of_four):
    """Nobody is slow by design: over 6 rounds of 3 of 4, each of the 4 gets sets in."""
    result = chief_of_four(
        programs.with_a_slow_worker, policy="one backup, stale by 2", steps=6, slow_seconds=0.0
    )
    assert all(counts["applied"] > 0 for counts in result["workers"].values())
    assert len(result["workers"]) == 4


@pytest.mark.parametrize("bound", [0, 1, 3])
def test_p7_clocks_are_never_further_apart_than_the_bound(chief, bound):
    """At a completion the gap between the two workers is at most bound + 1, as long as both have data."""
    result = chief(programs.with_a_slow_worker, policy=f"clock {bound}", steps=8, slow_seconds=0.25)
    clocks, gaps = [0, 0], []
    for ((worker, _, _),) in result["applied"]:
        clocks[worker] += 1
        if max(clocks) < 8:
            gaps.append(abs(clocks[0] - clocks[1]))
    assert max(gaps) <= bound + 1
    assert result["counts"].tolist() == [1.0] * 16
    # One is slow: the fast one uses what it is allowed.
    assert max(gaps) >= min(bound, 2)


def test_p7_without_a_bound_is_asynchronous(chief):
    result = chief(programs.with_a_slow_worker, policy="clock unbounded", steps=8, slow_seconds=0.8)
    workers = [worker for ((worker, _, _),) in result["applied"]]
    assert result["counts"].tolist() == [1.0] * 16
    assert workers[:6].count(0) >= 5  # The fast worker does not wait for the one of 0.8 s a batch.


@pytest.mark.parametrize("policy", ["bounded 1", "bounded 4", "bounded 1, drop", "one backup, stale by 2"])
def test_no_applied_set_is_older_than_the_bound(chief, policy):
    bound = {"bounded 1": 1, "bounded 4": 4, "bounded 1, drop": 1, "one backup, stale by 2": 2}[policy]
    result = chief(programs.with_a_slow_worker, policy=policy, steps=8, slow_seconds=0.03)
    assert max(staleness for step in result["applied"] for _, staleness, _ in step) <= bound
    books = result["statistics"]
    assert books["dispatched"] == books["applied"] + books["dropped"] + books["lost"] + books["ran_out"]


def test_every_policy_of_the_table_is_used():
    assert set(WITHOUT_DROPS) <= set(models.POLICIES)
