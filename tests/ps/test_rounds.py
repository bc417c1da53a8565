"""Synchronous training, with and without backup workers."""

import math

import pytest

from tests.ps.ledgers import Table
from tests.ps.simulation import Simulation, exponential
from tfdist_ext.ps import Batch, Synchronous, TooFewWorkers


def fixed(*seconds):
    return lambda dispatch: seconds[dispatch.worker]


def test_p4_with_a_sleeping_worker_updates_are_rounds_and_none_is_stale():
    simulation = Simulation(Synchronous(), 3, fixed(1.0, 1.0, 10.0), [5, 5, 5]).run()
    assert len(simulation.steps) == simulation.ledger.version == 5
    assert simulation.ledger.statistics.total().ages == {0: 15}
    assert simulation.now == 60.0  # Five rounds of ten seconds, and one to find the end of the data.
    assert simulation.batches() == [(shard, step) for step in range(5) for shard in range(3)]


def test_p5_a_quorum_of_three_of_four_drops_and_counts_the_late_one():
    table = Table(Synchronous(num_backup_workers=1), 4)
    assert table.dispatch() == {worker: (worker, 0) for worker in range(4)}
    assert [table.arrive(worker, rows=2) for worker in (2, 0)] == ["admitted", "admitted"]
    assert table.apply() is None
    assert table.arrive(1, rows=4) == "admitted"
    assert table.apply() == [(0, 0, (0, 0)), (1, 1, (1, 0)), (2, 2, (2, 0))]
    assert [one.share for one in table.applied.sets] == [0.25, 0.5, 0.25]
    (drop,) = table.ledger.drops
    assert (drop.worker, drop.batches, drop.base_version) == (3, (Batch(3, 0),), 0)
    assert "step 0" in drop.reason and not drop.requeued
    # The slow worker's slot is not given away: the round of the others goes on without it.
    assert table.dispatch() == {worker: (worker, 1) for worker in range(3)}
    assert table.arrive(3, rows=7) == "dropped"
    statistics = table.ledger.statistics.of(3)
    assert (statistics.dropped, statistics.rows_dropped, statistics.applied) == (1, 7, 0)
    # It takes part in the open round with its next batch.
    assert table.dispatch() == {3: (3, 1)}


def test_p5_a_set_that_comes_while_the_step_is_applied_is_too_late():
    table = Table(Synchronous(num_backup_workers=1), 2)
    table.dispatch()
    table.arrive(0)
    apply = table.ledger.next_apply()
    assert table.arrive(1) == "held"
    assert table.dispatch() == {}
    table.ledger.applied(apply)
    assert [drop.worker for drop in table.ledger.drops] == [1]
    assert table.dispatch() == {0: (0, 1), 1: (1, 1)}


def test_p5_a_set_that_comes_while_a_step_fails_takes_part_in_it():
    table = Table(Synchronous(num_backup_workers=1), 2)
    table.dispatch()
    table.arrive(0)
    apply = table.ledger.next_apply()
    assert table.arrive(1) == "held"
    table.ledger.apply_failed(apply, [table.last[0].set_id])
    table.ledger.check()
    assert table.apply() == [(1, 1, (1, 0))]
    assert table.ledger.statistics.of(0).lost == 1
    assert table.dispatch() == {0: (0, 0), 1: (1, 1)}


def test_p6_backup_workers_compute_live_data():
    simulation = Simulation(Synchronous(num_backup_workers=1), 4, exponential(3), [50] * 4).run()
    for worker in range(4):
        statistics = simulation.ledger.statistics.of(worker)
        # All are equally fast: each is among the first three about three times in four.
        assert statistics.applied >= 20 and statistics.dropped >= 1
    assert all(shard == worker for worker, shard in shards_of(simulation))


def shards_of(simulation):
    return {(one.worker, one.batches[0].shard) for one in simulation.dispatched}


@pytest.mark.parametrize("sleep", [5.5, 50.5, 500.5, math.inf])
def test_with_one_backup_the_step_time_is_independent_of_one_sleeper(sleep):
    simulation = Simulation(Synchronous(num_backup_workers=1), 4, fixed(1.0, 1.0, 1.0, sleep)).run(20)
    assert simulation.now == 20.0
    assert len(simulation.steps) == 20


