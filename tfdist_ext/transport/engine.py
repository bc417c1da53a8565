"""Which thread touches the sockets? One engine thread a group, and nobody else.

ZeroMQ sockets are not thread safe. Other threads hand functions to the engine with `call`, which never
blocks.
"""

from __future__ import annotations

import collections
import socket
import threading
from collections.abc import Callable

import zmq
from absl import logging


class Engine:
    """A poll loop in a daemon thread.

    Args:
        name: Name of the thread.
        tick: Called after every wake-up; returns the seconds after which to call it again at the latest.
        on_crash: Called with an exception that no callback handled; the loop goes on.
        on_stop: Called in the thread as its last act.
    """

    def __init__(
        self,
        name: str,
        *,
        tick: Callable[[], float],
        on_crash: Callable[[Exception], None],
        on_stop: Callable[[], None],
    ):
        self._tick = tick
        self._on_crash = on_crash
        self._on_stop = on_stop
        self._calls: collections.deque[Callable[[], None]] = collections.deque()
        self._callbacks: dict[object, Callable[[], None]] = {}
        self._poller = zmq.Poller()
        self._stopping = False
        self._finished = False
        self._waking = False
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._wake_reader.setblocking(False)
        self._wake_writer.setblocking(False)
        self._poller.register(self._wake_reader, zmq.POLLIN)
        self._callbacks[self._wake_reader.fileno()] = self._drain_wake_ups
        # A daemon: a task whose main thread ends must not be kept alive by its links.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def watch(self, source: zmq.Socket, callback: Callable[[], None]) -> None:
        """Calls `callback` whenever `source` can be read. Before `start`, or in the engine thread."""
        self._poller.register(source, zmq.POLLIN)
        self._callbacks[source] = callback

    def unwatch(self, source: zmq.Socket) -> None:
        """Undoes `watch`. In the engine thread."""
        if self._callbacks.pop(source, None) is not None:
            self._poller.unregister(source)

    def call(self, function: Callable[[], None]) -> None:
        """Has `function` run in the engine thread, in the order of the calls. Any thread; never blocks."""
        self._calls.append(function)
        if self._finished:
            self._run_calls()  # Sockets are closed; what is called now can only find that out.
        elif not self._waking:
            self._waking = True
            try:
                self._wake_writer.send(b"\0")
            except OSError:  # Full, so that the engine is waking already; or closed, so that nobody listens.
                pass

    def stop(self) -> None:
        """Ends the loop after the current round. In the engine thread."""
        self._stopping = True

    def join(self, timeout_seconds: float) -> bool:
        """Waits for the end of the thread; returns whether it has ended."""
        if self._thread.is_alive():
            self._thread.join(timeout_seconds)
        return not self._thread.is_alive()

    def _drain_wake_ups(self) -> None:
        try:
            self._wake_reader.recv(4096)
        except BlockingIOError:
            pass

    def _run(self) -> None:
        while not self._stopping:
            self._waking = (
                False  # Before looking at the calls: one appended from here on sends its own wake-up.
            )
            self._run_calls()
            delay = self._guard(self._tick)
            for source, _ in self._poller.poll(round(1000 * (0.1 if delay is None else delay))):
                callback = self._callbacks.get(source)
                if callback is not None:  # None: an earlier callback of this round has closed it.
                    self._guard(callback)
        self._guard(self._on_stop)
        self._finished = True
        self._run_calls()
        self._wake_reader.close()
        self._wake_writer.close()

    def _run_calls(self) -> None:
        while self._calls:
            try:
                function = self._calls.popleft()
            except IndexError:  # After the end, several threads may come here.
                return
            self._guard(function)

    def _guard(self, function: Callable[[], float | None]) -> float | None:
        """Calls `function`; an engine that died would leave every caller waiting for ever."""
        try:
            return function()
        except Exception as error:
            logging.exception("Internal error in the engine thread.")
            self._on_crash(error)
            return None
