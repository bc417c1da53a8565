"""How does a directory of checkpoints look on a screen, and as JSON? Pure."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from tfdist_ext.checkpoint.manifest import CheckpointRecord, Manifest, TensorRecord
from tfdist_ext.checkpoint.strict_json import float_to_json

_AGES = ((86_400, "days"), (3_600, "h"), (60, "min"), (1, "s"))
_HEADINGS = ("step", "epoch/batch", "age", "size", "state", "metrics")


@dataclasses.dataclass(frozen=True)
class Inspected:
    """A checkpoint and what was found out about it.

    Attributes:
        record: The checkpoint.
        problem: What is wrong with it, as one sentence; None if nothing is.
        verified: Whether the tensors were read too.
    """

    record: CheckpointRecord
    problem: str | None
    verified: bool

    @property
    def state(self) -> str:
        """In one word: `intact` is said only of what was read in full."""
        if self.problem is not None:
            return "PROBLEM"
        return "intact" if self.verified else "complete"


def overview(found: Sequence[Inspected], now_unix_seconds: float) -> list[str]:
    """Lists checkpoints.

    Args:
        found: The checkpoints, the oldest first.
        now_unix_seconds: The time.

    Returns:
        Lines: a table, problems below their checkpoint, and a summary.
    """
    return [*_table(found, now_unix_seconds), "", *_summary(found)]


def details(one: Inspected, now_unix_seconds: float) -> list[str]:
    """Describes a checkpoint.

    Args:
        one: The checkpoint.
        now_unix_seconds: The time.

    Returns:
        Lines: what it is, its pieces, its tensors and where it came from.
    """
    lines = [*_table([one], now_unix_seconds), "", f"Folder: {one.record.path}"]
    manifest = one.record.manifest
    if manifest is None:
        return lines
    return [
        *lines,
        f"Made by: {_pairs(manifest.fingerprint)}; {_pairs(manifest.cluster)}",
        f"Input position: {_pairs(manifest.input) if manifest.input else 'not kept'}",
        "",
        *_pieces(manifest),
        "",
        *_tensors(manifest.tensors),
    ]


def as_json(one: Inspected, now_unix_seconds: float, *, with_details: bool) -> dict[str, Any]:
    """Describes a checkpoint for a program.

    Args:
        one: The checkpoint.
        now_unix_seconds: The time.
        with_details: Whether to add all that the manifest says.

    Returns:
        Plain values; metrics that are not finite are texts, as in the manifest.
    """
    record, manifest = one.record, one.record.manifest
    fields: dict[str, Any] = {
        "step": record.step,
        "path": record.path,
        "problem": one.problem,
        "verified": one.verified,
        "num_bytes": record.num_bytes,
    }
    if manifest is not None:
        fields |= {
            "epoch": manifest.epoch,
            "batch": manifest.batch,
            "age_seconds": now_unix_seconds - manifest.created_unix_seconds,
            "metrics": {name: float_to_json(value) for name, value in manifest.metrics.items()},
        }
        if with_details:
            fields = {**dataclasses.asdict(manifest), **fields}
            fields["tensors"] = [
                {**dataclasses.asdict(tensor), "num_bytes": tensor.num_bytes} for tensor in manifest.tensors
            ]
    return fields


def size_text(num_bytes: float) -> str:
    """Writes a size.

    Args:
        num_bytes: The size.

    Returns:
        Text of three digits or so.

    Example:
        >>> size_text(999), size_text(1234), size_text(5_600_000_000)
        ('999 B', '1.23 kB', '5.6 GB')
    """
    power = 0
    while num_bytes >= 999.5 and power < 5:
        num_bytes /= 1000
        power += 1
    return f"{num_bytes:.3g} {['B', 'kB', 'MB', 'GB', 'TB', 'PB'][power]}"


def age_text(seconds: float) -> str:
    """Writes an age.

    Args:
        seconds: The age; clocks of two machines may make it negative.

    Returns:
        A whole number of the largest unit of which there are at least two.

    Example:
        >>> age_text(90), age_text(7_300), age_text(400_000)
        ('90 s', '2 h', '4 days')
    """
    seconds = max(0.0, seconds)
    unit, name = next((pair for pair in _AGES if seconds >= 2 * pair[0]), _AGES[-1])
    return f"{math.floor(seconds / unit)} {name}"


def _table(found: Sequence[Inspected], now_unix_seconds: float) -> list[str]:
    cells = [_cells(one, now_unix_seconds) for one in found]
    widths = [max(len(row[column]) for row in [_HEADINGS, *cells]) for column in range(len(_HEADINGS))]
    lines = [_aligned(_HEADINGS, widths)]
    for one, row in zip(found, cells, strict=True):
        lines.append(_aligned(row, widths))
        if one.problem is not None:
            lines.append(f"  PROBLEM: {one.problem}")
    return lines


def _cells(one: Inspected, now_unix_seconds: float) -> tuple[str, ...]:
    manifest = one.record.manifest
    if manifest is None:
        return (str(one.record.step), "?", "?", "?", one.state, "")
    return (
        str(manifest.step),
        f"{manifest.epoch}/{manifest.batch}",
        age_text(now_unix_seconds - manifest.created_unix_seconds),
        size_text(manifest.num_bytes),
        one.state,
        ", ".join(f"{name}={value:.4g}" for name, value in manifest.metrics.items()),
    )


def _aligned(cells: Sequence[str], widths: Sequence[int]) -> str:
    right = [cell.rjust(width) for cell, width in zip(cells[:4], widths[:4], strict=True)]
    return "  ".join([*right, cells[4].ljust(widths[4]), cells[5]]).rstrip()


def _summary(found: Sequence[Inspected]) -> list[str]:
    whole = [one for one in found if one.problem is None]
    total = size_text(sum(one.record.num_bytes for one in found))
    count = f"{len(found)} checkpoint{'s' if len(found) != 1 else ''}, {total}."
    newest = (
        f"Step {whole[-1].record.step} is the newest without a problem." if whole else "None can be used."
    )
    lines = [f"{count} {newest}"]
    if any(one.state == "complete" for one in found):
        lines.append(
            "complete: every file is there and has its size; `--verify` reads the tensors too and compares checksums."
        )
    return lines


def _pieces(manifest: Manifest) -> list[str]:
    width = max((len(piece.name) for piece in manifest.pieces), default=0)
    lines = [
        f"  {piece.name:<{width}}  {'captured' if piece.captured else 'NOT CAPTURED'}"
        f"{': ' if piece.reason else ''}{piece.reason}"
        for piece in manifest.pieces
    ]
    return [f"{len(lines)} pieces:", *lines]


def _tensors(tensors: Sequence[TensorRecord]) -> list[str]:
    width = max((len(tensor.name) for tensor in tensors), default=0)
    total = size_text(sum(tensor.num_bytes or 0 for tensor in tensors))
    return [
        f"{len(tensors)} tensors, {total}:",
        *(
            f"  {tensor.name:<{width}}  {tensor.dtype} {list(tensor.shape)}"
            f"{'' if tensor.num_bytes is None else '  ' + size_text(tensor.num_bytes)}"
            for tensor in tensors
        ),
    ]


def _pairs(table: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {_words(value)}" for name, value in table.items()) or "unknown"


def _words(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)
