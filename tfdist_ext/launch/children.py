"""How is one task started, read, signalled and buried?"""

from __future__ import annotations

import collections
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import IO

from tfdist_ext.launch import guard as guard_lib
from tfdist_ext.launch.output import LineAssembler, LogFile, PrefixedPrinter

NUM_LAST_LINES = 20
_PROGRESS_SECONDS = 10.0


class Guard:
    """The process that kills the tasks if the launcher is killed; see guard.py."""

    def __init__(self):
        # Isolated and without site: it starts in some 15 ms and can import nothing of the user's.
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", guard_lib.__file__],
            stdin=subprocess.PIPE,
            start_new_session=True,
            text=True,
        )
        assert self._process.stdin is not None
        self._stdin = self._process.stdin
        self._lock = threading.Lock()

    def tell(self, change: str, pid: int) -> None:
        """Tells the guard that a task started (`"+"`) or ended (`"-"`).

        Args:
            change: `"+"` or `"-"`.
            pid: Its process, which is its process group too.
        """
        with self._lock:
            try:
                self._stdin.write(f"{change}{pid}\n")
                self._stdin.flush()
            except BrokenPipeError:
                return  # Somebody killed the guard; the job goes on without it.

    def close(self) -> None:
        """Ends the guard."""
        self._process.communicate()


class Child:
    """One running task: a process in a session of its own, and the threads that read and await it.

    Attributes:
        name: Its name, for instance `"worker:0"`.
        pid: Its process and process group.
        last_lines: The last lines that it wrote, of both streams.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        *,
        printers: tuple[PrefixedPrinter, PrefixedPrinter],
        log_file: LogFile | None,
        guard: Guard,
        on_exit: Callable[[int], None],
    ):
        self.last_lines: collections.deque[str] = collections.deque(maxlen=NUM_LAST_LINES)
        self.name = name
        self._lock = threading.Lock()
        self._ended = False
        self._guard = guard
        # A session of its own: Ctrl-C in the terminal reaches the launcher alone, which passes it on once.
        self._process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        self.pid = self._process.pid
        guard.tell("+", self.pid)
        self._reader = threading.Thread(target=self._read, args=(printers, log_file), daemon=True)
        self._reader.start()
        threading.Thread(target=self._await, args=(on_exit,), daemon=True).start()

    def send_signal(self, signum: int) -> None:
        """Sends a signal to the task and all its children; does nothing if it has ended.

        Args:
            signum: The signal.
        """
        with self._lock:
            if not self._ended:
                _signal_group(self.pid, signum)

    def join_output(self, timeout_seconds: float) -> None:
        """Waits until everything that the task wrote has been printed.

        Args:
            timeout_seconds: How long at most; a process that moved to another group may hold the pipes open.
        """
        self._reader.join(timeout_seconds)

    def _await(self, on_exit: Callable[[int], None]) -> None:
        # What a dead task leaves behind (a data loader, the script under a shell) would hold its port and its
        # pipes. Not reaped yet, the dead process still owns its number: nobody else's group can be hit.
        os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        with self._lock:
            _signal_group(self.pid, signal.SIGKILL)
            code = self._process.wait()
            self._ended = True
        self._guard.tell("-", self.pid)
        on_exit(code)

    def _read(self, printers: tuple[PrefixedPrinter, PrefixedPrinter], log: LogFile | None) -> None:
        try:
            with selectors.DefaultSelector() as selector:
                for stream, printer in zip(
                    (self._process.stdout, self._process.stderr), printers, strict=True
                ):
                    assert stream is not None
                    selector.register(stream, selectors.EVENT_READ, _Stream(self, stream, printer, log))
                while selector.get_map():
                    for key, _ in selector.select():
                        if not key.data.read_some():
                            selector.unregister(key.fileobj)
        finally:
            if log:
                log.close()

    def show(self, printer: PrefixedPrinter, lines: list[str]) -> None:
        """Prints lines of the task and remembers them.

        Args:
            printer: Where to.
            lines: Text without line ends.
        """
        self.last_lines.extend(lines)
        printer.write(self.name, lines)


class _Stream:
    """One of the two pipes of a child."""

    def __init__(self, child: Child, stream: IO[bytes], printer: PrefixedPrinter, log: LogFile | None):
        self._child = child
        self._stream = stream
        self._printer = printer
        self._log = log
        self._assembler = LineAssembler()
        self._shown_at = time.monotonic()

    def read_some(self) -> bool:
        """Reads what is there; False at the end."""
        data = os.read(self._stream.fileno(), 65_536)
        if self._log is not None:
            self._log.write(data)
        lines = self._assembler.feed(data) if data else self._assembler.finish()
        self._child.show(self._printer, lines)
        self._show_progress_bar(bool(lines))
        if not data:
            self._stream.close()
        return bool(data)

    def _show_progress_bar(self, has_lines: bool) -> None:
        """Shows a long-lived progress bar now and then, so that a long epoch is not silent."""
        now = time.monotonic()
        if has_lines:
            self._shown_at = now
        state = self._assembler.state_of_progress_bar()
        if state and now - self._shown_at >= _PROGRESS_SECONDS:
            self._shown_at = now
            self._printer.write(self._child.name, [state])


def _signal_group(group: int, signum: int) -> None:
    try:
        os.killpg(group, signum)
    except (ProcessLookupError, PermissionError):
        return  # The group is empty, or on some systems holds only the dead leader.
