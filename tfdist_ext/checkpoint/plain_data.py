"""How does Python state (counters, histories, arrays, random states) become text, and come back the same?

JSON with marks for what JSON has no word for. Nothing in it can name code to run, as a pickle can.
"""

from __future__ import annotations

import base64
import json
import math
from typing import Any

import numpy as np

_MARK = "__tfdist_ext__"


def encode(value: Any, where: str = "state") -> Any:
    """Turns a value into what `json.dumps` takes.

    Args:
        value: None, bool, int, float (also NaN and infinite), str, bytes, list, tuple, set, dict, NumPy scalar or
            array, nested at will; also tensors, which come back as arrays.
        where: Name for the message of an error.

    Returns:
        Lists, dicts, strings and numbers.

    Raises:
        TypeError: Something in it is of another type; the message says where and what.

    Example:
        >>> decode(encode({"best": float("nan"), 3: (1, 2)}))
        {'best': nan, 3: (1, 2)}
    """
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, (int, float)) and not isinstance(value, np.generic):
        return (
            value if isinstance(value, int) or math.isfinite(value) else {_MARK: "float", "of": repr(value)}
        )
    if isinstance(value, list):
        return [encode(item, f"{where}[{index}]") for index, item in enumerate(value)]
    if isinstance(value, dict):
        return _encode_dict(value, where)
    if isinstance(value, bytes):
        return {_MARK: "bytes", "of": base64.b64encode(value).decode("ascii")}
    if type(value) in (tuple, set, frozenset):
        items = list(value) if isinstance(value, tuple) else sorted(value, key=repr)
        return {_MARK: type(value).__name__, "of": encode(items, where)}
    return _encode_array(value, where)


def decode(value: Any) -> Any:
    """Turns what `encode` returned back into the value."""
    if isinstance(value, list):
        return [decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    kind = value.get(_MARK)
    if kind is None:
        return {key: decode(item) for key, item in value.items()}
    return _DECODERS[kind](value)


def dumps(value: Any, where: str = "state") -> bytes:
    """Returns `value` as UTF-8 text; raises `TypeError` as `encode` does."""
    return json.dumps(encode(value, where), allow_nan=False).encode()


def loads(text: bytes) -> Any:
    """Returns the value that `dumps` was given."""
    return decode(json.loads(text))


def _encode_dict(value: dict, where: str) -> Any:
    encoded = [(key, encode(item, f"{where}[{key!r}]")) for key, item in value.items()]
    if all(isinstance(key, str) for key in value) and _MARK not in value:
        return dict(encoded)
    return {_MARK: "dict", "of": [[encode(key, where), item] for key, item in encoded]}


def _encode_array(value: Any, where: str) -> Any:
    array = value.numpy() if hasattr(value, "numpy") else value
    if not isinstance(array, (np.ndarray, np.generic)) or np.asarray(array).dtype.hasobject:
        kind = f"{type(value).__module__}.{type(value).__name__}"
        raise TypeError(f"`{where}` is a {kind}, which cannot be written as plain data.")
    contiguous = np.asarray(array, order="C")
    return {
        _MARK: "array" if isinstance(array, np.ndarray) else "scalar",
        "dtype": contiguous.dtype.name if contiguous.dtype.kind not in "SU" else contiguous.dtype.str,
        "shape": list(contiguous.shape),
        "of": base64.b64encode(contiguous.tobytes()).decode("ascii"),
    }


def _decode_array(value: dict) -> np.ndarray:
    import ml_dtypes  # bfloat16 and its like are known to NumPy only after this.

    name = value["dtype"]
    dtype = np.dtype(getattr(ml_dtypes, name)) if hasattr(ml_dtypes, name) else np.dtype(name)
    return np.frombuffer(base64.b64decode(value["of"]), dtype).reshape(value["shape"]).copy()


_DECODERS = {
    "float": lambda value: float(value["of"]),
    "bytes": lambda value: base64.b64decode(value["of"]),
    "tuple": lambda value: tuple(decode(value["of"])),
    "set": lambda value: set(decode(value["of"])),
    "frozenset": lambda value: frozenset(decode(value["of"])),
    "dict": lambda value: {_hashable(decode(key)): decode(item) for key, item in value["of"]},
    "array": _decode_array,
    "scalar": lambda value: _decode_array(value)[()],
}


def _hashable(key: Any) -> Any:
    return tuple(key) if isinstance(key, list) else key
