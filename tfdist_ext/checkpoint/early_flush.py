"""Why does making a large file durable not take as long again as writing it?

The system keeps what is written in memory, and begins to bring it to the disk when it likes, or when it is asked. Asked
only at the end, the disk has been idle all the while.
"""

from __future__ import annotations

import glob
import os
import threading

_INTERVAL_SECONDS = 0.02


class EarlyFlush:
    """Brings what is written in a `with` block to the disk while the block goes on writing.

    Args:
        prefix: Of the bundle. TensorFlow's data files have temporary names until they are complete, and there may be
            several parts.
    """

    def __init__(self, prefix: str):
        self._pattern = f"{glob.escape(prefix)}.*data-*"
        self._done = threading.Event()
        self._error: OSError | None = None
        self._thread = threading.Thread(target=self._run, name="checkpoint flush", daemon=True)

    def __enter__(self) -> EarlyFlush:
        self._thread.start()
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        """Ends.

        Raises:
            OSError: What the system said. It says it once: the fsync that makes the file durable, which opens it anew,
                would not hear of it.
        """
        self._done.set()
        self._thread.join()
        if kind is None and self._error is not None:
            raise self._error

    def _run(self) -> None:
        while self._error is None and not self._done.wait(_INTERVAL_SECONDS):
            for path in glob.glob(self._pattern):
                try:
                    _flush(path)
                except FileNotFoundError:
                    pass  # It has its final name by now.
                except OSError as error:
                    self._error = error


def _flush(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
