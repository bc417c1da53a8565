"""Start-up and authentication over real sockets."""

import itertools
import logging
import os
import socket
import subprocess
import sys
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import zmq

from tests.collectives.groups import DEADLINE_SECONDS, connected, each, free_addresses, names
from tfdist_ext import errors
from tfdist_ext.collectives import ProcessGroup
from tfdist_ext.transport import framing
from tfdist_ext.transport.bulk import BulkLinks
from tfdist_ext.transport.handshake import Handshake, Identity
from tfdist_ext.transport.links import BulkLink
from tfdist_ext.transport.mesh import Mesh, _State


def connect(addresses, rank, **options):
    return ProcessGroup.connect(addresses, rank, task_names=names(len(addresses)), **options)


def test_missing_task_is_announced_and_then_an_error(caplog):
    addresses = free_addresses(2)
    with caplog.at_level(logging.WARNING), pytest.raises(errors.StartupTimeoutError) as caught:
        connect(addresses, 0, first_notice_seconds=0.1, start_timeout_seconds=0.4)
    assert caught.value.missing == (f"worker:1 at {addresses[1]}",)
    assert "wrong cluster secret" in str(caught.value) and caught.value.waited_seconds >= 0.4
    assert f"for worker:1 at {addresses[1]}" in caplog.text


def test_address_in_use_is_named_with_a_fix():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(
            errors.ClusterSpecError, match=f"worker:0 cannot listen on {address}.*already in use.*ss -ltnp"
        ):
            connect([address, "127.0.0.1:1"], 0)


def test_links_beyond_loopback_are_refused_without_a_secret():
    with pytest.raises(errors.AuthenticationError, match="192.0.2.1:80.*`cluster_secret`.*`insecure=True`"):
        connect(["192.0.2.1:80", "192.0.2.2:80"], 0)


def test_an_address_that_is_not_local_listens_on_all_interfaces():
    # The advertised address exists nowhere here, so nobody answers; but listening works.
    port = free_addresses(1)[0].rpartition(":")[2]
    with pytest.raises(errors.StartupTimeoutError):
        connect([f"192.0.2.1:{port}", "192.0.2.2:80"], 0, insecure=True, start_timeout_seconds=0.2)


@pytest.mark.parametrize("size", [2, 3])
def test_secret_turns_on_curve_on_loopback_too(size):
    with connected(
        size, secret="correct horse battery", direct_threshold_bytes=0, ring_chunk_bytes=1 << 17
    ) as groups:
        for result in each(groups, lambda group: group.all_reduce(np.full(300_000, 1.0), name="sum")):
            np.testing.assert_array_equal(result, np.full(300_000, float(size)))


def test_wrong_secret_fails_at_its_own_deadline_and_disturbs_nobody():
    addresses = free_addresses(3)
    impostor_addresses = [addresses[0], addresses[2]]

    def work(rank):
        if rank == 2:
            return connect(impostor_addresses, 1, secret="the wrong one, and long", start_timeout_seconds=0.8)
        if rank == 1:
            # Comes after the impostor, who has the same rank, has knocked.
            assert knocked.wait(10)
        group = connect(addresses[:2], rank, secret="the right one, and long", start_timeout_seconds=20)
        knocked.set()
        total = group.all_reduce(np.ones(3), name="sum")
        group.close()
        return total.tolist()

    knocked = threading.Event()
    timer = threading.Timer(0.4, knocked.set)
    timer.start()
    found = each(range(3), work)
    assert found[:2] == [[2.0] * 3] * 2
    assert isinstance(found[2], errors.StartupTimeoutError) and "wrong cluster secret looks the same" in str(
        found[2]
    )


def test_task_without_the_secret_is_kept_out():
    addresses = free_addresses(2)
    found = each(
        range(2),
        lambda rank: connect(
            addresses, rank, secret=[None, "correct horse battery"][rank], start_timeout_seconds=0.8
        ),
    )
    assert all(isinstance(error, errors.StartupTimeoutError) for error in found)


def test_ipv6():
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6) as first:
            with socket.create_server(("::1", 0), family=socket.AF_INET6) as second:
                addresses = [f"[::1]:{one.getsockname()[1]}" for one in (first, second)]
    except OSError:
        pytest.skip("This machine has no IPv6 loopback.")
    groups = each(range(2), lambda rank: connect(addresses, rank, start_timeout_seconds=10))
    assert each(groups, lambda group: group.all_reduce(np.ones(1), name="sum")[0]) == [2.0, 2.0]
    each(groups, lambda group: group.close())


def test_garbage_is_ignored():
    addresses = free_addresses(2)
    groups = each(range(2), lambda rank: connect(addresses, rank, start_timeout_seconds=10))
    with zmq.Context() as context, context.socket(zmq.PUSH) as stranger:
        stranger.linger = 1000
        stranger.connect(f"tcp://{addresses[0]}")
        for head in (
            b"",
            b"x",
            os.urandom(40),
            framing.pack_head(framing.Kind.DATA, 1, 7, 0, b"body"),
            b"y" * 100_000,
        ):
            stranger.send_multipart([head, b"payload"])
            stranger.send(head)
            stranger.send_multipart([head] * 3)
        for kind in framing.Kind:
            for source in (0, 1, 2, 9):
                stranger.send_multipart([framing.pack_head(kind, source, 7, 1), b'{"rank": 1}'])
    assert each(groups, lambda group: group.all_reduce(np.ones(1), name="sum")[0]) == [2.0, 2.0]
    each(groups, lambda group: group.close())


