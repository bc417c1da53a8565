"""What does the ledger tell the engine? Plain, immutable answers."""

from __future__ import annotations

import dataclasses

from tfdist_ext.ps.leases import Batch


@dataclasses.dataclass(frozen=True)
class Dispatch:
    """A worker starts to compute a set now.

    Attributes:
        set_id: Number of the set, from 0.
        worker: Who computes it.
        batches: Consecutive batches of one shard; the first one may turn out not to exist.
        base_version: Version of the variables it is computed on.
        slot: Slot of the round; 0 where there are no rounds.
        draw: How many sets of this base version were dispatched before, or the slot where there are rounds:
            (base_version, draw) names a stream of random numbers.
        refresh: True if the worker fetches the variables, False if it computes on those it has.
    """

    set_id: int
    worker: int
    batches: tuple[Batch, ...]
    base_version: int
    slot: int
    draw: int
    refresh: bool


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What becomes of a set that arrived.

    Attributes:
        outcome: "admitted": it is applied next, keep it. "held": it may be applied later, keep it.
            "dropped": forget it.
        reason: Why, in a few words; empty if admitted.
    """

    outcome: str
    reason: str = ""


@dataclasses.dataclass(frozen=True)
class AdmittedSet:
    """One set of a step.

    Attributes:
        set_id: Number of the set.
        worker: Who computed it, and keeps its tensors.
        batches: The batches that exist.
        base_version: Version it was computed on.
        slot: Slot it fills in this step.
        draw: As in its `Dispatch`.
        staleness: Version of the step minus base version.
        rows: Rows of its batches.
        weight: What its share is measured by; its rows unless something else was given.
        share: Its weight over the weight of all sets of the step.
    """

    set_id: int
    worker: int
    batches: tuple[Batch, ...]
    base_version: int
    slot: int
    draw: int
    staleness: int
    rows: int
    weight: float
    share: float


@dataclasses.dataclass(frozen=True)
class Apply:
    """One step: sum these sets in this order, and update once.

    Attributes:
        version: Version of the variables before.
        sets: In slot order.
        factor: Factor of the learning rate.
    """

    version: int
    sets: tuple[AdmittedSet, ...]
    factor: float


@dataclasses.dataclass(frozen=True)
class DroppedSet:
    """A set that was not applied by decision of the policy.

    Attributes:
        worker: Who computed it, or still does.
        set_id: Number of the set.
        batches: Its batches.
        base_version: Version it was computed on.
        version: Version when it was dropped.
        reason: Why, in a few words.
        requeued: True if its batches are read again.
    """

    worker: int
    set_id: int
    batches: tuple[Batch, ...]
    base_version: int
    version: int
    reason: str
    requeued: bool
