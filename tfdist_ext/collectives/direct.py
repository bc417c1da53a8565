"""All-reduce of small buffers: everybody sends everything to everybody.

One latency in place of 2 (size - 1), for size / 2 times the bytes of the ring. Every rank adds in rank order.
"""

from __future__ import annotations

import numpy as np

from tfdist_ext.collectives.arithmetic import accumulator_dtype, quietly
from tfdist_ext.collectives.message import Message
from tfdist_ext.transport import ProtocolViolation


class DirectAllReduce:
    """State machine of one rank; see `message.Collective`.

    Args:
        rank: This rank.
        size: Number of ranks.
        buffer: `[length]`, contiguous; reduced in place.
        reduction: "sum" or "mean".
    """

    def __init__(self, rank: int, size: int, buffer: np.ndarray, *, reduction: str = "sum"):
        self._rank, self._size = rank, size
        self._buffer = buffer
        self._divisor = size if reduction == "mean" else None
        self._contributions: dict[int, np.ndarray] = {rank: buffer}
        self.missing = set(range(size)) - {rank}
        self.done = False

    def start(self) -> list[Message]:
        """Sends the buffer to everybody."""
        if not self.missing:
            self._finish()
            return []
        # A copy, because the sum may be complete here, and written into the buffer, before the last peer has
        # taken it.
        snapshot = self._buffer.copy()
        return [Message(peer, snapshot) for peer in sorted(self.missing)]

    def receive(self, message: Message) -> list[Message]:
        """Keeps the contribution of one peer; adds when all are there."""
        payload = memoryview(message.payload)
        if (
            message.peer not in self.missing
            or message.hop
            or message.piece
            or payload.nbytes != self._buffer.nbytes
        ):
            raise ProtocolViolation(f"an unexpected contribution of {payload.nbytes} bytes")
        self._contributions[message.peer] = np.frombuffer(payload, self._buffer.dtype, self._buffer.size)
        self.missing.discard(message.peer)
        if not self.missing:
            self._finish()
        return []

    def result(self) -> np.ndarray:
        """The reduced buffer."""
        return self._buffer

    def _finish(self) -> None:
        with quietly():
            self._add()
        self._contributions.clear()
        self.done = True

    def _add(self) -> None:
        dtype = accumulator_dtype(self._buffer.dtype)
        total = self._contributions[0]
        if self._size == 2 and dtype == self._buffer.dtype:
            total = np.add(total, self._contributions[1], out=self._buffer)
        else:
            total = total.astype(dtype)
            for rank in range(1, self._size):
                # Without `dtype`, NumPy would not add float32 and bfloat16.
                np.add(total, self._contributions[rank], out=total, dtype=dtype)
        if self._divisor is not None:
            total = np.divide(total, self._divisor, out=total)
        if total is not self._buffer:
            self._buffer[:] = total
