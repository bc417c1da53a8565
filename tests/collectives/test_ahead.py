"""A task that is ahead of a late one sends a bounded part and holds the rest until the late one enters."""

import collections
import threading
import time

import hypothesis
import ml_dtypes
import numpy as np
import pytest
from hypothesis import strategies as st

from tests.collectives.groups import DEADLINE_SECONDS, connected, each
from tfdist_ext import errors
from tfdist_ext.collectives import StreamAbandoned
from tfdist_ext.collectives.message import Message
from tfdist_ext.collectives.outbox import Budget, Outbox
from tfdist_ext.collectives.streams import StreamTable

AHEAD_BYTES = 300_000
CHUNK_BYTES = 1 << 16
ROWS = 400_000  # 1.6 MB of float32: five budgets.


@pytest.fixture
def most_early_bytes(monkeypatch):
    """Makes the budget small; records the most bytes that ever waited at a rank for it to enter."""
    monkeypatch.setattr("tfdist_ext.collectives.process_group._AHEAD_LIMIT_BYTES", AHEAD_BYTES)
    most, keep = collections.Counter(), StreamTable._keep_early

    def keep_and_note(table, *arguments):
        keep(table, *arguments)
        most[table._rank] = max(most[table._rank], table._early_bytes)

    monkeypatch.setattr(StreamTable, "_keep_early", keep_and_note)
    return most


def wait_until(condition):
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        threading.Event().wait(0.005)


def held_for(group):
    """Ranks for whom the group's first stream holds something back."""
    streams = list(group._table._streams.values())
    return {
        rank for stream in streams for one in list(stream.pending.values()) for rank in one.outbox.waiting_for
    }


def values_of(rank, dtype="float32"):
    return (np.arange(ROWS) % 61 + rank).astype(dtype)


def gather(group):
    return group.submit_all_gather(values_of(group.rank), name="rows")


def gather_thrice(group):
    return [group.submit_all_gather(values_of(group.rank), name=f"rows{number}") for number in range(3)][-1]


def broadcast(group):
    return group.submit_broadcast(values_of(group.rank), root=0, name="first value")


def ring(group):
    return group.submit_all_reduce(values_of(group.rank), name="sum")


def ring_of_bfloat16(group):
    return group.submit_all_reduce(values_of(group.rank, ml_dtypes.bfloat16), name="sum")


def direct(group):
    return group.submit_all_reduce(values_of(group.rank)[:100_000], name="direct")


def right_values(work, size):
    if work in (gather, gather_thrice):
        return [values_of(rank) for rank in range(size)]
    if work is broadcast:
        return values_of(0)
    # Sums of integers below 256: exact in bfloat16's 8 bits.
    return sum(values_of(rank) for rank in range(size))[: 100_000 if work is direct else None]


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("work", [gather, gather_thrice, broadcast, ring, ring_of_bfloat16, direct])
def test_h11_what_is_larger_than_the_budget_waits_for_a_late_task(most_early_bytes, work, size):
    options = {"ring_chunk_bytes": CHUNK_BYTES, "direct_threshold_bytes": (1 << 20) * (work is direct)}
    late = size - 1
    with connected(size, **options) as groups:
        ahead = [work(group) for group in groups[:late]]
        # In a ring, the one before the late one alone sends to it.
        sender = groups[0] if work is broadcast else groups[late - 1]
        wait_until(lambda: held_for(sender) == {late})
        # A message that alone is larger than the budget waits whole; of others some are on the way.
        wait_until(lambda: work is direct or most_early_bytes[late] > 0)
        assert not any(future.done() for future in ahead[:1])
        results = [work(groups[late]).result(DEADLINE_SECONDS)]
        results += [future.result(DEADLINE_SECONDS) for future in ahead]
        for result in results:
            np.testing.assert_array_equal(np.asarray(result, "float32"), right_values(work, size))
        assert held_for(sender) == set()
        assert set(sender._table._budget._spent.values()) <= {0}
    assert max(most_early_bytes.values(), default=0) <= AHEAD_BYTES * (size - 1)


def test_h11_all_peers_together_stay_below_the_limit_of_the_late_one(most_early_bytes, monkeypatch):
    monkeypatch.setattr("tfdist_ext.collectives.process_group._EARLY_LIMIT_BYTES", 2 * CHUNK_BYTES + 1)
    with connected(3, ring_chunk_bytes=CHUNK_BYTES) as groups:
        futures = [gather(group) for group in groups[:2]]
        wait_until(lambda: most_early_bytes[2] == 2 * CHUNK_BYTES)
        futures.append(gather(groups[2]))
        for future in futures:
            np.testing.assert_array_equal(future.result(DEADLINE_SECONDS), right_values(gather, 3))


