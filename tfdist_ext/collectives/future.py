"""How does a caller wait for an operation?"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import zmq

from tfdist_ext import errors


class StreamAbandoned(errors.CollectiveError):
    """An operation cannot finish because this task, or one that it needs, has abandoned the stream.

    Attributes:
        reason: What that task said of why, or "".
    """

    reason: str = ""


class Future:
    """The result of one operation, some time.

    Args:
        describe_timeout: Builds the error of a `result` that waited too long, from the seconds waited.
    """

    def __init__(self, describe_timeout: Callable[[float], Exception]):
        self._describe_timeout = describe_timeout
        # A bare lock, held until the end: half the cost of an Event, and this is waited on in every training
        # step.
        self._unfinished = threading.Lock()
        self._unfinished.acquire()
        self._value: Any = None
        self._error: Exception | None = None
        self._trackers: Sequence[zmq.MessageTracker] = ()
        self._finished = False

    def done(self) -> bool:
        """True if `result` will not wait for another task any more."""
        return self._finished

    def result(self, timeout_seconds: float | None = None) -> Any:
        """Waits for the result.

        Args:
            timeout_seconds: How long to wait; by default until the deadline of the operation. An operation
                whose caller stops waiting goes on, and `result` may be called again.

        Raises:
            PeerLostError: If a task that the operation needs died or left.
            SignatureMismatchError: If another task entered a different operation in its place.
            CollectiveTimeoutError: If a task did not join in time.
            StreamAbandoned: If the stream was abandoned.
        """
        begin = time.monotonic()
        if not self._unfinished.acquire(timeout=-1 if timeout_seconds is None else max(0.0, timeout_seconds)):
            raise self._describe_timeout(time.monotonic() - begin)
        self._unfinished.release()
        if self._error is not None:
            raise self._error
        # The last pieces this task sends lie in the result, which the caller may overwrite from here on.
        for tracker in self._trackers:
            tracker.wait()
        self._trackers = ()
        return self._value

    def set_result(self, value: Any, trackers: Sequence[zmq.MessageTracker] = ()) -> None:
        """Finishes with a value, to be handed out once the messages of `trackers` have left."""
        self._value, self._trackers = value, trackers
        self._finish()

    def set_error(self, error: Exception) -> None:
        """Finishes with an error."""
        self._error = error
        self._finish()

    def _finish(self) -> None:
        self._finished = True
        self._unfinished.release()
