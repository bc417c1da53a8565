"""Whatever order things happen in: nothing is too stale, applied twice, or lost, and every epoch ends."""

import math

import hypothesis
import pytest
from hypothesis import strategies as st

from tests.ps.simulation import Simulation, exponential
from tfdist_ext.ps import Asynchronous, Batch, BoundedStaleness, InverseStaleness, Synchronous
from tfdist_ext.testing.ledger_chaos import LedgerChaos as Chaos

RUNS = hypothesis.settings(max_examples=120, deadline=None)
SEEDS = st.integers(0, 2**32)


@st.composite
def clusters(draw, max_workers=4, max_length=7):
    """(number of workers, lengths of the shards); as many shards as workers, or not."""
    num_workers = draw(st.integers(1, max_workers))
    num_shards = draw(st.one_of(st.just(num_workers), st.integers(1, 6)))
    return num_workers, draw(st.lists(st.integers(0, max_length), min_size=num_shards, max_size=num_shards))


@st.composite
def synchronous(draw, num_workers):
    backups = draw(st.integers(0, num_workers - 1))
    return Synchronous(num_backup_workers=backups, max_staleness=draw(st.integers(0, 2)))


ONE_AT_A_TIME = st.one_of(
    st.builds(
        BoundedStaleness,
        max_staleness=st.one_of(st.integers(0, 8), st.just(math.inf)),
        late=st.sampled_from(["wait", "drop"]),
        damping=st.sampled_from([None, InverseStaleness()]),
    ),
    st.builds(BoundedStaleness, max_staleness=st.integers(0, 3), clock=st.just("worker")),
    st.just(Asynchronous()),
)


def check_bound(chaos):
    if isinstance(chaos.policy, Synchronous) or getattr(chaos.policy, "clock", "") == "version":
        assert chaos.max_staleness <= chaos.policy.max_staleness


def check_rounds(chaos):
    """A round admits whole sets, one a slot, in the order of the slots."""
    for apply in chaos.applies:
        slots = [one.slot for one in apply.sets]
        assert slots == sorted(set(slots))
        assert all(0 <= slot < chaos.num_workers for slot in slots)
        assert sum(one.share for one in apply.sets) == pytest.approx(1.0, abs=1e-12)


@RUNS
@hypothesis.given(
    ONE_AT_A_TIME, clusters(), SEEDS, st.booleans(), st.integers(1, 3), st.integers(1, 3), st.booleans()
)
def test_one_set_a_step_with_deaths_and_late_sets(policy, cluster, seed, known, fetch, push, requeue):
    num_workers, lengths = cluster
    chaos = Chaos(
        policy,
        num_workers,
        lengths,
        seed,
        known=known,
        fetch_every_steps=fetch,
        push_every_steps=push,
        requeue_dropped=requeue,
    )
    chaos.run_epoch()
    check_bound(chaos)
    chaos.check_every_batch_once()
    chaos.check_counts()
    # Also where sets are given up, their batches are not.
    assert set(chaos.applied) == chaos.all_batches
    assert all(len(apply.sets) == 1 for apply in chaos.applies)


@RUNS
@hypothesis.given(st.data(), clusters(), SEEDS, st.booleans(), st.integers(1, 3), st.booleans())
def test_rounds_with_deaths_and_late_sets(data, cluster, seed, known, push, requeue):
    num_workers, lengths = cluster
    policy = data.draw(synchronous(num_workers))
    too_few = data.draw(st.sampled_from(["wait", "shrink"]))
    chaos = Chaos(
        policy,
        num_workers,
        lengths,
        seed,
        known=known,
        push_every_steps=push,
        requeue_dropped=requeue,
        too_few_workers=too_few,
    )
    chaos.run_epoch()
    check_bound(chaos)
    check_rounds(chaos)
    chaos.check_every_batch_once()
    chaos.check_counts()
    if requeue or policy.num_backup_workers == 0:
        assert set(chaos.applied) == chaos.all_batches


@RUNS
@hypothesis.given(st.integers(1, 4), st.data(), SEEDS, st.booleans(), st.integers(0, 1))
def test_rounds_without_backup_hold_the_same_batches_whoever_dies(num_workers, data, seed, known, stale):
    lengths = data.draw(st.lists(st.integers(0, 6), min_size=num_workers, max_size=num_workers))
    chaos = Chaos(Synchronous(max_staleness=stale), num_workers, lengths, seed, known=known)
    chaos.run_epoch()
    expected = [
        [Batch(shard, step) for shard in range(num_workers) if step < lengths[shard]]
        for step in range(max(lengths))
    ]
    assert [[batch for one in apply.sets for batch in one.batches] for apply in chaos.applies] == expected
    assert all(one.slot == one.batches[0].shard for apply in chaos.applies for one in apply.sets)
    assert chaos.ledger.num_drops == 0