def test_one_of_four_ten_times_slower_ends_with_every_batch_counted():
    # Ten rounds of one second; the slow one's first set comes at 10.5, too late, and its other nine at 10.5 each.
    seconds = fixed(1.0, 1.0, 1.0, 10.5)
    simulation = Simulation(Synchronous(num_backup_workers=1), 4, seconds, [10] * 4, known=True).run()
    assert simulation.now == 105.0
    assert len(simulation.steps) == 19
    assert (simulation.leases.num_applied, simulation.leases.num_dropped) == (39, 1)
    assert simulation.ledger.num_drops == 1


def test_requeued_batches_are_read_by_whoever_is_free():
    seconds = fixed(1.0, 1.0, 1.0, 10.5)
    policy = Synchronous(num_backup_workers=1)
    simulation = Simulation(policy, 4, seconds, [10] * 4, known=True, requeue_dropped=True).run()
    assert sorted(simulation.batches()) == [(shard, position) for shard in range(4) for position in range(10)]
    assert simulation.ledger.num_drops >= 1
    (second,) = [one for one in simulation.dispatched[4:] if one.batches[0] == Batch(3, 0)]
    assert second.worker != 3 and second.base_version == 1


def test_a_late_set_fills_its_slot_of_the_next_round():
    table = Table(Synchronous(num_backup_workers=1, max_staleness=1), 3)
    table.dispatch()
    table.arrive(0), table.arrive(1)
    assert table.apply() == [(0, 0, (0, 0)), (1, 1, (1, 0))]
    assert table.ledger.num_drops == 0
    assert table.dispatch() == {0: (0, 1), 1: (1, 1)}
    assert table.arrive(2) == "admitted"
    # One slot a worker: it computes nothing more for this round.
    assert table.dispatch() == {}
    table.arrive(0)
    assert table.apply() == [(0, 0, (0, 1)), (2, 2, (2, 0))]
    assert [one.staleness for one in table.applied.sets] == [0, 1]
    assert table.applied.factor == 1.0


def test_a_set_older_than_the_bound_is_dropped():
    table = Table(Synchronous(num_backup_workers=1, max_staleness=1), 2)
    table.dispatch()
    for step in range(2):
        table.arrive(0)
        assert table.apply() == [(0, 0, (0, step))]
        table.dispatch()
    # At version 2 the set of base 0 is two steps old.
    assert [drop.worker for drop in table.ledger.drops] == [1]
    assert table.arrive(1) == "dropped"


def test_a_late_set_is_held_while_the_round_is_complete_and_enters_the_next_one():
    table = Table(Synchronous(num_backup_workers=1, max_staleness=1), 2)
    table.dispatch()
    table.arrive(0)
    assert table.arrive(1) == "held"
    assert table.ledger.statistics.of(1).held == 1
    assert table.apply() == [(0, 0, (0, 0))]
    # It is the quorum of the next round, all by itself.
    assert table.apply() == [(1, 1, (1, 0))]
    assert table.applied.sets[0].staleness == 1


def test_the_slot_and_the_batch_of_a_dead_worker_go_to_a_live_one():
    table = Table(Synchronous(), 3)
    table.dispatch()
    table.lose(2)
    assert table.dispatch() == {}
    table.arrive(1)
    assert table.dispatch() == {1: (2, 0)}
    assert table.computing[1].slot == table.computing[1].draw == 2
    table.arrive(0)
    assert table.apply() is None
    table.arrive(1)
    assert table.apply() == [(0, 0, (0, 0)), (1, 1, (1, 0)), (2, 1, (2, 0))]
    # One of the two reads on in the shard of the dead, after its own batch.
    assert table.dispatch() == {0: (0, 1), 1: (1, 1)}
    table.arrive(0), table.arrive(1)
    assert list(table.dispatch().values()) == [(2, 1)]


def test_a_worker_that_comes_back_has_its_slot_again():
    table = Table(Synchronous(), 2)
    table.dispatch()
    table.lose(1)
    table.join(1)
    assert table.dispatch() == {1: (1, 0)}
    table.arrive(0), table.arrive(1)
    assert table.apply() == [(0, 0, (0, 0)), (1, 1, (1, 0))]


