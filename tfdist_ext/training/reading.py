"""Which batches of a pass are unread when somebody begins to read it?"""

from __future__ import annotations

from tfdist_ext.data.worker_dataset import WorkerIterator
from tfdist_ext.ps import Leases, resharded

_MOST_AHEAD_FED = 4


def leases_of(data: WorkerIterator) -> Leases:
    """Returns the books of a pass over the data: those that it has, or new ones that go on where a checkpoint stood.

    Args:
        data: The pass.
    """
    if data.leases is None:
        dataset = data.dataset
        # What the chief reads ahead for the fast it has to keep for the slow.
        most_ahead = None if dataset.fed_by_chief is None else _MOST_AHEAD_FED
        data.leases = Leases(dataset.num_shards, dataset.lengths, most_ahead)
        state = data.saved_leases
        if state is not None:
            if len(state["shards"]) != dataset.num_shards:
                state = resharded(state, dataset.num_shards)
            pairs = zip(state["shards"], dataset.lengths, strict=True)
            shards = [{**shard, "end": shard["end"] if length is None else length} for shard, length in pairs]
            data.leases.load_state_dict({**state, "shards": shards})
            data.was_used = _used_in(state)
    return data.leases


def _used_in(state):
    positions = [shard["position"] for shard in state["shards"]]
    pending = {tuple(batch) for batch in state["pending"]}
    return lambda shard, position: position < positions[shard] and (shard, position) not in pending
