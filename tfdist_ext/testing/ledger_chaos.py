"""What happens to a ledger when workers, machines and the network do what they may, in random order?

`LedgerChaos` checks what it sees from outside against the true data, and calls the ledger's own check after every call.
"""

from __future__ import annotations

import collections
import random
from collections.abc import Callable, Collection, Sequence
from typing import Any

from tfdist_ext.ps import Apply, Batch, Dispatch, Leases, Ledger, Policy


class PolicyConformanceError(AssertionError):
    """A policy broke a promise that training relies on; the message says which, and how to see it again."""


def require(condition: Any, sentence: str) -> None:
    """Raises PolicyConformanceError with the sentence unless the condition holds."""
    if not condition:
        raise PolicyConformanceError(sentence)


class LedgerChaos:
    """One ledger, its workers and the true dataset. Deterministic: the same seed does the same.

    Args:
        policy: The policy.
        num_workers: Number of workers; all join at once.
        lengths: True lengths of the shards, in batches.
        seed: Of all that is random.
        known: Whether the leases are told the lengths.
        stopped: Workers that never return a set.
        deaths: Whether workers die, sets time out and applies fail.
        **options: Of the ledger.
    """

    def __init__(
        self,
        policy: Policy,
        num_workers: int,
        lengths: Sequence[int],
        seed: int,
        *,
        known: bool = False,
        stopped: Collection[int] = (),
        deaths: bool = True,
        **options: Any,
    ):
        self.random = random.Random(seed)
        self.policy, self.num_workers, self.lengths = policy, num_workers, lengths
        self.stopped, self.deaths = set(stopped), deaths
        self.now = 0.0
        self.ledger = Ledger(policy, num_workers, clock=lambda: self.now, **options)
        self.leases = Leases(len(lengths), lengths if known else None)
        self.running: dict[int, Dispatch] = {}  # By set id, at workers that may still report it.
        self.live: set[int] = set()
        self.apply: Apply | None = None
        self.applies: list[Apply] = []
        self.started: list[Dispatch] = []
        self.applied: collections.Counter[Batch] = collections.Counter()
        self.applied_sets: set[int] = set()
        for worker in range(num_workers):
            self.join(worker)

    # --- What may happen -------------------------------------------------------------------------------------------
    def join(self, worker: int) -> None:
        """A worker is there, for the first time or again."""
        self.live.add(worker)
        self._call(self.ledger.joined, worker)

    def kill(self, worker: int) -> None:
        """A worker is gone, with what it computes."""
        self.live.discard(worker)
        self.running = {key: one for key, one in self.running.items() if one.worker != worker}
        self._call(self.ledger.lost, worker)

    def dispatch(self) -> list[Dispatch]:
        """Starts all that may start."""
        started = self._call(self.ledger.dispatches)
        for one in started:
            busy = {other.worker for other in self.running.values()}
            require(one.worker in self.live, f"Worker {one.worker} was given work and is not there.")
            require(one.worker not in busy, f"Worker {one.worker} was given two sets at once.")
            require(one.base_version <= self.ledger.version, f"{one} is based on variables of the future.")
            require(len({batch.shard for batch in one.batches}) == 1, f"{one} mixes shards.")
            self.running[one.set_id] = one
            self.started.append(one)
        return started

    def report(self, set_id: int) -> None:
        """A worker has computed a set, or found the end of its shard."""
        one = self.running.pop(set_id)
        rows = 0
        for batch in one.batches:
            if batch.position >= self.lengths[batch.shard]:
                self._call(self.ledger.ran_out, set_id, batch)
                break
            rows += 1
        if rows:
            self._call(self.ledger.arrived, set_id, rows)

    def time_out(self, set_id: int) -> None:
        """A set is declared lost; its worker may still report it."""
        self._call(self.ledger.lost_set, set_id)

    def start_apply(self) -> bool:
        """Begins the next step, if there is one."""
        self.apply = self._call(self.ledger.next_apply)
        if self.apply is not None:
            require(
                self.apply.version == self.ledger.version, "A step has another version than the variables."
            )
            require(self.ledger.next_apply() is None, "Two steps are applied at once.")
        return self.apply is not None

    def finish_apply(self) -> None:
        """The step that was begun is applied."""
        apply, self.apply = self._begun(), None
        self._call(self.ledger.applied, apply)
        require(self.ledger.version == apply.version + 1, "A step did not advance the version by one.")
        for one in apply.sets:
            require(one.set_id not in self.applied_sets, f"Set {one.set_id} was applied twice.")
            self.applied_sets.add(one.set_id)
            self.applied.update(one.batches)
        self.applies.append(apply)

    def fail_apply(self) -> None:
        """The step that was begun fails, and some of its sets cannot be pulled."""
        apply, self.apply = self._begun(), None
        lost = [one.set_id for one in apply.sets if self.random.random() < 0.5]
        self._call(self.ledger.apply_failed, apply, lost)

    def _begun(self) -> Apply:
        if self.apply is None:
            raise RuntimeError("No step was begun. Call `start_apply` first.")
        return self.apply

    def _call(self, method: Callable, *arguments):
        self.now += self.random.random()
        result = method(*arguments)
        self.ledger.check()
        require(self.ledger.waiting_for(), "`waiting_for` says nothing.")
        return result

    # --- Runs ------------------------------------------------------------------------------------------------------
    def run_epoch(self, *, num_random: int = 60, max_steps: int | None = None) -> None:
        """Opens an epoch, does `num_random` things, then lets it end.

        Args:
            num_random: How many random events come first.
            max_steps: Updates after which the epoch ends; None: when the data does.

        Raises:
            PolicyConformanceError: A promise was broken, or the epoch does not end.
        """
        self._call(self.ledger.begin_epoch, self.leases, max_steps)
        for _ in range(num_random):
            if self.ledger.epoch_finished:
                break
            self.random.choice(self.possible())()
        self.drain()
        self._call(self.ledger.close_epoch)

    def possible(self) -> list[Callable[[], Any]]:
        """Lists what may happen now; what is likelier stands there more often."""
        actions: list[Callable[[], Any]] = [self.dispatch, self.dispatch]
        actions += [self.finish_apply] * 3 if self.apply is not None else [self.start_apply] * 2
        moving = self._moving()
        actions += [lambda: self.report(self.random.choice(moving))] * 4 if moving else []
        if self.deaths:
            dead = sorted(set(range(self.num_workers)) - self.live)
            actions += [lambda: self.kill(self.random.choice(sorted(self.live)))] if self.live else []
            actions += [lambda: self.join(self.random.choice(dead))] if dead else []
            actions += [lambda: self.time_out(self.random.choice(list(self.running)))] if self.running else []
            actions += [self.fail_apply] if self.apply is not None else []
        return actions

    def drain(self) -> None:
        """Nothing fails from here on, and every set comes or is declared lost: the epoch has to end."""
        if not self.live - self.stopped:
            self.join(next(worker for worker in range(self.num_workers) if worker not in self.stopped))
        for _ in range(20 * sum(self.lengths) + 200):
            if self.ledger.epoch_finished:
                return
            if self.apply is not None:
                self.finish_apply()
            elif not (self.start_apply() or self.dispatch() or self.start_apply()):
                self._bring_one_in()
        raise PolicyConformanceError(f"The epoch does not end. {self.ledger.waiting_for()}")

    def _bring_one_in(self) -> None:
        moving = self._moving()
        if moving:
            self.report(self.random.choice(moving))
            return
        overdue = self.ledger.overdue(self.now, 0.0)
        require(
            overdue, f"Nothing is in flight, and nothing starts or is applied. {self.ledger.waiting_for()}"
        )
        for set_id in overdue:
            self.time_out(set_id)

    def _moving(self) -> list[int]:
        return [key for key, one in self.running.items() if one.worker not in self.stopped]

    # --- What must be true in the end ------------------------------------------------------------------------------
    @property
    def all_batches(self) -> set[Batch]:
        """The batches that there are."""
        return {Batch(shard, at) for shard, length in enumerate(self.lengths) for at in range(length)}

    def check_every_batch_once(self) -> None:
        """Checks that every batch was applied once, or dropped and counted once."""
        twice = sorted(batch for batch, count in self.applied.items() if count > 1)
        require(not twice, f"Batches were applied twice: {twice}.")
        dropped = [batch for one in self.ledger.drops if not one.requeued for batch in one.batches]
        require(len(dropped) == len(set(dropped)), "A batch was dropped twice.")
        # Dropped before its worker knew that it does not exist, and the worker died before it could tell.
        ghosts = set(dropped) - self.all_batches
        dropped = [batch for batch in dropped if batch in self.all_batches]
        counted = self.leases.num_dropped
        require(
            len(dropped) <= counted <= len(dropped) + len(ghosts),
            f"{counted} drops are counted, {len(dropped)} seen.",
        )
        forgotten = sorted(self.all_batches - set(self.applied) - set(dropped))
        require(not forgotten, f"Batches were neither applied nor dropped: {forgotten}.")
        require(not set(self.applied) & set(dropped), "A batch was applied and dropped.")

    def check_counts(self) -> None:
        """Checks the statistics against what was seen."""
        total = self.ledger.statistics.total()
        require(
            total.dispatched == len(self.started) == total.settled,
            "Dispatched and settled sets do not add up.",
        )
        require(total.applied == len(self.applied_sets), "The number of applied sets is wrong.")
        require(total.rows_applied == sum(self.applied.values()), "The number of applied rows is wrong.")
        require(total.held == 0, "Sets are held after the end.")

    @property
    def max_staleness(self) -> int:
        """The largest staleness of an applied set."""
        return max((one.staleness for apply in self.applies for one in apply.sets), default=0)
