"""What does a task remember of one stream?"""

from __future__ import annotations

import dataclasses

from tfdist_ext import errors
from tfdist_ext.collectives.message import Message
from tfdist_ext.collectives.operation import Operation


@dataclasses.dataclass
class Failure:
    """Why a stream failed, in the words that all its operations share."""

    error_class: type[errors.CollectiveError]
    text: str
    task: str


class Stream:
    """Books of one stream.

    Attributes:
        next_sequence: Number of the next operation that this task enters.
        pending: Operations that are not finished, by number.
        early: Messages of operations that this task has not entered yet, each with the sender's signature.
        askers: Ranks that want to know when this task enters an operation, by number.
        abandoned_from: By rank, the first operation that it will not finish, having abandoned the stream.
        reasons: By rank, why it did, where it said so.
        failure: Why no operation can run any more, or None.
    """

    def __init__(self):
        self.next_sequence = 0
        self.pending: dict[int, Operation] = {}
        self.early: dict[int, list[tuple[Message, str]]] = {}
        self.askers: dict[int, set[int]] = {}
        self.abandoned_from: dict[int, int] = {}
        self.reasons: dict[int, str] = {}
        self.failure: Failure | None = None

    @property
    def first_incomplete(self) -> int:
        """Number of the first operation that is not finished here."""
        return min(self.pending, default=self.next_sequence)

    def forget_early(self) -> int:
        """Drops what came early; returns how many bytes that frees."""
        num_bytes = sum(
            memoryview(message.payload).nbytes for kept in self.early.values() for message, _ in kept
        )
        self.early.clear()
        self.askers.clear()
        return num_bytes