def test_a_forked_child_does_not_say_goodbye():
    addresses = free_addresses(2)
    groups = each(range(2), lambda rank: connect(addresses, rank, start_timeout_seconds=10))
    child = os.fork()
    if child == 0:
        groups[0].close()
        os._exit(0)
    os.waitpid(child, 0)
    assert each(groups, lambda group: group.all_reduce(np.ones(1), name="sum")[0]) == [2.0, 2.0]
    each(groups, lambda group: group.close())


def test_a_group_can_be_formed_again_in_the_same_process():
    addresses = free_addresses(2)
    for _ in range(3):
        groups = each(range(2), lambda rank: connect(addresses, rank, start_timeout_seconds=10))
        each(groups, lambda group: group.barrier("b"))
        each(groups, lambda group: group.close())


def test_g10_the_last_act_of_a_task_arrives_though_it_leaves_at_once():
    # 64 MB in chunks, sent by a task that closes without waiting; the other enters only then.
    with connected(2, direct_threshold_bytes=0) as groups:
        large = np.arange(8_000_000, dtype="float64")
        groups[1].submit_all_gather(large, name="last")
        leaving = threading.Thread(target=groups[1].close)
        leaving.start()
        first, second = groups[0].all_gather(large[:1], name="last")
        leaving.join(DEADLINE_SECONDS)
        assert first.tolist() == [0.0] and np.array_equal(second, large) and not leaving.is_alive()


def test_g10_a_goodbye_that_overtakes_large_messages_is_heard_after_them():
    heard, sent = [], []
    mesh = Mesh.__new__(Mesh)  # Its bookkeeping alone: no sockets.
    mesh._goodbyes, mesh._expected_bulk, mesh._states = {}, {1: 1}, {1: _State.ALIVE}
    mesh._send = lambda rank, kind, **_: sent.append((rank, kind))
    mesh._handler = SimpleNamespace(
        peer_left=lambda rank, farewell: heard.append((rank, farewell["streams"]))
    )
    goodbye = memoryview(framing.pack_json({"streams": {"step": 3}, "bulk": 2}))
    mesh._handle_control(1, framing.Kind.GOODBYE, goodbye)
    assert not heard and not sent  # One of two large messages is on its way.
    mesh._expected_bulk[1] = 2
    mesh._hear_goodbye_if_all_is_here(1)
    mesh._hear_goodbye_if_all_is_here(1)
    assert heard == [(1, {"step": 3})] and sent == [(1, framing.Kind.ACKNOWLEDGE_GOODBYE)]
    assert mesh._states[1] is _State.LEFT


STRANGER = """
import os, sys, zmq, zmq.utils.monitor
os.setuid(int(sys.argv[2]))
socket = zmq.Context().socket(zmq.PUSH)
socket.linger = 1000
events = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED)
socket.connect(sys.argv[1])
event = zmq.utils.monitor.recv_monitor_message(events)["event"] if events.poll(10000) else None
print({zmq.EVENT_HANDSHAKE_SUCCEEDED: "let in", zmq.EVENT_DISCONNECTED: "refused"}.get(event))
"""


