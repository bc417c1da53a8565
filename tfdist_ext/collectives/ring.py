"""All-reduce of large buffers around a ring.

The buffer is cut into one segment a rank, a segment into chunks. Chunk c of segment s starts at rank s,
crosses size - 1 links while every rank adds its own values, and is then final at rank s - 1; size - 1 more
hops carry the final values to everybody. Each rank sends 2 (size - 1) / size of the buffer, whatever the
size. Chunks do not wait for each other, so adding one overlaps with the transfer of the next.

References:
    P. Patarasuk, X. Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations",
    Journal of Parallel and Distributed Computing 69(2), 2009.
"""

from __future__ import annotations

import numpy as np

from tfdist_ext.collectives.arithmetic import accumulator_dtype, quietly
from tfdist_ext.collectives.message import Message
from tfdist_ext.transport import ProtocolViolation


class RingAllReduce:
    """State machine of one rank; see `message.Collective`.

    Args:
        rank: This rank.
        size: Number of ranks, at least 2.
        buffer: `[length]`, contiguous; reduced in place.
        reduction: "sum" or "mean".
        chunk_bytes: Largest payload of one message.
    """

    def __init__(
        self, rank: int, size: int, buffer: np.ndarray, *, reduction: str = "sum", chunk_bytes: int = 1 << 20
    ):
        self._rank, self._size = rank, size
        self._buffer = buffer
        self._divisor = size if reduction == "mean" else None
        self._accumulator = accumulator_dtype(buffer.dtype)
        self._chunk_length = max(1, chunk_bytes // buffer.dtype.itemsize)
        self._next, self._previous = (rank + 1) % size, (rank - 1) % size
        self._received: set[tuple[int, int]] = set()
        self._num_remaining = sum(
            self._num_chunks(segment) * len(self._expected_hops(segment)) for segment in range(size)
        )

    @property
    def done(self) -> bool:
        """True once every chunk is final here, and passed on."""
        return self._num_remaining == 0

    @property
    def missing(self) -> set[int]:
        """All other ranks until done: the previous one relays what all of them contribute."""
        return set() if self.done else set(range(self._size)) - {self._rank}

    def start(self) -> list[Message]:
        """Sends this rank's own segment, unreduced."""
        return [
            Message(self._next, self._chunk(self._rank, piece), hop=0, piece=piece)
            for piece in range(self._num_chunks(self._rank))
        ]

    def receive(self, message: Message) -> list[Message]:
        """Adds or stores one chunk, and passes it on."""
        hop, piece = message.hop, message.piece
        # Both on the way to the sum and after it, a value that has crossed hop + 1 links started that far
        # behind us.
        segment = (self._rank - hop - 1) % self._size
        if message.peer != self._previous or hop > 2 * self._size - 3 or piece >= self._num_chunks(segment):
            raise ProtocolViolation(f"a ring message out of place (hop {hop}, chunk {piece})")
        if (hop, piece) in self._received:
            raise ProtocolViolation(f"a ring message that came twice (hop {hop}, chunk {piece})")
        self._received.add((hop, piece))
        own = self._chunk(segment, piece)
        # The first hop carries single values, exact in their own dtype; later ones carry partial sums.
        partial = 0 < hop < self._size - 1
        received = _values(message.payload, self._accumulator if partial else own.dtype, own.size)
        self._num_remaining -= 1
        if hop >= self._size - 1:
            return self._store(own, received, message)
        return self._add(own, received, message)

    def result(self) -> np.ndarray:
        """The reduced buffer."""
        return self._buffer

    def _add(self, own: np.ndarray, received: np.ndarray, message: Message) -> list[Message]:
        is_final = message.hop == self._size - 2
        if self._accumulator == own.dtype:
            # In place although `own` may be on its way to the next rank: only a value to which the next rank
            # has added comes back to this chunk, so the bytes have left by then.
            with quietly():
                total = np.add(own, received, out=own)
        else:
            with quietly():
                total = np.add(own, received, dtype=self._accumulator)
        if is_final:
            if self._divisor is not None:
                np.divide(total, self._divisor, out=total)
            if total is not own:
                own[:] = total
                total = own
        return [Message(self._next, total, message.hop + 1, message.piece, borrowed=is_final)]

    def _store(self, own: np.ndarray, received: np.ndarray, message: Message) -> list[Message]:
        own[:] = received
        if message.hop == 2 * self._size - 3:
            return []
        # Passes on the memory it came in, not `own`: that belongs to the caller as soon as this rank is done.
        return [Message(self._next, message.payload, message.hop + 1, message.piece)]

    def _expected_hops(self, segment: int) -> list[int]:
        distance = (self._rank - segment) % self._size
        adding = [distance - 1] if distance > 0 else []
        storing = [distance + self._size - 1] if distance < self._size - 1 else []
        return adding + storing

    def _bounds(self, segment: int) -> tuple[int, int]:
        length = self._buffer.size
        return segment * length // self._size, (segment + 1) * length // self._size

    def _num_chunks(self, segment: int) -> int:
        begin, end = self._bounds(segment)
        return -(-(end - begin) // self._chunk_length)

    def _chunk(self, segment: int, piece: int) -> np.ndarray:
        begin, end = self._bounds(segment)
        begin += piece * self._chunk_length
        return self._buffer[begin : min(begin + self._chunk_length, end)]


def _values(payload, dtype: np.dtype, length: int) -> np.ndarray:
    if memoryview(payload).nbytes != length * dtype.itemsize:
        raise ProtocolViolation(f"a chunk of {memoryview(payload).nbytes} bytes in place of {length} {dtype}")
    return np.frombuffer(payload, dtype, length)
