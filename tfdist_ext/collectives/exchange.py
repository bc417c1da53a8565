"""Gather, broadcast and barrier: collectives that move values without computing."""

from __future__ import annotations

from typing import Any

import numpy as np

from tfdist_ext.collectives.message import Message
from tfdist_ext.transport import MAX_PAYLOAD_BYTES, ProtocolViolation

_EMPTY = memoryview(b"")
# ZeroMQ encrypts a message as a whole, and no heartbeat passes it: a peer would take a long one for silence.
_CHUNK_BYTES = 2 * 1024 * 1024


class AllGather:
    """Every rank gets the arrays of all ranks; their first dimensions may differ. See `message.Collective`.

    In a message, `piece` is the number of rows of the whole array and `hop` the number of the chunk.

    Args:
        rank: This rank.
        size: Number of ranks.
        array: `[rows, ...]`, contiguous, not changed by anybody while the operation runs.
        chunk_bytes: Largest payload of one message, the same on all ranks.
    """

    def __init__(self, rank: int, size: int, array: np.ndarray, *, chunk_bytes: int = _CHUNK_BYTES):
        self._rank = rank
        self._array = array
        self._chunk_bytes = chunk_bytes
        self._incoming: dict[int, _Incoming] = {}
        self._num_rows: dict[int, int] = {}
        self.missing = set(range(size)) - {rank}

    @property
    def done(self) -> bool:
        """True once the arrays of all ranks are here."""
        return not self.missing

    def start(self) -> list[Message]:
        """Sends the array to everybody, chunk by chunk."""
        return [
            Message(peer, chunk, hop=number, piece=self._array.shape[0])
            for number, chunk in enumerate(_chunks(_flat(self._array), self._chunk_bytes))
            for peer in sorted(self.missing)
        ]

    def receive(self, message: Message) -> list[Message]:
        """Keeps one chunk of the array of one peer."""
        payload = memoryview(message.payload)
        row_bytes = self._array.dtype.itemsize * int(np.prod(self._array.shape[1:], dtype=np.int64))
        total_bytes = message.piece * row_bytes
        incoming = self._incoming.get(message.peer)
        if incoming is None and message.peer in self.missing and total_bytes <= MAX_PAYLOAD_BYTES:
            # Memory of its own: what came off the wire is not aligned for every dtype.
            values = np.empty(total_bytes, np.uint8)
            incoming = self._incoming[message.peer] = _Incoming(values, self._chunk_bytes)
            self._num_rows[message.peer] = message.piece
        if (
            incoming is None
            or self._num_rows[message.peer] != message.piece
            or not incoming.take(message.hop, payload)
        ):
            raise ProtocolViolation(
                f"an unexpected array of {payload.nbytes} bytes with {message.piece} rows"
            )
        if incoming.is_complete:
            self.missing.discard(message.peer)
        return []

    def result(self) -> Any:
        """The arrays by rank; this rank's own is a copy."""
        arrays = {
            peer: incoming.values.view(self._array.dtype).reshape(
                self._num_rows[peer], *self._array.shape[1:]
            )
            for peer, incoming in self._incoming.items()
        }
        arrays[self._rank] = self._array.copy()
        return [arrays[rank] for rank in sorted(arrays)]


class Broadcast:
    """Every rank gets the array of the root. See `message.Collective`.

    The root waits until every rank has joined, so that a rank which expects something else is noticed by
    both. In a message of the root, `piece` is the number of the chunk.

    Args:
        rank: This rank.
        size: Number of ranks.
        array: Contiguous; the value on the root, elsewhere overwritten with it.
        root: Rank whose value counts.
        chunk_bytes: Largest payload of one message, the same on all ranks.
    """

    def __init__(
        self, rank: int, size: int, array: np.ndarray, *, root: int, chunk_bytes: int = _CHUNK_BYTES
    ):
        self._array = array
        self._root = root
        self._is_root = rank == root
        self._chunk_bytes = chunk_bytes
        self._incoming = _Incoming(_flat(array), chunk_bytes)
        self.missing = set(range(size)) - {rank} if self._is_root else {root}

    @property
    def done(self) -> bool:
        """True once the value is here and, on the root, everybody has joined."""
        return not self.missing

    def start(self) -> list[Message]:
        """Sends the value from the root, chunk by chunk, and an empty message to it from the others."""
        if not self._is_root:
            return [Message(self._root, _EMPTY)]
        return [
            Message(peer, chunk, piece=number, borrowed=True)
            for number, chunk in enumerate(_chunks(_flat(self._array), self._chunk_bytes))
            for peer in sorted(self.missing)
        ]

    def receive(self, message: Message) -> list[Message]:
        """Takes a chunk of the value on the others, and notes who joined on the root."""
        payload = memoryview(message.payload)
        fits = message.peer in self.missing and not message.hop
        if self._is_root:
            fits = fits and not message.piece and not payload.nbytes
        if not fits or not (self._is_root or self._incoming.take(message.piece, payload)):
            raise ProtocolViolation(f"an unexpected broadcast of {payload.nbytes} bytes")
        if self._is_root or self._incoming.is_complete:
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


def _chunks(values: np.ndarray, chunk_bytes: int) -> list[np.ndarray]:
    """Cuts bytes into chunks; at least one, which is empty where there are none."""
    return [values[start : start + chunk_bytes] for start in range(0, max(1, values.size), chunk_bytes)]


class _Incoming:
    """An array that comes in chunks, in any order.

    Attributes:
        values: `[bytes]`, filled by and by.
    """

    def __init__(self, values: np.ndarray, chunk_bytes: int):
        self.values = values
        self._chunk_bytes = chunk_bytes
        self._missing = set(range(len(_chunks(values, chunk_bytes))))

    @property
    def is_complete(self) -> bool:
        """True once all chunks are there."""
        return not self._missing

    def take(self, number: int, payload: memoryview) -> bool:
        """Stores one chunk; False, having changed nothing, if it cannot belong here."""
        start = number * self._chunk_bytes
        place = self.values[start : start + self._chunk_bytes]
        if number not in self._missing or payload.nbytes != place.size:
            return False
        place[:] = np.frombuffer(payload, np.uint8)
        self._missing.discard(number)
        return True
