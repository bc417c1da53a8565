"""Which batch is next, for whom, exactly once."""

import json

import hypothesis
import pytest
from hypothesis import strategies as st

from tfdist_ext.ps import Asynchronous, Batch, Leases, ShardMismatch, Synchronous
from tfdist_ext.testing.ledger_chaos import LedgerChaos as Chaos


def leases_of(num_workers, lengths, live=None):
    leases = Leases(len(lengths), lengths)
    leases.set_workers(range(num_workers) if live is None else live, num_workers)
    return leases


def test_each_worker_reads_its_own_shard():
    leases = leases_of(3, [2, 2, 2])
    assert [leases.peek(worker) for worker in range(3)] == [Batch(0, 0), Batch(1, 0), Batch(2, 0)]
    assert leases.take(Batch(1, 0)) == (Batch(1, 0),)
    assert leases.peek(1) == Batch(1, 1)
    assert leases.index(Batch(1, 1)) == 4
    assert leases.lowest() == Batch(0, 0)


def test_a_worker_of_several_shards_reads_the_lowest_index_first():
    leases = leases_of(2, [2] * 4)
    order = []
    while (batch := leases.peek(0)) is not None:
        order += leases.take(batch)
    assert order == [Batch(0, 0), Batch(2, 0), Batch(0, 1), Batch(2, 1)]


def test_what_came_back_is_served_first_to_anybody():
    leases = leases_of(2, [3, 3])
    for batch in (Batch(0, 0), Batch(0, 1), Batch(1, 0)):
        leases.take(batch)
    for batch in (Batch(0, 1), Batch(1, 0)):
        leases.give_back(batch)
    assert leases.pending() == [Batch(1, 0), Batch(0, 1)]
    assert leases.peek(0) == leases.peek(1) == Batch(1, 0)


def test_a_dead_workers_shard_goes_to_who_has_least_left_and_back():
    leases = leases_of(3, [5, 3, 4])
    leases.set_workers([0, 2], 3)
    assert leases.fresh(2) == [Batch(1, 0), Batch(2, 0)]
    leases.take(Batch(1, 0))
    leases.set_workers([0, 1, 2], 3)
    assert leases.fresh(1) == [Batch(1, 1)]


def test_a_worker_with_nothing_left_takes_over_from_who_reads_for_the_dead():
    leases = leases_of(4, [1, 5, 5, 5], live=[0, 1])
    assert [len(leases.fresh(worker)) for worker in (0, 1)] == [2, 2]
    leases.take(Batch(0, 0))
    assert [len(leases.fresh(worker)) for worker in (0, 1)] == [1, 2]
    leases.take(leases.fresh(0)[0], 5)
    assert [len(leases.fresh(worker)) for worker in (0, 1)] == [1, 1]
    leases.check()


def test_the_end_of_a_shard_is_found_out():
    leases = leases_of(1, [None])
    assert leases.take(Batch(0, 0), 3) == (Batch(0, 0), Batch(0, 1), Batch(0, 2))
    leases.confirm(Batch(0, 0))
    leases.exhausted(0, 1)
    leases.discard(Batch(0, 1)), leases.discard(Batch(0, 2))
    leases.check()
    assert not leases.has_unread and leases.end_of(0) == 1
    leases.apply(Batch(0, 0))
    assert (leases.num_applied, leases.num_dropped) == (1, 0)


def test_a_batch_beyond_the_end_does_not_come_back():
    leases = leases_of(1, [None])
    leases.take(Batch(0, 0), 3)
    leases.give_back(Batch(0, 2))
    leases.exhausted(0, 1)
    assert leases.pending() == []
    leases.give_back(Batch(0, 1))
    assert leases.pending() == []
    leases.check()


def test_a_batch_dropped_before_it_was_known_not_to_exist_is_not_counted():
    leases = leases_of(1, [None])
    leases.take(Batch(0, 0), 2)
    leases.drop(Batch(0, 0)), leases.drop(Batch(0, 1))
    assert leases.num_dropped == 2
    leases.exhausted(0, 1)
    assert leases.num_dropped == 1
    leases.check()


def test_two_lengths_of_one_shard_are_an_error():
    leases = leases_of(1, [None])
    leases.take(Batch(0, 0), 4)
    leases.confirm(Batch(0, 2))
    with pytest.raises(ShardMismatch, match="Shard 0 .* ended after 2 .* position 2 .*deterministic"):
        leases.exhausted(0, 2)
    leases.exhausted(0, 3)
    with pytest.raises(ShardMismatch) as error:
        leases.confirm(Batch(0, 3))
    assert (error.value.shard, error.value.end, error.value.position) == (0, 3, 3)


def test_only_what_is_unread_can_be_taken():
    leases = leases_of(1, [3])
    with pytest.raises(ValueError, match="not unread; the shard is at position 0"):
        leases.take(Batch(0, 1))
    leases.take(Batch(0, 0))
    with pytest.raises(ValueError, match="not unread"):
        leases.take(Batch(0, 0))


def test_positions_are_not_restored_over_batches_in_flight_or_other_shards():
    leases = leases_of(1, [3])
    state = leases.state_dict()
    leases.take(Batch(0, 0))
    with pytest.raises(RuntimeError, match="1 batches are in flight"):
        leases.load_state_dict(state)
    with pytest.raises(ValueError, match="of 1 shards; received by 2"):
        Leases(2).load_state_dict(state)


@hypothesis.settings(max_examples=80, deadline=None)
@hypothesis.given(
    st.integers(0, 2**32),
    st.lists(st.integers(0, 6), min_size=1, max_size=5),
    st.integers(1, 4),
    st.integers(1, 4),
    st.sampled_from([Asynchronous(), Synchronous()]),
    st.booleans(),
)
def test_reading_goes_on_after_restoring_with_other_workers(seed, lengths, before, after, policy, known):
    first = Chaos(policy, before, lengths, seed, known=known)
    first.ledger.begin_epoch(first.leases)
    for _ in range(40):
        first.random.choice(first.possible())()
    # The cut: what has been applied by now, and everything else unread.
    state = json.loads(json.dumps(first.leases.state_dict()))
    second = Chaos(policy, after, lengths, seed + 1, known=known)
    second.leases.load_state_dict(state)
    second.leases.check()
    second.run_epoch()
    assert not set(first.applied) & set(second.applied)
    assert set(first.applied) | set(second.applied) == first.all_batches
