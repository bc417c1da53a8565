"""Which states end a parameter-server training?"""

from __future__ import annotations


class TooFewWorkers(Exception):
    """Fewer workers are live than a step needs, and the user asked for an error.

    Attributes:
        live: Indices of the live workers.
        num_needed: Workers a step needs.
    """

    def __init__(self, live: tuple[int, ...], num_needed: int):
        self.live = live
        self.num_needed = num_needed
        names = ", ".join(f"worker:{worker}" for worker in live) or "none"
        super().__init__(
            f"A step needs {num_needed} live workers, and {len(live)} are live ({names}). Try "
            '`too_few_workers="wait"` or `"shrink"`, or start the missing workers again.'
        )


class ShardMismatch(Exception):
    """Two readings of one shard disagreed about its length: the input pipeline is not deterministic.

    Attributes:
        shard: The shard.
        end: Number of batches that one reading found.
        position: Position of a batch that another reading found, at or beyond the end.
    """

    def __init__(self, shard: int, end: int, position: int):
        self.shard, self.end, self.position = shard, end, position
        super().__init__(
            f"Shard {shard} of the dataset ended after {end} batches in one reading and had a batch at position "
            f"{position} in another. Batches of a lost worker are read again by another one, so the input "
            "pipeline must give the same batches every time. Try fixed seeds, and `deterministic=True`."
        )
