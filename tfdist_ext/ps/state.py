"""What does a rule see when it decides?

Plain records. The ledger alone changes them; a rule reads them, and may `mark` an arrived set as ADMITTED or
HELD, and set its `round_slot`.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import math

from tfdist_ext.ps.leases import Batch, Leases


class Status(enum.Enum):
    """Where a set is; the last four are final."""

    IN_FLIGHT = "in flight"
    ARRIVED = "arrived, not judged yet"
    HELD = "held until it may be applied"
    ADMITTED = "to be applied next"
    APPLYING = "being applied"
    APPLIED = "applied"
    DROPPED = "dropped"
    LOST = "lost"
    VOID = "of a batch that does not exist"


_FINAL = (Status.APPLIED, Status.DROPPED, Status.LOST, Status.VOID)


@dataclasses.dataclass(eq=False)
class SetRecord:
    """The life of one set.

    Attributes:
        set_id: Counts dispatches from 0.
        worker: Who computes it.
        incarnation: How often that worker had joined.
        batches: Consecutive batches of one shard.
        base_version: Version of the variables it is computed on.
        slot: Slot of the round it was dispatched for; 0 where there are no rounds.
        round_slot: Slot it fills; differs from `slot` if it came a round late.
        draw: How many sets of the same base version were dispatched before.
        dispatched_at: On the ledger's clock, in seconds.
        leases: Where the batches come from.
        status: Where it is.
        order: Counts arrivals.
        rows: Rows, once it arrived.
        weight: What its share is measured by, once it arrived.
        reason: Why it was dropped or lost.
    """

    set_id: int
    worker: int
    incarnation: int
    batches: tuple[Batch, ...]
    base_version: int
    slot: int
    round_slot: int
    draw: int
    dispatched_at: float
    leases: Leases
    status: Status = Status.IN_FLIGHT
    order: int = -1
    rows: int = 0
    weight: float = 0.0
    reason: str = ""

    @property
    def has_arrived(self) -> bool:
        """True if it came, and nothing has been decided for good."""
        return self.status in (Status.ARRIVED, Status.HELD, Status.ADMITTED)


@dataclasses.dataclass(eq=False)
class WorkerRecord:
    """What is known of one worker.

    Attributes:
        live: False before it joined and after it was lost.
        incarnation: How often it has joined.
        computing: The set it works on, whatever has been decided about that set since.
        stalled: True from the loss of a set that did not come back in time until it comes.
        cached_version: Version of the variables the worker has, None if it has none.
        num_batches_since_fetch: Batches computed on them.
        idle_since: When its last set came, None once it has the next one.
    """

    live: bool = False
    incarnation: int = 0
    computing: SetRecord | None = None
    stalled: bool = False
    cached_version: int | None = None
    num_batches_since_fetch: int = 0
    idle_since: float | None = None

    @property
    def active(self) -> bool:
        """True if it can be given work, now or when it is done with what it has."""
        return self.live and not self.stalled


@dataclasses.dataclass(eq=False)
class State:
    """All that a decision may depend on.

    Attributes:
        leases: The batches of the open epoch.
        num_workers: Number of workers at the start, the number of slots of a round.
        fetch_every_steps: Batches a worker may compute on one copy of the variables.
        version: Updates applied so far.
        steps_left: Updates that may still be applied in this epoch, the one being applied included; infinity
            if only the data ends it.
        workers: Every worker ever seen, in the order of their indices.
        unapplied: Every set that may still be applied, in order of dispatch.
        applying: The sets being applied, empty if none is.
    """

    leases: Leases
    num_workers: int
    fetch_every_steps: int = 1
    version: int = 0
    steps_left: float = math.inf
    workers: dict[int, WorkerRecord] = dataclasses.field(default_factory=dict)
    unapplied: dict[int, SetRecord] = dataclasses.field(default_factory=dict)
    applying: list[SetRecord] = dataclasses.field(default_factory=list)
    _by_status: dict[Status, dict[int, SetRecord]] = dataclasses.field(
        default_factory=lambda: collections.defaultdict(dict)
    )

    def mark(self, record: SetRecord, status: Status) -> None:
        """Moves a set to another state; it is unapplied until that one is final."""
        self._by_status[record.status].pop(record.set_id, None)
        record.status = status
        if status in _FINAL:
            self.unapplied.pop(record.set_id, None)
        else:
            self.unapplied[record.set_id] = self._by_status[status][record.set_id] = record

    def active(self) -> list[int]:
        """The workers that can be given work, now or later."""
        return [index for index, worker in self.workers.items() if worker.live and not worker.stalled]

    def is_active(self, worker: int) -> bool:
        """Whether a worker can be given work, now or later."""
        return worker in self.workers and self.workers[worker].active

    def free(self) -> list[int]:
        """The active workers that compute nothing."""
        return [index for index in self.active() if self.workers[index].computing is None]

    def idle(self) -> list[int]:
        """The free workers that do not wait for a set of theirs to be applied."""
        waiting = {record.worker for record in self.with_status(Status.ADMITTED, Status.APPLYING)}
        return [index for index in self.free() if index not in waiting]

    def with_status(self, *statuses: Status) -> list[SetRecord]:
        """The unapplied sets in one of these states, in the order in which they came into it."""
        return [record for status in statuses for record in self._by_status[status].values()]

    def num_with_status(self, status: Status) -> int:
        """How many sets are in this state."""
        return len(self._by_status[status])

    def has_room(self) -> bool:
        """Whether one more set can be applied within the epoch, at one set a step."""
        return len(self.unapplied) < self.steps_left

    def base_for(self, worker: int) -> tuple[int, bool]:
        """The version a worker would compute on now, and whether it has to fetch the variables for that."""
        record = self.workers[worker]
        if record.cached_version is None or record.num_batches_since_fetch >= self.fetch_every_steps:
            return self.version, True
        return record.cached_version, False
