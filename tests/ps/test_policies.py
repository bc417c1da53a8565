"""What the user chooses: values, and refusals that say what to do."""

import math

import numpy as np
import pytest

from tfdist_ext.ps import (
    Asynchronous,
    BoundedStaleness,
    Choice,
    ExponentialStaleness,
    HyperbolicStaleness,
    InverseStaleness,
    Leases,
    Ledger,
    Synchronous,
)
from tfdist_ext.ps.clocks import FreeRule
from tfdist_ext.ps.damping import factor


@pytest.mark.parametrize(
    ("damping", "staleness", "expected"),
    [
        (InverseStaleness(), 0, 1.0),
        (InverseStaleness(), 1, 1.0),
        (InverseStaleness(), 5, 0.2),
        (InverseStaleness(power=0.5), 16, 0.25),
        (ExponentialStaleness(0.5), 4, math.exp(-2.0)),
        (HyperbolicStaleness(0.25), 4, 0.5),
        (lambda staleness: 1 / (1 + staleness), 3, 0.25),
        (None, 100, 1.0),
    ],
)
def test_damping(damping, staleness, expected):
    assert factor(damping, staleness) == expected


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Synchronous(num_backup_workers=-1), "`num_backup_workers`.*received -1.*Try"),
        (lambda: Synchronous(max_staleness=1.5), "`max_staleness`.*received 1.5"),
        (lambda: BoundedStaleness(-1), "`max_staleness`.*received -1"),
        (lambda: BoundedStaleness(math.nan), "`max_staleness`.*received nan"),
        (lambda: BoundedStaleness(clock="wall"), '`clock` must be "version" or "worker"; received \'wall\''),
        (lambda: BoundedStaleness(late="never"), '`late` must be "wait" or "drop"'),
        (lambda: BoundedStaleness(clock="worker", late="drop"), '`late`.*Try `clock="version"`'),
        (lambda: BoundedStaleness(damping=0.5), "`damping`.*received 0.5.*InverseStaleness"),
        (lambda: Asynchronous(damping=InverseStaleness), "`damping`.*received <class"),
        (lambda: InverseStaleness(power=-1), "`power`.*received -1"),
        (lambda: ExponentialStaleness(math.inf), "`kappa`.*received inf"),
        (lambda: factor(lambda staleness: math.nan, 2), "`damping`.*gave nan for staleness 2"),
        (
            lambda: Ledger(Synchronous(num_backup_workers=2), 2),
            "`num_backup_workers`.*2 for 2 workers.*Try 1",
        ),
        (lambda: Ledger(Synchronous(), 2, fetch_every_steps=2), "`fetch_every_steps` must be 1.*received 2"),
        (lambda: Ledger(Asynchronous(), 0), "`num_workers`.*received 0"),
        (lambda: Ledger(Asynchronous(), 2, too_few_workers="stop"), "`too_few_workers`.*received 'stop'"),
        (lambda: Leases(0), "`num_shards`.*received 0"),
        (lambda: Leases(2, [1]), "`lengths`.*received 1 for 2"),
        (lambda: Leases(1, [-1]), "`lengths`.*received"),
    ],
)
def test_refusals_name_the_argument_and_the_value(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_infinite_and_numpy_bounds_are_numbers_too():
    assert BoundedStaleness(math.inf).max_staleness == math.inf
    assert Synchronous(num_backup_workers=np.int64(1)).num_backup_workers == 1


def test_the_factor_follows_the_staleness_of_the_step():
    ledger = Ledger(Asynchronous(damping=InverseStaleness()), 2)
    ledger.joined(0)
    ledger.joined(1)
    ledger.begin_epoch(Leases(2), max_steps=4)
    first, slow = ledger.dispatches()
    factors = []
    for _ in range(3):
        assert ledger.arrived(first.set_id, rows=1).outcome == "admitted"
        apply = ledger.next_apply()
        factors.append(apply.factor)
        ledger.applied(apply)
        (first,) = ledger.dispatches() or [None]
    ledger.arrived(slow.set_id, rows=1)
    factors.append(ledger.next_apply().factor)
    # Three steps alone, each on fresh variables; then one that is three steps old.
    assert factors == [1.0, 1.0, 1.0, 1 / 3]


class PairsRule(FreeRule):
    """A user's own rule: applies two sets at a time, in the order of arrival."""

    def next_apply(self, state):
        admitted = sorted(
            (record for record in state.unapplied.values() if record.status.name == "ADMITTED"),
            key=lambda record: record.order,
        )
        last = not state.leases.has_unread and len(admitted) == len(state.unapplied)
        return admitted[:2] if len(admitted) >= 2 or last else []

    def choices(self, state):
        for worker in state.free():
            batch = state.leases.peek(worker)
            if batch is not None:
                yield Choice(worker, batch)


class Pairs:
    damping = None

    def rule(self, num_workers, too_few_workers):
        return PairsRule()


def test_a_policy_of_ones_own():
    ledger = Ledger(Pairs(), 3)
    for worker in range(3):
        ledger.joined(worker)
    ledger.begin_epoch(Leases(3, [3, 2, 2]))
    sizes = []
    waiting = []
    while not ledger.epoch_finished:
        waiting += ledger.dispatches()
        ledger.arrived(waiting.pop(0).set_id, rows=4)
        ledger.check()
        if (apply := ledger.next_apply()) is not None:
            ledger.applied(apply)
            sizes.append(len(apply.sets))
    assert sizes == [2, 2, 2, 1]
    assert ledger.version == 4
