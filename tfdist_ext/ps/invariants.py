"""What is true of the books after every change? Asserted by the tests."""

from __future__ import annotations

import collections

from tfdist_ext.ps.books import Books
from tfdist_ext.ps.state import State, Status

_UNAPPLIED = (Status.IN_FLIGHT, Status.HELD, Status.ADMITTED, Status.APPLYING)


def check(state: State, books: Books) -> None:
    """Asserts that every set and every batch is in exactly one place, and that the counts say so.

    Args:
        state: What the rules see.
        books: What counts it.

    Raises:
        AssertionError: If the books are wrong.
    """
    state.leases.check()
    _check_sets(state, books)
    _check_batches(state)
    _check_workers(state, books)


def _check_sets(state: State, books: Books) -> None:
    unapplied = collections.Counter(record.worker for record in state.unapplied.values())
    for index, statistics in books.statistics.workers.items():
        assert statistics.dispatched == statistics.settled + unapplied[index], f"worker {index}: {statistics}"
        assert sum(statistics.ages.values()) == statistics.applied, f"worker {index}: {statistics}"
    for set_id, record in state.unapplied.items():
        assert set_id == record.set_id and books.sets[set_id] is record, f"{record} is lost from the books"
        assert record.status in _UNAPPLIED, f"{record} is not settled"
        assert record.base_version <= state.version, f"{record} comes from the future"
        computing = state.workers[record.worker].computing is record
        assert computing == (record.status is Status.IN_FLIGHT), f"{record}: is it being computed?"
    applying = state.with_status(Status.APPLYING)
    assert sorted(map(id, applying)) == sorted(map(id, state.applying)), (
        "two accounts of what is being applied"
    )
    assert len(books.drops) == min(books.num_drops, books.drops.maxlen or 0), "a drop was not written down"


def _check_batches(state: State) -> None:
    used = [
        batch
        for record in state.unapplied.values()
        if record.leases is state.leases
        for batch in record.batches
    ]
    assert len(used) == len(set(used)), "two sets have the same batch"
    assert state.leases.in_flight == set(used), "a batch is in flight in no set"


def _check_workers(state: State, books: Books) -> None:
    for index, worker in state.workers.items():
        computing = worker.computing
        assert worker.live or (computing is None and not worker.stalled), f"worker {index} is dead and busy"
        if computing is not None:
            assert computing.worker == index and books.sets[computing.set_id] is computing
        assert not worker.stalled or computing is not None, f"worker {index} is stalled by nothing"
    known = {record.set_id for record in state.unapplied.values()}
    known |= {worker.computing.set_id for worker in state.workers.values() if worker.computing is not None}
    assert set(books.sets) == known, "a set is kept for nobody"
