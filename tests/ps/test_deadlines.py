"""Bounded staleness on the version clock: the deadline rule."""

import itertools

import hypothesis
import pytest
from hypothesis import strategies as st

from tests.ps.ledgers import Table
from tests.ps.simulation import Simulation, exponential
from tfdist_ext.ps import Batch, BoundedStaleness, Leases
from tfdist_ext.ps.deadlines import feasible, last_appliable
from tfdist_ext.testing.ledger_chaos import LedgerChaos as Chaos

DEADLINES = st.lists(st.integers(0, 8), max_size=6)


def some_order_is_in_time(version, deadlines):
    return any(
        all(version + place <= deadline for place, deadline in enumerate(order))
        for order in itertools.permutations(deadlines)
    )


@hypothesis.given(st.integers(0, 4), DEADLINES)
def test_feasible_is_that_some_order_is_in_time(version, deadlines):
    assert feasible(version, deadlines) == some_order_is_in_time(version, deadlines)


@hypothesis.given(st.integers(0, 4), DEADLINES)
def test_last_appliable_is_what_leaves_the_others_feasible(version, deadlines):
    hypothesis.assume(feasible(version, deadlines))
    limit = last_appliable(version, deadlines)
    for place, deadline in enumerate(deadlines):
        others = deadlines[:place] + deadlines[place + 1 :]
        assert (deadline <= limit) == some_order_is_in_time(version + 1, others)


def slow_first_worker(late="wait"):
    """Two workers, s = 2, and worker 1 comes first three times."""
    table = Table(BoundedStaleness(2, late=late), 2)
    assert table.dispatch() == {0: (0, 0), 1: (1, 0)}
    for position in (1, 2):
        assert table.arrive(1) == "admitted"
        assert table.apply() == [(0, 1, (1, position - 1))]
        assert table.dispatch() == {1: (1, position)}
    # At version 2 the set of worker 0 is at its deadline: nothing may be applied before it.
    assert table.arrive(1) == "held"
    assert table.apply() is None
    # A worker whose set is held takes its next batch at once: deadlines 2, 4 and 4 fit at version 2.
    assert table.dispatch() == {1: (1, 3)}
    assert table.arrive(1) == "held"
    assert table.ledger.statistics.of(1).held == 2
    return table


def test_at_the_bound_the_fast_wait_for_the_slow():
    table = slow_first_worker()
    # Deadlines 2, 4, 4 and 4 would not fit.
    assert table.dispatch() == {}
    assert table.ledger.waiting_for() == (
        "Step 2 waits for worker 0 (batch 0 of shard 0), which has to be applied by version 2; sets of worker 1 are "
        "held for it."
    )
    assert table.arrive(0) == "admitted"
    assert [table.apply() for _ in range(4)] == [[(0, 0, (0, 0))], [(0, 1, (1, 2))], [(0, 1, (1, 3))], None]
    assert table.ledger.num_drops == 0


def test_the_ages_of_held_sets_count_the_wait():
    table = slow_first_worker()
    table.arrive(0)
    ages = []
    while table.apply():
        ages.append(table.applied.sets[0].staleness)
    # Base 0 at version 2, then twice base 2 at versions 3 and 4.
    assert ages == [2, 1, 2]


def test_late_sets_are_given_up_once_and_their_batch_goes_to_the_next_free_worker():
    table = slow_first_worker(late="drop")
    # Giving up the set of worker 0 lets a held one be applied, and its batch is dispatched again at once.
    assert table.dispatch() == {1: (0, 0)}
    (drop,) = table.ledger.drops
    assert (drop.worker, drop.batches, drop.requeued) == (0, (Batch(0, 0),), True)
    assert [table.apply(), table.apply()] == [[(0, 1, (1, 2))], [(0, 1, (1, 3))]]
    assert table.apply() is None
    # What was given up is ignored when it comes.
    assert table.arrive(0) == "dropped"
    assert table.dispatch() == {0: (0, 1)}
    # The batch given up once is waited for: version 4, its deadline.
    assert table.ledger.version == 4
    assert table.arrive(0) == "held"
    assert table.dispatch() == {0: (0, 2)}
    assert table.arrive(0) == "held"
    assert table.dispatch() == {} and table.apply() is None
    assert table.ledger.num_drops == 1
    assert table.arrive(1) == "admitted"
    assert table.apply() == [(0, 1, (0, 0))]


@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(st.integers(0, 2**32), st.integers(0, 5), st.booleans())
def test_no_batch_is_given_up_twice(seed, bound, deaths):
    chaos = Chaos(BoundedStaleness(bound, late="drop"), 4, [8, 8, 6, 3], seed, deaths=deaths)
    chaos.run_epoch(num_random=400)
    given_up = [batch for drop in chaos.ledger.drops for batch in drop.batches]
    assert len(given_up) == len(set(given_up))
    assert set(chaos.applied) == chaos.all_batches


def test_nothing_is_given_up_if_nobody_is_kept_from_work():
    # s = 0 lets one worker compute at a time; the others have to wait anyway.
    table = Table(BoundedStaleness(0, late="drop"), 3, [1, 1, 1])
    assert table.dispatch() == {0: (0, 0)}
    assert table.dispatch() == {}
    assert table.ledger.num_drops == 0


