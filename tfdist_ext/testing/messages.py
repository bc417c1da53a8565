"""How do nested values with arrays cross a pipe without running code from it?

A message is the length of a header, the header (JSON), and the bytes of the arrays, which the header numbers.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

_LENGTH = struct.Struct("<Q")


class Writer(Protocol):
    """What a message is written to."""

    def write(self, data: bytes, /) -> Any:
        """Takes all of `data`."""

    def flush(self) -> Any:
        """Sends what was written."""


class Reader(Protocol):
    """What a message is read from."""

    def read(self, size: int, /) -> bytes:
        """Returns `size` bytes, or fewer at the end."""


def write_message(stream: Writer, value: Any) -> None:
    """Writes one message.

    Args:
        stream: Where to.
        value: None, bool, int, float, str, bytes, arrays, tensors and variables (which arrive as arrays), and
            lists, tuples and dictionaries of such values.

    Raises:
        TypeError: Something in `value` is of another type; the message names its place.
    """
    header, buffers = encode(value)
    stream.write(_LENGTH.pack(len(header)) + header)
    for buffer in buffers:
        stream.write(buffer)
    stream.flush()


def read_message(stream: Reader) -> Any:
    """Reads one message.

    Args:
        stream: Where from.

    Returns:
        The value.

    Raises:
        EOFError: The stream ended.
    """
    (length,) = _LENGTH.unpack(_read(stream, _LENGTH.size))
    header = json.loads(_read(stream, length))
    buffers = [_read(stream, size) for size in header["sizes"]]
    return _decode(header["value"], buffers)


def encode(value: Any, name: str = "value") -> tuple[bytes, list[bytes]]:
    """Turns a value into a header and buffers; see `write_message`.

    Args:
        value: The value.
        name: What an error calls it.

    Returns:
        The header and the buffers.

    Raises:
        TypeError: Something in `value` is of another type; the message names its place.
    """
    buffers: list[bytes] = []
    encoded = _encode(value, buffers, name)
    header = {"value": encoded, "sizes": [len(buffer) for buffer in buffers]}
    return json.dumps(header).encode(), buffers


def _encode(value: Any, buffers: list[bytes], place: str) -> Any:
    if isinstance(value, np.ndarray | np.generic):
        return _encode_array(value, buffers, place)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list):
        return [_encode(item, buffers, f"{place}[{index}]") for index, item in enumerate(value)]
    if isinstance(value, tuple):
        return {"tuple": _encode(list(value), buffers, place)}
    if isinstance(value, Mapping):
        items = [
            [_encode(key, buffers, f"a key of {place}"), _encode(item, buffers, f"{place}[{key!r}]")]
            for key, item in value.items()
        ]
        return {"dict": items}
    if isinstance(value, bytes):
        buffers.append(value)
        return {"bytes": len(buffers) - 1}
    if callable(getattr(value, "numpy", None)):
        return _encode(value.numpy(), buffers, place)
    raise TypeError(
        f"{place} is a {type(value).__name__}, which does not cross to another process. Try numbers, text, "
        "arrays, lists, tuples or dictionaries."
    )


def _encode_array(array: np.ndarray | np.generic, buffers: list[bytes], place: str) -> dict[str, Any]:
    if array.dtype.hasobject:
        raise TypeError(f"{place} is an array of Python objects, which does not cross to another process.")
    buffers.append(array.tobytes())
    # An extension type such as bfloat16 has only its name; dtype.str would call it plain bytes.
    dtype = array.dtype.name if array.dtype.kind == "V" else array.dtype.str
    scalar = isinstance(array, np.generic)
    return {"array": len(buffers) - 1, "dtype": dtype, "shape": list(array.shape), "scalar": scalar}


def _decode(encoded: Any, buffers: list[bytes]) -> Any:
    if isinstance(encoded, list):
        return [_decode(item, buffers) for item in encoded]
    if not isinstance(encoded, dict):
        return encoded
    if "dict" in encoded:
        return {_decode(key, buffers): _decode(item, buffers) for key, item in encoded["dict"]}
    if "tuple" in encoded:
        return tuple(_decode(encoded["tuple"], buffers))
    if "bytes" in encoded:
        return buffers[encoded["bytes"]]
    flat = np.frombuffer(buffers[encoded["array"]], _dtype(encoded["dtype"]))
    array = flat.reshape(encoded["shape"]).copy()
    return array[()] if encoded["scalar"] else array


def _dtype(name: str) -> np.dtype:
    try:
        return np.dtype(name)
    except TypeError:
        import ml_dtypes  # It comes with TensorFlow, and adds bfloat16 and the like to NumPy.

        return np.dtype(getattr(ml_dtypes, name))


def _read(stream: Reader, size: int) -> bytes:
    data = stream.read(size)
    if len(data) < size:
        raise EOFError("The other process closed the pipe.")
    return data
