"""A driver that does to a ledger, in random order, whatever an engine and its machines may do.

It checks what it sees from outside against the true data, and calls the ledger's own check after every call.
"""

from __future__ import annotations

import collections
import random

from tfdist_ext.ps import Batch, Leases, Ledger


class Chaos:
    """One ledger, its workers and the true dataset.

    Args:
        policy: The policy.
        num_workers: Number of workers.
        lengths: True lengths of the shards.
        seed: Of all that is random.
        known: Whether the leases are told the lengths.
        stopped: Workers that never return a set.
        deaths: Whether workers die, sets time out and applies fail.
        options: Of the ledger.
    """

    def __init__(
        self, policy, num_workers, lengths, seed, *, known=False, stopped=(), deaths=True, **options
    ):
        self.random = random.Random(seed)
        self.policy, self.num_workers, self.lengths = policy, num_workers, lengths
        self.stopped, self.deaths = set(stopped), deaths
        self.now = 0.0
        self.ledger = Ledger(policy, num_workers, clock=lambda: self.now, **options)
        self.leases = Leases(len(lengths), lengths if known else None)
        self.running = {}  # set id -> dispatch, at workers that may still report it
        self.live = set()
        self.apply = None
        self.applies = []
        self.started = []
        self.applied = collections.Counter()
        self.applied_sets = set()
        for worker in range(num_workers):
            self.join(worker)

    # What may happen.

    def join(self, worker):
        self.live.add(worker)
        self.call(self.ledger.joined, worker)

    def kill(self, worker):
        self.live.discard(worker)
        self.running = {key: one for key, one in self.running.items() if one.worker != worker}
        self.call(self.ledger.lost, worker)

    def dispatch(self):
        started = self.call(self.ledger.dispatches)
        for one in started:
            assert one.worker in self.live
            assert one.worker not in {other.worker for other in self.running.values()}, "two sets at once"
            assert one.base_version <= self.ledger.version
            assert {batch.shard for batch in one.batches} == {one.batches[0].shard}
            self.running[one.set_id] = one
            self.started.append(one)
        return started

    def report(self, set_id):
        one = self.running.pop(set_id)
        rows = 0
        for batch in one.batches:
            if batch.position >= self.lengths[batch.shard]:
                self.call(self.ledger.ran_out, set_id, batch)
                break
            rows += 1
        if rows:
            self.call(self.ledger.arrived, set_id, rows)

    def time_out(self, set_id):
        self.call(self.ledger.lost_set, set_id)

    def start_apply(self):
        self.apply = self.call(self.ledger.next_apply)
        if self.apply is not None:
            assert self.apply.version == self.ledger.version
            assert self.ledger.next_apply() is None, "two steps at once"
        return self.apply is not None

    def finish_apply(self):
        apply, self.apply = self.apply, None
        self.call(self.ledger.applied, apply)
        assert self.ledger.version == apply.version + 1
        for one in apply.sets:
            assert one.set_id not in self.applied_sets, "a set was applied twice"
            self.applied_sets.add(one.set_id)
            self.applied.update(one.batches)
        self.applies.append(apply)

    def fail_apply(self):
        apply, self.apply = self.apply, None
        lost = [one.set_id for one in apply.sets if self.random.random() < 0.5]
        self.call(self.ledger.apply_failed, apply, lost)

    def call(self, method, *arguments):
        self.now += self.random.random()
        result = method(*arguments)
        self.ledger.check()
        assert self.ledger.waiting_for()
        return result

    # Runs.

    def run_epoch(self, *, num_random=60, max_steps=None):
        self.call(self.ledger.begin_epoch, self.leases, max_steps)
        for _ in range(num_random):
            if self.ledger.epoch_finished:
                break
            self.random.choice(self.possible())()
        self.drain()
        self.call(self.ledger.close_epoch)

    def possible(self):
        actions = [self.dispatch, self.dispatch]
        actions += [self.finish_apply] * 3 if self.apply is not None else [self.start_apply] * 2
        moving = [key for key, one in self.running.items() if one.worker not in self.stopped]
        actions += [lambda: self.report(self.random.choice(moving))] * 4 if moving else []
        if self.deaths:
            dead = sorted(set(range(self.num_workers)) - self.live)
            actions += [lambda: self.kill(self.random.choice(sorted(self.live)))] if self.live else []
            actions += [lambda: self.join(self.random.choice(dead))] if dead else []
            actions += [lambda: self.time_out(self.random.choice(list(self.running)))] if self.running else []
            actions += [self.fail_apply] if self.apply is not None else []
        return actions

    def drain(self):
        """Nothing fails from here on, and every set comes or is declared lost: the epoch has to end."""
        if not self.live - self.stopped:
            self.join(next(worker for worker in range(self.num_workers) if worker not in self.stopped))
        for _ in range(20 * sum(self.lengths) + 200):
            if self.ledger.epoch_finished:
                return
            if self.apply is not None:
                self.finish_apply()
                continue
            if self.start_apply():
                continue
            if self.dispatch() or self.start_apply():
                continue
            moving = [key for key, one in self.running.items() if one.worker not in self.stopped]
            overdue = self.ledger.overdue(self.now, 0.0)
            if moving:
                self.report(self.random.choice(moving))
            else:
                assert overdue, f"deadlock: {self.ledger.waiting_for()}"
                for set_id in overdue:
                    self.time_out(set_id)
        raise AssertionError(f"the epoch does not end: {self.ledger.waiting_for()}")

    # What must be true in the end.

    @property
    def all_batches(self):
        return {Batch(shard, at) for shard, length in enumerate(self.lengths) for at in range(length)}

    def check_every_batch_once(self):
        assert set(self.applied.values()) <= {1}, "a batch was applied twice"
        dropped = [batch for one in self.ledger.drops if not one.requeued for batch in one.batches]
        assert len(dropped) == len(set(dropped)), "a batch was dropped twice"
        # Dropped before its worker knew that it does not exist, and the worker died before it could tell.
        ghosts = set(dropped) - self.all_batches
        dropped = [batch for batch in dropped if batch in self.all_batches]
        assert len(dropped) <= self.leases.num_dropped <= len(dropped) + len(ghosts)
        assert set(self.applied) | set(dropped) == self.all_batches, "a batch was forgotten"
        assert not set(self.applied) & set(dropped), "a batch was applied and dropped"

    def check_counts(self):
        total = self.ledger.statistics.total()
        assert total.dispatched == len(self.started) == total.settled
        assert total.applied == len(self.applied_sets)
        assert total.rows_applied == sum(self.applied.values())
        assert total.held == 0

    @property
    def max_staleness(self):
        return max((one.staleness for apply in self.applies for one in apply.sets), default=0)