@RUNS
@hypothesis.given(clusters(), SEEDS, st.booleans(), st.sampled_from(["wait", "drop"]))
def test_bound_zero_applies_in_exactly_the_order_of_the_dataset(cluster, seed, known, late):
    num_workers, lengths = cluster
    chaos = Chaos(BoundedStaleness(0, late=late), num_workers, lengths, seed, known=known)
    chaos.run_epoch()
    batches = [one.batches[0] for apply in chaos.applies for one in apply.sets]
    assert batches == sorted(chaos.all_batches, key=chaos.leases.index)
    assert chaos.ledger.num_drops == 0


@RUNS
@hypothesis.given(st.integers(2, 5), SEEDS, st.integers(0, 60))
def test_bound_of_others_applies_in_order_of_dispatch(num_workers, seed, steps):
    # Every worker has data, and starts as soon as it may: with fewer sets under way, some may overtake.
    simulation = Simulation(BoundedStaleness(num_workers - 1), num_workers, exponential(seed)).run(steps)
    # Sets that start together have the same base, and no order among them.
    bases = [step.apply.sets[0].base_version for step in simulation.steps]
    assert len(bases) == steps
    assert bases == sorted(bases)


@RUNS
@hypothesis.given(st.data(), clusters(), SEEDS, st.booleans(), st.booleans(), st.booleans())
def test_a_worker_that_stops_for_ever(data, cluster, seed, known, requeue, deaths):
    num_workers, lengths = cluster
    policy = data.draw(st.one_of(ONE_AT_A_TIME, synchronous(num_workers)))
    chaos = Chaos(
        policy,
        num_workers + 1,
        lengths,
        seed,
        known=known,
        requeue_dropped=requeue,
        stopped=[data.draw(st.integers(0, num_workers))],
        deaths=deaths,
    )
    chaos.run_epoch(num_random=data.draw(st.integers(0, 100)))
    check_bound(chaos)
    chaos.check_every_batch_once()


@RUNS
@hypothesis.given(
    st.data(), clusters(max_length=5), SEEDS, st.lists(st.one_of(st.none(), st.integers(0, 6)), max_size=4)
)
def test_epochs_of_a_number_of_steps_go_on_where_the_last_one_stopped(data, cluster, seed, budgets):
    num_workers, lengths = cluster
    policy = data.draw(st.one_of(ONE_AT_A_TIME, synchronous(num_workers)))
    chaos = Chaos(policy, num_workers, lengths, seed, requeue_dropped=True)
    for budget in [*budgets, None]:
        before = chaos.ledger.version
        chaos.run_epoch(num_random=20, max_steps=budget)
        steps = chaos.ledger.version - before
        finished = set(chaos.applied) == chaos.all_batches
        assert finished if budget is None else steps == budget or (steps < budget and finished)
    check_bound(chaos)
    chaos.check_every_batch_once()


@RUNS
@hypothesis.given(ONE_AT_A_TIME, clusters(), SEEDS, st.integers(0, 12))
def test_nothing_is_in_flight_when_the_steps_are_done(policy, cluster, seed, budget):
    num_workers, lengths = cluster
    chaos = Chaos(policy, num_workers, lengths, seed)
    chaos.run_epoch(num_random=30, max_steps=budget)
    assert not [one for one in chaos.ledger.drops if one.reason == "the epoch ended without it"]


@RUNS
@hypothesis.given(st.integers(1, 4), SEEDS, st.sampled_from([0, 1, 3, math.inf]), st.data())
def test_p7_clock_gap_never_more_than_s_at_a_start(num_workers, seed, bound, data):
    lengths = data.draw(st.lists(st.integers(0, 9), min_size=num_workers, max_size=num_workers))
    slow = BoundedStaleness(bound, clock="worker")
    chaos = Chaos(slow, num_workers, lengths, seed, known=True, deaths=False)
    # Counted from outside: batches completed, and who has data left or under way.
    completed = [0] * num_workers

    def has_data(worker):
        return completed[worker] < lengths[worker]

    dispatch, finish = chaos.dispatch, chaos.finish_apply

    def checked_dispatch():
        started = dispatch()
        others = [completed[worker] for worker in range(num_workers) if has_data(worker)]
        for one in started:
            assert min(others) >= completed[one.worker] - bound
        return started

    def checked_finish():
        finish()
        completed[chaos.applies[-1].sets[0].worker] += 1
        with_data = [completed[worker] for worker in range(num_workers) if has_data(worker)]
        assert not with_data or max(with_data) - min(with_data) <= bound + 1

    chaos.dispatch, chaos.finish_apply = checked_dispatch, checked_finish
    chaos.run_epoch(num_random=300)
    assert completed == lengths
    if bound < math.inf:
        assert chaos.max_staleness <= (num_workers - 1) * (2 * bound + 1)
