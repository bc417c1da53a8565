"""The life of sets and workers, and the books of it."""

import math

import pytest

from tests.ps.ledgers import Table
from tests.ps.simulation import Simulation, exponential
from tfdist_ext.ps import Asynchronous, Batch, BoundedStaleness, Leases, Ledger, Synchronous
from tfdist_ext.ps.statistics import age_percentiles


def test_p10_ten_rows_in_shards_of_seven_and_three_each_once_and_a_clean_end():
    policies = [
        Synchronous(),
        Synchronous(num_backup_workers=1),
        BoundedStaleness(0),
        BoundedStaleness(2),
        BoundedStaleness(2, late="drop"),
        BoundedStaleness(1, clock="worker"),
        Asynchronous(),
    ]
    for policy in policies:
        simulation = Simulation(policy, 2, exponential(7), [7, 3], requeue_dropped=True).run()
        assert simulation.ledger.epoch_finished
        simulation.close()
        every = [(shard, at) for shard, length in enumerate((7, 3)) for at in range(length)]
        assert sorted(simulation.batches()) == every
        total = simulation.ledger.statistics.total()
        assert total.applied == total.rows_applied == 10
        assert total.ran_out >= 2  # Each end is found by looking.


def test_the_books_balance():
    simulation = Simulation(BoundedStaleness(4, late="drop"), 4, exponential(1, {3: 8.0}), [20] * 4)
    simulation.at(3.0, lambda: simulation.ledger.lost(0))
    simulation.at(9.0, lambda: simulation.ledger.joined(0))
    simulation.run()
    simulation.close()
    statistics = simulation.ledger.statistics
    for worker in range(4):
        counts = statistics.of(worker)
        assert counts.dispatched == counts.applied + counts.dropped + counts.lost + counts.ran_out
        assert counts.dispatched == sum(one.worker == worker for one in simulation.dispatched)
    assert statistics.of(0).lost >= 1 and statistics.of(0).num_joined == 2
    assert statistics.total().dropped == simulation.ledger.num_drops > 0
    plain = statistics.as_dict()
    assert plain["total"]["applied"] == 80
    assert sum(plain["total"]["ages"].values()) == 80
    assert plain["total"]["age_max"] <= 4
    assert set(plain["workers"]) == {0, 1, 2, 3}


def test_seconds_between_a_set_and_the_next_one():
    table = Table(Synchronous(), 2)
    table.dispatch()
    table.now = 1.0
    table.arrive(0)
    table.now = 5.0
    table.arrive(1)
    table.apply()
    table.now = 5.5
    table.dispatch()
    assert [table.ledger.statistics.of(worker).waited_seconds for worker in (0, 1)] == [4.5, 0.5]


def test_percentiles_by_nearest_rank():
    assert age_percentiles({}) == {"age_p50": None, "age_p95": None, "age_max": None}
    assert age_percentiles({2: 1}) == {"age_p50": 2, "age_p95": 2, "age_max": 2}
    assert age_percentiles({0: 10, 1: 9, 7: 1}) == {"age_p50": 0, "age_p95": 1, "age_max": 7}


def test_no_more_is_dispatched_than_can_be_applied():
    table = Table(Asynchronous(), 4, max_steps=3)
    assert sorted(table.dispatch()) == [0, 1, 2]
    for worker in range(3):
        table.arrive(worker)
        table.apply()
    assert table.ledger.epoch_finished
    assert table.dispatch() == {} and table.apply() is None
    table.ledger.close_epoch()
    assert table.ledger.num_drops == 0
    # The next epoch goes on with the next batches.
    table.ledger.begin_epoch(table.leases, 4)
    assert table.dispatch() == {0: (0, 1), 1: (1, 1), 2: (2, 1), 3: (3, 0)}
    assert all(one.refresh and one.base_version == 3 for one in table.computing.values())


@pytest.mark.parametrize(("requeue", "expected"), [(False, (3, 2)), (True, (3, 1))])
def test_what_is_in_flight_when_an_epoch_is_closed_is_dropped_or_read_again(requeue, expected):
    table = Table(Synchronous(num_backup_workers=1, max_staleness=2), 4, max_steps=1, requeue_dropped=requeue)
    table.dispatch()
    for worker in range(3):
        table.arrive(worker)
    table.apply()
    assert table.ledger.epoch_finished
    table.ledger.close_epoch()
    assert table.ledger.drops[-1].worker == 3
    assert table.ledger.drops[-1].requeued == requeue
    assert table.leases.num_dropped == (0 if requeue else 1)
    # Busy with what nobody wants any more; the next epoch does not get its set.
    table.ledger.begin_epoch(table.leases, 1)
    started = table.dispatch()
    assert sorted(started) == [0, 1, 2]
    assert ((3, 0) in started.values()) == requeue
    assert table.arrive(3) == "dropped"
    assert table.ledger.statistics.of(3).rows_dropped == 1


