"""What does a message look like on the wire?

Every message is two ZeroMQ frames: a head (a fixed header and an opaque body of the layer above) and a
payload (possibly empty; large ones are never copied). Nothing received is trusted: sizes are bounded and
every field is checked before use, and nothing is ever unpickled.
"""

from __future__ import annotations

import enum
import json
import struct
from typing import Any, NamedTuple

PROTOCOL_VERSION = 3
MAX_BODY_BYTES = 64 * 1024
MAX_JSON_BYTES = 4 * 1024 * 1024
MAX_PAYLOAD_BYTES = 1 << 32

_MAGIC = b"TFDX"
# magic, protocol version, kind, source rank, incarnation of the source, sequence number on this link
_HEADER = struct.Struct("!4sBBHQQ")


class ProtocolViolation(ValueError):
    """Received bytes are not what the protocol allows at this point."""


class Kind(enum.IntEnum):
    """What a message is for."""

    HELLO = 1
    ACKNOWLEDGE_HELLO = 2
    DATA = 3
    GOODBYE = 4
    ACKNOWLEDGE_GOODBYE = 5
    LOST = 6
    BULK_DATA = 7


class Header(NamedTuple):
    """The checked fixed part of a head frame."""

    version: int
    kind: Kind
    source: int
    incarnation: int
    sequence: int


def pack_head(kind: Kind, source: int, incarnation: int, sequence: int, body: bytes = b"") -> bytes:
    """Builds a head frame."""
    return _HEADER.pack(_MAGIC, PROTOCOL_VERSION, kind, source, incarnation, sequence) + body


def unpack_head(head: bytes | memoryview, num_tasks: int) -> tuple[Header, bytes]:
    """Splits a head frame into its header and the body of the layer above.

    A foreign protocol version is let through for `HELLO` alone, so that the handshake can name it.

    Raises:
        ProtocolViolation: If the frame is malformed.
    """
    if not _HEADER.size <= len(head) <= _HEADER.size + MAX_BODY_BYTES:
        raise ProtocolViolation(f"a head frame of {len(head)} bytes")
    magic, version, kind, source, incarnation, sequence = _HEADER.unpack_from(head)
    if magic != _MAGIC:
        raise ProtocolViolation("a message of another protocol")
    if version != PROTOCOL_VERSION and kind != Kind.HELLO:
        raise ProtocolViolation(f"protocol version {version}")
    if not Kind.HELLO <= kind <= Kind.BULK_DATA:
        raise ProtocolViolation(f"message kind {kind}")
    if source >= num_tasks:
        raise ProtocolViolation(f"source rank {source} in a group of {num_tasks}")
    return Header(version, Kind(kind), source, incarnation, sequence), bytes(head[_HEADER.size :])


def pack_json(fields: dict[str, Any]) -> bytes:
    """Encodes small fields as JSON.

    Raises:
        ValueError: If they exceed `MAX_JSON_BYTES`, or hold a value that JSON cannot express.
    """
    try:
        encoded = json.dumps(fields, allow_nan=False).encode()
    except TypeError as error:
        raise ValueError(f"Only JSON values can be sent to other tasks: {error}.") from error
    if len(encoded) > MAX_JSON_BYTES:
        raise ValueError(f"{len(encoded)} bytes of JSON exceed the limit of {MAX_JSON_BYTES} bytes.")
    return encoded


def unpack_json(payload: bytes | memoryview) -> dict[str, Any]:
    """Decodes what `pack_json` made.

    Raises:
        ProtocolViolation: If the payload is too long or no JSON object.
    """
    if len(payload) > MAX_JSON_BYTES:
        raise ProtocolViolation(f"{len(payload)} bytes of JSON")
    try:
        fields = json.loads(bytes(payload))
    except (ValueError, RecursionError) as error:
        raise ProtocolViolation(f"broken JSON ({error})") from error
    if not isinstance(fields, dict):
        raise ProtocolViolation("JSON that is no object")
    return fields
