"""Addresses, frames and the handshake: no sockets."""

import socket

import hypothesis
import pytest
import zmq
from hypothesis import strategies as st

from tfdist_ext import errors
from tfdist_ext.transport import framing, security
from tfdist_ext.transport.addresses import Address
from tfdist_ext.transport.framing import Kind, ProtocolViolation
from tfdist_ext.transport.handshake import Handshake, Identity


@pytest.mark.parametrize(
    ("text", "host", "port", "loopback", "endpoint"),
    [
        ("127.0.0.1:2222", "127.0.0.1", 2222, True, "tcp://127.0.0.1:2222"),
        ("127.8.0.1:1", "127.8.0.1", 1, True, "tcp://127.8.0.1:1"),
        ("localhost:2222", "localhost", 2222, True, "tcp://127.0.0.1:2222"),
        ("[::1]:65535", "::1", 65535, True, "tcp://[::1]:65535"),
        ("10.0.0.7:80", "10.0.0.7", 80, False, "tcp://10.0.0.7:80"),
        ("node-3.example:80", "node-3.example", 80, False, "tcp://node-3.example:80"),
        ("[2001:db8::1]:80", "2001:db8::1", 80, False, "tcp://[2001:db8::1]:80"),
    ],
)
def test_address(text, host, port, loopback, endpoint):
    address = Address.parse(text)
    assert (address.host, address.port, address.is_loopback) == (host, port, loopback)
    assert address.connect_endpoint == endpoint and str(address) == text


@pytest.mark.parametrize(
    "text", ["", "host", "host:", ":80", "host:0", "host:65536", "host:x", "::1:80", "host:-1"]
)
def test_malformed_address(text):
    with pytest.raises(errors.ClusterSpecError):
        Address.parse(text)


def test_only_a_foreign_address_falls_back_to_all_interfaces():
    # 192.0.2.0/24 is reserved for documentation (RFC 5737).
    assert Address.parse("192.0.2.1:80").bind_endpoints() == ["tcp://192.0.2.1:80", "tcp://0.0.0.0:80"]
    assert Address.parse("localhost:80").bind_endpoints() == ["tcp://127.0.0.1:80"]
    assert Address.parse("[::1]:80").bind_endpoints() == ["tcp://[::1]:80"]


def test_secret_is_needed_beyond_loopback():
    outside = [Address.parse("127.0.0.1:1"), Address.parse("192.0.2.1:1")]
    with pytest.raises(
        errors.AuthenticationError, match="TFDIST_EXT_CLUSTER_SECRET.*`cluster_secret`.*`insecure=True`"
    ):
        security.require_secret_beyond_loopback(outside, None, False)
    security.require_secret_beyond_loopback(outside, "correct horse battery", False)
    security.require_secret_beyond_loopback(outside, None, True)
    security.require_secret_beyond_loopback(outside[:1], None, False)
    with pytest.raises(ValueError, match="contradict"):
        security.require_secret_beyond_loopback(outside, "correct horse battery", True)
    with pytest.raises(ValueError, match="empty"):
        security.require_secret_beyond_loopback(outside, "", False)


@pytest.mark.parametrize("secret", ["s", "fifteen letters"])
def test_h17_a_short_secret_is_refused(secret):
    addresses = [Address.parse("127.0.0.1:2222")]
    with pytest.raises(ValueError, match=f"has {len(secret)} characters.*at least 16.*openssl rand -hex 32"):
        security.require_secret_beyond_loopback(addresses, secret, False)


def test_h17_refused_links_are_told_of_every_ten_seconds(caplog):
    # 30 refusals, one every 2 s: told of at 0, 10, 20, 30, 40 and 50.
    times = iter(float(second) for second in range(0, 60, 2))
    now = [0.0]
    keeper = security.Gatekeeper(zmq.Context(), security.Curve("correct horse battery"), lambda: now[0])
    for now[0] in times:
        keeper._tell_of_refusal("192.0.2.7")
    keeper.socket.close()
    told = [record.getMessage() for record in caplog.records if "Refused a link" in record.getMessage()]
    assert len(told) == 6 and "26 refused so far" in told[-1]


