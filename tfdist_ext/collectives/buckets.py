"""Which gradients travel in one message? Pure arithmetic, no TensorFlow."""

from __future__ import annotations

from collections.abc import Sequence

from tfdist_ext.collectives.buffer_pool import ALIGNMENT_BYTES

# Segments start at multiples of the alignment, so that TensorFlow takes each one over without a copy.


def plan_buckets(
    dtypes: Sequence[str], num_bytes: Sequence[int | None], bytes_per_pack: int
) -> list[list[int]]:
    """Groups tensors into buckets of one dtype, from the last tensor to the first.

    Backward passes make the last layer's gradients first, so the first bucket can leave while the rest is
    being computed.

    Args:
        dtypes: Dtype name of each tensor.
        num_bytes: Size of each tensor; None where only the run knows it (counted as 0).
        bytes_per_pack: A bucket is closed when it holds at least this many bytes; 0 puts all tensors of a
            dtype into one.

    Returns:
        Lists of indices; every index once, in one fixed order.

    Raises:
        ValueError: `bytes_per_pack` is negative.

    Example:
        >>> plan_buckets(["float32"] * 3, [4, 4, 4], bytes_per_pack=8)
        [[2, 1], [0]]
    """
    if bytes_per_pack < 0:
        raise ValueError(f"Argument `bytes_per_pack` must be >= 0; received {bytes_per_pack}.")
    open_buckets: dict[str, tuple[list[int], int]] = {}
    buckets: list[list[int]] = []
    for index in reversed(range(len(dtypes))):
        dtype = dtypes[index]
        if dtype not in open_buckets:
            bucket: list[int] = []
            buckets.append(bucket)
            open_buckets[dtype] = (bucket, 0)
        bucket, size = open_buckets[dtype]
        bucket.append(index)
        size += num_bytes[index] or 0
        open_buckets[dtype] = (bucket, size)
        if bytes_per_pack and size >= bytes_per_pack:
            del open_buckets[dtype]
    return buckets


def segment_starts(lengths: Sequence[int], item_bytes: int) -> tuple[list[int], int]:
    """Lays arrays one after another in a buffer, each start aligned.

    Args:
        lengths: Number of items of each array.
        item_bytes: Bytes of an item.

    Returns:
        Pair of the starts and of the buffer's length, in items.

    Raises:
        ValueError: `item_bytes` does not divide the alignment.

    Example:
        >>> segment_starts([1, 20], item_bytes=4)
        ([0, 16], 48)
    """
    if item_bytes < 1 or ALIGNMENT_BYTES % item_bytes:
        raise ValueError(f"Argument `item_bytes` must divide {ALIGNMENT_BYTES}; received {item_bytes}.")
    step = ALIGNMENT_BYTES // item_bytes
    starts, position = [], 0
    for length in lengths:
        starts.append(position)
        position += -(-length // step) * step
    return starts, position
