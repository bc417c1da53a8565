"""Does a JSON value have exactly the fields of a dataclass? If not, which one is wrong?

JSON knows no NaN and no infinity; where a float is expected they are the texts "NaN", "Infinity" and "-Infinity".
"""

from __future__ import annotations

import dataclasses
import json
import math
import typing
from typing import Any, TypeVar

T = TypeVar("T")

_NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


class MalformedError(ValueError):
    """A value is not what it must be.

    Attributes:
        field: Where it is, for instance `"files.2.num_bytes"`; empty for the whole.
        text: What it must be.
    """

    def __init__(self, text: str, *path: str):
        self.field = ".".join(path)
        self.text = text
        self._path = path
        super().__init__(f"{self.field or 'it'} {text}")

    def within(self, name: str) -> MalformedError:
        """The same, seen from one level further out."""
        return MalformedError(self.text, name, *self._path)


def parse(text: str | bytes) -> Any:
    """Parses JSON text; NaN and infinity as bare words, which are no JSON, are refused.

    Args:
        text: UTF-8 text.

    Returns:
        The value.

    Raises:
        MalformedError: If it is no JSON.
    """
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise MalformedError(f"is no JSON: {error}") from error


def float_to_json(value: float) -> float | str:
    """Writes a float so that `read` finds it again.

    Args:
        value: Any float.

    Returns:
        Itself, or a text if it is not finite.

    Example:
        >>> float_to_json(0.5), float_to_json(-math.inf)
        (0.5, '-Infinity')
    """
    value = float(value)
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")


def read(kind: type[T], value: Any) -> T:
    """Reads a value strictly.

    Args:
        kind: A dataclass, int (not negative), float, bool, str, `tuple[X, ...]`, `dict[str, X]`, or Any.
        value: What `parse` returned.

    Returns:
        It as `kind`.

    Raises:
        MalformedError: Naming the first field that is missing, unknown, or of another type.
    """
    arguments = typing.get_args(kind)
    if dataclasses.is_dataclass(kind):
        return _read_fields(kind, value)
    if typing.get_origin(kind) is tuple:
        items = enumerate(_require(value, list, "a list"))
        return tuple(_read_part(str(index), arguments[0], item) for index, item in items)  # type: ignore[return-value]
    if typing.get_origin(kind) is dict:
        table = _require(value, dict, "an object")
        return {name: _read_part(name, arguments[1], item) for name, item in table.items()}  # type: ignore[return-value]
    return _read_scalar(kind, value)


def _read_fields(kind: type[T], value: Any) -> T:
    kinds = typing.get_type_hints(kind)
    table = _require(value, dict, "an object")
    for name in kinds:
        if name not in table:
            raise MalformedError("is missing", name)
    for name in table:
        if name not in kinds:
            raise MalformedError("is unknown", name)
    fields = {name: _read_part(name, kinds[name], item) for name, item in table.items()}
    try:
        return kind(**fields)
    except ValueError as error:
        raise MalformedError(f"is refused: {error}") from error


def _read_part(name: str, kind: Any, value: Any) -> Any:
    try:
        return read(kind, value)
    except MalformedError as error:
        raise error.within(name) from None


def _read_scalar(kind: Any, value: Any) -> Any:
    if kind is int:
        if _require(value, int, "a whole number") < 0:
            raise MalformedError(f"must not be negative; it is {value}")
    elif kind is float:
        value = _NOT_FINITE.get(value, value) if isinstance(value, str) else value
        return float(_require(value, (int, float), "a number"))
    elif kind is not Any:
        _require(value, kind, {bool: "true or false", str: "a text"}[kind])
    return value


def _require(value: Any, kind: type | tuple[type, ...], name: str) -> Any:
    # In Python, but not in JSON, true is a number.
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise MalformedError(f"must be {name}; it is {json.dumps(value)[:40]}")
    return value


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no number")
