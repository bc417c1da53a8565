"""When may a set start, and when be applied, so that none is ever staler than s? The deadline rule.

The deadline of a set is its base version + s, the last version at which it may be applied. Sets that are not
applied yet, with deadlines d_(0) <= d_(1) <= ..., can all be in time iff version + k <= d_(k) for every k,
since each update moves the version by one. A set starts only if that stays true with it, and is applied only
if it stays true of the others at the next version; until then it is held. So every set is in time, by
construction.

s = 0 is sequential SGD in the order of the dataset. With s = N - 1, sets are applied in the order of their base
versions; each unit above lets one set overtake.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

from tfdist_ext.ps.leases import Batch
from tfdist_ext.ps.rule import Choice, Drop
from tfdist_ext.ps.sentences import name_batches, name_workers, nobody_computes
from tfdist_ext.ps.state import SetRecord, State, Status


def feasible(version: int, deadlines: Iterable[float]) -> bool:
    """Says whether sets can all be applied in time, one after the other from this version on.

    Args:
        version: Version at which the first one would be applied.
        deadlines: Last version at which each may be.

    Returns:
        True if an order exists.

    Example:
        >>> feasible(3, [4, 3]), feasible(3, [3, 3])
        (True, False)
    """
    return all(version + place <= deadline for place, deadline in enumerate(sorted(deadlines)))


def last_appliable(version: int, deadlines: Iterable[float]) -> float:
    """Finds which of some sets, feasible at this version, may be applied first.

    Args:
        version: The version now.
        deadlines: Deadlines of all unapplied sets.

    Returns:
        The greatest deadline a set may have so that the others stay feasible at version + 1. It is the first
        deadline without slack: applying a later one before it would make it late. Infinity if all have slack.

    Example:
        >>> last_appliable(3, [9, 4, 5]), last_appliable(3, [3, 9])
        (inf, 3)
    """
    for place, deadline in enumerate(sorted(deadlines)):
        if version + place >= deadline:
            return deadline
    return math.inf


class DeadlineRule:
    """Bounded staleness on the version clock; see the module.

    Args:
        max_staleness: s.
        gives_up: Whether a set that holds others back is given up. Its batches go to the next free worker,
            and a batch given up once is then waited for.
    """

    needs_fresh_variables = False

    def __init__(self, max_staleness: float, gives_up: bool = False):
        self._max_staleness = max_staleness
        self._gives_up = gives_up
        self._given_up: set[Batch] = set()

    def begin_epoch(self, state: State) -> None:
        """Forgets what was given up in the epoch before."""
        self._given_up.clear()

    def state_dict(self, state: State) -> dict[str, Any]:
        """The global indices of the batches that were given up and are waited for now, as plain data."""
        return {"given_up": sorted(map(state.leases.index, self._given_up))}

    def load_state_dict(self, saved: dict[str, Any], state: State) -> None:
        """Goes on from `state_dict`, with any number of shards."""
        number = state.leases.num_shards
        self._given_up = {Batch(index % number, index // number) for index in saved["given_up"]}

    def num_needed(self, state: State) -> int:
        """One worker is enough."""
        return 1

    def choices(self, state: State) -> Iterator[Choice]:
        """Starts batches in the order of the dataset as far as the bound allows."""
        while (choice := self._next_choice(state)) is not None:
            yield choice

    def settle(self, state: State) -> list[Drop]:
        """Admits what may be applied now, holds the rest; a held set does not become admitted again."""
        limit = self._limit(state)
        for record in state.with_status(Status.ARRIVED, Status.ADMITTED):
            state.mark(record, Status.ADMITTED if self._deadline(record) <= limit else Status.HELD)
        return []

    def next_apply(self, state: State) -> list[SetRecord]:
        """The arrived set of the oldest base that may be applied."""
        limit = self._limit(state)
        arrived = state.with_status(Status.ARRIVED, Status.HELD, Status.ADMITTED)
        oldest = min(arrived, key=lambda record: (record.base_version, record.set_id), default=None)
        return [oldest] if oldest is not None and self._deadline(oldest) <= limit else []

    def on_applied(self, state: State, records: list[SetRecord]) -> None:
        """A batch that was applied is given up by nobody."""
        self._given_up.difference_update(*(record.batches for record in records))

    def give_up(self, state: State) -> list[Drop]:
        """Gives up sets in flight, earliest deadline first, until one that is held may be applied.

        Only if a worker is kept from starting; and never in vain.
        """
        held = state.with_status(Status.HELD)
        if not self._gives_up or state.applying or not held or self.next_apply(state):
            return []
        if not (state.has_room() and any(state.leases.peek(worker) for worker in state.idle())):
            return []
        rest = dict(state.unapplied)
        flying = [
            record
            for record in state.with_status(Status.IN_FLIGHT)
            if not self._given_up.intersection(record.batches)
        ]
        given_up = []
        for record in sorted(flying, key=lambda record: (record.base_version, record.set_id)):
            given_up.append(record)
            del rest[record.set_id]
            limit = last_appliable(state.version, map(self._deadline, rest.values()))
            if any(self._deadline(other) <= limit for other in held):
                self._given_up.update(*(record.batches for record in given_up))
                return [
                    Drop(record, "given up: others waited for it at the bound", True) for record in given_up
                ]
        return []

    def waiting_for(self, state: State) -> str:
        """Names the set in flight with the earliest deadline."""
        flying = state.with_status(Status.IN_FLIGHT)
        if not flying:
            return nobody_computes(state)
        record = min(flying, key=lambda record: (record.base_version, record.set_id))
        sentence = f"Step {state.version} waits for worker {record.worker} ({name_batches(record)})"
        if self._max_staleness < math.inf:
            sentence += f", which has to be applied by version {self._deadline(record)}"
        held = sorted({other.worker for other in state.with_status(Status.HELD)})
        return f"{sentence}; sets of {name_workers(held)} are held for it." if held else f"{sentence}."

    def _deadline(self, record: SetRecord) -> float:
        return record.base_version + self._max_staleness

    def _ahead(self, state: State) -> tuple[int, list[float]]:
        """The version once what is being applied is, and the deadlines of the other sets."""
        bound = self._max_staleness
        deadlines = [
            record.base_version + bound
            for record in state.unapplied.values()
            if record.status is not Status.APPLYING
        ]
        return state.version + len(state.applying), deadlines

    def _limit(self, state: State) -> float:
        return last_appliable(*self._ahead(state))

    def _next_choice(self, state: State) -> Choice | None:
        if not state.has_room():
            return None
        candidates = []
        for worker in state.idle():
            batch = state.leases.peek(worker)
            if batch is not None:
                candidates.append((state.leases.index(batch), worker, batch))
        version, deadlines = self._ahead(state)
        for _, worker, batch in sorted(candidates):
            if self._max_staleness == 0 and batch != state.leases.lowest():
                return None
            base, refresh = state.base_for(worker)
            if feasible(version, [*deadlines, base + self._max_staleness]):
                return Choice(worker, batch, refresh=refresh)
            # What it has may be too old where fresh variables are not.
            if feasible(version, [*deadlines, state.version + self._max_staleness]):
                return Choice(worker, batch, refresh=True)
            return None
        return None