def test_bound_zero_waits_for_the_worker_whose_batch_is_next():
    table = Table(BoundedStaleness(0), 2, [2, 1])
    order = []
    for worker in (0, 1, 0):
        assert list(table.dispatch()) == [worker]
        assert table.arrive(worker) == "admitted"
        order += table.apply()
    assert [batch for _, _, batch in order] == [(0, 0), (1, 0), (0, 1)]
    assert table.ledger.epoch_finished


def test_bound_zero_goes_on_without_a_dead_worker():
    table = Table(BoundedStaleness(0), 2, [1, 1])
    table.dispatch()
    table.lose(0)
    assert table.dispatch() == {1: (0, 0)}
    table.arrive(1), table.apply()
    assert table.dispatch() == {1: (1, 0)}


def test_bound_zero_waits_for_a_worker_busy_with_a_set_of_an_epoch_that_was_closed():
    table = Table(BoundedStaleness(0), 2)
    table.dispatch()
    table.ledger.close_epoch()
    table.ledger.begin_epoch(Leases(2, [1, 1]))
    assert table.dispatch() == {}
    assert table.ledger.waiting_for() == (
        "Step 0 waits for worker 0, busy with sets nobody waits for any more."
    )
    assert table.arrive(0) == "dropped"
    assert table.dispatch() == {0: (0, 0)}


def test_a_set_that_starts_while_another_is_applied_has_the_version_before_as_its_base():
    table = Table(BoundedStaleness(2), 3)
    table.lose(2)
    table.dispatch()
    table.arrive(1)
    apply = table.ledger.next_apply()
    table.join(2)
    # At version 1, two sets of deadline 2 fit.
    assert table.dispatch() == {2: (2, 0)}
    assert table.computing[2].base_version == 0
    table.ledger.applied(apply)
    assert table.dispatch() == {1: (1, 1)}
    assert table.computing[1].base_version == 1


def test_a_worker_computes_on_the_variables_it_has_and_its_real_base_counts():
    table = Table(BoundedStaleness(2), 2, fetch_every_steps=10)
    table.dispatch()
    bases = []
    for _ in range(4):
        table.arrive(1)
        table.apply()
        table.dispatch()
        bases.append((table.computing[1].base_version, table.computing[1].refresh))
        table.arrive(0)
        table.apply()
        table.dispatch()
    # At version 1 a set of base 0 is in time, beside the one of worker 0; at version 3 it is not. Then worker 0
    # computes on version 2 until version 4, where all others are held for it.
    assert bases == [(0, False), (3, True), (4, True), (6, True)]
    assert max(table.ledger.statistics.total().ages) <= 2


def test_fetching_every_third_batch():
    table = Table(BoundedStaleness(100), 1, fetch_every_steps=3)
    seen = []
    for _ in range(7):
        table.dispatch()
        seen.append((table.computing[0].base_version, table.computing[0].refresh, table.computing[0].draw))
        table.arrive(0)
        table.apply()
    assert seen == [
        (0, True, 0), (0, False, 1), (0, False, 2),
        (3, True, 0), (3, False, 1), (3, False, 2),
        (6, True, 0),
    ]  # fmt: skip


def test_fetching_counts_batches_and_pushing_makes_sets_of_them():
    table = Table(BoundedStaleness(100), 1, fetch_every_steps=4, push_every_steps=2)
    seen = []
    for _ in range(5):
        table.dispatch()
        seen.append(
            (table.computing[0].base_version, tuple(one.position for one in table.computing[0].batches))
        )
        table.arrive(0)
        table.apply()
    assert seen == [(0, (0, 1)), (0, (2, 3)), (2, (4, 5)), (2, (6, 7)), (4, (8, 9))]


# Time a step over the ideal 1.5 / N, for 2,000 steps of workers that take 0.5 + Exp(1).
REFERENCE = [
    (8, 7, 1.0, 1.51),
    (8, 16, 1.0, 1.03),
    (8, 32, 1.0, 1.01),
    (8, 7, 10.0, 5.6),
    (8, 28, 10.0, 1.65),
    (8, 80, 10.0, 1.17),
    (50, 49, 1.0, 2.10),
    (50, 100, 1.0, 1.26),
    (50, 200, 1.0, 1.01),
]


@pytest.mark.parametrize(("num_workers", "bound", "slowness", "expected"), REFERENCE)
def test_reference_simulation(num_workers, bound, slowness, expected):
    seeds = range(5 if num_workers == 8 else 2)
    ratios = []
    for seed in seeds:
        seconds = exponential(seed, {0: slowness})
        simulation = Simulation(BoundedStaleness(bound), num_workers, seconds, checked=False).run(2000)
        assert len(simulation.steps) == 2000
        assert max(simulation.ledger.statistics.total().ages) <= bound
        ratios.append(simulation.now / 2000 / (1.5 / num_workers))
    assert sum(ratios) / len(ratios) == pytest.approx(expected, rel=0.1)