def test_h13_a_name_with_ipv6_addresses_only(monkeypatch):
    def resolved(host, port, family, kind):
        if family == socket.AF_INET:
            raise socket.gaierror("no address of this kind")
        return [(family, kind, 6, "", ("2001:db8::7", port, 0, 0))]

    monkeypatch.setattr(socket, "getaddrinfo", resolved)
    address = Address.parse("trainer-1:2222")
    assert address.uses_ipv6 and address.connect_endpoint == "tcp://trainer-1:2222"
    assert address.bind_endpoints() == ["tcp://[2001:db8::7]:2222", "tcp://[::]:2222"]


@pytest.mark.parametrize(
    ("text", "expected"), [("127.0.0.1:1", False), ("[::1]:1", True), ("localhost:1", False)]
)
def test_h13_literals_and_localhost_are_what_they_were(text, expected):
    assert Address.parse(text).uses_ipv6 is expected


def test_key_depends_on_the_secret_alone():
    assert security.Curve("a").public_key == security.Curve("a").public_key != security.Curve("b").public_key


@hypothesis.given(
    st.sampled_from(list(Kind)),
    st.integers(0, 4),
    st.integers(0, 2**64 - 1),
    st.integers(0, 2**64 - 1),
    st.binary(max_size=50),
)
def test_head_round_trip(kind, source, incarnation, sequence, body):
    head = framing.pack_head(kind, source, incarnation, sequence, body)
    header, rest = framing.unpack_head(head, num_tasks=5)
    assert (header.kind, header.source, header.incarnation, header.sequence, rest) == (
        kind,
        source,
        incarnation,
        sequence,
        body,
    )
    with pytest.raises(ProtocolViolation):
        framing.unpack_head(head[:20], num_tasks=5)
    with pytest.raises(ProtocolViolation, match="rank"):
        framing.unpack_head(head, num_tasks=source)


@hypothesis.given(st.binary(max_size=200))
def test_any_bytes_are_understood_or_refused(data):
    for unpack in (lambda: framing.unpack_head(data, 3), lambda: framing.unpack_json(data)):
        try:
            unpack()
        except ProtocolViolation:
            pass


def test_json_is_bounded():
    with pytest.raises(ValueError, match="limit"):
        framing.pack_json({"x": "y" * framing.MAX_JSON_BYTES})
    with pytest.raises(ProtocolViolation):
        framing.unpack_json(b" " * (framing.MAX_JSON_BYTES + 1))
    with pytest.raises(ValueError, match="JSON"):
        framing.pack_json({"x": object()})
    with pytest.raises(ProtocolViolation):
        framing.unpack_json(b"[" * 100_000)


def make_pair(**settings):
    return [
        Handshake(
            Identity(
                group_name="g",
                rank=rank,
                task_names=("worker:0", "worker:1"),
                incarnation=100 + rank,
                settings={"chunk": settings.get(f"chunk{rank}", 1)},
                hello={"rank": rank},
            )
        )
        for rank in range(2)
    ]


def pump(pair, incarnations, source, outgoing):
    """Delivers what `source` wants sent, and all that follows from it."""
    for target, kind, fields in outgoing:
        if kind is Kind.HELLO:
            pump(pair, incarnations, target, pair[target].receive_hello(source, incarnations[source], fields))
        else:
            pair[target].receive_acknowledgement(source, fields)


def test_handshake_needs_both_links():
    pair = make_pair()
    pump(pair, [100, 101], 0, pair[0].link_up(1))
    assert pair[0].missing == [1] and pair[1].missing == [0]
    pump(pair, [100, 101], 1, pair[1].link_up(0))
    assert pair[0].missing == pair[1].missing == []
    assert pair[0].hellos == pair[1].hellos == [{"rank": 0}, {"rank": 1}]


def test_a_restarted_peer_is_waited_for_again():
    pair = make_pair()
    pump(pair, [100, 101], 1, pair[1].link_up(0))
    lost = pair[0].link_up(1)  # Sent into the void: task 1 dies.
    assert [kind for _, kind, _ in lost] == [Kind.HELLO, Kind.ACKNOWLEDGE_HELLO]
    pair[0].link_down(1)
    assert pair[0].missing == [1]
    pair[1] = make_pair()[1]
    pump(pair, [100, 201], 0, pair[0].link_up(1))
    assert pair[0].missing == [1]  # The old process was acknowledged; nothing is known of the new one.
    pair[1] = Handshake(
        Identity(
            group_name="g",
            rank=1,
            task_names=("worker:0", "worker:1"),
            incarnation=201,
            settings={"chunk": 1},
        )
    )
    pair[0].link_down(1)
    pump(pair, [100, 201], 1, pair[1].link_up(0))
    pump(pair, [100, 201], 0, pair[0].link_up(1))
    assert pair[0].missing == pair[1].missing == [] and pair[0].incarnation(1) == 201


