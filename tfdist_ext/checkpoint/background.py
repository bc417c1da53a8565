"""Who writes while training goes on, and who hears of it when that fails?"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable

from absl import logging

from tfdist_ext import errors

_SAY_WAITING_AFTER_SECONDS = 5.0
# To the scheduler a thread of this niceness is worth a thirtieth of one of training: it gets what training leaves, and
# a little more, so that a save ends in any case.
_NICENESS = 15


# Errors of jobs that no call has raised yet.
_unheard: list[BaseException] = []


@atexit.register
def _end_with_unheard_errors() -> None:
    """Ends the process with code 1; Python has waited for threads before, and sets no code for what this raises."""
    if _unheard:
        for error in _unheard:
            sys.stderr.write("".join(traceback.format_exception(error)))
        sys.stderr.write(
            "The last checkpoint was not saved, and the program ended without asking: exit code 1.\n"
        )
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


class BackgroundWriter:
    """Runs one job at a time behind the caller's back.

    A job begins when the one before it has ended, and the caller waits for that: what waits to be written is in memory,
    and there is never more of it than one save. The error of a job is raised by the next call. The interpreter
    does not exit before the last job has ended, and then with code 1 if no call was left to raise its error.
    """

    def __init__(self):
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def submit(self, job: Callable[[], None], *, gives_way: bool = False) -> float:
        """Starts a job.

        Args:
            job: Function without arguments.
            gives_way: Whether other threads come first. Pass False for a job that somebody waits for.

        Returns:
            Seconds waited for the job before it.

        Raises:
            Exception: What the job before it raised.
        """
        waited = self.wait()
        self._thread = threading.Thread(
            target=self._run, args=(job, gives_way), name="checkpoint writer", daemon=False
        )
        self._thread.start()
        return waited

    def wait(self, timeout_seconds: float | None = None) -> float:
        """Waits for the running job; returns the seconds waited.

        Raises:
            CheckpointError: It has not ended in time.
            Exception: What it raised.
        """
        started = time.monotonic()
        if self._thread is not None:
            self._thread.join(_SAY_WAITING_AFTER_SECONDS if timeout_seconds is None else timeout_seconds)
            if self._thread.is_alive():
                if timeout_seconds is not None:
                    raise errors.CheckpointError(
                        f"The checkpoint is still being written after {timeout_seconds:.0f} s. Is the disk slow, or "
                        "the directory on a network that does not answer?"
                    )
                logging.warning(
                    "Training waits: the checkpoint before is still being written after %.0f s. Save less often, or to "
                    "a faster disk.",
                    time.monotonic() - started,
                )
                self._thread.join()
            self._thread = None
        self.raise_error()
        return time.monotonic() - started

    def raise_error(self) -> None:
        """Raises what a job raised, once."""
        error, self._error = self._error, None
        if error is not None:
            _unheard.remove(error)
            raise error

    def _run(self, job: Callable[[], None], gives_way: bool) -> None:
        if gives_way:
            _give_way()
        try:
            job()
        except BaseException as error:  # noqa: BLE001 - raised again by the next call
            self._error = error
            _unheard.append(error)
            logging.error("A checkpoint could not be saved: %s", error)


def _give_way() -> None:
    """Lets other threads come first before this one and those that it will start."""
    # Elsewhere niceness is the whole process'.
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
