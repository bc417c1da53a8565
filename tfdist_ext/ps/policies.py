"""How stale may a worker be, and whom do we wait for? What the user chooses.

Small frozen dataclasses; each names the rule that carries it out. `rule.py` says how to write another one.
"""

from __future__ import annotations

import dataclasses
import math

from tfdist_ext.ps.arguments import require_choice, require_count
from tfdist_ext.ps.clocks import ClockRule, FreeRule
from tfdist_ext.ps.damping import Damping
from tfdist_ext.ps.deadlines import DeadlineRule
from tfdist_ext.ps.rounds import RoundRule
from tfdist_ext.ps.rule import Rule


@dataclasses.dataclass(frozen=True)
class Synchronous:
    """Each step sums the sets of one round, one of each worker, as all-reduce would.

    Attributes:
        num_backup_workers: Slowest workers a step does without; what they computed is dropped and counted.
        max_staleness: Age in steps up to which a set that came too late enters a later round.

    Example:
        >>> Synchronous(num_backup_workers=1)
        Synchronous(num_backup_workers=1, max_staleness=0)

    References:
        J. Chen, X. Pan, R. Monga, S. Bengio, R. Jozefowicz, "Revisiting Distributed Synchronous SGD",
        arXiv:1604.00981, 2016.
    """

    num_backup_workers: int = 0
    max_staleness: int = 0

    def __post_init__(self):
        require_count("num_backup_workers", self.num_backup_workers)
        require_count("max_staleness", self.max_staleness)

    @property
    def damping(self) -> Damping | None:
        """None, because a round is one update of the full learning rate."""
        return None

    def rule(self, num_workers: int, too_few_workers: str) -> Rule:
        """The policy at work."""
        return RoundRule(num_workers, self.num_backup_workers, self.max_staleness, too_few_workers)


@dataclasses.dataclass(frozen=True)
class BoundedStaleness:
    """Sets are applied one at a time, and none is too stale.

    Beside a worker that is much slower than s updates take, the version clock makes sets old: the others compute on
    until s sets wait for the slow one, all from the same version, and these are then applied in a row. Choose a larger
    s or `late="drop"`, or a quorum (`Synchronous(num_backup_workers=1)`).

    Attributes:
        max_staleness: s. Infinity (`math.inf`) for no bound.
        clock: "version": no applied set is older than s updates, by construction. "worker": no worker is more
            than s batches ahead of the slowest (stale synchronous parallel).
        late: What happens at the bound of the version clock. "wait": the fast wait for the slow. "drop": sets
            that hold others back are given up, once a batch, and counted.
        damping: Factor of the learning rate by staleness, for instance `InverseStaleness()`.

    Example:
        >>> BoundedStaleness(max_staleness=8, late="drop").max_staleness
        8
    """

    max_staleness: float = 4
    clock: str = "version"
    late: str = "wait"
    damping: Damping | None = None

    def __post_init__(self):
        if self.max_staleness != math.inf:
            require_count("max_staleness", self.max_staleness)
        require_choice("clock", self.clock, ("version", "worker"))
        require_choice("late", self.late, ("wait", "drop"))
        if self.clock == "worker" and self.late == "drop":
            raise ValueError(
                'Argument `late` must be "wait" with `clock="worker"`, where no set is ever too late; received '
                '"drop". Try `clock="version"`.'
            )
        _require_damping(self.damping)

    def rule(self, num_workers: int, too_few_workers: str) -> Rule:
        """The policy at work."""
        if self.clock == "worker":
            return ClockRule(self.max_staleness)
        return DeadlineRule(self.max_staleness, gives_up=self.late == "drop")


@dataclasses.dataclass(frozen=True)
class Asynchronous:
    """Sets are applied as they come, however stale; staleness is counted all the same.

    Attributes:
        damping: Factor of the learning rate by staleness, for instance `InverseStaleness()`.
    """

    damping: Damping | None = None

    def __post_init__(self):
        _require_damping(self.damping)

    def rule(self, num_workers: int, too_few_workers: str) -> Rule:
        """The policy at work."""
        return FreeRule()


def _require_damping(damping: Damping | None) -> None:
    if damping is not None and (not callable(damping) or isinstance(damping, type)):
        raise ValueError(
            f"Argument `damping` must be None or a function from staleness to a factor; received {damping!r}. Try "
            "`InverseStaleness()`."
        )