def test_an_end_found_by_a_set_of_an_earlier_epoch_is_an_end_of_its_own_data():
    table = Table(Asynchronous(), 2, max_steps=1)
    table.dispatch()
    (old,) = [one for one in table.computing.values()]
    table.ledger.close_epoch()
    data = Leases(2)
    table.ledger.begin_epoch(data)
    table.ledger.ran_out(old.set_id, Batch(0, 0))
    table.ledger.check()
    assert table.leases.end_of(0) == 0 and data.end_of(0) is None
    assert table.ledger.statistics.of(0).dropped == 0
    assert table.ledger.statistics.of(0).ran_out == 1


def test_an_epoch_begins_with_fresh_variables_and_no_time_waited():
    table = Table(Asynchronous(), 1, max_steps=1, fetch_every_steps=10)
    table.dispatch()
    table.arrive(0), table.apply()
    table.ledger.close_epoch()
    table.now = 1000.0
    table.ledger.begin_epoch(table.leases, 1)
    table.dispatch()
    assert table.computing[0].refresh and table.computing[0].base_version == 1
    assert table.ledger.statistics.of(0).waited_seconds == 0.0


def test_the_end_of_an_epoch_of_steps_can_be_moved_back():
    table = Table(Asynchronous(), 2, max_steps=1)
    assert sorted(table.dispatch()) == [0]
    table.arrive(0), table.apply()
    assert table.ledger.epoch_finished
    table.ledger.allow_steps(2)
    assert not table.ledger.epoch_finished
    assert sorted(table.dispatch()) == [0, 1]


def test_overdue_sets_are_lost_and_their_worker_gets_nothing_before_they_come():
    table = Table(Asynchronous(), 2, [3, 3])
    table.dispatch()
    late = table.computing[1]
    table.now = 50.0
    table.arrive(0), table.apply(), table.dispatch()
    assert table.ledger.overdue(59.0, 60.0) == []
    assert table.ledger.overdue(60.0, 60.0) == [late.set_id]
    table.ledger.lost_set(late.set_id)
    assert table.ledger.overdue(1e9, 60.0) == [table.computing[0].set_id]
    table.ledger.check()
    applied = []
    while not table.ledger.epoch_finished:
        table.arrive(0)
        applied += table.apply()
        assert 1 not in table.dispatch()
    assert [batch for _, _, batch in applied] == [(0, 1), (1, 0), (1, 1), (0, 2), (1, 2)]
    assert table.arrive(1) == "dropped"
    assert table.ledger.statistics.of(1).lost == 1


def test_a_stalled_worker_works_again_once_its_set_has_come():
    table = Table(Asynchronous(), 1)
    table.dispatch()
    table.ledger.lost_set(table.computing[0].set_id)
    assert table.dispatch() == {}
    assert table.ledger.waiting_for() == (
        "Step 0 waits for a worker: none of 1 is there; worker 0 did not come back in time."
    )
    assert table.arrive(0) == "dropped"
    assert table.dispatch() == {0: (0, 0)}


def test_a_lost_worker_takes_its_held_and_admitted_sets_with_it():
    table = Table(BoundedStaleness(2), 2)
    table.dispatch()
    for _ in range(2):
        table.arrive(1), table.apply(), table.dispatch()
    assert table.arrive(1) == "held"
    table.dispatch()
    table.lose(1)
    assert table.ledger.statistics.of(1).lost == 2
    assert table.leases.pending() == [Batch(1, 2), Batch(1, 3)]
    table.join(1)
    assert table.dispatch() == {1: (1, 2)}
    assert table.computing[1].refresh


def test_a_set_of_a_worker_that_died_while_it_was_applied():
    for survives in (True, False):
        table = Table(Asynchronous(), 2, [1, 1])
        table.dispatch()
        table.arrive(0)
        apply = table.ledger.next_apply()
        table.lose(0)
        if survives:
            table.ledger.applied(apply)
        else:
            # Not listed as lost, but its tensors died with the worker, also if it is there again.
            table.join(0)
            table.ledger.apply_failed(apply, [])
        table.ledger.check()
        assert table.ledger.version == (1 if survives else 0)
        assert table.leases.pending() == ([] if survives else [Batch(0, 0)])


def test_an_apply_that_failed_without_a_loss_is_tried_again():
    table = Table(Synchronous(), 2)
    table.dispatch()
    table.arrive(0), table.arrive(1)
    first = table.ledger.next_apply()
    assert table.ledger.is_applying and table.ledger.next_apply() is None
    table.ledger.apply_failed(first, [])
    assert not table.ledger.is_applying
    second = table.ledger.next_apply()
    assert second is not first and second.sets == first.sets
    with pytest.raises(ValueError, match="Step 0 is not being applied"):
        table.ledger.applied(first)
    table.ledger.applied(second)
    assert table.ledger.version == 1


