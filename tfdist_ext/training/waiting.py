"""How long is something waited for that workers do, and what is said meanwhile?"""

from __future__ import annotations

import time
from collections.abc import Callable

from absl import logging

from tfdist_ext import errors
from tfdist_ext.training.worker_threads import WorkerThreads

LOOK_AROUND_SECONDS = 0.5
_SAY_WAITING_AFTER_SECONDS = 5.0
_SAY_AGAIN_SECONDS = 30.0


class Waiting:
    """One wait, which begins now.

    Args:
        threads: The workers' threads.
        patience_seconds: How long it may last.
        what: What does not come, for instance "No batch".
        whom: Returns a sentence that says whom it waits for.
    """

    def __init__(self, threads: WorkerThreads, patience_seconds: float, what: str, whom: Callable[[], str]):
        self._threads, self._patience_seconds = threads, patience_seconds
        self._what, self._whom = what, whom
        self._started = time.monotonic()
        self._says = self._started + _SAY_WAITING_AFTER_SECONDS

    def look_around(self, step: int | None = None) -> None:
        """Says now and then what is waited for.

        Args:
            step: Updates applied so far, for the error.

        Raises:
            ParameterServerLostError: A ps has not answered for too long.
            WorkersLostError: It has lasted too long.
        """
        now = time.monotonic()
        if now > self._says:
            self._says = now + _SAY_AGAIN_SECONDS
            logging.warning("%s for %.0f s. %s", self._what, now - self._started, self._sentence())
        if now - self._started < self._patience_seconds:
            return
        silent = self._threads.silent_ps()
        if silent is not None:
            silent.step = step
            raise silent
        raise errors.WorkersLostError(
            f"{self._what} for {now - self._started:.0f} s. {self._sentence()} Start the missing workers again, or see "
            "why those that are there do not finish what they compute.",
            tasks=self._threads.missing(),
            step=step,
        )

    def _sentence(self) -> str:
        missing = ", ".join(self._threads.missing())
        return self._whom() + (f" Missing: {missing}." if missing else "")
