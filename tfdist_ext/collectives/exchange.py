"""Gather, broadcast and barrier: collectives that move values without computing."""

from __future__ import annotations

from typing import Any

import numpy as np

from tfdist_ext.collectives.message import Message
from tfdist_ext.transport import ProtocolViolation

_EMPTY = memoryview(b"")


class AllGather:
    """Every rank gets the arrays of all ranks; their first dimensions may differ. See `message.Collective`.

    Args:
        rank: This rank.
        size: Number of ranks.
        array: `[rows, ...]`, contiguous, not changed by anybody while the operation runs.
    """

    def __init__(self, rank: int, size: int, array: np.ndarray):
        self._array = array
        self._gathered: dict[int, np.ndarray] = {rank: array}
        self.missing = set(range(size)) - {rank}

    @property
    def done(self) -> bool:
        """True once the arrays of all ranks are here."""
        return not self.missing

    def start(self) -> list[Message]:
        """Sends the array, and its number of rows as the piece, to everybody."""
        return [
            Message(peer, _flat(self._array), piece=self._array.shape[0]) for peer in sorted(self.missing)
        ]

    def receive(self, message: Message) -> list[Message]:
        """Keeps the array of one peer."""
        payload = memoryview(message.payload)
        row_shape = self._array.shape[1:]
        row_bytes = self._array.dtype.itemsize * int(np.prod(row_shape, dtype=np.int64))
        if message.peer not in self.missing or message.hop or payload.nbytes != message.piece * row_bytes:
            raise ProtocolViolation(
                f"an unexpected array of {payload.nbytes} bytes with {message.piece} rows"
            )
        # A copy: memory that came off the wire is not aligned for every dtype, and would stay as large as its
        # frame.
        values = np.frombuffer(payload, np.uint8).copy().view(self._array.dtype)
        self._gathered[message.peer] = values.reshape((message.piece, *row_shape))
        self.missing.discard(message.peer)
        return []

    def result(self) -> Any:
        """The arrays by rank; this rank's own is a copy."""
        own = {rank: array.copy() for rank, array in self._gathered.items() if array is self._array}
        return [own.get(rank, self._gathered[rank]) for rank in sorted(self._gathered)]


class Broadcast:
    """Every rank gets the array of the root. See `message.Collective`.

    The root waits until every rank has joined, so that a rank which expects something else is noticed by
    both.

    Args:
        rank: This rank.
        size: Number of ranks.
        array: Contiguous; the value on the root, elsewhere overwritten with it.
        root: Rank whose value counts.
    """

    def __init__(self, rank: int, size: int, array: np.ndarray, *, root: int):
        self._array = array
        self._root = root
        self._is_root = rank == root
        self.missing = set(range(size)) - {rank} if self._is_root else {root}

    @property
    def done(self) -> bool:
        """True once the value is here and, on the root, everybody has joined."""
        return not self.missing

    def start(self) -> list[Message]:
        """Sends the value from the root, and an empty message to it from the others."""
        if self._is_root:
            return [Message(peer, _flat(self._array), borrowed=True) for peer in sorted(self.missing)]
        return [Message(self._root, _EMPTY)]

    def receive(self, message: Message) -> list[Message]:
        """Takes the value on the others, and notes who joined on the root."""
        payload = memoryview(message.payload)
        expected_bytes = 0 if self._is_root else self._array.nbytes
        if (
            message.peer not in self.missing
            or message.hop
            or message.piece
            or payload.nbytes != expected_bytes
        ):
            raise ProtocolViolation(f"an unexpected broadcast of {payload.nbytes} bytes")
        if not self._is_root:
            _flat(self._array)[:] = np.frombuffer(payload, np.uint8)
        self.missing.discard(message.peer)
        return []

    def result(self) -> np.ndarray:
        """The root's value."""
        return self._array


class Barrier:
    """Every rank waits until all have come. See `message.Collective`.

    Args:
        rank: This rank.
        size: Number of ranks.
    """

    def __init__(self, rank: int, size: int):
        self.missing = set(range(size)) - {rank}

    @property
    def done(self) -> bool:
        """True once all have come."""
        return not self.missing

    def start(self) -> list[Message]:
        """Tells everybody."""
        return [Message(peer, _EMPTY) for peer in sorted(self.missing)]

    def receive(self, message: Message) -> list[Message]:
        """Notes who has come."""
        if (
            message.peer not in self.missing
            or message.hop
            or message.piece
            or memoryview(message.payload).nbytes
        ):
            raise ProtocolViolation("an unexpected barrier message")
        self.missing.discard(message.peer)
        return []

    def result(self) -> None:
        """Nothing."""


def _flat(array: np.ndarray) -> np.ndarray:
    """The bytes of a contiguous array. bfloat16 has no buffer protocol of its own."""
    return array.reshape(-1).view(np.uint8)
