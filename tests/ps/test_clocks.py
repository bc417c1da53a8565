"""Asynchronous training, and stale synchronous parallel."""

import math

import pytest

from tests.ps.ledgers import Table
from tests.ps.simulation import Simulation, exponential
from tfdist_ext.ps import Asynchronous, BoundedStaleness


def ssp(bound):
    return BoundedStaleness(bound, clock="worker")


def frozen(*workers):
    return lambda dispatch: math.inf if dispatch.worker in workers else 1.0


@pytest.mark.parametrize("bound", [0, 1, 3])
def test_p7_beside_a_frozen_worker_exactly_s_and_one_batches_are_completed(bound):
    simulation = Simulation(ssp(bound), 2, frozen(1)).run()
    assert simulation.ledger.statistics.of(0).applied == bound + 1
    assert not simulation.ledger.epoch_finished
    assert simulation.ledger.waiting_for() == (
        f"Worker 0 may not be more than {bound} batches ahead of worker 1, done with 0."
    )


def test_p7_without_a_bound_nobody_waits():
    simulation = Simulation(ssp(math.inf), 2, frozen(1)).run(100)
    assert simulation.ledger.statistics.of(0).applied == 99
    # One step is left for the set that is in flight.
    assert simulation.ledger.waiting_for() == "Step 99 waits for worker 1 (batch 0 of shard 1)."


def test_p7_bound_zero_is_clocked_as_bulk_synchronous():
    simulation = Simulation(ssp(0), 3, exponential(1)).run(30)
    workers = [step.apply.sets[0].worker for step in simulation.steps]
    assert all(sorted(workers[at : at + 3]) == [0, 1, 2] for at in range(0, 30, 3))
    # Applied at once, it is not synchronous: ages up to N - 1.
    assert simulation.ledger.statistics.total().ages == {0: 10, 1: 10, 2: 10}


@pytest.mark.parametrize("bound", [0, 1, 3])
@pytest.mark.parametrize("slowness", [1.0, 10.0])
def test_ages_are_at_most_others_times_two_s_and_one(bound, slowness):
    simulation = Simulation(ssp(bound), 4, exponential(2, {0: slowness}), checked=False).run(500)
    assert max(simulation.ledger.statistics.total().ages) <= 3 * (2 * bound + 1)


@pytest.mark.parametrize("known", [True, False])
def test_p10_shards_of_seven_and_three_do_not_deadlock(known):
    for policy in (ssp(1), Asynchronous()):
        simulation = Simulation(policy, 2, frozen(), [7, 3], known=known).run()
        assert simulation.ledger.epoch_finished
        assert sorted(simulation.batches()) == [(0, at) for at in range(7)] + [(1, at) for at in range(3)]


def test_a_dead_worker_leaves_the_minimum_and_enters_again_at_it():
    table = Table(ssp(1), 3)
    table.dispatch()

    def complete(worker):
        assert table.arrive(worker) == "admitted"
        assert table.apply() is not None
        return table.dispatch()

    assert sorted(complete(0)) == [0]
    assert sorted(complete(0)) == []  # 2, 0 and 0 completed
    table.lose(2)
    assert sorted(complete(1)) == [0, 1]  # 2 and 1
    table.join(2)
    # It enters at the minimum, 1: at 0, it would keep worker 1 from its next batch below.
    assert sorted(table.dispatch()) == [2]
    assert sorted(complete(0)) == []  # 3, 1 and 1
    assert sorted(complete(1)) == [1]  # 3, 2 and 1
    assert sorted(complete(1)) == []  # 3, 3 and 1
    assert table.ledger.waiting_for() == (
        "Workers 0, 1 may not be more than 1 batches ahead of worker 2, done with 1."
    )
    assert sorted(complete(2)) == [0, 1, 2]  # 3, 3 and 2


def test_a_set_that_is_lost_does_not_count_and_its_worker_is_not_waited_for():
    table = Table(ssp(0), 2)
    table.dispatch()
    table.arrive(0), table.apply()
    assert table.dispatch() == {}
    table.ledger.lost_set(table.computing[1].set_id)
    table.ledger.check()
    # The batch that was lost comes first.
    assert table.dispatch() == {0: (1, 0)}
    table.arrive(0), table.apply()
    assert table.arrive(1) == "dropped"
    assert sorted(table.dispatch()) == [0, 1]


def test_asynchronous_worker_takes_its_next_batch_when_its_set_is_applied():
    table = Table(Asynchronous(), 2)
    table.dispatch()
    table.arrive(0), table.arrive(1)
    assert table.dispatch() == {}
    assert table.apply() == [(0, 0, (0, 0))]
    assert table.dispatch() == {0: (0, 1)}
    assert table.apply() == [(0, 1, (1, 0))]
    assert table.applied.sets[0].staleness == 1


def test_asynchronous_draws_name_each_stream_once():
    simulation = Simulation(Asynchronous(), 4, exponential(5), fetch_every_steps=2).run(200)
    streams = [(one.base_version, one.draw) for one in simulation.dispatched]
    assert len(set(streams)) == len(streams)
    assert [one.draw for one in simulation.dispatched[:4]] == [0, 1, 2, 3]
