"""How much may be sent to a peer that has perhaps not entered the operation yet? Pure.

What comes before its receiver has entered the operation waits in the receiver's memory. So a task sends no more
than a budget of such bytes to each peer, over all operations; what goes beyond waits here, where it is no copy but
a view of the operation's own values (partial sums of 16-bit floats excepted, which are new). The peer is asked
whether it has entered, early enough that the answer is here when it is needed, and what waits goes out when it
says so, or sends a message of the operation itself.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable

from tfdist_ext.collectives.message import Message


class Budget:
    """Bytes that are on their way to peers ahead of them, over all operations of a task.

    Args:
        limit_bytes: How many there may be to one peer.

    Attributes:
        relieved: Peers to whom more may be sent now than when something was held back from them.
    """

    def __init__(self, limit_bytes: int):
        self.limit_bytes = limit_bytes
        self.relieved: set[int] = set()
        self._spent: collections.Counter[int] = collections.Counter()
        self._refused: set[int] = set()

    def spend(self, peer: int, num_bytes: int) -> bool:
        """Sets bytes aside for a peer; False, having changed nothing, if they would be too many."""
        if self._spent[peer] + num_bytes > self.limit_bytes:
            self._refused.add(peer)
            return False
        self._spent[peer] += num_bytes
        return True

    def give_back(self, peer: int, num_bytes: int) -> None:
        """Undoes `spend`, since the peer has entered the operation, or the operation is over."""
        self._spent[peer] -= num_bytes
        if num_bytes and peer in self._refused:
            self._refused.discard(peer)
            self.relieved.add(peer)


class Outbox:
    """What one operation has to send.

    Args:
        budget: The task's.

    Attributes:
        joined: Peers that are known to have entered the operation.
    """

    def __init__(self, budget: Budget):
        self.joined: set[int] = set()
        self._budget = budget
        self._ahead: dict[int, int] = {}
        self._held: dict[int, collections.deque[Message]] = {}
        self._asked: set[int] = set()

    @property
    def is_empty(self) -> bool:
        """Whether nothing is held back."""
        return not self._held

    @property
    def waiting_for(self) -> set[int]:
        """Peers for whom something is held back."""
        return set(self._held)

    def offer(self, messages: Iterable[Message]) -> tuple[list[Message], list[int]]:
        """Takes messages; returns those to send now, and the peers to ask before whether they have entered."""
        ready, to_ask = [], []
        for message in messages:
            peer = message.peer
            if peer in self.joined:
                ready.append(message)
                continue
            if peer not in self._held and self._spend(peer, message.payload.nbytes):
                ready.append(message)
                if self._ahead[peer] <= self._budget.limit_bytes // 2:
                    continue
            else:
                self._held.setdefault(peer, collections.deque()).append(message)
            if peer not in self._asked:
                self._asked.add(peer)
                to_ask.append(peer)
        return ready, to_ask

    def peer_joined(self, peer: int) -> list[Message]:
        """Notes that a peer has entered; returns what to send to it."""
        if peer in self.joined:
            return []
        self.joined.add(peer)
        self._budget.give_back(peer, self._ahead.pop(peer, 0))
        return list(self._held.pop(peer)) if peer in self._held else []

    def retry(self, peer: int) -> list[Message]:
        """Returns what may be sent to a peer now that others of its bytes are out of the way."""
        held, ready = self._held.get(peer), []
        while held and self._spend(peer, held[0].payload.nbytes):
            ready.append(held.popleft())
        if held is not None and not held:
            del self._held[peer]
        return ready

    def close(self) -> None:
        """Forgets everything, because the operation is over."""
        for peer, num_bytes in self._ahead.items():
            self._budget.give_back(peer, num_bytes)
        self._ahead.clear()
        self._held.clear()

    def empty(self) -> list[Message]:
        """Gives out all that is held, because this task leaves and can wait for nobody."""
        held = [message for messages in self._held.values() for message in messages]
        self._held.clear()
        return held

    def _spend(self, peer: int, num_bytes: int) -> bool:
        if not self._budget.spend(peer, num_bytes):
            return False
        self._ahead[peer] = self._ahead.get(peer, 0) + num_bytes
        return True
