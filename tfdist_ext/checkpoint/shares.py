"""How is work on many tensors dealt to a few threads?

One thread writes or reads about a gigabyte a second: most of the time goes into checksums and copies in memory, which
threads do side by side, and not into the disk.
"""

from __future__ import annotations

import concurrent.futures
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import tensorflow as tf

from tfdist_ext import compat

Item = TypeVar("Item")
_MOST_THREADS = 4
# For less than this a thread is not worth its while, nor a file of its own.
_LEAST_BYTES = 16 << 20


def deal(items: Sequence[Item], num_bytes_of: Callable[[Item], int], num_shares: int) -> list[list[Item]]:
    """Deals items to shares of about the same number of bytes; the same each time.

    Args:
        items: In any order; none is parted.
        num_bytes_of: Size of an item.
        num_shares: Largest number of shares.

    Returns:
        At least one share, and none that is small or empty while another could have had it.

    Example:
        >>> deal([50 << 20, 20 << 20, 30 << 20], lambda item: item, 2) == [[50 << 20], [30 << 20, 20 << 20]]
        True
        >>> deal([3, 4], lambda item: item, 2)
        [[4, 3]]
    """
    total = sum(map(num_bytes_of, items))
    shares: list[list[Item]] = [[] for _ in range(max(1, min(num_shares, total // _LEAST_BYTES)))]
    sizes = [0] * len(shares)
    for item in sorted(items, key=num_bytes_of, reverse=True):  # The largest first: longest processing time.
        smallest = sizes.index(min(sizes))
        shares[smallest].append(item)
        sizes[smallest] += num_bytes_of(item)
    return [share for share in shares if share] or [[]]


def num_threads() -> int:
    """Returns how many threads to use: one for each core that this process may use, and not more than four."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(_MOST_THREADS, cores)


def read_all(prefix: str, specs: Mapping[str, tuple[str, tuple[int, ...]]]) -> dict[str, tf.Tensor]:
    """Reads whole tensors of a bundle.

    Runs on: any thread; all tensors are in the memory of this process afterwards.

    Args:
        prefix: Of the bundle.
        specs: dtype and shape of each tensor by key.

    Returns:
        The tensors by key.

    Raises:
        tf.errors.DataLossError: The file is damaged.
        tf.errors.NotFoundError: The file has no such tensor.
    """

    def num_bytes(key: str) -> int:
        dtype, shape = specs[key]
        return tf.TensorShape(shape).num_elements() * tf.as_dtype(dtype).size

    def read(keys: list[str]) -> dict[str, tf.Tensor]:
        with compat.own_executor(), tf.device("/device:CPU:0"):
            tensors = tf.raw_ops.RestoreV2(
                prefix=prefix,
                tensor_names=keys,
                shape_and_slices=[""] * len(keys),
                dtypes=[tf.as_dtype(specs[key][0]) for key in keys],
            )
        return dict(zip(keys, tensors, strict=True))

    shares = [share for share in deal(sorted(specs), num_bytes, num_threads()) if share]
    found: dict[str, tf.Tensor] = {}
    with concurrent.futures.ThreadPoolExecutor(max(1, len(shares)), "checkpoint reader") as threads:
        for tensors in threads.map(read, shares):
            found.update(tensors)
    return found
