"""How do the books of parameter-server training survive the process that keeps them?"""

from __future__ import annotations

import contextlib
from typing import Any, Protocol


class _Ledger(Protocol):
    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class TrainingBooks:
    """What training under a policy remembers besides variables and input: version, counts, clocks.

    A checkpoint is restored before the first step, and the ledger is made at the first step: what was restored waits
    here for it.
    """

    def __init__(self):
        self._ledger: _Ledger | None = None
        self._lock: contextlib.AbstractContextManager = contextlib.nullcontext()
        self._restored: dict[str, Any] | None = None

    @property
    def has_restored(self) -> bool:
        """True while restored books wait for a ledger."""
        return self._restored is not None

    def state_dict(self) -> dict[str, Any] | None:
        """Returns the books as plain data, None before the first step.

        Runs on: chief, between two steps. Sets that are in flight are not in them: their batches are unread.
        """
        if self._restored is not None or self._ledger is None:
            return self._restored
        with self._lock:
            return self._ledger.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Keeps `state` for the ledger with which training begins or goes on.

        Runs on: chief.
        """
        self._restored = state

    def attach(self, ledger: _Ledger, lock: contextlib.AbstractContextManager) -> None:
        """Notes the ledger that training goes on with, and gives it what was restored.

        Args:
            ledger: No epoch of it is open if something was restored.
            lock: Held by whoever asks or tells the ledger.
        """
        self._ledger, self._lock = ledger, lock
        if self._restored is not None:
            with lock:
                ledger.load_state_dict(self._restored)
            self._restored = None
