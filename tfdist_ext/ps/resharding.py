"""Where does reading go on when there are more or fewer shards than before?

Shard i of n holds the batches i, i + n, i + 2n, ... of one dataset. What is unread is a set of those global indices,
and stays the same set when it is dealt to m shards. A pure conversion of what `Leases.state_dict` returned.
"""

from __future__ import annotations

from typing import Any


def resharded(state: dict[str, Any], num_shards: int) -> dict[str, Any]:
    """Deals the batches of a dataset to another number of shards.

    Args:
        state: What `Leases.state_dict` returned, of shards that are every n-th batch of one dataset.
        num_shards: The new number.

    Returns:
        A state for `Leases(num_shards).load_state_dict`: the same batches are unread, as many were applied and
        dropped in all. Who of them was dropped is not known any more; the first shards are said to have dropped them.

    Raises:
        ValueError: `num_shards` is below 1.

    Example:
        >>> shard = {"position": 1, "end": 2, "num_applied": 1, "num_dropped": 0}
        >>> state = {"shards": [shard, shard], "pending": [], "doubtful": []}
        >>> [(shard["position"], shard["end"]) for shard in resharded(state, 1)["shards"]]
        [(2, 4)]
    """
    if num_shards < 1:
        raise ValueError(f"Argument `num_shards` must be at least 1; received {num_shards}. Try 1.")
    used = _Used(state)
    total = used.num_batches
    shards: list[dict[str, Any]] = []
    pending: list[list[int]] = []
    dropped = sum(shard["num_dropped"] for shard in state["shards"])
    for number in range(num_shards):
        position = used.position_of(number, num_shards)
        lowest = used.first_unread // num_shards
        waiting = [p for p in range(min(lowest, position), position) if p * num_shards + number not in used]
        pending += [[number, p] for p in waiting]
        num_used = position - len(waiting)
        num_dropped = min(dropped, num_used)
        dropped -= num_dropped
        shards.append(
            {
                "position": position,
                "end": None if total is None else len(range(number, total, num_shards)),
                "num_applied": num_used - num_dropped,
                "num_dropped": num_dropped,
            }
        )
    old = len(state["shards"])
    doubtful = [divmod(position * old + shard, num_shards) for shard, position in state["doubtful"]]
    return {
        "shards": shards,
        "pending": sorted(pending, key=lambda batch: batch[1] * num_shards + batch[0]),
        "doubtful": sorted([shard, position] for position, shard in doubtful),
    }


class _Used:
    """The global indices of the batches that were applied or dropped."""

    def __init__(self, state: dict[str, Any]):
        self._shards = state["shards"]
        self._number = len(self._shards)
        self._pending = {position * self._number + shard for shard, position in state["pending"]}

    def __contains__(self, index: int) -> bool:
        position, shard = divmod(index, self._number)
        return position < self._shards[shard]["position"] and index not in self._pending

    @property
    def num_batches(self) -> int | None:
        """Batches of the dataset, where the ends of all shards are known."""
        ends = [shard["end"] for shard in self._shards]
        return None if None in ends else sum(ends)

    @property
    def first_unread(self) -> int:
        """No batch below it is unread."""
        heads = [shard["position"] * self._number + number for number, shard in enumerate(self._shards)]
        return min([*heads, *self._pending])

    def position_of(self, shard: int, num_shards: int) -> int:
        """One more than the position of the last used batch of a new shard."""
        end = max(shard["position"] for shard in self._shards) * self._number
        position = len(range(shard, end, num_shards))
        while position and (position - 1) * num_shards + shard not in self:
            position -= 1
        return position
