"""Who is there, and who is lost? All links of one task, run by one engine thread."""

from __future__ import annotations

import dataclasses
import enum
import functools
import json
import threading
import time
from collections.abc import Sequence
from typing import Any

import zmq
from absl import logging

from tfdist_ext import errors
from tfdist_ext.transport import framing, security
from tfdist_ext.transport.addresses import Address
from tfdist_ext.transport.bulk import BulkLinks
from tfdist_ext.transport.engine import Engine
from tfdist_ext.transport.framing import Kind, ProtocolViolation
from tfdist_ext.transport.handler import Handler
from tfdist_ext.transport.handshake import Handshake, Identity, Outgoing
from tfdist_ext.transport.links import (
    ZERO_COPY_BYTES,
    BulkLink,
    Link,
    LinkEvent,
    open_listener,
    receive,
)

_EMPTY = memoryview(b"")
_MESSAGES_PER_ROUND = 64
# How long a task that leaves waits for a peer that is alive and still takes its large messages.
_BULK_LINGER_SECONDS = 60.0


class _State(enum.Enum):
    ALIVE = enum.auto()
    LEFT = enum.auto()
    LOST = enum.auto()


class Mesh:
    """The links of one task to all the others.

    Args:
        addresses: Address of every task, by rank.
        identity: What this task believes itself and the group to be.
        handler: Receives messages and news of peers.
        secret: Cluster secret, the same on all tasks; turns on encryption and authentication.
        insecure: Allows links beyond this machine without a secret.
        peer_timeout_seconds: Silence after which a peer counts as lost; a closed connection counts at once.

    Raises:
        AuthenticationError: If the links leave this machine without a secret.
        ClusterSpecError: If an address is malformed or in use.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        identity: Identity,
        handler: Handler,
        *,
        secret: str | None = None,
        insecure: bool = False,
        peer_timeout_seconds: float = 5.0,
    ):
        self._addresses = [Address.parse(address) for address in addresses]
        self._rank = identity.rank
        self._names = identity.task_names
        self._incarnation = identity.incarnation
        self._handler = handler
        self._bulk = BulkLinks()
        self._handshake = Handshake(dataclasses.replace(identity, bulk=self._bulk.announcement))
        self._peer_timeout_seconds = peer_timeout_seconds
        self._states = {rank: _State.ALIVE for rank in range(len(addresses)) if rank != self._rank}
        self._expected = dict.fromkeys(self._states, 0)
        self._expected_bulk = dict.fromkeys(self._states, 0)
        self._formed = threading.Event()
        self._start_error: Exception | None = None
        self._closing_until: float | None = None
        self._bulk_linger_seconds = 0.0
        self._unacknowledged: set[int] = set()
        # Goodbyes that have overtaken the last large messages, which come another way.
        self._goodbyes: dict[int, dict[str, Any]] = {}
        self._greeted: set[int] = set()
        security.require_secret_beyond_loopback(self._addresses, secret, insecure)
        self._engine = Engine(
            f"tfdist_ext {identity.group_name} {self._names[self._rank]}",
            tick=self._tick,
            on_crash=lambda error: handler.closed(error),
            on_stop=self._close_sockets,
        )
        self._open_sockets(security.Curve(secret) if secret else None)
        self._engine.start()

    def _open_sockets(self, curve: security.Curve | None) -> None:
        self._context = zmq.Context()
        try:
            if curve is not None:
                gatekeeper = security.Gatekeeper(self._context, curve)
                self._engine.watch(gatekeeper.socket, gatekeeper.answer_requests)
            own_address = self._addresses[self._rank]
            self._listener = open_listener(self._context, own_address, self._names[self._rank], curve)
            self._bulk_listener = self._bulk.listen(self._context)
            self._links = {
                rank: Link(self._context, self._addresses[rank], curve, self._peer_timeout_seconds)
                for rank in self._states
            }
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._engine.watch(self._listener, self._receive_messages)
        if self._bulk_listener is not None:
            self._engine.watch(self._bulk_listener, self._receive_bulk)
        for rank, link in self._links.items():
            self._engine.watch(link.monitor, functools.partial(self._watch_link, rank))

    # Any thread.

    def start(self, timeout_seconds: float, *, first_notice_seconds: float = 5.0) -> list[dict[str, Any]]:
        """Waits until every task is there.

        Returns:
            The `hello` fields of all tasks, by rank.

        Raises:
            StartupTimeoutError: If a task did not answer in time.
            ConfigurationMismatchError: If a task has other settings.
        """
        begin = time.monotonic()
        notice_seconds = first_notice_seconds
        while not self._formed.wait(
            max(0.0, min(notice_seconds, timeout_seconds) - (time.monotonic() - begin))
        ):
            waited = time.monotonic() - begin
            missing = [f"{self._names[rank]} at {self._addresses[rank]}" for rank in self._handshake.missing]
            if waited >= timeout_seconds and self._handshake.mismatch is not None:
                raise self._handshake.mismatch
            if waited >= timeout_seconds:
                raise errors.StartupTimeoutError(
                    f"{', '.join(missing)} did not answer {self._names[self._rank]} within {waited:.0f} s. "
                    f"Check that "
                    "it runs, that it was given the same addresses, and that its port can be reached from "
                    "here; "
                    "a wrong cluster secret looks the same.",
                    missing=tuple(missing),
                    waited_seconds=waited,
                )
            if waited >= notice_seconds:
                logging.warning(
                    "%s has waited %.0f s for %s.", self._names[self._rank], waited, ", ".join(missing)
                )
                notice_seconds = waited + 10.0
        if self._start_error is not None:
            raise self._start_error
        return json.loads(json.dumps(self._handshake.hellos))

    def call(self, function) -> None:
        """Has `function` run in the engine thread; never blocks."""
        self._engine.call(function)

    def close(self, linger_seconds: float = 5.0) -> None:
        """Says goodbye and waits until every peer has taken what was sent to it, for a bounded time."""
        self._engine.call(lambda: self._begin_close(linger_seconds))
        self._engine.join(max(linger_seconds, _BULK_LINGER_SECONDS) + 5.0)

    # Engine thread only.

    def send(
        self, rank: int, body: bytes, payload=_EMPTY, *, track: bool = False
    ) -> zmq.MessageTracker | None:
        """Queues a message for a peer, or drops it if the peer is gone; see `Link.send`."""
        if self._states[rank] is not _State.ALIVE:
            return None
        return self._send(rank, Kind.DATA, body, payload, track)

    def _send(self, rank: int, kind: Kind, body: bytes = b"", payload=_EMPTY, track: bool = False):
        link: Link | BulkLink = self._links[rank]
        if kind is Kind.DATA and payload.nbytes >= ZERO_COPY_BYTES and rank in self._bulk.links:
            kind, link = Kind.BULK_DATA, self._bulk.links[rank]
        head = framing.pack_head(kind, self._rank, self._incarnation, link.num_sent, body)
        return link.send(head, payload, track=track)

    def _send_fields(self, messages: Outgoing) -> None:
        for rank, kind, fields in messages:
            if kind is Kind.HELLO:
                self._links[rank].restart_sequence()
                self._bulk.restart_sequence(rank)
            self._send(rank, kind, payload=memoryview(framing.pack_json(fields)))

    def _receive_messages(self, limit: int = _MESSAGES_PER_ROUND) -> None:
        self._receive_from(self._listener, limit)

    def _receive_bulk(self, limit: int = _MESSAGES_PER_ROUND) -> None:
        if self._bulk_listener is not None:
            self._receive_from(self._bulk_listener, limit)

    def _receive_from(self, listener: zmq.Socket, limit: int) -> None:
        for frames in receive(listener, limit):
            try:
                if len(frames) != 2:
                    raise ProtocolViolation(f"a message of {len(frames)} frames")
                self._handle(*frames, is_bulk=listener is self._bulk_listener)
            except ProtocolViolation as violation:
                logging.log_every_n_seconds(
                    logging.WARNING, "%s ignored %s.", 10, self._names[self._rank], violation
                )

    def _handle(self, head: memoryview, payload: memoryview, *, is_bulk: bool) -> None:
        header, body = framing.unpack_head(head, len(self._names))
        source, kind = header.source, header.kind
        if source == self._rank:
            raise ProtocolViolation("a message that claims to come from this task")
        if is_bulk is not (kind is Kind.BULK_DATA):
            # The way for large messages is not encrypted: nothing that decides who is who comes over it.
            raise ProtocolViolation(f"a message of kind {kind.name} on the wrong socket")
        if self._states[source] is _State.LOST:
            return
        known = header.incarnation == self._handshake.incarnation(source)
        if kind is Kind.HELLO and not self._formed.is_set():
            fields = framing.unpack_json(payload)
            self._send_fields(self._handshake.receive_hello(source, header.incarnation, fields))
            if self._handshake.incarnation(source) == header.incarnation:
                self._begin_to_hear(source)
            return
        if not known:
            raise ProtocolViolation(f"a message of another process that claims to be {self._names[source]}")
        expected = self._expected_bulk if kind is Kind.BULK_DATA else self._expected
        if header.sequence != expected[source] or kind is Kind.HELLO:
            if not self._formed.is_set():
                raise ProtocolViolation(f"a message of an earlier link of {self._names[source]}")
            self._lose(source, "messages were lost on the way from it")
            return
        expected[source] += 1
        if kind in (Kind.DATA, Kind.BULK_DATA):
            self._handler.receive(source, body, payload)
            self._hear_goodbye_if_all_is_here(source)
        else:
            self._handle_control(source, kind, payload)

    def _begin_to_hear(self, rank: int) -> None:
        """Counts anew what comes from a peer whose HELLO was taken."""
        self._expected[rank], self._expected_bulk[rank] = 1, 0
        self._bulk.open(rank, self._handshake.bulk(rank))

    def _handle_control(self, source: int, kind: Kind, payload: memoryview) -> None:
        if kind is Kind.ACKNOWLEDGE_HELLO:
            self._handshake.receive_acknowledgement(source, framing.unpack_json(payload))
        elif kind is Kind.GOODBYE:
            self._goodbyes[source] = framing.unpack_json(payload)
            self._hear_goodbye_if_all_is_here(source)
        elif kind is Kind.ACKNOWLEDGE_GOODBYE:
            self._unacknowledged.discard(source)
        elif kind is Kind.LOST:
            fields = framing.unpack_json(payload)
            rank, reason = fields.get("rank"), str(fields.get("reason"))[:500]
            if rank == self._rank:
                self._lose(source, f"it gave this task up: {reason}")
            elif rank in self._states:
                self._lose(rank, f"{self._names[source]} reports: {reason}")

    def _hear_goodbye_if_all_is_here(self, source: int) -> None:
        farewell = self._goodbyes.get(source)
        if farewell is None or not _has_come(self._expected_bulk[source], farewell.get("bulk")):
            return
        del self._goodbyes[source]
        self._send(source, Kind.ACKNOWLEDGE_GOODBYE)
        if self._states[source] is _State.ALIVE:
            self._states[source] = _State.LEFT
            self._handler.peer_left(source, farewell)

    def _watch_link(self, rank: int) -> None:
        for event in self._links[rank].events():
            if event is LinkEvent.UP:
                self._greeted.add(rank)
                self._send_fields(self._handshake.link_up(rank))
            elif self._formed.is_set() or self._states[rank] is not _State.ALIVE:
                # What the peer sent before its end may still wait in a listener; its goodbye, above all.
                self._receive_messages(limit=1 << 30)
                self._receive_bulk(limit=1 << 30)
                if self._states[rank] is _State.ALIVE:
                    self._lose(rank, "its connection closed or stopped answering")
                self._close_link(rank)
                return
            elif self._handshake.link_down(rank):
                self._begin_to_hear(rank)

    def _lose(self, rank: int, reason: str) -> None:
        if self._states[rank] is not _State.ALIVE:
            return
        self._states[rank] = _State.LOST
        self._close_link(rank)
        # Every task should see it on its own link. The notice covers a failure between two tasks only, of
        # which the others would otherwise learn from a collective that times out.
        notice = memoryview(framing.pack_json({"rank": rank, "reason": reason}))
        for other, state in self._states.items():
            if state is _State.ALIVE:
                self._send(other, Kind.LOST, payload=notice)
        self._handler.peer_lost(rank, reason)

    def _close_link(self, rank: int) -> None:
        self._unacknowledged.discard(rank)
        self._engine.unwatch(self._links[rank].monitor)
        self._links[rank].close()
        self._bulk.close(rank)

    def _tick(self) -> float:
        if self._closing_until is not None:
            remaining = self._closing_until - time.monotonic()
            if self._unacknowledged & self._bulk.links.keys():
                remaining += self._bulk_linger_seconds
            if not self._unacknowledged or remaining <= 0:
                self._engine.stop()
                return 0.0
            return min(remaining, 0.1)
        if not self._formed.is_set():
            mismatch = self._handshake.mismatch
            if mismatch is not None:
                self._fail_start(mismatch)
            elif not self._handshake.missing:
                self._formed.set()
            return 0.1
        return self._handler.tick()

    def _fail_start(self, mismatch: errors.ConfigurationMismatchError) -> None:
        # The other task should learn of the disagreement too, so it must have had our HELLO first.
        if self._names.index(mismatch.tasks[1]) in self._greeted:
            self._start_error = mismatch
            self._formed.set()

    def _begin_close(self, linger_seconds: float) -> None:
        if self._closing_until is not None:
            return
        self._closing_until = time.monotonic() + linger_seconds
        self._bulk_linger_seconds = max(0.0, _BULK_LINGER_SECONDS - linger_seconds)
        # Before `closed`, which fails what is pending here: peers must learn how far this task really came.
        farewell = self._handler.farewell()
        self._handler.closed(None)
        if not self._formed.is_set() or self._start_error is not None:
            return
        for rank, state in self._states.items():
            if state is _State.ALIVE:
                goodbye = framing.pack_json({**farewell, "bulk": self._bulk.num_sent(rank)})
                self._send(rank, Kind.GOODBYE, payload=memoryview(goodbye))
                self._unacknowledged.add(rank)

    def _close_sockets(self) -> None:
        for link in self._links.values():
            # Acknowledged goodbyes mean that everything arrived. What lingers is the HELLO of a failed start,
            # and our acknowledgement of a goodbye that crossed our own.
            link.close(linger_seconds=0.5)
        self._bulk.close_all(linger_seconds=0.5)
        self._context.destroy()


def _has_come(num_received: int, num_sent: Any) -> bool:
    return not isinstance(num_sent, int) or num_received >= num_sent
