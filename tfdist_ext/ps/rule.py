"""What does the ledger ask a policy?

To write a policy of your own: a frozen dataclass with a method `rule(num_workers, too_few_workers)` that
returns an object with the methods of `Rule`, and an attribute `damping` (None for none). The ledger keeps all
books; a rule looks at a `State` and decides. It is asked:

- `choices`: which worker starts on which batch? Asked for one at a time; each is booked before the next;
- `settle`: what becomes of the sets that have arrived? Asked after every change;
- `next_apply`: is a step complete, and of which sets?
- `give_up`: asked when nothing more can start: which sets shall nobody wait for any more?

A rule whose decisions depend on more than the `State` has two methods besides: `state_dict(state)` returns it as plain
data, `load_state_dict(saved, state)` goes on from there; it is called after `begin_epoch`, when training is resumed
within an epoch.

A rule keeps training alive if it ends whenever every set in flight arrives or is lost: with nothing in flight,
it must start something, or apply something, unless no batch is left.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import NamedTuple, Protocol

from tfdist_ext.ps.damping import Damping
from tfdist_ext.ps.leases import Batch
from tfdist_ext.ps.state import SetRecord, State


@dataclasses.dataclass(frozen=True)
class Choice:
    """A worker starts now.

    Attributes:
        worker: A worker that computes nothing.
        batch: The first batch of its set.
        slot: The slot of the round, 0 where there are no rounds.
        refresh: Whether it fetches the variables, else it computes on those it has.
        draw: Number of the set among those of its base version; None lets the ledger count.
    """

    worker: int
    batch: Batch
    slot: int = 0
    refresh: bool = True
    draw: int | None = None


class Drop(NamedTuple):
    """A set is not applied, whether it came or not.

    `read_again` says whether its batches are; None leaves it to the user's `requeue_dropped`.
    """

    record: SetRecord
    reason: str
    read_again: bool | None = None


class Rule(Protocol):
    """One policy at work; see the module for what each method is for.

    Attributes:
        needs_fresh_variables: True if a worker must fetch the variables before every set.
    """

    needs_fresh_variables: bool

    def begin_epoch(self, state: State) -> None:
        """An epoch begins: nothing is in flight."""
        ...

    def num_needed(self, state: State) -> int:
        """Workers a step needs."""
        ...

    def choices(self, state: State) -> Iterator[Choice]:
        """Yields who starts now; `state` has changed by the choice when the next one is asked for."""
        ...

    def settle(self, state: State) -> list[Drop]:
        """Sets the status of arrived sets to ADMITTED or HELD, and names those to be dropped."""
        ...

    def next_apply(self, state: State) -> list[SetRecord]:
        """The sets of the next step in their order, none if it has to wait; nothing is being applied."""
        ...

    def on_applied(self, state: State, records: list[SetRecord]) -> None:
        """A step was applied; `state.version` counts it already."""
        ...

    def give_up(self, state: State) -> list[Drop]:
        """Sets in flight that others shall not wait for."""
        ...

    def waiting_for(self, state: State) -> str:
        """One sentence: whom training waits for, and why; some worker is active."""
        ...


class Policy(Protocol):
    """What the user chooses."""

    @property
    def damping(self) -> Damping | None:
        """Factor of the learning rate by staleness."""
        ...

    def rule(self, num_workers: int, too_few_workers: str) -> Rule:
        """The policy at work on a number of workers."""
        ...
