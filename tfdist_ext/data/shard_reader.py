"""Where does each reader of a pass stand, on a worker or on the chief?"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import tensorflow as tf

if TYPE_CHECKING:
    from tfdist_ext.data.worker_dataset import WorkerIterator


class ChiefFeed:
    """Hands out batches that the chief reads, by shard and position, and keeps those that may be needed again.

    Args:
        elements: Iterator of the batches in their order.
        num_shards: Number of shards.
        is_used: Function of shard and position that says whether a batch was used before and is not needed; or None.
    """

    def __init__(self, elements, num_shards: int, is_used: Callable[[int, int], bool] | None = None):
        self._elements = elements
        self._num_shards = num_shards
        self._is_used = is_used
        self._read = 0
        self._kept: dict[int, object] = {}
        # Reading may take long: whoever moves training forward must not wait for it.
        self._reading = threading.Lock()

    def get(self, shard: int, position: int):
        """Returns a batch, or None when the data end before it.

        Raises:
            LookupError: It was released: nobody needs it.
        """
        index = position * self._num_shards + shard
        with self._reading:
            while self._read <= index:
                try:
                    element = next(self._elements)
                except (StopIteration, tf.errors.OutOfRangeError):
                    return None
                at, of = divmod(self._read, self._num_shards)
                if self._is_used is None or not self._is_used(of, at):
                    self._kept[self._read] = element
                self._read += 1
            return self._kept[index]

    def release(self, shard: int, position: int) -> None:
        """Forgets a batch that nobody will ask for again."""
        self._kept.pop(position * self._num_shards + shard, None)


class ShardReader:
    """The iterators that one worker has open; they live as long as the pass they read.

    Args:
        device: Device of the worker.
    """

    def __init__(self, device: str):
        self._device = device
        self._open: Any = weakref.WeakKeyDictionary()
        self._datasets: Any = weakref.WeakKeyDictionary()

    def at(self, data: WorkerIterator, shard: int, position: int):
        """Returns an iterator of the worker that stands at a batch, and counts it as taken."""
        of_pass = self._open.setdefault(data, {})
        running = of_pass.get(shard)
        if running is not None and running[1] == position:
            running[1] += 1
            return running[0]
        iterator = self._new(data, shard, position)
        if running is None or running[1] < position:
            of_pass[shard] = [iterator, position + 1]
        return iterator

    def close(self) -> None:
        """Closes all iterators: a call failed, and nobody knows whether it took its batch."""
        self._open.clear()

    def _new(self, data: WorkerIterator, shard: int, position: int):
        source = data.dataset.sources[shard]
        with tf.device(self._device):
            dataset = self._datasets.get(source)
            if dataset is None:
                dataset = source.dataset(data.pass_number)
                if source.is_the_same_in_each_pass:
                    self._datasets[source] = dataset
            return source.open(dataset, position)