@pytest.mark.parametrize("secret", [None, "correct horse battery"])
@pytest.mark.parametrize("is_other", [False, True])
def test_g9_local_sockets_are_for_the_user_of_the_job_alone(is_other, secret):
    # Only root can be somebody else; elsewhere the own user is let in once more.
    other = 65534 if is_other and os.getuid() == 0 else os.getuid()
    with connected(2, secret=secret) as groups:
        endpoint = groups[0]._mesh._bulk.announcement["endpoint"]
        command = [sys.executable, "-c", STRANGER, endpoint, str(other)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
        assert done.stdout.strip() == ("let in" if other == os.getuid() else "refused"), done.stderr
        assert each(groups, lambda group: group.all_reduce(np.ones(1), name="sum")[0]) == [2.0, 2.0]


def test_g9_large_messages_between_processes_of_a_host_are_not_encrypted(monkeypatch):
    # Encryption takes longer than the sum. What has no key could not be sent to a socket that asks for one.
    sent, original = [], BulkLink.send
    monkeypatch.setattr(
        BulkLink, "send", lambda self, head, p, **k: sent.append(p.nbytes) or original(self, head, p, **k)
    )
    with connected(2, secret="correct horse battery", ring_chunk_bytes=1 << 17) as groups:
        for result in each(groups, lambda group: group.all_reduce(np.full(400_000, 1.0), name="sum")):
            np.testing.assert_array_equal(result, np.full(400_000, 2.0))
        for group in groups:
            mechanisms = [group._mesh._listener.mechanism, group._mesh._bulk_listener.mechanism]
            assert mechanisms == [zmq.CURVE, zmq.NULL]
    assert sum(sent) > 3_000_000


def test_g9_the_socket_for_large_messages_takes_nothing_else(caplog):
    with connected(2, secret="correct horse battery") as groups:
        mesh = groups[0]._mesh
        known = groups[1]._mesh._incarnation
        heads = [
            framing.pack_head(kind, 1, incarnation, 0)
            for kind in framing.Kind
            for incarnation in (known, 7)
            if (kind, incarnation) != (framing.Kind.BULK_DATA, known)
        ]
        with zmq.Context() as context, context.socket(zmq.PUSH) as stranger, caplog.at_level(logging.WARNING):
            stranger.linger = 1000
            stranger.connect(mesh._bulk.announcement["endpoint"])
            for head in heads:
                stranger.send_multipart([head, b'{"rank": 1, "reason": "no reason"}'])
        assert each(groups, lambda group: group.all_reduce(np.ones(1), name="sum")[0]) == [2.0, 2.0]
        assert mesh._states == {1: _State.ALIVE} and mesh._expected_bulk == {1: 0}
        with pytest.raises(framing.ProtocolViolation, match="BULK_DATA on the wrong socket"):
            head = framing.pack_head(framing.Kind.BULK_DATA, 1, known, 0)
            mesh._handle(memoryview(head), memoryview(b""), is_bulk=False)


def test_g9_what_cannot_share_a_local_socket_uses_the_other_way():
    bulk = BulkLinks()
    if not bulk.announcement:
        pytest.skip("This system has no abstract sockets.")
    # Another user's processes may be in the same network, that of a container for instance.
    elsewhere = {**bulk.announcement, "host": bulk.announcement["host"] + "1"}
    for announcement in (elsewhere, {}, None, {**bulk.announcement, "endpoint": "tcp://192.0.2.1:1"}):
        bulk.open(1, announcement)
        assert not bulk.links
    assert str(os.geteuid()) in bulk.announcement["host"].split()


@pytest.mark.parametrize("secret", [None, "correct horse battery"])
@pytest.mark.parametrize("size", [2, 3])
def test_g9_large_messages_between_hosts_go_over_the_links_that_the_secret_protects(
    monkeypatch, size, secret
):
    hosts = itertools.count()
    monkeypatch.setattr("tfdist_ext.transport.bulk._this_host", lambda: f"host {next(hosts)}")
    with connected(size, secret=secret, ring_chunk_bytes=1 << 17) as groups:
        values = np.arange(200_000.0)
        for result in each(groups, lambda group: group.all_reduce(values, name="sum")):
            np.testing.assert_array_equal(result, values * size)
        for result in each(groups, lambda group: group.broadcast(values + group.rank, name="first")):
            np.testing.assert_array_equal(result, values)
        assert not any(group._mesh._bulk.links for group in groups)


def test_g9_an_impostor_does_not_take_the_place_of_a_live_peer_while_the_group_forms():
    addresses = free_addresses(3)

    def work(rank):
        if rank == 2:
            assert spoken.wait(DEADLINE_SECONDS)
        group = ProcessGroup.connect(
            addresses, rank, task_names=names(3), start_timeout_seconds=DEADLINE_SECONDS
        )
        total = group.all_reduce(np.ones(1), name="sum")[0]
        group.close()
        return total

    def impersonate():
        # Workers 0 and 1 have met; the group waits for worker 2. The impostor knows all but their numbers.
        identity = Identity(group_name="replicas", rank=1, task_names=tuple(names(3)), incarnation=7)
        _, _, fields = Handshake(identity).link_up(0)[0]
        fields["agreed"].update({"settings.ring_chunk_bytes": 3, "settings.direct_threshold_bytes": 3})
        with zmq.Context() as context, context.socket(zmq.PUSH) as stranger:
            stranger.connect(f"tcp://{addresses[0]}")
            assert met.wait(DEADLINE_SECONDS)
            head = framing.pack_head(framing.Kind.HELLO, 1, 7, 0)
            stranger.send_multipart([head, framing.pack_json(fields)])
            assert kept_aside.wait(DEADLINE_SECONDS)
        spoken.set()

    met, kept_aside, spoken = threading.Event(), threading.Event(), threading.Event()
    taken, kept = Handshake.receive_acknowledgement, Handshake.receive_hello

    def note_acknowledgement(self, rank, fields):
        taken(self, rank, fields)
        if self._identity.rank == 0 and self._peers[1].acknowledged:
            met.set()

    def note_hello(self, rank, incarnation, fields):
        outgoing = kept(self, rank, incarnation, fields)
        if incarnation == 7:
            kept_aside.set()
        return outgoing

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Handshake, "receive_acknowledgement", note_acknowledgement)
        patch.setattr(Handshake, "receive_hello", note_hello)
        found = each([0, 1, 2, None], lambda rank: impersonate() if rank is None else work(rank))
    assert found == [3.0, 3.0, 3.0, None]
