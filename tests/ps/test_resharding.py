"""Dealt to more or fewer shards, the same batches are unread: none is lost, none read twice."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfdist_ext.ps import Batch, Leases, resharded


@st.composite
def books(draw):
    """Returns leases of n shards of one dataset in mid-pass, and the global indices of what was used."""
    num_shards = draw(st.integers(1, 5))
    total = draw(st.integers(0, 30))
    lengths = [len(range(shard, total, num_shards)) for shard in range(num_shards)]
    known = draw(st.booleans())
    leases = Leases(num_shards, lengths if known else None)
    leases.set_workers(range(num_shards), num_shards)
    used = set()
    for _ in range(draw(st.integers(0, 30))):
        worker = draw(st.integers(0, num_shards - 1))
        batch = leases.peek(worker)
        if batch is None:
            continue
        if batch.position >= lengths[batch.shard]:
            leases.take(batch)
            leases.exhausted(batch.shard, batch.position)
            leases.discard(batch)
            continue
        leases.take(batch)
        fate = draw(st.sampled_from(["apply", "drop", "give back", "in flight"]))
        if fate != "in flight":
            if fate in ("apply", "drop"):
                leases.confirm(batch)
                used.add(leases.index(batch))
            {"apply": leases.apply, "drop": leases.drop, "give back": leases.give_back}[fate](batch)
    return leases, used, total


def read_to_the_end(leases, total):
    """Reads all that is unread, in turn; returns the global indices."""
    number, read = leases.num_shards, []
    leases.set_workers(range(number), number)
    while leases.has_unread:
        for worker in range(number):
            batch = leases.peek(worker)
            if batch is None:
                continue
            leases.take(batch)
            if leases.index(batch) >= total:
                leases.exhausted(batch.shard, batch.position)
                leases.discard(batch)
                continue
            leases.confirm(batch)
            leases.apply(batch)
            read.append(leases.index(batch))
    return read


@given(books(), st.integers(1, 6))
def test_c15_what_is_unread_stays_so_under_any_number_of_shards(made, num_shards):
    leases, used, total = made
    state = leases.state_dict()
    other = Leases(num_shards)
    other.load_state_dict(resharded(state, num_shards))
    other.set_workers(range(num_shards), num_shards)
    other.check()
    assert (other.num_applied, other.num_dropped) == (leases.num_applied, leases.num_dropped)
    read = read_to_the_end(other, total)
    assert sorted(read) == sorted(set(range(total)) - used)


@given(books(), st.integers(1, 6))
def test_c15_there_and_back_is_the_same_state(made, num_shards):
    leases, _, _ = made
    state = resharded(leases.state_dict(), leases.num_shards)
    back = resharded(resharded(state, num_shards), leases.num_shards)
    if None not in [shard["end"] for shard in state["shards"]]:
        assert back == state
    else:
        assert [s["position"] for s in back["shards"]] == [s["position"] for s in state["shards"]]
        assert back["pending"] == state["pending"]


@given(books())
def test_the_same_number_of_shards_goes_on_with_what_is_unread(made):
    leases, used, total = made
    again = Leases(leases.num_shards)
    again.load_state_dict(leases.state_dict())
    assert sorted(read_to_the_end(again, total)) == sorted(set(range(total)) - used)


def test_what_is_in_flight_at_the_end_of_a_shard_is_as_if_nobody_had_taken_it():
    """Two workers that have used the same batches are in the same state, whatever they compute just now."""
    busy, idle = Leases(1, [5]), Leases(1, [5])
    for leases, taken in ((busy, 4), (idle, 2)):
        leases.set_workers([0], 1)
        leases.take(Batch(0, 0), taken)
        for position in (0, 1):
            leases.confirm(Batch(0, position))
            leases.apply(Batch(0, position))
    assert busy.state_dict() == idle.state_dict()
    assert idle.state_dict()["shards"][0]["position"] == 2
    assert idle.state_dict()["pending"] == []


def test_no_shards_are_refused():
    with pytest.raises(ValueError, match="num_shards"):
        resharded(Leases(1).state_dict(), 0)
