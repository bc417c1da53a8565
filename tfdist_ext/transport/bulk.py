"""Which peers run on this host, and how do large messages reach them? Unix sockets without files."""

from __future__ import annotations

import os
import pathlib
import secrets
from typing import Any

import zmq

from tfdist_ext.transport import framing
from tfdist_ext.transport.links import BulkLink

# The @ makes it an abstract socket, which has no file and ends with its process.
_PREFIX = "ipc://@tfdist_ext-"
# Every task of the host connects once, and is not to be turned away because others do so at the same time.
_BACKLOG = 4096


class BulkLinks:
    """The socket for large messages of one task, and its links to those of the peers on this host.

    Neither end has a key: the listener admits processes of the same user alone, which the kernel vouches for, and
    a link is opened only to the name that came in a peer's HELLO, over its link that the cluster secret protects.

    Attributes:
        announcement: What peers must know to send large messages here, `{"host": ..., "endpoint": ...}`; empty
            where there are no such sockets.
        links: The open links, by rank.
    """

    def __init__(self) -> None:
        host = _this_host()
        endpoint = f"{_PREFIX}{secrets.token_hex(16)}"
        self.announcement: dict[str, str] = {"host": host, "endpoint": endpoint} if host else {}
        self.links: dict[int, BulkLink] = {}

    def listen(self, context: zmq.Context) -> zmq.Socket | None:
        """Opens the socket on which this task receives large messages, where there are such sockets."""
        self._context = context
        if not self.announcement:
            return None
        listener = context.socket(zmq.PULL)
        listener.linger = 0
        listener.rcvhwm = 0
        listener.backlog = _BACKLOG
        listener.handshake_ivl = 0
        listener.maxmsgsize = framing.MAX_PAYLOAD_BYTES
        listener.setsockopt(zmq.IPC_FILTER_UID, os.geteuid())
        listener.bind(self.announcement["endpoint"])
        return listener

    def open(self, rank: int, announcement: Any) -> None:
        """Opens the way to a peer if it is on this host, anew for each of its processes."""
        self.close(rank)
        if not isinstance(announcement, dict) or not self.announcement:
            return
        endpoint = str(announcement.get("endpoint"))
        if announcement.get("host") == self.announcement["host"] and endpoint.startswith(_PREFIX):
            self.links[rank] = BulkLink(self._context, endpoint)

    def num_sent(self, rank: int) -> int:
        """Large messages that were sent to a peer."""
        return self.links[rank].num_sent if rank in self.links else 0

    def restart_sequence(self, rank: int) -> None:
        """Numbers the next message to a peer 0."""
        if rank in self.links:
            self.links[rank].num_sent = 0

    def close(self, rank: int, linger_seconds: float = 0.0) -> None:
        """Closes the way to a peer, if there is one."""
        if rank in self.links:
            self.links.pop(rank).close(linger_seconds)

    def close_all(self, linger_seconds: float) -> None:
        """Closes all of them."""
        for rank in list(self.links):
            self.close(rank, linger_seconds)


def _this_host() -> str | None:
    """Returns a text that is the same for two processes that can share an abstract Unix socket, or None."""
    try:
        boot = pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        spaces = [os.readlink(f"/proc/self/ns/{kind}") for kind in ("net", "user")]
    except OSError:
        return None  # Not Linux: there are no abstract sockets either.
    # Containers may share a network and run as different users, whom the sockets keep apart.
    return " ".join([boot, *spaces, str(os.geteuid())])
