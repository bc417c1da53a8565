"""Large messages travel in chunks: no heartbeat waits behind the encryption of a whole one."""

import collections
import itertools

import numpy as np
import pytest

from tests.collectives.groups import connected, each
from tfdist_ext.collectives.exchange import AllGather, Broadcast
from tfdist_ext.collectives.message import Message
from tfdist_ext.transport import ProtocolViolation


def exchange(machines, from_back):
    """Delivers all messages, oldest or newest first; returns the sizes of their payloads."""
    queue = collections.deque((rank, m) for rank, machine in enumerate(machines) for m in machine.start())
    sizes = []
    while queue:
        rank, message = queue.pop() if from_back else queue.popleft()
        payload = memoryview(bytes(memoryview(message.payload).cast("B")))
        sizes.append(payload.nbytes)
        replies = machines[message.peer].receive(message._replace(peer=rank, payload=payload))
        queue.extend((message.peer, reply) for reply in replies)
    assert all(machine.done for machine in machines)
    return sizes


@pytest.mark.parametrize("from_back", [False, True])
@pytest.mark.parametrize("rows", [(0, 1), (5, 0), (3, 7), (16, 16)])
def test_g1_gathers_and_broadcasts_are_cut_into_chunks(rows, from_back):
    arrays = [np.arange(2.0 * count).reshape(count, 2) + rank for rank, count in enumerate(rows)]
    machines = [AllGather(rank, 2, array, chunk_bytes=24) for rank, array in enumerate(arrays)]
    assert max(exchange(machines, from_back)) <= 24
    for machine in machines:
        for result, array in zip(machine.result(), arrays, strict=True):
            np.testing.assert_array_equal(result, array)
    values = [np.full((rows[1], 3), float(rank)) for rank in range(2)]
    machines = [Broadcast(rank, 2, value, root=1, chunk_bytes=24) for rank, value in enumerate(values)]
    assert max(exchange(machines, from_back)) <= 24
    np.testing.assert_array_equal(machines[0].result(), np.full((rows[1], 3), 1.0))


@pytest.mark.parametrize(
    "message",
    [
        Message(1, b"x" * 8, hop=0, piece=2),  # a chunk too short
        Message(1, b"x" * 24, hop=2, piece=4),  # a chunk too many
        Message(1, b"x" * 24, hop=0, piece=1 << 50),  # more than the limit, which nobody may have us allocate
    ],
)
def test_g1_chunks_out_of_place_are_refused(message):
    machine = AllGather(0, 2, np.zeros((1, 2)), chunk_bytes=24)
    with pytest.raises(ProtocolViolation):
        machine.receive(message)
    machine = AllGather(0, 2, np.zeros((1, 2)), chunk_bytes=24)
    twice = Message(1, b"x" * 24, hop=0, piece=2)
    machine.receive(twice)
    for again in (twice, twice._replace(hop=1, piece=3, payload=b"x" * 24)):
        with pytest.raises(ProtocolViolation):
            machine.receive(again)


def test_g1_large_values_arrive_over_encrypted_links(monkeypatch):
    largest = []

    def note(payload):
        largest.append(payload.nbytes)
        return payload

    from tfdist_ext.transport import links

    original = links.BulkLink.send, links.Link.send
    for kind, send in zip((links.BulkLink, links.Link), original, strict=True):
        monkeypatch.setattr(
            kind, "send", lambda self, head, p, send=send, **k: send(self, head, note(p), **k)
        )
    hosts = itertools.count()  # Processes of one host do not encrypt what is large.
    monkeypatch.setattr("tfdist_ext.transport.bulk._this_host", lambda: f"host {next(hosts)}")
    with connected(2, secret="0123456789abcdef", ring_chunk_bytes=1 << 17) as groups:
        value = np.arange(200_000.0)
        found = each(groups, lambda group: group.broadcast(value * (1 - group.rank), name="first value"))
        gathered = each(groups, lambda group: group.all_gather(value + group.rank, name="rows"))
    for rank in range(2):
        np.testing.assert_array_equal(found[rank], value)
        np.testing.assert_array_equal(gathered[rank], [value, value + 1])
    assert max(largest) == 1 << 17
