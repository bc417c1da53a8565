"""Which parameter server holds which variable? Pure."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence


def largest_first(
    sizes: Mapping[str, float], num_tasks: int, occupied: Sequence[float] | None = None
) -> dict[str, int]:
    """Deals variables to tasks: the largest first, each to the task that holds least so far.

    The fullest task gets at most 4/3 - 1/(3 m) times what it gets in the best of all placements on m tasks
    that are empty at first.

    Args:
        sizes: Bytes of each variable with all that must lie beside it (its optimizer slots). Equal sizes are
            dealt in the order of appearance.
        num_tasks: Number of tasks, m.
        occupied: Bytes that each task holds already; None means nothing.

    Returns:
        For each variable, in the order of appearance, the index of its task. Of tasks that hold the same, the
        one with the lowest index is taken.

    Raises:
        ValueError: There is no task, `occupied` has not one entry for each, or a size is negative.

    Example:
        >>> largest_first({"bias": 4, "kernel": 100, "table": 103}, num_tasks=2)
        {'bias': 1, 'kernel': 1, 'table': 0}

    References:
        R. L. Graham, "Bounds on Multiprocessing Timing Anomalies", SIAM Journal on Applied Mathematics, 1969.
    """
    if num_tasks < 1:
        raise ValueError(f"Argument `num_tasks` must be at least 1; received {num_tasks}.")
    loads = [0.0] * num_tasks if occupied is None else list(occupied)
    if len(loads) != num_tasks:
        raise ValueError(
            f"Argument `occupied` must have one entry for each of {num_tasks} tasks; received {len(loads)}."
        )
    negative = next((name for name, size in sizes.items() if size < 0), None)
    if negative is not None:
        raise ValueError(
            f"Argument `sizes` must not be negative; received {sizes[negative]} for {negative!r}."
        )
    placed: dict[str, int] = {}
    # Sorting is stable: equal sizes stay in the order of appearance.
    for name in sorted(sizes, key=lambda name: -sizes[name]):
        task = loads.index(min(loads))
        placed[name] = task
        loads[task] += sizes[name]
    return {name: placed[name] for name in sizes}


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlacementRow:
    """Where one variable lies.

    Attributes:
        variable: Its name.
        num_bytes: Its own bytes.
        slot_bytes: Bytes of its optimizer slots, which lie beside it.
        task: Index of the ps.
    """

    variable: str
    num_bytes: int
    slot_bytes: int = 0
    task: int

    @property
    def total_bytes(self) -> int:
        """The variable and its slots."""
        return self.num_bytes + self.slot_bytes


@dataclasses.dataclass(frozen=True)
class PlacementTable:
    """Where all variables of a model lie; `str()` of it is a table to read.

    Attributes:
        rows: One for each variable.
        num_tasks: Number of ps, also those that hold nothing.

    Raises:
        ValueError: A row names a task that does not exist, or a variable is there twice.

    Example:
        >>> print(PlacementTable((
        ...     PlacementRow(variable="kernel", num_bytes=4096, slot_bytes=8192, task=0),
        ...     PlacementRow(variable="bias", num_bytes=64, task=1)), num_tasks=2))
        variable  bytes  slot bytes  task
        kernel    4,096       8,192  ps:0
        bias         64           0  ps:1
        total     4,096       8,192  ps:0
        total        64           0  ps:1
        imbalance 1.99 (fullest / mean)
    """

    rows: tuple[PlacementRow, ...]
    num_tasks: int

    def __post_init__(self):
        object.__setattr__(self, "rows", tuple(self.rows))
        if self.num_tasks < 1:
            raise ValueError(f"Argument `num_tasks` must be at least 1; received {self.num_tasks}.")
        seen = set()
        for row in self.rows:
            if not 0 <= row.task < self.num_tasks:
                raise ValueError(
                    f"Variable {row.variable!r} is on ps:{row.task}, but there are only {self.num_tasks} ps."
                )
            if row.variable in seen:
                raise ValueError(f"Variable {row.variable!r} is in the table twice.")
            seen.add(row.variable)

    @classmethod
    def largest_first(
        cls,
        num_bytes: Mapping[str, int],
        num_tasks: int,
        *,
        slot_bytes: Mapping[str, int] | None = None,
        occupied: Sequence[int] | None = None,
        weight: Mapping[str, float] | None = None,
    ) -> PlacementTable:
        """Places variables with their slots by `tfdist_ext.placement.largest_first`.

        Args:
            num_bytes: Bytes of each variable.
            num_tasks: Number of ps.
            slot_bytes: Bytes of each variable's slots; those left out have none.
            occupied: What each task holds already, in bytes or as `weight` counts.
            weight: What to balance in place of bytes, by name: traffic in bytes a step, for one. Variables left out
                weigh nothing.

        Returns:
            The table, in the order of `num_bytes`. What was there already is not in it.

        Raises:
            ValueError: As for `largest_first`.
        """
        slots = slot_bytes or {}
        sizes: dict[str, float] = {name: size + slots.get(name, 0) for name, size in num_bytes.items()}
        if weight is not None:
            sizes = {name: weight.get(name, 0) for name in num_bytes}
        tasks = largest_first(sizes, num_tasks, occupied)
        rows = (
            PlacementRow(variable=name, num_bytes=size, slot_bytes=slots.get(name, 0), task=tasks[name])
            for name, size in num_bytes.items()
        )
        return cls(tuple(rows), num_tasks)

    @property
    def totals(self) -> tuple[int, ...]:
        """Bytes on each task, slots included."""
        loads = [0] * self.num_tasks
        for row in self.rows:
            loads[row.task] += row.total_bytes
        return tuple(loads)

    @property
    def imbalance(self) -> float:
        """Bytes of the fullest task / mean over the tasks, 1 at best; also 1 when there is nothing."""
        total = sum(self.totals)
        return max(self.totals) * self.num_tasks / total if total else 1.0

    def to_json(self) -> str:
        """Writes the table for other programs.

        Returns:
            JSON with `rows`, `num_tasks`, `totals` and `imbalance`.
        """
        rows = [dataclasses.asdict(row) for row in self.rows]
        return json.dumps(
            {
                "rows": rows,
                "num_tasks": self.num_tasks,
                "totals": self.totals,
                "imbalance": self.imbalance,
            }
        )

    def __str__(self) -> str:
        lines = [("variable", "bytes", "slot bytes", "task")]
        for row in self.rows:
            lines.append((row.variable, f"{row.num_bytes:,}", f"{row.slot_bytes:,}", f"ps:{row.task}"))
        for task in range(self.num_tasks):
            mine = [row for row in self.rows if row.task == task]
            own, slots = sum(row.num_bytes for row in mine), sum(row.slot_bytes for row in mine)
            lines.append(("total", f"{own:,}", f"{slots:,}", f"ps:{task}"))
        widths = [max(len(line[column]) for line in lines) for column in range(4)]
        texts = [
            f"{name:<{widths[0]}}  {size:>{widths[1]}}  {slots:>{widths[2]}}  {task}"
            for name, size, slots, task in lines
        ]
        return "\n".join([*texts, f"imbalance {self.imbalance:.2f} (fullest / mean)"])
