"""Which batch size and learning rate keep N replicas as busy as one was, and what does that change?

Pure arithmetic. With the same global batch the run is that of one device and nothing need be scaled.
"""

from __future__ import annotations

import dataclasses
import warnings

_RULES = {"linear": lambda n: float(n), "square root": lambda n: n**0.5, "none": lambda n: 1.0}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScaledSettings:
    """Settings for several replicas.

    Attributes:
        batch_size: Rows of the global batch, for `dataset.batch`.
        learning_rate: For the optimizer, once warmed up.
        steps_per_epoch: Updates of one pass over the rows; None where their number is not known.
    """

    batch_size: int
    learning_rate: float
    steps_per_epoch: int | None = None


def scaled_settings(
    num_replicas: int,
    *,
    batch_size: int,
    learning_rate: float,
    num_rows: int | None = None,
    rule: str = "linear",
) -> ScaledSettings:
    """Scales the settings of one replica to many, each with as many rows a step as the one had.

    Runs on: anywhere.

    Args:
        num_replicas: N: `strategy.num_replicas_in_sync`, or the workers of a `Synchronous()` round.
        batch_size: Rows of a step of one replica.
        learning_rate: Of one replica.
        num_rows: Rows of a pass; given, the number of updates is told, and a warning says if it shrinks.
        rule: How the learning rate grows with N: "linear", "square root" or "none".

    Returns:
        N times the batch size, and the learning rate by the rule.

    Raises:
        ValueError: An argument is not positive, or there is no such rule.

    Example:
        >>> scaled_settings(4, batch_size=32, learning_rate=0.1)
        ScaledSettings(batch_size=128, learning_rate=0.4, steps_per_epoch=None)

    References:
        Goyal et al., "Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour", 2017 (linear, with a warm-up);
        Krizhevsky, "One weird trick for parallelizing convolutional neural networks", 2014 (square root).
    """
    positive = {"num_replicas": num_replicas, "batch_size": batch_size, "learning_rate": learning_rate}
    for name, value in {**positive, **({} if num_rows is None else {"num_rows": num_rows})}.items():
        if not value > 0:
            raise ValueError(f"Argument `{name}` must be positive; received {value!r}.")
    if rule not in _RULES:
        raise ValueError(f"Argument `rule` must be one of {sorted(_RULES)}; received {rule!r}.")
    steps = None
    if num_rows is not None:
        before, steps = -(-num_rows // batch_size), -(-num_rows // (batch_size * num_replicas))
        if steps < before:
            warnings.warn(
                f"{num_replicas} replicas make {steps} updates an epoch where one made {before}. Shorten schedules and "
                "callbacks that count steps; train more epochs if the quality falls.",
                stacklevel=2,
            )
    return ScaledSettings(
        batch_size=batch_size * num_replicas,
        learning_rate=learning_rate * _RULES[rule](num_replicas),
        steps_per_epoch=steps,
    )
