"""Who takes part in a checkpoint, and how do they agree?

Everything that several workers must do alike goes through `gather`: each gives a few bytes and gets everybody's.
"""

from __future__ import annotations

import itertools
import weakref
from typing import Any, Protocol

import numpy as np
import tensorflow as tf

from tfdist_ext import compat
from tfdist_ext.checkpoint import plain_data

# Managers are made in the same order by all workers of a group, which may have seen different groups before.
_numbers: weakref.WeakKeyDictionary[Any, itertools.count] = weakref.WeakKeyDictionary()


class Participants(Protocol):
    """The workers of a job, of whom this process is one.

    Attributes:
        index: This worker; 0 is the chief.
        task_names: All of them, by index.
        reads_together: True where reading variables takes all workers, and nobody may communicate behind training.
    """

    index: int
    task_names: tuple[str, ...]
    reads_together: bool

    def gather(self, value: Any, name: str, *, stream: str = "steps") -> list[Any]:
        """Gives `value`, plain data, and returns everybody's by index; waits for all, up to a deadline."""
        ...


class Alone:
    """One process that trains, or the chief of parameter servers."""

    index = 0
    reads_together = False

    def __init__(self, task_name: str = "chief:0"):
        self.task_names: tuple[str, ...] = (task_name,)

    def gather(self, value: Any, name: str, *, stream: str = "steps") -> list[Any]:
        """Returns `[value]`."""
        return [value]


class Group:
    """The workers of a synchronous multi-worker strategy of this package.

    Args:
        process_group: What links them: has `rank`, `task_names` and `all_gather_bytes`.
    """

    reads_together = False

    def __init__(self, process_group):
        self._group = process_group
        self._number = next(_numbers.setdefault(process_group, itertools.count()))
        self.index = process_group.rank
        self.task_names = tuple(process_group.task_names)

    def gather(self, value: Any, name: str, *, stream: str = "steps") -> list[Any]:
        """Returns everybody's value, by index.

        Raises:
            CollectiveTimeoutError: A worker did not come in time; the message names it.
            PeerLostError: A worker is gone.
        """
        answers = self._group.all_gather_bytes(
            plain_data.dumps(value, name), name=name, stream=f"checkpoint/{self._number}/{stream}"
        )
        return [plain_data.loads(answer) for answer in answers]


class StockGroup:
    """The workers of TensorFlow's own multi-worker strategy.

    Its collectives are matched by the order in which they are called, so that a save is not written behind training.

    Args:
        strategy: `tf.distribute.MultiWorkerMirroredStrategy`.
    """

    reads_together = True

    def __init__(self, strategy):
        self._strategy = strategy
        resolver = strategy.cluster_resolver
        jobs = resolver.cluster_spec().as_dict()
        self.task_names = tuple(
            f"{job}:{index}" for job in ("chief", "worker") for index in range(len(jobs.get(job, ())))
        )
        self.index = self.task_names.index(f"{resolver.task_type}:{resolver.task_id}")

    def gather(self, value: Any, name: str, *, stream: str = "steps") -> list[Any]:
        """Returns everybody's value, by index; waits as long as TensorFlow's collectives do."""
        # TensorFlow gathers no bytes.
        text = np.frombuffer(plain_data.dumps(value, name), np.uint8).astype(np.int32)
        sizes = self._gathered(np.array([len(text)], np.int32))
        ends = np.cumsum(sizes)
        everything = self._gathered(text)
        return [
            plain_data.loads(everything[end - size : end].astype(np.uint8).tobytes())
            for end, size in zip(ends, sizes, strict=True)
        ]

    def _gathered(self, array: np.ndarray) -> np.ndarray:
        """Returns the arrays of all workers one after another; only the first replica of each brings its own."""

        def of_replica(context):
            first = context.replica_id_in_sync_group % self._replicas_of_worker == 0
            return tf.constant(array if first else array[:0])

        values = self._strategy.experimental_distribute_values_from_function(of_replica)
        return self._strategy.gather(values, axis=0).numpy()

    @property
    def _replicas_of_worker(self) -> int:
        return self._strategy.num_replicas_in_sync // len(self.task_names)


def of_strategy(strategy) -> Participants:
    """Returns who saves together under a strategy.

    Args:
        strategy: `tf.distribute.Strategy`.
    """
    group = getattr(strategy, "process_group", None) or getattr(strategy.extended, "process_group", None)
    if group is not None and len(group.task_names) > 1:
        return Group(group)
    if group is None and _is_stock_multi_worker(strategy):
        return StockGroup(strategy)
    return Alone()


def _is_stock_multi_worker(strategy) -> bool:
    return (
        isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy) and compat.num_workers(strategy) > 1
    )
