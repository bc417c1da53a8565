"""What a rule remembers within an epoch, and what was counted, goes on in another process."""

import pytest

from tfdist_ext.ps import Asynchronous, Batch, BoundedStaleness, Leases, ResumableLedger, resharded


def begun(policy, leases, num_workers=2, state=None):
    """Returns a ledger in an epoch, and what it has dispatched by worker."""
    ledger = ResumableLedger(policy, num_workers)
    if state is not None:
        ledger.load_state_dict(state)
    for worker in range(num_workers):
        ledger.joined(worker)
    ledger.begin_epoch(leases)
    return ledger, {dispatch.worker: dispatch for dispatch in ledger.dispatches()}


def apply_next(ledger):
    apply = ledger.next_apply()
    ledger.applied(apply)
    ledger.check()
    return {dispatch.worker: dispatch for dispatch in ledger.dispatches()}


def in_new_process(ledger, leases, policy, num_workers=2):
    saved, unread = ledger.state_dict(), leases.state_dict()
    other = Leases(num_workers)
    other.load_state_dict(resharded(unread, num_workers))
    return begun(policy, other, num_workers, saved), saved, other


def test_a_worker_that_was_ahead_still_waits_for_the_slowest():
    """Bound 1: worker 0 has done 2 batches and worker 1 none, so that 0 may not start; nor may it after a restart."""
    policy, leases = BoundedStaleness(1, clock="worker"), Leases(2, [5, 5])
    ledger, running = begun(policy, leases)
    for _ in range(2):
        ledger.arrived(running[0].set_id, rows=4)
        running |= apply_next(ledger)
    assert ledger.statistics.of(0).applied == 2 and running[0].batches == (Batch(0, 1),)
    (again, started), saved, other = in_new_process(ledger, leases, policy)
    assert saved["rule"]["state"] == {"clocks": {0: 2, 1: 0}, "counted": [0, 1]}
    assert list(started) == [1] and started[1].batches == (Batch(1, 0),)
    assert again.version == 2 and started[1].base_version == 2
    again.check()
    # A third worker enters at the lowest clock, 0, and is not waited for more than worker 1 is.
    (_, started), _, _ = in_new_process(ledger, leases, policy, 3)
    assert sorted(started) == [1, 2]


def test_a_batch_that_was_given_up_once_is_waited_for_under_any_number_of_shards():
    policy, leases = BoundedStaleness(1, late="drop"), Leases(2, [5, 5])
    ledger, running = begun(policy, leases)
    ledger._rule._given_up = {Batch(1, 2)}
    (again, _), saved, other = in_new_process(ledger, leases, policy, 3)
    # Batch 2 of shard 1 of 2 has the global index 5: batch 1 of shard 2 of 3.
    assert saved["rule"]["state"] == {"given_up": [5]}
    assert again._rule._given_up == {Batch(2, 1)}


def test_counts_go_on_and_what_is_in_flight_is_counted_when_it_is_computed_again():
    policy, leases = Asynchronous(), Leases(2, [5, 5])
    ledger, running = begun(policy, leases)
    ledger.arrived(running[1].set_id, rows=4)
    apply_next(ledger)
    (again, started), _, _ = in_new_process(ledger, leases, policy)
    again.check()
    total = again.statistics.total()
    assert (total.applied, total.rows_applied, total.dispatched) == (1, 4, 3)
    assert [started[worker].batches[0] for worker in (0, 1)] == [Batch(0, 0), Batch(1, 1)]


def test_between_epochs_a_rule_remembers_nothing_and_the_memory_of_another_rule_is_not_used():
    policy, leases = BoundedStaleness(1, clock="worker"), Leases(2, [5, 5])
    ledger, _ = begun(policy, leases)
    saved = ledger.state_dict()
    other, _ = begun(BoundedStaleness(1), Leases(2, [5, 5]), state=saved)
    assert other.version == 0
    with pytest.raises(RuntimeError, match="close_epoch"):
        ledger.load_state_dict(saved)
    ledger.close_epoch()
    assert ledger.state_dict()["rule"] is None
