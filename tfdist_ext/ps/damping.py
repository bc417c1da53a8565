"""How much smaller should the step of a stale update be?

A damping maps the staleness of an update (in steps) to the factor its *learning rate* is multiplied by. Any
callable will do; the classes here are the usual ones. With Adam, scaling the gradient would do nothing.

References:
    W. Zhang, S. Gupta, X. Lian, J. Liu, "Staleness-aware Async-SGD for Distributed Deep Learning",
    IJCAI 2016.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

Damping = Callable[[int], float]


@dataclasses.dataclass(frozen=True, kw_only=True)
class InverseStaleness:
    """The factor 1 / max(1, staleness) ** power.

    Attributes:
        power: 1.0 divides the learning rate by the staleness, 0.5 by its square root.

    Example:
        >>> InverseStaleness()(4), InverseStaleness(power=0.5)(4), InverseStaleness()(0)
        (0.25, 0.5, 1.0)
    """

    power: float = 1.0

    def __post_init__(self):
        _require_not_negative("power", self.power)

    def __call__(self, staleness: int) -> float:
        """The factor of an update this many steps stale."""
        return 1.0 / max(1, staleness) ** self.power


@dataclasses.dataclass(frozen=True)
class ExponentialStaleness:
    """The factor exp(-kappa * staleness).

    Attributes:
        kappa: Decay per step of staleness, not negative.

    Example:
        >>> round(ExponentialStaleness(0.5)(2), 3)
        0.368
    """

    kappa: float

    def __post_init__(self):
        _require_not_negative("kappa", self.kappa)

    def __call__(self, staleness: int) -> float:
        """The factor of an update this many steps stale."""
        return math.exp(-self.kappa * staleness)


@dataclasses.dataclass(frozen=True)
class HyperbolicStaleness:
    """The factor 1 / (1 + kappa * staleness).

    Attributes:
        kappa: Not negative; at staleness 1 / kappa the learning rate is halved.

    Example:
        >>> HyperbolicStaleness(0.25)(4)
        0.5
    """

    kappa: float

    def __post_init__(self):
        _require_not_negative("kappa", self.kappa)

    def __call__(self, staleness: int) -> float:
        """The factor of an update this many steps stale."""
        return 1.0 / (1.0 + self.kappa * staleness)


def factor(damping: Damping | None, staleness: int) -> float:
    """Evaluates a damping, and checks what a user's own returned.

    Args:
        damping: Maps staleness to a factor; None for no damping.
        staleness: In steps, from 0.

    Returns:
        The factor of the learning rate, 1.0 without damping.

    Raises:
        ValueError: If the damping returned a negative number, infinity or NaN.

    Example:
        >>> factor(None, 3), factor(InverseStaleness(), 3) == 1 / 3
        (1.0, True)
    """
    if damping is None:
        return 1.0
    value = float(damping(staleness))
    if not 0.0 <= value < math.inf:
        raise ValueError(
            f"Argument `damping` must map a staleness to a finite factor of at least 0; {damping!r} gave {value} "
            f"for staleness {staleness}. Try `InverseStaleness()`."
        )
    return value


def _require_not_negative(name: str, value: float) -> None:
    if not 0.0 <= value < math.inf:
        raise ValueError(
            f"Argument `{name}` must be a finite number of at least 0; received {value}. Try `{name}=1.0`."
        )
