"""What is one operation, and how does it fail? Every error text of the collectives is made here."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import zmq

from tfdist_ext import errors
from tfdist_ext.collectives.future import Future, StreamAbandoned
from tfdist_ext.collectives.message import Collective, pack_names
from tfdist_ext.collectives.outbox import Outbox


@dataclasses.dataclass
class Operation:
    """One collective that this task has entered.

    Attributes:
        kind: For instance "all_reduce".
        name: The caller's name for it.
        stream: Name of the stream it belongs to.
        details: What must be equal on all tasks besides kind and name, for instance "float32[3] sum".
        machine: The state machine that does it.
        step: Training step, counted since this start, or None.
        timeout_seconds: Seconds until it fails.
        task_names: Names of all tasks, by rank.
        rank: This task.
        outbox: What it has to send, and who is known to have entered it too.
    """

    kind: str
    name: str
    stream: str
    details: str
    machine: Collective
    step: int | None
    timeout_seconds: float
    task_names: tuple[str, ...]
    rank: int
    outbox: Outbox

    def __post_init__(self):
        self.signature = f"{self.kind} {self.name!r} {self.details}".rstrip()
        self.names = pack_names(self.stream, self.signature)
        self.begin = time.monotonic()
        self.future = Future(self.timeout_error)
        self.asked = False
        self.trackers: list[zmq.MessageTracker] = []

    @property
    def waited_seconds(self) -> float:
        """Seconds since the task entered it."""
        return time.monotonic() - self.begin

    @property
    def missing(self) -> set[int]:
        """Ranks that it still needs: for what they send, or to take what waits for them here."""
        return set(self.machine.missing) | self.outbox.waiting_for

    @property
    def is_over(self) -> bool:
        """Whether this task has its result and owes nothing to the others."""
        return self.machine.done and self.outbox.is_empty

    def timeout_error(self, waited_seconds: float) -> errors.CollectiveTimeoutError:
        """Nobody is dead, but it takes too long."""
        absent = [self.task_names[rank] for rank in sorted(self.missing - self.outbox.joined)]
        if absent:
            text = (
                f"{', '.join(absent)} did not join {self._where} within {waited_seconds:.1f} s of {self._me}."
            )
        else:
            text = (
                f"{self._where} did not finish on {self._me} within {waited_seconds:.1f} s, although every "
                f"task has "
                "joined it: the links are too slow for its size, or a task is too busy to answer."
            )
        return errors.CollectiveTimeoutError(text, **self._facts(absent[0] if absent else "", waited_seconds))

    def lost_error(self, rank: int, reason: str, *, earlier: bool = False) -> errors.PeerLostError:
        """A task that everybody needs died, now or `earlier`."""
        peer = self.task_names[rank]
        if earlier:
            text = f"{self._me} cannot run {self._where}: {peer} was lost before ({reason})."
        else:
            waited = f"{self.waited_seconds:.1f} s"
            text = f"{self._me} lost {peer} ({reason}) after waiting {waited} in {self._where}."
        return errors.PeerLostError(text, **self._facts(peer))

    def left_error(self, rank: int) -> errors.PeerLostError:
        """A task that this operation needs has said goodbye."""
        peer = self.task_names[rank]
        text = (
            f"{peer} left the group normally (its program ended, or closed the group), but {self._me} still "
            f"needs it in "
            f"{self._where}, where it waited {self.waited_seconds:.1f} s. Do all tasks run the same number "
            f"of steps?"
        )
        return errors.PeerLostError(text, **self._facts(peer))

    def abandoned_error(self, rank: int, reason: str = "") -> StreamAbandoned:
        """A task, perhaps this one, takes no more part in the stream."""
        peer = self.task_names[rank]
        error = StreamAbandoned(f"{peer} has abandoned the stream of {self._where}.", **self._facts(peer))
        error.reason = reason
        return error

    def mismatch_text(self, rank: int, signature: str, sequence: int) -> str:
        """Another task has entered something else."""
        return (
            f"Operation {sequence} of stream {self.stream!r} is {self.signature} on {self._me}, but "
            f"{signature} on "
            f"{self.task_names[rank]}. All tasks must enter the same operations in the same order, with "
            f"tensors of the "
            "same dtype and shape."
        )

    def error(
        self, error_class: type[errors.CollectiveError], text: str, task: str
    ) -> errors.CollectiveError:
        """An error of the stream, which all its operations share."""
        return error_class(f"{text} (Seen by {self._me} in {self._where}.)", **self._facts(task))

    @property
    def _me(self) -> str:
        return self.task_names[self.rank]

    @property
    def _where(self) -> str:
        # A restored run counts on from its checkpoint, which the group knows nothing of.
        at_step = "" if self.step is None else f" at step {self.step} since this start"
        return f"{self.kind} {self.name!r}{at_step}"

    def _facts(self, task: str, waited_seconds: float | None = None) -> dict[str, Any]:
        waited = self.waited_seconds if waited_seconds is None else waited_seconds
        return {"task": task, "collective": self.name, "step": self.step, "waited_seconds": waited}
