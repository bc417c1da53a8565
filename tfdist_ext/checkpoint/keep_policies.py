"""Which checkpoints are kept?

`LatestN(3) | BestN("val_accuracy", 1)` keeps what any of the two keeps. New is what was committed last, whatever its
step: training may have gone back to an older one. Whatever the policy, the newest checkpoint is kept, and so is one
whose manifest cannot be read: that is for a person to judge, not for a rule to delete.
"""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from tfdist_ext.checkpoint.manifest import CheckpointRecord, newest_first

# Of a metric's name: more is better. What is called a loss or an error is less the better, whatever else it is.
_MORE_IS_BETTER = ("acc", "auc", "precision", "recall", "f1", "fbeta", "iou", "io_u", "bleu", "similarity")
_LESS_IS_BETTER = ("loss", "error")


@runtime_checkable
class KeepPolicy(Protocol):
    """Says which checkpoints are kept."""

    def keeps(self, records: Sequence[CheckpointRecord]) -> set[int]:
        """Decides after a checkpoint was committed.

        Args:
            records: All committed checkpoints, in any order.

        Returns:
            The steps to keep, the newest always among them. The others may be deleted.
        """


class _Joinable:
    """Gives the policies here their `|`."""

    def __or__(self, other: KeepPolicy) -> KeepUnion:
        if isinstance(other, type) or not isinstance(other, KeepPolicy):
            return NotImplemented
        return KeepUnion((*_members(self), *_members(other)))


@dataclasses.dataclass(frozen=True)
class LatestN(_Joinable):
    """Keeps the newest checkpoints.

    Attributes:
        n: How many. With 1, a crash that finds the newest damaged finds none before it.

    Example:
        >>> LatestN(3)
        LatestN(n=3)
    """

    n: int

    def __post_init__(self):
        _require_count(self.n, "LatestN(3)")

    def keeps(self, records: Sequence[CheckpointRecord]) -> set[int]:
        """The steps of the `n` that were committed last."""
        return _always_kept(records) | set(_newest_steps(records)[: self.n])


@dataclasses.dataclass(frozen=True)
class BestN(_Joinable):
    """Keeps the checkpoints with the best values of a metric.

    A checkpoint without the metric, or where it is NaN, is never among the best. Of two equal ones the newer is the
    better.

    Attributes:
        metric: Name in the manifest's metrics, for instance `"val_loss"`.
        n: How many.
        mode: "min" or "max" is better; "auto" is "max" for names of accuracies and scores (`"val_accuracy"`, `"auc"`),
            else "min".

    Example:
        >>> BestN("val_accuracy", 1).is_max, BestN("val_loss", 1).is_max
        (True, False)
    """

    metric: str
    n: int
    mode: str = "auto"

    def __post_init__(self):
        _require_count(self.n, 'BestN("val_loss", 1)')
        if self.mode not in ("auto", "min", "max"):
            raise ValueError(
                f'Argument `mode` must be "auto", "min" or "max"; received {self.mode!r}. Try `mode="auto"`.'
            )

    @property
    def is_max(self) -> bool:
        """Whether a greater value is the better one."""
        if self.mode != "auto":
            return self.mode == "max"
        name = self.metric.lower()
        return any(part in name for part in _MORE_IS_BETTER) and not any(
            part in name for part in _LESS_IS_BETTER
        )

    def keeps(self, records: Sequence[CheckpointRecord]) -> set[int]:
        """The steps of the `n` best values."""
        sign = 1.0 if self.is_max else -1.0
        best: dict[int, float] = {}
        for record in newest_first(records):
            value = (
                math.nan if record.manifest is None else record.manifest.metrics.get(self.metric, math.nan)
            )
            if not math.isnan(value):
                best[record.step] = max(sign * value, best.get(record.step, -math.inf))
        # Sorting is stable: of equal ones the newest stays first.
        ranked = sorted(best, key=lambda step: -best[step])
        return _always_kept(records) | set(ranked[: self.n])


@dataclasses.dataclass(frozen=True)
class KeepUnion(_Joinable):
    """Keeps what any of several policies keeps; what `|` makes.

    Attributes:
        policies: The policies.

    Example:
        >>> LatestN(3) | BestN("val_loss", 1)
        KeepUnion(policies=(LatestN(n=3), BestN(metric='val_loss', n=1, mode='auto')))
    """

    policies: tuple[KeepPolicy, ...]

    def keeps(self, records: Sequence[CheckpointRecord]) -> set[int]:
        """The steps that any policy keeps."""
        return _always_kept(records).union(*(policy.keeps(records) for policy in self.policies))


def _newest_steps(records: Sequence[CheckpointRecord]) -> list[int]:
    return list(dict.fromkeys(record.step for record in newest_first(records)))


def _always_kept(records: Sequence[CheckpointRecord]) -> set[int]:
    """The newest, and what cannot be read."""
    return {record.step for record in records if record.manifest is None} | set(_newest_steps(records)[:1])


def _members(policy: object) -> tuple:
    """A union of unions is one flat union."""
    return policy.policies if isinstance(policy, KeepUnion) else (policy,)


def _require_count(value: int, example: str) -> None:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < 1:
        raise ValueError(
            f"Argument `n` must be a whole number of at least 1; received {value!r}. Try `{example}`."
        )
