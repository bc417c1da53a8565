"""How does the output of several tasks become one readable stream?

Bytes arrive in pieces that end anywhere; lines leave whole, each with its task's name before it.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import re
import sys
import threading
from collections.abc import Callable
from typing import BinaryIO

MAX_LINE_BYTES = 65_536
# Colours pass; a bell, a backspace or a stray control byte would garble the other tasks' lines.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1a\x1c-\x1f\x7f]")


class LineAssembler:
    r"""Turns pieces of bytes into lines of text; pure.

    A progress bar writes its states over each other with `\r` (Keras adds backspaces) and ends with `\n`; it
    becomes one line, its last state. Bytes that are no UTF-8 become replacement characters.

    Example:
        >>> assembler = LineAssembler()
        >>> assembler.feed(b"one\ntw"), assembler.feed(b"o\n10%\r20%\r\n")
        (['one'], ['two', '20%'])
    """

    def __init__(self, max_line_bytes: int = MAX_LINE_BYTES):
        self._max_line_bytes = max_line_bytes
        self._pending = b""

    def feed(self, data: bytes) -> list[str]:
        """Takes a piece.

        Args:
            data: Any bytes.

        Returns:
            The lines that it completes, without their ends. A line longer than the maximum is cut.
        """
        *complete, self._pending = (self._pending + data).split(b"\n")
        lines = [_as_text(line) for line in complete]
        if len(self._pending) > self._max_line_bytes:
            self._pending = _last_states(self._pending)
        if len(self._pending) > self._max_line_bytes:
            lines.append(_as_text(self._pending))
            self._pending = b""
        return lines

    def finish(self) -> list[str]:
        """Ends the stream.

        Returns:
            The last line, if it had no end.
        """
        pending, self._pending = self._pending, b""
        return [_as_text(pending)] if pending.strip() else []

    def state_of_progress_bar(self) -> str | None:
        """Looks at the line that is being written over.

        Returns:
            Its present state, or None if no progress bar is being drawn.
        """
        return (_as_text(self._pending) or None) if b"\r" in self._pending else None


class PrefixedPrinter:
    r"""Writes whole lines of many tasks to one stream, from many threads.

    Args:
        stream: Where to.
        hidden: Lines that begin like this are left out.
        on_loss: Called once with a sentence when the stream takes no more (a full disk, a terminal that was closed).
            The lines that follow are dropped: the tasks must not stall on full pipes because of that.

    Example:
        >>> import io
        >>> stream = io.BytesIO()
        >>> PrefixedPrinter(stream).write("worker:0", ["a", "b"])
        >>> stream.getvalue()
        b'[worker:0] a\n[worker:0] b\n'
    """

    def __init__(
        self,
        stream: BinaryIO,
        *,
        hidden: re.Pattern[str] | None = None,
        on_loss: Callable[[str], None] | None = None,
    ):
        self._stream = stream
        self._hidden = hidden
        self._on_loss = on_loss
        self._lock = threading.Lock()
        self._closed = False

    def write(self, name: str, lines: list[str]) -> None:
        """Writes lines, each after `[name] `.

        Args:
            name: Whose lines they are.
            lines: Text without line ends.
        """
        shown = [line for line in lines if not (self._hidden and self._hidden.match(line))]
        text = "".join(f"[{name}] {line}\n" for line in shown)
        with self._lock:
            if text and not self._closed:
                try:
                    self._stream.write(text.encode("utf-8", "replace"))
                    self._stream.flush()
                except (OSError, ValueError) as error:
                    self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        self._closed = True
        # Python flushes at its end what the stream still holds; that would fail again and change the exit code.
        with contextlib.suppress(OSError, ValueError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)
        # Who leaves (`| head`) wants no more and no word about it.
        if self._on_loss and isinstance(error, OSError) and not isinstance(error, BrokenPipeError):
            self._on_loss(
                f"cannot write the output of the tasks any more: {error.strerror}. The job goes on."
            )


class LogFile:
    """The full copy of a task's output, which a full disk may interrupt.

    Args:
        path: The file; what it has stays.
        on_loss: Called with a sentence at the first piece that cannot be written.
    """

    def __init__(self, path: pathlib.Path, on_loss: Callable[[str], None]):
        self._path = path
        self._on_loss = on_loss
        self._file: BinaryIO | None = None
        self._num_lost_bytes = 0

    def write(self, data: bytes) -> None:
        """Appends what can be written; once there is room again, the file says how much is missing.

        Args:
            data: Any bytes.
        """
        num_written = 0
        try:
            if self._file is None:
                # Appended: a restarted task goes on in its file.
                self._file = self._path.open("ab", buffering=0)
            if self._num_lost_bytes and data:
                notice = f"\n--- tfdist-ext: {self._num_lost_bytes} bytes are missing here ---\n".encode()
                if self._file.write(notice) < len(notice):
                    raise OSError("no room")
                self._num_lost_bytes = 0
            # A nearly full disk takes a part.
            while num_written < len(data):
                num_written += self._file.write(data[num_written:])
        except OSError as error:
            self._num_lost_bytes += len(data) - num_written
            reason = error.strerror or error
            self._on_loss(f"cannot write to {self._path}: {reason}. The job goes on; its logs have gaps.")

    def close(self) -> None:
        """Closes the file."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()


def say(text: str) -> None:
    """Writes a line of the launcher itself to standard error, whatever state that is in.

    Args:
        text: Without line end.
    """
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(f"[tfdist-ext] {text}\n")
        sys.stderr.flush()


def _last_states(line: bytes) -> bytes:
    """Forgets the states of a progress bar that were written over, all but the last two."""
    return b"\r".join(line.split(b"\r")[-2:])


def _as_text(line: bytes) -> str:
    states = [state for state in line.split(b"\r") if state.strip(b"\b \t")]
    text = (states[-1] if states else b"").strip(b"\b").decode("utf-8", "replace")
    return _CONTROL.sub(lambda match: f"\\x{ord(match[0]):02x}", text)
