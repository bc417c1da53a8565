"""How does a placement report look in a browser? One page without scripts, fonts or images from elsewhere."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from typing import Any

_STYLE = """
:root { color-scheme: light dark; --line: #8885; --bar: #3b82c4; --critical: #d9822b; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: .25rem .6rem; border-bottom: 1px solid var(--line); overflow-wrap: anywhere; }
td.number, th.number { text-align: right; white-space: nowrap; }
svg { width: 100%; height: auto; } svg text { font: 11px system-ui, sans-serif; fill: currentColor; }
rect { stroke: Canvas; stroke-width: .6; }
.bar { fill: var(--bar); } .critical { fill: var(--critical); } .summary { font-size: 1.05rem; }
"""
_WIDTH, _ROW, _LETTER = 1000, 26, 6.5
_MOST_BARS = 4000


def page(report: Any) -> str:
    """Returns the page of a `Report`."""
    parts = [
        f"<h1>{_text(report.function)}</h1>",
        f'<p class="summary">{_text(_summary(report))}</p>',
        "<h2>Devices</h2>",
        _table(
            ("device", "operations", "FLOPs", "variables", "slots", "peak", "busy"),
            [
                (
                    row.device, f"{row.num_operations:,}", f"{row.flops:.3g}", _size(row.variable_bytes),
                    _size(row.slot_bytes), _size(row.peak_bytes), f"{1e3 * row.busy_seconds:.3f} ms",
                )
                for row in report.devices
            ],
            num_text=1,
        ),
        "<h2>Predicted schedule</h2>",
        _timeline(report),
    ]  # fmt: skip
    if report.transfers:
        parts += ["<h2>What crosses</h2>", _transfers(report)]
    for title, lines in (
        ("Try", [f"{one.text} ({1e3 * one.gain_seconds:.3f} ms)" for one in report.suggestions]),
        ("Apart from its variable", report.apart),
        ("Put elsewhere by TensorFlow", report.soft_placement),
        ("Not honoured", report.not_honoured),
        ("Tied to a variable", report.colocations),
        ("No device requested", report.unplaced),
        ("Not known", report.notes),
    ):
        if lines:
            parts += [f"<h2>{title}</h2>", _list(lines)]
    parts += ["<h2>Operations</h2>", _operations(report)]
    title = _text(f"Placement of {report.function}")
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f"<style>{_STYLE}</style></head><body>\n" + "\n".join(parts) + "\n</body></html>\n"
    )


def _summary(report: Any) -> str:
    measured = "" if report.measured_seconds is None else f", {1e3 * report.measured_seconds:.3f} ms measured"
    return (
        f"{len(report.operations):,} operations, {1e3 * report.predicted_seconds:.3f} ms predicted{measured}, "
        f"{_size(report.cut_bytes)} cross between devices in a step."
    )


def _timeline(report: Any) -> str:
    """Draws when each operation runs, a row for each device; those that decide the end in another colour."""
    total = report.predicted_seconds or 1.0
    row_of = {row.device: index for index, row in enumerate(report.devices)}
    critical = set(report.schedule.critical_path)
    left = 20 + _LETTER * max(map(len, row_of))
    height = _ROW * (len(row_of) + 1)
    scale = (_WIDTH - left - 10) / total
    shapes = [
        f'<text x="0" y="{_ROW * index + 17}">{_text(device)}</text>' for device, index in row_of.items()
    ]
    drawn = [
        row for row in report.operations if report.schedule.finish[row.name] > report.schedule.start[row.name]
    ]
    for row in drawn[:_MOST_BARS]:
        start, finish = report.schedule.start[row.name], report.schedule.finish[row.name]
        label = _text(f"{row.name} ({row.kind}), {1e3 * (finish - start):.4f} ms")
        kind = "critical" if row.name in critical else "bar"
        shapes.append(
            f'<rect class="{kind}" x="{left + start * scale:.2f}" y="{_ROW * row_of[row.device] + 4}" '
            f'width="{max(0.5, (finish - start) * scale):.2f}" height="{_ROW - 8}"><title>{label}</title></rect>'
        )
    shapes.append(f'<text x="{left}" y="{height - 6}">0</text>')
    shapes.append(f'<text x="{_WIDTH - 80}" y="{height - 6}">{1e3 * total:.3f} ms</text>')
    picture = f'<svg viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="schedule">{"".join(shapes)}</svg>'
    return (
        picture + "<p>What is orange decides when the step ends; a bar's name appears under the pointer.</p>"
    )


def _transfers(report: Any) -> str:
    rows = [
        (
            f"{one.producer}:{one.output}", one.source, one.destination, one.dtype,
            "sparse" if one.sparse else "dense", ", ".join(one.consumers), _size(one.num_bytes),
        )
        for one in sorted(report.transfers, key=lambda one: -one.num_bytes)
    ]  # fmt: skip
    return _table(("tensor", "from", "to", "dtype", "kind", "for", "bytes"), rows, num_text=6)


def _operations(report: Any) -> str:
    rows = [
        (row.name, row.kind, row.requested or "-", row.assigned or "-", row.device)
        for row in report.operations
    ]
    return _table(("operation", "type", "requested", "assigned", "expected"), rows, num_text=5)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], num_text: int) -> str:
    def cells(tag: str, values: Sequence[str]) -> str:
        classes = ["" if index < num_text else ' class="number"' for index in range(len(values))]
        return "".join(
            f"<{tag}{kind}>{_text(value)}</{tag}>" for kind, value in zip(classes, values, strict=True)
        )

    body = "\n".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    return f"<table><thead><tr>{cells('th', head)}</tr></thead><tbody>\n{body}\n</tbody></table>"


def _list(lines: Iterable[str]) -> str:
    return "<ul>" + "".join(f"<li>{_text(line)}</li>" for line in lines) + "</ul>"


def _size(num_bytes: float) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= size:
            return f"{num_bytes / size:.2f} {unit}"
    return f"{num_bytes:,.0f} B"


def _text(value: object) -> str:
    return html.escape(str(value))