def test_a_task_with_other_settings_is_named():
    pair = make_pair(chunk0=1, chunk1=2)
    pump(pair, [100, 101], 1, pair[1].link_up(0))
    assert pair[0].mismatch.tasks == ("worker:0", "worker:1") and pair[0].mismatch.values == (1, 2)
    assert pair[0].mismatch.field == "settings.chunk"


def test_a_hello_of_another_group_changes_nothing():
    pair = make_pair()
    with pytest.raises(ProtocolViolation, match="other"):
        pair[0].receive_hello(1, 7, {"group": "other", "agreed": {}, "hello": {}})
    with pytest.raises(ProtocolViolation):
        pair[0].receive_hello(1, 7, {"group": "g"})
    assert pair[0].incarnation(1) is None and pair[0].mismatch is None


def fields_of(incarnation, rank=1, chunk=1):
    """The HELLO of a process that calls itself worker 1."""
    identity = Identity(
        group_name="g", rank=rank, task_names=("worker:0", "worker:1"), incarnation=incarnation,
        settings={"chunk": chunk}, hello={"number": incarnation}, bulk={"endpoint": f"of {incarnation}"},
    )  # fmt: skip
    return Handshake(identity).link_up(1 - rank)[0][2]


def test_g9_the_first_hello_of_a_live_link_stays():
    us = make_pair()[0]
    us.receive_hello(1, 101, fields_of(101))
    assert us.receive_hello(1, 55, fields_of(55)) == []  # Nobody has acknowledged us: the latest counts.
    assert us.incarnation(1) == 55
    us.link_up(1)
    us.receive_hello(1, 101, fields_of(101))
    us.receive_acknowledgement(1, {"incarnation": 100})
    # From here on worker 1 is the one that has.
    assert us.receive_hello(1, 66, fields_of(66, chunk=2)) == []
    assert us.incarnation(1) == 101 and us.missing == [] and us.mismatch is None
    assert us.hellos[1] == {"number": 101} and us.bulk(1) == {"endpoint": "of 101"}
    # Its own link may break and come back, with a HELLO of its own.
    assert us.receive_hello(1, 101, fields_of(101)) == [(1, Kind.ACKNOWLEDGE_HELLO, {"incarnation": 101})]


def test_g9_a_restarted_task_takes_the_place_of_the_one_that_died_though_it_spoke_first():
    us = make_pair()[0]
    us.link_up(1)
    us.receive_hello(1, 101, fields_of(101))
    us.receive_acknowledgement(1, {"incarnation": 100})
    assert us.receive_hello(1, 201, fields_of(201)) == []  # The news of 101's end is still on its way.
    assert us.link_down(1) and us.incarnation(1) == 201 and us.bulk(1) == {"endpoint": "of 201"}
    assert us.missing == [1] and not us.link_down(1)
    assert us.link_up(1)[1] == (1, Kind.ACKNOWLEDGE_HELLO, {"incarnation": 201})
    us.receive_acknowledgement(1, {"incarnation": 100})
    assert us.missing == [] and us.hellos[1] == {"number": 201}


@hypothesis.given(st.lists(st.sampled_from(["up", "down", "hello", "acknowledge", "impostor"]), max_size=30))
def test_g9_whoever_acknowledged_this_process_is_its_peer_until_the_link_breaks(events):
    us, is_live = make_pair()[0], False
    for event in events:
        if event == "hello":
            us.receive_hello(1, 101, fields_of(101))
        elif event == "impostor":
            us.receive_hello(1, 66, fields_of(66))
        elif event == "acknowledge" and us.incarnation(1) == 101:  # A mesh hears known processes alone.
            us.receive_acknowledgement(1, {"incarnation": 100})
            is_live = True
        elif event in ("up", "down"):
            us.link_up(1) if event == "up" else us.link_down(1)
            is_live = False
        if is_live:
            assert us.incarnation(1) == 101 and us.hellos[1] == {"number": 101} and us.missing == []
    # However it went: a peer that comes anew is taken.
    us.link_down(1)
    us.link_up(1)
    assert us.receive_hello(1, 301, fields_of(301)) == [(1, Kind.ACKNOWLEDGE_HELLO, {"incarnation": 301})]
