"""How is it said whom training waits for?"""

from __future__ import annotations

from tfdist_ext.ps.state import SetRecord, State


def name_workers(workers: list[int]) -> str:
    """Names workers in a sentence.

    Example:
        >>> name_workers([3]), name_workers([0, 2])
        ('worker 3', 'workers 0, 2')
    """
    return f"worker{'s' if len(workers) != 1 else ''} {', '.join(map(str, workers))}"


def name_batches(record: SetRecord) -> str:
    """Names the batches of a set in a sentence."""
    first, last = record.batches[0], record.batches[-1]
    where = f"batch {first.position}" if first == last else f"batches {first.position} to {last.position}"
    return f"{where} of shard {first.shard}"


def step_applied_now(state: State) -> str:
    """Says what is being applied."""
    workers = sorted({record.worker for record in state.applying})
    return f"Step {state.version} is being applied, with sets of {name_workers(workers)}."


def nobody_there(state: State) -> str:
    """Says that no worker can be given work, and who is late."""
    stalled = sorted(index for index, worker in state.workers.items() if worker.stalled)
    late = f"; {name_workers(stalled)} did not come back in time" if stalled else ""
    return f"Step {state.version} waits for a worker: none of {state.num_workers} is there{late}."


def nobody_computes(state: State) -> str:
    """Says why nothing is in flight though the epoch goes on."""
    late = [worker for worker in state.active() if state.workers[worker].computing is not None]
    if late:
        return (
            f"Step {state.version} waits for {name_workers(late)}, busy with sets nobody waits for any more."
        )
    return f"Step {state.version} can go on."
