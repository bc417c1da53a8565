"""When do all tasks of a group know each other? The start-up protocol, without sockets, threads or clock.

Whenever the link to a peer comes up, this task sends `HELLO` (who it believes itself and the group to be);
each `HELLO` received is acknowledged. A task is started once it holds the `HELLO` of every peer and every
peer has acknowledged its own. A link that breaks before that starts over, so a task that is restarted while
the group forms is simply waited for again.

A peer that has acknowledged this very process is at the other end of a link that lives. A `HELLO` of another
process in its name is then kept aside until that link breaks: a restarted task takes the place of the one that
died, and an impostor takes nobody's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from tfdist_ext import errors
from tfdist_ext.transport.framing import PROTOCOL_VERSION, Kind, ProtocolViolation

# What the handshake wants sent: (peer, kind, JSON fields).
Outgoing = list[tuple[int, Kind, dict[str, Any]]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Identity:
    """What a task believes itself and its group to be.

    Attributes:
        group_name: Tells apart the groups that a process may form.
        rank: Position of this task in `task_names`.
        task_names: Names of all tasks, `("chief:0", "worker:0")`; they must be the same on every task.
        incarnation: Random number that tells this process from an earlier one at the same address.
        settings: Values that must be equal on all tasks, such as chunk sizes.
        hello: Any JSON fields that every other task gets to see.
        bulk: Where large messages may go on this host, `{"host": ..., "endpoint": ...}`, or nothing.
    """

    group_name: str
    rank: int
    task_names: tuple[str, ...]
    incarnation: int
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    hello: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    bulk: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def agreed_fields(self) -> dict[str, Any]:
        """The fields on which all tasks must agree."""
        return {
            "protocol_version": PROTOCOL_VERSION,
            "num_tasks": len(self.task_names),
            "task_names": list(self.task_names),
            **{f"settings.{name}": value for name, value in self.settings.items()},
        }


@dataclasses.dataclass
class _Peer:
    link_is_up: bool = False
    incarnation: int | None = None
    hello: dict[str, Any] | None = None
    bulk: Any = None
    acknowledged: bool = False
    # The latest HELLO of another process in the name of one whose link lives: incarnation and fields.
    successor: tuple[int, dict[str, Any]] | None = None


class Handshake:
    """Start-up state of one task towards all the others.

    Attributes:
        mismatch: The first disagreement seen with a peer, or None.
    """

    def __init__(self, identity: Identity):
        self._identity = identity
        self._peers = {rank: _Peer() for rank in range(len(identity.task_names)) if rank != identity.rank}
        self.mismatch: errors.ConfigurationMismatchError | None = None

    @property
    def missing(self) -> list[int]:
        """Ranks that are not ready yet."""
        return [rank for rank, peer in self._peers.items() if peer.hello is None or not peer.acknowledged]

    @property
    def hellos(self) -> list[dict[str, Any]]:
        """The `hello` fields of all tasks by rank; complete once `missing` is empty."""
        hellos = {rank: peer.hello or {} for rank, peer in self._peers.items()}
        hellos[self._identity.rank] = dict(self._identity.hello)
        return [hellos[rank] for rank in range(len(self._identity.task_names))]

    def incarnation(self, rank: int) -> int | None:
        """The process now known as `rank`, or None before its `HELLO`."""
        return self._peers[rank].incarnation

    def bulk(self, rank: int) -> Any:
        """What the process now known as `rank` said of its way for large messages; not checked."""
        return self._peers[rank].bulk

    def link_up(self, rank: int) -> Outgoing:
        """The link to `rank` can carry messages; returns what to send."""
        peer = self._peers[rank]
        peer.link_is_up, peer.acknowledged = True, False
        fields = {
            "group": self._identity.group_name,
            "agreed": self._identity.agreed_fields(),
            "hello": dict(self._identity.hello),
            "bulk": dict(self._identity.bulk),
        }
        return [(rank, Kind.HELLO, fields), *self._acknowledge(rank)]

    def link_down(self, rank: int) -> bool:
        """The link to `rank` broke before the group was complete.

        Its `HELLO` is kept, since it came over another link, which may well be alive. If the process died,
        its successor has another incarnation, and only an acknowledgement of the incarnation known here
        counts.

        Returns:
            Whether a successor, whose `HELLO` had come already, has taken its place.
        """
        peer = self._peers[rank]
        peer.link_is_up, peer.acknowledged = False, False
        if peer.successor is None:
            return False
        incarnation, fields = peer.successor
        self._take_hello(rank, incarnation, fields)
        return True

    def receive_hello(self, rank: int, incarnation: int, fields: Mapping[str, Any]) -> Outgoing:
        """Takes the `HELLO` of a peer, or keeps it aside; `incarnation` tells. Returns what to send.

        Raises:
            ProtocolViolation: If it belongs to another group or lacks a field; it then changes nothing.
        """
        agreed, hello = fields.get("agreed"), fields.get("hello")
        if not isinstance(agreed, dict) or not isinstance(hello, dict):
            raise ProtocolViolation("a HELLO without its fields")
        if fields.get("group") != self._identity.group_name:
            raise ProtocolViolation(f"a HELLO of the group {fields.get('group')!r}")
        peer = self._peers[rank]
        if peer.acknowledged and peer.incarnation != incarnation:
            peer.successor = incarnation, dict(fields)
            return []
        self._take_hello(rank, incarnation, fields)
        return self._acknowledge(rank)

    def _take_hello(self, rank: int, incarnation: int, fields: Mapping[str, Any]) -> None:
        peer = self._peers[rank]
        self.mismatch = self.mismatch or self._compare(rank, fields["agreed"])
        peer.incarnation, peer.hello, peer.bulk = incarnation, fields["hello"], fields.get("bulk")
        peer.successor = None

    def receive_acknowledgement(self, rank: int, fields: Mapping[str, Any]) -> None:
        """Takes an acknowledgement; one meant for an earlier process at our address is ignored."""
        if fields.get("incarnation") == self._identity.incarnation:
            self._peers[rank].acknowledged = True

    def _acknowledge(self, rank: int) -> Outgoing:
        peer = self._peers[rank]
        if not peer.link_is_up or peer.incarnation is None:
            return []
        return [(rank, Kind.ACKNOWLEDGE_HELLO, {"incarnation": peer.incarnation})]

    def _compare(self, rank: int, theirs: Mapping[str, Any]) -> errors.ConfigurationMismatchError | None:
        names: Sequence[str] = self._identity.task_names
        own_task, peer_task = names[self._identity.rank], names[rank]
        for field, value in self._identity.agreed_fields().items():
            if field not in theirs or theirs[field] != value:
                other = theirs.get(field, "(not set)")
                return errors.ConfigurationMismatchError(
                    f"`{field}` is {value!r} on {own_task} but {other!r} on {peer_task}. "
                    "Start every task of the group with the same settings.",
                    field=field,
                    tasks=(own_task, peer_task),
                    values=(value, other),
                )
        return None
