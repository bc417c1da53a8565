"""Where do the bytes of a message live? In buffers that are used again.

A new buffer of many megabytes each step is memory that the kernel must map, clear and fault in page by page,
which costs as much as filling it. Results are handed to TensorFlow without a copy, so a buffer is free only when
no array that was cut from it is referenced any more.
"""

from __future__ import annotations

import sys
import threading

import numpy as np

ALIGNMENT_BYTES = 64
# References that an unused buffer has while it is looked at: the list, the loop variable, and the call's argument.
_UNUSED_REFERENCES = 3


class BufferPool:
    """Aligned one-dimensional buffers, taken over and over.

    Args:
        max_buffers_of_a_size: How many buffers of one size are kept; more are made when all are in use, and dropped.
        max_bytes: How many bytes are kept in all; the sizes that were asked for longest ago go first.

    Example:
        >>> pool = BufferPool()
        >>> buffer = pool.take(10, np.dtype("float32"))
        >>> buffer.shape, buffer.ctypes.data % ALIGNMENT_BYTES
        ((10,), 0)
    """

    def __init__(self, max_buffers_of_a_size: int = 4, max_bytes: int = 256 * 1024 * 1024):
        self._max_buffers_of_a_size, self._max_bytes = max_buffers_of_a_size, max_bytes
        self._buffers: dict[int, list[np.ndarray]] = {}
        self._lock = threading.Lock()

    def take(self, length: int, dtype: np.dtype) -> np.ndarray:
        """Returns a buffer with unspecified contents that nobody else uses.

        Args:
            length: Number of items.
            dtype: Their dtype.

        Returns:
            Array `[length]`; the buffer is free again when it and all its views are garbage.
        """
        num_bytes = length * dtype.itemsize
        with self._lock:
            raw = self._unused(num_bytes)
        offset = -raw.ctypes.data % ALIGNMENT_BYTES
        return raw[offset : offset + num_bytes].view(dtype)

    def _unused(self, num_bytes: int) -> np.ndarray:
        # Those that were asked for last stand last.
        buffers = self._buffers[num_bytes] = self._buffers.pop(num_bytes, [])
        for raw in buffers:
            # A view keeps a reference to the array that owns the memory, never to another view.
            if sys.getrefcount(raw) <= _UNUSED_REFERENCES:
                return raw
        raw = np.empty(num_bytes + ALIGNMENT_BYTES, np.uint8)
        if len(buffers) < self._max_buffers_of_a_size:
            buffers.append(raw)
            self._forget_old_sizes()
        return raw

    def _forget_old_sizes(self) -> None:
        """Lets go of buffers until few enough bytes are kept; one that is in use lives on where it is used."""
        kept = sum(raw.nbytes for buffers in self._buffers.values() for raw in buffers)
        for num_bytes in list(self._buffers):
            if kept <= self._max_bytes:
                return
            kept -= sum(raw.nbytes for raw in self._buffers.pop(num_bytes))
