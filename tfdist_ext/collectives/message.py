"""What does a collective say to its peers, and how is that written in bytes?"""

from __future__ import annotations

import enum
import struct
from typing import Any, NamedTuple, Protocol

from tfdist_ext.transport import ProtocolViolation

_MAX_NAME_BYTES = 16 * 1024
# kind, length of the stream name, hop, sequence number in the stream, piece
_BODY = struct.Struct("!BHIQQ")


class Message(NamedTuple):
    """One message of a collective.

    Attributes:
        peer: Rank that it goes to, or came from.
        payload: A contiguous 1-D buffer.
        hop: How many links the value has crossed before.
        piece: Which part of the whole this is.
        borrowed: True if `payload` is memory that the result will live in, so that the operation may not be
            reported as finished before the message has left.
    """

    peer: int
    payload: Any
    hop: int = 0
    piece: int = 0
    borrowed: bool = False


class Collective(Protocol):
    """State machine of one operation on one task.

    `done` is True once this task has its result and owes nothing to the others; `missing` holds the ranks
    that it still needs something from.
    """

    @property
    def done(self) -> bool:
        """Whether the operation is over here."""

    @property
    def missing(self) -> set[int]:
        """Whom it still needs."""

    def start(self) -> list[Message]:
        """Begins; returns messages to send."""

    def receive(self, message: Message) -> list[Message]:
        """Takes one message; returns messages to send.

        Raises:
            ProtocolViolation: If it cannot belong here. The machine is then unusable.
        """

    def result(self) -> Any:
        """The value, once `done`."""


class Kind(enum.IntEnum):
    """What a body is about."""

    DATA = 1
    # "I am in this operation; are you?", sent once an operation takes long, and its answer. They tell in an
    # error who never joined, which the ring itself cannot: there everybody waits for a neighbour.
    ASK = 2
    JOINED = 3
    STREAM_FAILED = 4
    ABANDON = 5


class Body(NamedTuple):
    """The checked head of a message of a stream."""

    kind: Kind
    hop: int
    sequence: int
    piece: int
    stream: str
    signature: str


def pack_names(stream: str, signature: str) -> tuple[int, bytes]:
    """The part of a body that all messages of an operation share.

    Raises:
        ValueError: If the names are too long.
    """
    names = stream.encode() + signature.encode()
    if len(names) > _MAX_NAME_BYTES:
        raise ValueError(f"The names of a stream and its collective must fit into {_MAX_NAME_BYTES} bytes.")
    return len(stream.encode()), names


def pack_body(kind: Kind, hop: int, sequence: int, piece: int, names: tuple[int, bytes]) -> bytes:
    """Builds a body."""
    return _BODY.pack(kind, names[0], hop, sequence, piece) + names[1]


def unpack_body(body: bytes) -> Body:
    """Reads what `pack_body` made.

    Raises:
        ProtocolViolation: If it is malformed.
    """
    if not _BODY.size <= len(body) <= _BODY.size + _MAX_NAME_BYTES:
        raise ProtocolViolation(f"a body of {len(body)} bytes")
    kind, stream_bytes, hop, sequence, piece = _BODY.unpack_from(body)
    if not Kind.DATA <= kind <= Kind.ABANDON:
        raise ProtocolViolation(f"a body of kind {kind}")
    names = body[_BODY.size :]
    if stream_bytes > len(names):
        raise ProtocolViolation("a body with a truncated stream name")
    try:
        return Body(
            Kind(kind), hop, sequence, piece, names[:stream_bytes].decode(), names[stream_bytes:].decode()
        )
    except UnicodeDecodeError as error:
        raise ProtocolViolation("a body whose names are not UTF-8") from error
