"""What does one want to know about where a function runs? Data, to print and to store. Pure."""

from __future__ import annotations

import dataclasses
import html
import json
import os
import pathlib

from tfdist_ext.placement import report_html
from tfdist_ext.placement.schedule import Schedule, Transfer

# All of it fits on one screen of 60 lines: what crosses and what to try at length, the rest as examples.
_MOST_DEVICES, _MOST_TRANSFERS, _MOST_SENTENCES = 8, 10, 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeviceRow:
    """What one device has to do and to hold.

    Attributes:
        device: Its name.
        num_operations: Operations of the graph on it.
        flops: Floating-point operations of a step.
        variable_bytes: Variables without slots.
        slot_bytes: Optimizer slots.
        peak_bytes: The most that lives at once, variables included.
        busy_seconds: Predicted time of its operations in a step.
    """

    device: str
    num_operations: int = 0
    flops: float = 0.0
    variable_bytes: int = 0
    slot_bytes: int = 0
    peak_bytes: int = 0
    busy_seconds: float = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class OperationRow:
    """Where one operation runs.

    Attributes:
        name: Its path in the function.
        kind: TensorFlow's type.
        requested: Device the graph asks for; "" for none.
        device: Where it is expected to run: as requested, beside its variable, or on the default device.
        assigned: Where TensorFlow put it; None where that was not asked for or it was optimized away.
    """

    name: str
    kind: str
    requested: str
    device: str
    assigned: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Suggestion:
    """Something to try.

    Attributes:
        text: One sentence.
        gain_seconds: Predicted gain of a step.
    """

    text: str
    gain_seconds: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """Where a function runs, what crosses between devices, and what that costs; made by `explain`.

    Attributes:
        function: Its name.
        devices: A row for each device, in the machine's order.
        operations: A row for each operation, in the order of the graph.
        transfers: Every tensor that crosses, once for each destination.
        schedule: The predicted schedule.
        measured_seconds: Median of a few runs; None where that was not asked for.
        unplaced: Operations for which no device is requested, beside no variable.
        apart: Sentences: an operation without a request takes a variable from another device.
        soft_placement: Sentences: TensorFlow put an operation elsewhere than it was requested.
        not_honoured: Sentences: a request that cannot or did not count.
        colocations: Sentences: a request or a move that parts an operation from its variable.
        suggestions: The largest gain first.
        notes: Sentences about what is not known.
    """

    function: str
    devices: tuple[DeviceRow, ...]
    operations: tuple[OperationRow, ...]
    transfers: tuple[Transfer, ...]
    schedule: Schedule
    measured_seconds: float | None = None
    unplaced: tuple[str, ...] = ()
    apart: tuple[str, ...] = ()
    soft_placement: tuple[str, ...] = ()
    not_honoured: tuple[str, ...] = ()
    colocations: tuple[str, ...] = ()
    suggestions: tuple[Suggestion, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def predicted_seconds(self) -> float:
        """Predicted time of one step."""
        return self.schedule.seconds

    @property
    def cut_bytes(self) -> int:
        """Bytes that cross in a step."""
        return sum(transfer.num_bytes for transfer in self.transfers)

    def device_of(self, name: str) -> str:
        """Returns where an operation is expected to run; raises `KeyError` for one that is not there."""
        for row in self.operations:
            if row.name == name:
                return row.device
        raise KeyError(f"There is no operation {name!r} in {self.function}.")

    def __str__(self) -> str:
        measured = "" if self.measured_seconds is None else f", {1e3 * self.measured_seconds:.3f} ms measured"
        width = max(len(row.device) for row in self.devices)
        lines = [
            f"{self.function}: {len(self.operations)} operations, {1e3 * self.predicted_seconds:.3f} ms predicted"
            f"{measured}, {self.cut_bytes:,} bytes cross",
            f"{'device':<{width}} {'operations':>10} {'FLOPs':>10} {'variables':>12} {'slots':>12} "
            f"{'peak':>12} {'busy':>10}",
        ]
        for row in self.devices[:_MOST_DEVICES]:
            lines.append(
                f"{row.device:<{width}} {row.num_operations:>10} {row.flops:>10.3g} {row.variable_bytes:>12,} "
                f"{row.slot_bytes:>12,} {row.peak_bytes:>12,} {1e3 * row.busy_seconds:>7.3f} ms"
            )
        if len(self.devices) > _MOST_DEVICES:
            lines.append(f"and {len(self.devices) - _MOST_DEVICES} more devices")
        transfers = sorted(self.transfers, key=lambda transfer: -transfer.num_bytes)
        lines += _section("crosses", [describe(transfer) for transfer in transfers], _MOST_TRANSFERS)
        path = " > ".join(self.schedule.critical_path[-8:])
        lines += _section("critical path", [path] if path else [])
        unplaced = [f"{len(self.unplaced)}, such as {self.unplaced[0]}"] if self.unplaced else []
        for title, sentences in (
            ("apart from its variable", self.apart),
            ("put elsewhere", self.soft_placement),
            ("not honoured", self.not_honoured),
            ("tied to a variable", self.colocations),
            ("no device requested", unplaced),
            ("try", [f"{one.text} ({1e3 * one.gain_seconds:.3f} ms)" for one in self.suggestions]),
            ("not known", self.notes),
        ):
            lines += _section(title, sentences)
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        """Shows a notebook what `print` shows."""
        return f"<pre>{html.escape(str(self))}</pre>"

    def to_json(self) -> str:
        """Returns all of it as text."""
        return json.dumps(dataclasses.asdict(self), indent=1)

    def to_html(self, path: str | os.PathLike[str]) -> None:
        """Writes one file that a browser shows without a network."""
        pathlib.Path(path).write_text(report_html.page(self), encoding="utf-8")


def describe(transfer: Transfer) -> str:
    """Returns one line about a tensor that crosses."""
    kind = "sparse" if transfer.sparse else "dense"
    consumers = ", ".join(transfer.consumers[:3]) + (", ..." if len(transfer.consumers) > 3 else "")
    return (
        f"{transfer.num_bytes:>12,} bytes {transfer.source} -> {transfer.destination}: {transfer.producer}:"
        f"{transfer.output} {transfer.dtype} {kind}, for {consumers}"
    )


def _section(title: str, lines, most: int = _MOST_SENTENCES) -> list[str]:
    if not lines:
        return []
    shown = [f"  {line}" for line in list(lines)[:most]]
    more = len(lines) - len(shown)
    return [f"{title}:", *shown, *([f"  and {more} more"] if more > 0 else [])]
