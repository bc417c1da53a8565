"""Who takes part in a checkpoint, and how do they agree?

Everything that several workers must do alike goes through `gather`: each gives a few bytes and gets everybody's.
"""

from __future__ import annotations

import itertools
from typing import Any, Protocol

from tfdist_ext.checkpoint import plain_data

_numbers = itertools.count()


class Participants(Protocol):
    """The workers of a job, of whom this process is one.

    Attributes:
        index: This worker; 0 is the chief.
        task_names: All of them, by index.
    """

    index: int
    task_names: tuple[str, ...]

    def gather(self, value: Any, name: str, *, stream: str = "steps") -> list[Any]:
        """Gives `value`, plain data, and returns everybody's by index; waits for all, up to a deadline."""
        ...


class Alone:
    """One process that trains, or the chief of parameter servers."""

    index = 0

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

    def __init__(self, process_group):
        self._group = process_group
        self._number = next(_numbers)
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


def of_strategy(strategy) -> Participants:
    """Returns who saves together under a strategy.

    Args:
        strategy: `tf.distribute.Strategy`.
    """
    group = getattr(strategy, "process_group", None) or getattr(strategy.extended, "process_group", None)
    if group is None or len(group.task_names) == 1:
        return Alone()
    return Group(group)
