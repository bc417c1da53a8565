"""How does a test hold one worker process?"""

from __future__ import annotations

import collections
import contextlib
import os
import queue
import signal
import socket
import subprocess
import threading
import time
from typing import Any

from tfdist_ext.testing import messages
from tfdist_ext.testing.forked_process import START_SECONDS, ForkedProcess

_CLOSE_SECONDS = 15.0
_STACK_SECONDS = 3.0
_QUIET_SECONDS = 0.2
_NUM_LINES = 10_000

# (rank, message); a message of None says that the process has ended.
Inbox = queue.SimpleQueue


class WorkerProcess:
    """One process that serves as in `tfdist_ext.testing.worker`, and the threads that read from it.

    The constructor does not wait until the process runs; `wait_until_ready` does.

    Attributes:
        num_devices: Its logical CPU devices.
        lines: What it wrote, line by line.
    """

    def __init__(self, *, num_devices: int = 1, num_threads: int = 1):
        self.num_devices = num_devices
        self.lines: collections.deque[str] = collections.deque(maxlen=_NUM_LINES)
        self._news = threading.Condition()
        self._num_lines = 0
        self._heard_from = threading.Event()
        self._is_ready = False
        self._recipient: tuple[Inbox, int] | None = None
        ours, theirs = socket.socketpair()
        with theirs:
            # With one inter-op thread that waits for a peer, a worker can do nothing else.
            variables = {"TF_NUM_INTEROP_THREADS": "2", "TF_NUM_INTRAOP_THREADS": str(num_threads)}
            self._process = ForkedProcess(theirs, num_devices=num_devices, variables=variables)
        self._socket = ours
        self._stream = ours.makefile("rwb")
        self._threads = [
            threading.Thread(target=target, daemon=True) for target in (self._receive, self._read_lines)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def pid(self) -> int:
        """Number of the process, and of its process group."""
        return self._process.pid

    def wait_until_ready(self, timeout_seconds: float = START_SECONDS) -> None:
        """Waits until it takes jobs.

        Args:
            timeout_seconds: How long at most.

        Raises:
            RuntimeError: The process ended, or took too long; the text has its last lines.
        """
        self._heard_from.wait(timeout_seconds)
        if not self._is_ready:
            self.kill()
            raise RuntimeError(
                "A worker process did not start. If TensorFlow could not be imported, that error is further up; else "
                "these are its last lines:\n" + "\n".join(self.last_lines())
            )

    def request(self, job: dict[str, Any], inbox: Inbox, rank: int) -> None:
        """Hands over a job; the answer comes as `(rank, message)`.

        Args:
            job: The message.
            inbox: Where the answer goes; `(rank, None)` if the process ends before.
            rank: What to call this process there.
        """
        self._recipient = (inbox, rank)
        try:
            messages.write_message(self._stream, job)
        except OSError:
            self._deliver(None)

    def send_signal(self, signum: int) -> None:
        """Sends a signal to the process and its children.

        Args:
            signum: The signal.
        """
        if self._process.poll() is None:
            # It may end at this moment.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signum)

    def kill(self) -> None:
        """Ends the process at once and reaps it."""
        self.send_signal(signal.SIGKILL)
        self._finish()

    def close(self, timeout_seconds: float = _CLOSE_SECONDS) -> int:
        """Lets the process end by itself, and kills it if it does not.

        Args:
            timeout_seconds: How long to wait.

        Returns:
            Its exit code; negative for a signal.
        """
        self.send_signal(signal.SIGCONT)
        self._shut_down()
        try:
            self._process.wait(timeout_seconds)
        except subprocess.TimeoutExpired:
            self.send_signal(signal.SIGKILL)
        return self._finish()

    def exit_code(self, timeout_seconds: float) -> int | None:
        """Waits for the end of the process.

        Args:
            timeout_seconds: How long at most.

        Returns:
            Its exit code, negative for a signal; None if it still runs.
        """
        try:
            return self._process.wait(timeout_seconds)
        except subprocess.TimeoutExpired:
            return None

    def wait_for(self, text: str, timeout_seconds: float) -> str:
        """Waits for a line of output.

        Args:
            text: What the line contains.
            timeout_seconds: How long at most.

        Returns:
            The first such line, which may have been written before the call.

        Raises:
            TimeoutError: There was none in time.
        """

        def find() -> str | None:
            return next((line for line in self.lines if text in line), None)

        with self._news:
            if not self._news.wait_for(lambda: find() is not None, timeout_seconds):
                raise TimeoutError(
                    f"No line with {text!r} within {timeout_seconds} s; the last lines:\n"
                    + "\n".join(self.last_lines())
                )
            return find() or ""

    def last_lines(self, count: int = 20) -> tuple[str, ...]:
        """Returns the last lines of output.

        Args:
            count: How many at most.
        """
        with self._news:
            return tuple(self.lines)[-count:]

    def stacks(self) -> str:
        """Asks for the Python stacks of all threads; empty if the process does not answer (it is stopped)."""
        with self._news:
            begin = self._num_lines
            self.send_signal(signal.SIGUSR1)
            deadline = time.monotonic() + _STACK_SECONDS
            seen = begin
            while time.monotonic() < deadline:
                # The end of a dump has no mark of its own.
                if not self._news.wait(_QUIET_SECONDS) and seen > begin and seen == self._num_lines:
                    break
                seen = self._num_lines
            return "\n".join(list(self.lines)[len(self.lines) - (self._num_lines - begin) :])

    def _receive(self) -> None:
        try:
            while True:
                message = messages.read_message(self._stream)
                if "ready" in message:
                    self._is_ready = True
                    self._heard_from.set()
                else:
                    self._deliver(message)
        except (EOFError, OSError, ValueError):
            self._heard_from.set()
            self._deliver(None)

    def _deliver(self, message: dict[str, Any] | None) -> None:
        if self._recipient is not None:
            inbox, rank = self._recipient
            inbox.put((rank, message))

    def _read_lines(self) -> None:
        for line in self._process.stdout:
            with self._news:
                self.lines.append(line.rstrip("\n"))
                self._num_lines += 1
                self._news.notify_all()

    def _shut_down(self) -> None:
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # The process is gone.

    def _finish(self) -> int:
        code = self._process.wait()
        self._shut_down()
        for thread in self._threads:
            # A child of the worker may hold its output open.
            thread.join(1.0)
        self._socket.close()
        return code
