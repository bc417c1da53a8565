"""What is one link, and how does its end show? Sockets and their options."""

from __future__ import annotations

import enum
from collections.abc import Iterator

import zmq
import zmq.utils.monitor

from tfdist_ext import errors
from tfdist_ext.transport import framing
from tfdist_ext.transport.addresses import Address
from tfdist_ext.transport.security import Curve

# Below this, copying is cheaper than telling Python, through pyzmq's collector thread, that a buffer is free
# again.
ZERO_COPY_BYTES = 64 * 1024


class LinkEvent(enum.Enum):
    """What happened to a link."""

    UP = enum.auto()
    DOWN = enum.auto()


_EVENTS = {zmq.EVENT_HANDSHAKE_SUCCEEDED: LinkEvent.UP, zmq.EVENT_DISCONNECTED: LinkEvent.DOWN}


class Link:
    """The outgoing half of the connection to one peer.

    Liveness is left to ZeroMQ, whose own I/O thread sends and answers heartbeats in C++: a peer that holds
    the Python lock for seconds (importing, tracing a model) still answers, a stopped process or a frozen host
    does not.

    Attributes:
        num_sent: Messages sent since the last `restart_sequence`; the sequence number of the next.
    """

    def __init__(
        self, context: zmq.Context, address: Address, curve: Curve | None, peer_timeout_seconds: float
    ):
        self.num_sent = 0
        self._socket = context.socket(zmq.PUSH)
        self._socket.linger = 0
        # Unlimited: the layer above decides what is in flight, and a full queue here would block the only
        # thread.
        self._socket.sndhwm = 0
        self._socket.ipv6 = address.uses_ipv6
        self._socket.reconnect_ivl = 50
        self._socket.reconnect_ivl_max = 400
        timeout_ms = max(1, round(1000 * peer_timeout_seconds))
        self._socket.heartbeat_ivl = max(1, timeout_ms // 5)
        self._socket.heartbeat_timeout = timeout_ms
        # A heartbeat queues behind data that the kernel cannot deliver, so it cannot see a peer that froze
        # while it was being sent to. This sets TCP_USER_TIMEOUT, with which the kernel itself gives such a
        # connection up.
        self._socket.setsockopt(zmq.TCP_MAXRT, timeout_ms)
        if curve is not None:
            curve.protect_connector(self._socket)
        self.monitor = self._socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        self._socket.connect(address.connect_endpoint)

    def restart_sequence(self) -> None:
        """Numbers the next message 0, as after every (re)connection."""
        self.num_sent = 0

    def send(self, head: bytes, payload, *, track: bool = False) -> zmq.MessageTracker | None:
        """Queues one message; never blocks.

        Args:
            head: The head frame.
            payload: A contiguous buffer. A large one is not copied, so it must not change before it has been
                sent.
            track: Whether to return a tracker, which is done as soon as `payload` may be changed again.
        """
        self.num_sent += 1
        self._socket.send(head, zmq.NOBLOCK | zmq.SNDMORE)
        if payload.nbytes < ZERO_COPY_BYTES:
            self._socket.send(payload, zmq.NOBLOCK)
            return None
        return self._socket.send(payload, zmq.NOBLOCK, copy=False, track=track)

    def events(self) -> list[LinkEvent]:
        """What happened since the last call; never blocks."""
        happened = []
        while self.monitor.poll(0):
            event = zmq.utils.monitor.recv_monitor_message(self.monitor)
            if event["event"] in _EVENTS:
                happened.append(_EVENTS[event["event"]])
        return happened

    def close(self, linger_seconds: float = 0.0) -> None:
        """Closes the link, giving what is queued `linger_seconds` to leave."""
        if not self._socket.closed:
            self._socket.disable_monitor()
            self._socket.close(linger=round(1000 * linger_seconds))


class BulkLink:
    """A second way to a peer on the same host, for large messages only: a Unix socket costs less than loopback TCP.

    It needs no liveness of its own: the peer's `Link` stays idle enough for heartbeats, even in mid-transfer. It is
    not encrypted: the bytes stay in the kernel of this host, which has checked whose process the other end is.
    """

    def __init__(self, context: zmq.Context, endpoint: str):
        self.num_sent = 0
        self._socket = context.socket(zmq.PUSH)
        self._socket.linger = 0
        self._socket.sndhwm = 0
        # Once only, to the peer that announced the name: after its end anybody may take that name. And without a
        # limit in time, since a peer that is stopped for long is the business of its `Link`.
        self._socket.reconnect_ivl = -1
        self._socket.handshake_ivl = 0
        self._socket.connect(endpoint)

    def send(self, head: bytes, payload, *, track: bool = False) -> zmq.MessageTracker | None:
        """Queues one message without copying it; see `Link.send`."""
        self.num_sent += 1
        try:
            self._socket.send(head, zmq.NOBLOCK | zmq.SNDMORE)
            return self._socket.send(payload, zmq.NOBLOCK, copy=False, track=track)
        except zmq.Again:
            return None  # The process at the other end is gone, which its `Link` is about to tell.

    def close(self, linger_seconds: float = 0.0) -> None:
        """Closes the link, giving what is queued `linger_seconds` to leave."""
        if not self._socket.closed:
            self._socket.close(linger=round(1000 * linger_seconds))


def open_listener(context: zmq.Context, address: Address, task_name: str, curve: Curve | None) -> zmq.Socket:
    """Opens the socket on which `task_name` receives from all its peers.

    Raises:
        ClusterSpecError: If the address is in use or belongs to another machine.
    """
    listener = context.socket(zmq.PULL)
    listener.linger = 0
    listener.rcvhwm = 0
    listener.maxmsgsize = framing.MAX_PAYLOAD_BYTES
    listener.ipv6 = address.uses_ipv6
    if curve is not None:
        curve.protect_listener(listener)
    failure: zmq.ZMQError | None = None
    for endpoint in address.bind_endpoints():
        try:
            listener.bind(endpoint)
            return listener
        except zmq.ZMQError as error:
            failure = error
            if error.errno == zmq.EADDRINUSE:
                break
    listener.close()
    if failure is not None and failure.errno == zmq.EADDRINUSE:
        raise errors.ClusterSpecError(
            f"{task_name} cannot listen on {address}: the address is already in use, perhaps by an earlier "
            f"run. "
            f"Stop that process (`ss -ltnp 'sport = :{address.port}'` shows it), or give {task_name} another "
            f"port "
            "in the cluster of every task."
        ) from failure
    raise errors.ClusterSpecError(f"{task_name} cannot listen on {address}: {failure}.") from failure


def receive(listener: zmq.Socket, limit: int) -> Iterator[list[memoryview]]:
    """Yields the frames of up to `limit` waiting messages; never blocks."""
    for _ in range(limit):
        try:
            frames = [listener.recv(zmq.NOBLOCK, copy=False)]
        except zmq.Again:
            return
        while frames[-1].more:
            frames.append(listener.recv(copy=False))
        yield [frame.buffer for frame in frames]
