"""How does a process learn that it must go, without dying on the spot?"""

from __future__ import annotations

import signal
import threading
from typing import Any

from absl import logging

# 128 + SIGTERM, what a shell shows for a process that SIGTERM ended.
EXIT_CODE = 143


class StopRequest:
    """Notes SIGTERM for the training loop, which saves and ends at the next step.

    The second signal does what it did before.
    """

    def __init__(self):
        self.received = False
        self._previous: Any = None
        self._installed = False

    def listen(self) -> None:
        """Takes the signal over; does nothing on a thread that is not the main one, where Python forbids it."""
        if self._installed or threading.current_thread() is not threading.main_thread():
            return
        self._previous = signal.signal(signal.SIGTERM, self._note)
        self._installed = True

    def stop_listening(self) -> None:
        """Gives the signal back."""
        if self._installed and threading.current_thread() is threading.main_thread():
            if signal.getsignal(signal.SIGTERM) == self._note:
                signal.signal(signal.SIGTERM, self._previous or signal.SIG_DFL)
            self._installed = False

    def request(self) -> None:
        """Asks for the same as a signal."""
        self.received = True

    def _note(self, signum, frame) -> None:
        self.received = True
        signal.signal(signal.SIGTERM, self._previous or signal.SIG_DFL)
        self._installed = False
        logging.warning(
            "SIGTERM: saving a checkpoint at the next step, then ending with exit code %d.", EXIT_CODE
        )