def test_a_killed_worker_without_backups_every_batch_is_applied_in_its_round():
    simulation = Simulation(Synchronous(), 4, exponential(1), [10] * 4)
    simulation.at(4.0, lambda: simulation.ledger.lost(1))
    simulation.at(9.0, lambda: simulation.ledger.lost(3))
    simulation.run()
    assert simulation.batches() == [(shard, step) for step in range(10) for shard in range(4)]
    assert len(simulation.steps) == 10


def test_too_few_workers_shrink():
    table = Table(Synchronous(), 3, [2, 2, 2], too_few_workers="shrink")
    table.dispatch()
    table.lose(2)
    table.arrive(0)
    # One set of each: worker 0 does not compute for the dead one, too.
    assert table.dispatch() == {}
    table.arrive(1)
    # Two are live: their two sets are a round, of half each.
    assert table.apply() == [(0, 0, (0, 0)), (1, 1, (1, 0))]
    assert [one.share for one in table.applied.sets] == [0.5, 0.5]
    sizes = []
    while not table.ledger.epoch_finished:
        table.dispatch()
        for worker in list(table.computing):
            table.arrive(worker)
        sizes.append(len(table.apply()))
    assert sizes == [2, 2]
    assert table.leases.num_applied == 6


def test_too_few_workers_fail():
    table = Table(Synchronous(num_backup_workers=1), 4, too_few_workers="fail")
    table.lose(0)
    assert table.dispatch() == {1: (0, 0), 2: (2, 0), 3: (3, 0)}
    table.lose(2)
    with pytest.raises(
        TooFewWorkers, match="needs 3 live workers, and 2 are live .worker:1, worker:3."
    ) as error:
        table.ledger.dispatches()
    assert (error.value.live, error.value.num_needed) == ((1, 3), 3)


def test_too_few_workers_wait_until_somebody_is_live():
    table = Table(Synchronous(), 2, [1, 1])
    table.dispatch()
    table.arrive(0)
    table.lose(1), table.lose(0)
    assert table.apply() is None and table.dispatch() == {}
    assert not table.ledger.epoch_finished
    assert table.ledger.waiting_for() == "Step 0 waits for a worker: none of 2 is there."
    table.join(1)
    # Both batches of the round were lost; its own slot comes first.
    assert table.dispatch() == {1: (1, 0)}
    table.arrive(1)
    assert table.dispatch() == {1: (0, 0)}
    table.arrive(1)
    assert table.apply() == [(0, 1, (0, 0)), (1, 1, (1, 0))]
    assert table.ledger.epoch_finished


def test_a_round_is_not_closed_because_nobody_is_left_to_fill_it():
    table = Table(Synchronous(), 2, [1, 1])
    table.dispatch()
    table.lose(1)
    table.arrive(0)
    assert table.dispatch() == {0: (1, 0)}
    late = table.computing[0]
    # Its first set is kept while it does not come back with the second one.
    table.ledger.lost_set(late.set_id)
    table.ledger.check()
    assert table.apply() is None
    table.join(1)
    assert table.dispatch() == {1: (1, 0)}
    table.arrive(1)
    assert table.apply() == [(0, 0, (0, 0)), (1, 1, (1, 0))]


def test_p10_at_the_end_of_uneven_data_rounds_are_smaller():
    simulation = Simulation(Synchronous(), 2, fixed(1.0, 1.0), [7, 3]).run()
    assert [len(step.apply.sets) for step in simulation.steps] == [2, 2, 2, 1, 1, 1, 1]
    assert sorted(simulation.batches()) == sorted([(0, at) for at in range(7)] + [(1, at) for at in range(3)])


def test_sets_of_several_batches_fill_one_slot():
    table = Table(Synchronous(), 2, [5, 3], push_every_steps=2)
    batches = []
    while not table.ledger.epoch_finished:
        table.dispatch()
        for worker in list(table.computing):
            table.arrive(worker)
        table.apply()
        batches.append([len(one.batches) for one in table.applied.sets])
    assert batches == [[2, 2], [2, 1], [1]]


def test_waiting_for_names_the_slow_worker_and_its_batch():
    table = Table(Synchronous(), 2)
    table.dispatch()
    table.arrive(0)
    assert table.ledger.waiting_for() == "Step 0 has 1 of 2 sets; it waits for worker 1 (batch 0 of shard 1)."
