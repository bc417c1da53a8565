"""How does what must be done wholly or not at all get done, when the user presses Ctrl-C?"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator


@contextlib.contextmanager
def interrupts_afterwards() -> Iterator[None]:
    """Lets an interrupt that comes meanwhile come right afterwards.

    Only the main thread is interrupted, and only where the handler is one of Python.
    """
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    came: list = []
    signal.signal(signal.SIGINT, lambda number, frame: came.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if came:
            handler(*came[0])