def test_part_of_a_set_does_not_exist():
    table = Table(Asynchronous(), 1, [None], push_every_steps=3)
    table.dispatch()
    one = table.computing[0]
    assert one.batches == (Batch(0, 0), Batch(0, 1), Batch(0, 2))
    table.ledger.ran_out(one.set_id, Batch(0, 2))
    table.ledger.check()
    assert table.arrive(0, rows=8) == "admitted"
    table.apply()
    assert table.applied.sets[0].batches == (Batch(0, 0), Batch(0, 1))
    assert table.ledger.epoch_finished
    assert table.ledger.statistics.of(0).ran_out == 0


def test_late_news_of_settled_sets_is_ignored():
    table = Table(Asynchronous(), 1)
    table.dispatch()
    old = table.computing[0].set_id
    table.lose(0)
    verdict = table.ledger.arrived(old, rows=1)
    assert (verdict.outcome, verdict.reason) == ("dropped", "it was settled before")
    table.ledger.ran_out(old, Batch(0, 0))
    table.ledger.lost_set(old)
    table.ledger.lost(0)
    table.ledger.lost(7)
    table.ledger.check()
    assert table.leases.pending() == [Batch(0, 0)]


def test_wrong_calls_are_refused():
    table = Table(Asynchronous(), 2)
    table.dispatch()
    with pytest.raises(ValueError, match="Set 99 was never dispatched"):
        table.ledger.arrived(99, rows=1)
    with pytest.raises(ValueError, match="is not in set 0"):
        table.ledger.ran_out(0, Batch(1, 0))
    with pytest.raises(RuntimeError, match="An epoch is open"):
        table.ledger.begin_epoch(Leases(2))
    table.arrive(0)
    with pytest.raises(ValueError, match="Set 0 has arrived before"):
        table.ledger.arrived(0, rows=1)
    apply = table.ledger.next_apply()
    with pytest.raises(RuntimeError, match="Step 0 is being applied"):
        table.ledger.close_epoch()
    with pytest.raises(ValueError, match="Call `apply_failed` instead"):
        table.ledger.lost_set(0)
    table.ledger.applied(apply)
    table.ledger.close_epoch()
    with pytest.raises(ValueError, match="`max_steps`.*received -1"):
        table.ledger.begin_epoch(Leases(2), -1)


def test_before_and_after_an_epoch_nothing_happens():
    ledger = Ledger(Synchronous(), 2, version=12, clock=lambda: 0.0)
    ledger.joined(0)
    assert ledger.epoch_finished and ledger.dispatches() == [] and ledger.next_apply() is None
    assert ledger.waiting_for() == "No epoch is open."
    ledger.begin_epoch(Leases(2, [0, 0]))
    assert ledger.epoch_finished and ledger.waiting_for() == "The epoch is finished."
    assert ledger.version == 12
    ledger.check()


def test_weights_give_the_shares_and_zero_rows_give_none():
    table = Table(Synchronous(), 2)
    table.dispatch()
    table.ledger.arrived(0, rows=4, weight=1.0)
    table.ledger.arrived(1, rows=4, weight=3.0)
    assert [one.share for one in table.ledger.next_apply().sets] == [0.25, 0.75]
    table = Table(Synchronous(), 2)
    table.dispatch()
    table.arrive(0, rows=0), table.arrive(1, rows=0)
    table.apply()
    assert [one.share for one in table.applied.sets] == [0.0, 0.0]


def test_the_last_thousand_drops_are_kept():
    seconds = {0: 1.0, 1: 1.5}
    simulation = Simulation(
        Synchronous(num_backup_workers=1), 2, lambda one: seconds[one.worker], checked=False
    ).run(3000)
    assert simulation.ledger.num_drops > 1000 == len(simulation.ledger.drops)


def test_memory_does_not_grow_with_the_data():
    simulation = Simulation(BoundedStaleness(8), 4, exponential(0), checked=False, fetch_every_steps=3).run(
        3000
    )
    books = simulation.ledger._books
    assert len(books.sets) <= 4 and len(books._draws) <= 5
    assert not simulation.leases.pending() and len(simulation.leases.in_flight) <= 4


def test_a_stopped_worker_ends_nothing():
    simulation = Simulation(
        Synchronous(), 3, lambda one: math.inf if one.worker == 2 else 1.0, [4] * 3, timeout_seconds=20.0
    ).run()
    assert simulation.batches() == [(shard, step) for step in range(4) for shard in range(3)]
    assert simulation.now < 40.0
