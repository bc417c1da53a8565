"""Which batch does a worker read next, so that each is used exactly once?

The dataset is cut into shards; a shard is leased to one worker, who reads its batches in order. A batch is at
any time exactly one of unread, in flight, applied or dropped, and what was lost on its way is unread again:
it waits in a queue that is served before fresh batches, to whoever is free.

A lease is about who reads on, not about where an iterator stands: the caller knows from (worker, shard,
position) whether the worker's own iterator is there already or has to be opened at that position.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from tfdist_ext.ps.exceptions import ShardMismatch


class Batch(NamedTuple):
    """The position-th batch (from 0) of a shard; its global index is position * num_shards + shard."""

    shard: int
    position: int


@dataclasses.dataclass
class _Shard:
    """The books of one shard; `confirmed` is one more than the highest position known to exist."""

    position: int = 0
    end: int | None = None
    holder: int | None = None
    confirmed: int = 0
    num_applied: int = 0
    num_dropped: int = 0

    @property
    def finished(self) -> bool:
        return self.end is not None and self.position >= self.end


class Leases:
    """The reading positions of all shards, and who reads them.

    Shard i belongs to worker i modulo the number of workers, and is leased to it whenever that worker is
    there. A shard whose worker is not there is leased to the live worker with least left to read, and
    moves on to one who has nothing left.

    Args:
        num_shards: Number of shards, at least 1.
        lengths: Number of batches of each shard, or None for a shard whose end is not known before it is
            found. None: no length is known.
        most_ahead: Batches by which the reading of one shard may be ahead of that of another before whoever is free
            helps with the one that is behind. None: any number.
    """

    def __init__(
        self, num_shards: int, lengths: Sequence[int | None] | None = None, most_ahead: int | None = None
    ):
        if num_shards < 1:
            raise ValueError(f"Argument `num_shards` must be at least 1; received {num_shards}. Try 1.")
        if lengths is not None and len(lengths) != num_shards:
            raise ValueError(
                f"Argument `lengths` must have one entry a shard; received {len(lengths)} for {num_shards} "
                "shards. Try None for a shard of unknown length."
            )
        if any(length is not None and length < 0 for length in lengths or ()):
            raise ValueError(f"Argument `lengths` must not be negative; received {lengths}. Try None.")
        self._most_ahead = most_ahead
        self._shards = [_Shard(end=lengths[shard] if lengths else None) for shard in range(num_shards)]
        self._pending: list[int] = []
        self._in_flight: set[Batch] = set()
        # Dropped before anybody knew whether they exist; beyond an end found later they never did.
        self._doubtful: set[Batch] = set()
        self._live: list[int] = []
        self._num_workers = num_shards
        self._held: dict[int, list[int]] = {}

    @property
    def num_shards(self) -> int:
        """Number of shards."""
        return len(self._shards)

    @property
    def has_unread(self) -> bool:
        """True while a batch is unread, or may be because the end of a shard is not known yet."""
        return bool(self._pending) or not all(shard.finished for shard in self._shards)

    @property
    def num_applied(self) -> int:
        """Batches applied."""
        return sum(shard.num_applied for shard in self._shards)

    @property
    def num_dropped(self) -> int:
        """Batches dropped for good."""
        return sum(shard.num_dropped for shard in self._shards)

    @property
    def in_flight(self) -> frozenset[Batch]:
        """Batches handed out and neither applied, nor dropped, nor given back."""
        return frozenset(self._in_flight)

    def end_of(self, shard: int) -> int | None:
        """The number of batches of a shard, or None where it is not known yet."""
        return self._shards[shard].end

    def index(self, batch: Batch) -> int:
        """The global index of a batch."""
        return batch.position * self.num_shards + batch.shard

    def pending(self) -> list[Batch]:
        """The batches that came back unused, lowest global index first."""
        return [self._batch(index) for index in self._pending]

    def lowest(self) -> Batch | None:
        """The unread batch of lowest global index, whoever may read it."""
        fresh = [
            shard.position * self.num_shards + number
            for number, shard in enumerate(self._shards)
            if not shard.finished
        ]
        lowest = min([*self._pending[:1], *fresh], default=None)
        return None if lowest is None else self._batch(lowest)

    def fresh(self, worker: int) -> list[Batch]:
        """The next batch of each unfinished shard leased to a worker, lowest global index first."""
        batches = [Batch(shard, self._shards[shard].position) for shard in self._held.get(worker, ())]
        return sorted(batches, key=self.index)

    def peek(self, worker: int) -> Batch | None:
        """The batch a free worker should take: the first of the queue, else one that is behind, else of its own."""
        if self._pending:
            return self._batch(self._pending[0])
        behind = self.behind(worker)
        return next(iter(self.fresh(worker)), None) if behind is None else behind

    def behind(self, worker: int) -> Batch | None:
        """The next batch of a shard of somebody else that is too far behind what a worker would read."""
        own = next(iter(self.fresh(worker)), None)
        if self._most_ahead is None or own is None:
            return None
        unfinished = [
            (shard.position, number) for number, shard in enumerate(self._shards) if not shard.finished
        ]
        position, number = min(unfinished)
        return Batch(number, position) if own.position - position >= self._most_ahead else None

    def take(self, first: Batch, num_batches: int = 1) -> tuple[Batch, ...]:
        """Marks a batch, and those that follow it in its shard, as in flight.

        Args:
            first: A batch of the queue, or the next one of a shard.
            num_batches: Batches to take at most; fewer where the queue or the shard has no more.

        Returns:
            The batches, at consecutive positions of one shard.
        """
        shard = self._shards[first.shard]
        pending = self.index(first) in self._pending
        if not pending and (shard.finished or shard.position != first.position):
            raise ValueError(f"{first} is not unread; the shard is at position {shard.position}.")
        taken: list[Batch] = []
        for position in range(first.position, first.position + num_batches):
            batch = Batch(first.shard, position)
            if pending:
                if self.index(batch) not in self._pending:
                    break
                self._pending.remove(self.index(batch))
            else:
                if shard.finished:
                    break
                shard.position += 1
            taken.append(batch)
        self._in_flight.update(taken)
        if shard.finished:
            self._lease()
        return tuple(taken)

    def confirm(self, batch: Batch) -> None:
        """Notes that a batch exists: its rows have been computed.

        Raises:
            ShardMismatch: If another reading of the shard has ended before it.
        """
        shard = self._shards[batch.shard]
        if shard.end is not None and batch.position >= shard.end:
            raise ShardMismatch(batch.shard, shard.end, batch.position)
        shard.confirmed = max(shard.confirmed, batch.position + 1)
        self._doubtful.discard(batch)

    def apply(self, batch: Batch) -> None:
        """A batch in flight is applied."""
        self._in_flight.remove(batch)
        self._shards[batch.shard].num_applied += 1

    def drop(self, batch: Batch) -> None:
        """A batch in flight is dropped for good."""
        self._in_flight.remove(batch)
        if not self._is_beyond_end(batch):
            self._shards[batch.shard].num_dropped += 1
            if batch.position >= self._shards[batch.shard].confirmed:
                self._doubtful.add(batch)

    def give_back(self, batch: Batch) -> None:
        """A batch in flight is unread again."""
        self._in_flight.remove(batch)
        if not self._is_beyond_end(batch):
            bisect.insort(self._pending, self.index(batch))

    def discard(self, batch: Batch) -> None:
        """A batch in flight turned out not to exist; call `exhausted` first."""
        self._in_flight.remove(batch)

    def exhausted(self, shard: int, at_position: int) -> None:
        """A reader found no batch at this position: the shard ends there, or before.

        Batches beyond that other workers have in flight stay so until each worker reports its own.

        Raises:
            ShardMismatch: If a batch at this position or later has been read before.
        """
        books = self._shards[shard]
        if books.confirmed > at_position:
            raise ShardMismatch(shard, at_position, books.confirmed - 1)
        if books.end is None or at_position < books.end:
            books.end = at_position
            books.position = min(books.position, at_position)
            self._pending = [index for index in self._pending if not self._is_beyond_end(self._batch(index))]
            for batch in [batch for batch in self._doubtful if self._is_beyond_end(batch)]:
                self._doubtful.remove(batch)
                books.num_dropped -= 1
            self._lease()

    def set_workers(self, live: Collection[int], num_workers: int) -> None:
        """Leases the shards to the workers that are there.

        Args:
            live: The workers that may read.
            num_workers: How many workers share the dataset: shard i belongs to worker i % num_workers.
        """
        self._live, self._num_workers = sorted(live), num_workers
        self._lease()

    def state_dict(self) -> dict[str, Any]:
        """Where reading stands, as plain data.

        What is in flight now has to be read again. What came last of a shard and was not used is as if nobody had
        taken it, so that two runs that have used the same batches have the same state.
        """
        unread = {*self._pending, *map(self.index, self._existing_in_flight())}
        shards = []
        for number, shard in enumerate(self._shards):
            position = shard.position
            while position and (last := self.index(Batch(number, position - 1))) in unread:
                unread.remove(last)
                position -= 1
            shards.append(
                {
                    "position": position,
                    "end": shard.end,
                    "num_applied": shard.num_applied,
                    "num_dropped": shard.num_dropped,
                }
            )
        return {
            "shards": shards,
            "pending": [list(self._batch(index)) for index in sorted(unread)],
            "doubtful": [list(batch) for batch in sorted(self._doubtful)],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from `state_dict`; nothing may be in flight here. See `resharded` for other numbers of shards."""
        if self._in_flight:
            raise RuntimeError(
                f"Positions cannot be restored while {len(self._in_flight)} batches are in flight."
            )
        if len(state["shards"]) != self.num_shards:
            raise ValueError(
                f"Argument `state` is of {len(state['shards'])} shards; received by {self.num_shards}. Try leases "
                "of as many shards."
            )
        self._shards = [_Shard(**shard) for shard in state["shards"]]
        self._pending = sorted(self.index(Batch(*batch)) for batch in state["pending"])
        self._doubtful = {Batch(*batch) for batch in state["doubtful"]}
        self._lease()

    def check(self) -> None:
        """Asserts that each batch is in exactly one place."""
        assert self._pending == sorted(set(self._pending)), "a batch waits twice"
        waiting = set(map(self._batch, self._pending))
        assert not waiting & self._in_flight, "a batch waits and is in flight"
        flying = self._existing_in_flight()
        for number, shard in enumerate(self._shards):
            unused = [batch for batch in [*waiting, *flying] if batch.shard == number]
            assert all(batch.position < shard.position for batch in unused), f"shard {number} reads twice"
            settled = shard.num_applied + shard.num_dropped
            assert settled + len(unused) == shard.position, (
                f"shard {number} has lost count: {shard}, {unused}"
            )
            if self._live and not shard.finished:
                assert shard.holder in self._live, f"nobody reads shard {number}"

    def _existing_in_flight(self) -> list[Batch]:
        return [batch for batch in self._in_flight if not self._is_beyond_end(batch)]

    def _is_beyond_end(self, batch: Batch) -> bool:
        end = self._shards[batch.shard].end
        return end is not None and batch.position >= end

    def _batch(self, index: int) -> Batch:
        position, shard = divmod(index, self.num_shards)
        return Batch(shard, position)

    def _lease(self) -> None:
        """Leases again, changing as little as possible."""
        live = set(self._live)
        self._held = {worker: [] for worker in self._live}
        free = []
        for number, shard in enumerate(self._shards):
            home = number % self._num_workers
            shard.holder = home if home in live else shard.holder if shard.holder in live else None
            if shard.finished:
                continue
            if shard.holder is None:
                free.append(number)
            else:
                self._held[shard.holder].append(number)
        for number in free if live else ():
            self._give(number, min(self._live, key=self._load))
        self._even_out()

    def _even_out(self) -> None:
        """Lets a worker with nothing left take a shard of an absent one from who reads for several."""
        for worker in self._live:
            if self._held[worker]:
                continue
            foreign = [
                number
                for donor in self._live
                if len(self._held[donor]) > 1
                for number in self._held[donor]
                if number % self._num_workers != donor
            ]
            if foreign:
                number = min(foreign, key=lambda number: self._shards[number].position)
                donor = self._shards[number].holder
                assert donor is not None
                self._held[donor].remove(number)
                self._give(number, worker)

    def _give(self, number: int, worker: int) -> None:
        self._shards[number].holder = worker
        self._held[worker].append(number)

    def _load(self, worker: int) -> tuple[int, int, int]:
        shards = [self._shards[number] for number in self._held[worker]]
        left = sum(shard.end - shard.position for shard in shards if shard.end is not None)
        return len(shards), left, worker