def test_h11_nothing_is_asked_where_the_peer_came_first_or_the_values_are_small(
    most_early_bytes, monkeypatch
):
    asked, offer = [], Outbox.offer

    def offer_and_note(outbox, messages):
        ready, to_ask = offer(outbox, messages)
        asked.extend(to_ask)
        return ready, to_ask

    monkeypatch.setattr(Outbox, "offer", offer_and_note)
    with connected(2, ring_chunk_bytes=CHUNK_BYTES) as groups:
        assert [future.result(DEADLINE_SECONDS).sum() for future in list(map(direct_and_small, groups))] == [
            2,
            2,
        ]
        assert not asked
        first = broadcast(groups[1])  # Not the root: an empty message, which says that it is there.
        wait_until(lambda: groups[0]._table._streams["step"].early)
        broadcast(groups[0]).result(DEADLINE_SECONDS)
        np.testing.assert_array_equal(first.result(DEADLINE_SECONDS), values_of(0))
        assert not asked


def direct_and_small(group):
    return group.submit_all_reduce(np.ones(1), name="small")


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("work", [gather, broadcast, ring])
def test_h11_a_task_that_never_comes_is_still_named(most_early_bytes, work, size):
    with connected(size, ring_chunk_bytes=CHUNK_BYTES, collective_timeout_seconds=1.0) as groups:
        late = size - 1
        futures = [work(group) for group in groups[:late]]
        sender = groups[0] if work is broadcast else groups[late - 1]
        wait_until(lambda: held_for(sender) == {late} or futures[0].done())
        found = each(futures, lambda future: future.result(DEADLINE_SECONDS))
        if work is broadcast and size == 3:
            # Worker 1 has its value; the root alone needs worker 2.
            np.testing.assert_array_equal(found.pop(), values_of(0))
        for error in found:
            assert isinstance(error, errors.CollectiveTimeoutError), error
            assert f"worker:{late} did not join" in str(error) and error.task == f"worker:{late}"


@pytest.mark.parametrize("ending", ["lost", "abandoned", "left"])
def test_h11_a_task_that_goes_while_something_waits_for_it_fails_the_operation(most_early_bytes, ending):
    with connected(2, ring_chunk_bytes=CHUNK_BYTES) as groups:
        future = ring(groups[0])
        wait_until(lambda: held_for(groups[0]) == {1})
        if ending == "lost":
            groups[0]._mesh.call(lambda: groups[0]._mesh._lose(1, "it was unplugged"))
        elif ending == "abandoned":
            groups[1].abandon("step")
        else:
            groups[1].close()
        expected = StreamAbandoned if ending == "abandoned" else errors.PeerLostError
        with pytest.raises(expected, match="worker:1"):
            future.result(DEADLINE_SECONDS)


def test_h11_a_task_that_leaves_first_sends_what_waits(most_early_bytes):
    with connected(3, ring_chunk_bytes=CHUNK_BYTES) as groups:
        futures = [gather(group) for group in groups[:2]]
        wait_until(lambda: 2 in held_for(groups[0]) and 2 in held_for(groups[1]))
        wait_until(lambda: groups[0]._table._streams["step"].pending[0].machine.missing == {2})
        leaving = threading.Thread(target=groups[0].close)
        leaving.start()
        for future in (gather(groups[2]), futures[1]):
            np.testing.assert_array_equal(future.result(DEADLINE_SECONDS), right_values(gather, 3))
        leaving.join(DEADLINE_SECONDS)


EVENTS = st.lists(
    st.tuples(st.integers(0, 2), st.integers(0, 1), st.sampled_from([0, 3, 7, 10, 12]) | st.none()),
    max_size=40,
)


@hypothesis.given(EVENTS)
def test_h11_the_budget_holds_and_every_message_leaves_once_in_order(events):
    """Three operations, two peers; None stands for the news that the peer has entered the operation."""
    budget = Budget(10)
    outboxes = [Outbox(budget) for _ in range(3)]
    offered, left = collections.defaultdict(list), collections.defaultdict(list)
    asked = set()

    def leave(number, messages):
        for message in messages:
            left[number, message.peer].append(message.piece)
            sizes[message.piece] = len(message.payload)

    def relieve():
        while budget.relieved:
            peer = budget.relieved.pop()
            for number, outbox in enumerate(outboxes):
                leave(number, outbox.retry(peer))

    sizes = {}
    for piece, (number, peer, num_bytes) in enumerate(events):
        if num_bytes is None:
            leave(number, outboxes[number].peer_joined(peer))
        else:
            offered[number, peer].append(piece)
            message = Message(peer, memoryview(bytes(num_bytes)), piece=piece)
            ready, to_ask = outboxes[number].offer([message])
            leave(number, ready)
            asked |= {(number, peer) for peer in to_ask}
        relieve()
        for peer in (0, 1):
            ahead = [n for n in range(3) if peer not in outboxes[n].joined]
            assert sum(sizes[piece] for n in ahead for piece in left[n, peer]) <= 10
            # Whoever has something held back for it has been asked: nobody waits for ever.
            assert all((n, peer) in asked for n in range(3) if peer in outboxes[n].waiting_for)
    for number, outbox in enumerate(outboxes):
        for peer in (0, 1):
            leave(number, outbox.peer_joined(peer))
    assert {key: pieces for key, pieces in left.items() if pieces} == offered
    assert not any(outbox.waiting_for for outbox in outboxes)
