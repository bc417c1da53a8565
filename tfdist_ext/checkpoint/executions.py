"""How many steps did an execution of several have? The last one of a pass may have fewer than were asked for."""

from __future__ import annotations

from collections.abc import Callable


class Executions:
    """Counts the steps of executions.

    Args:
        applied: Returns the updates that were applied so far, or None where nobody counts them.
    """

    def __init__(self, applied: Callable[[], int | None]):
        self._applied = applied
        self._before: int | None = None
        self._asked = 0
        self._at_most: int | None = None
        # A step may apply several updates.
        self._updates_per_step: int | None = None

    @property
    def is_open(self) -> bool:
        """True from the begin of an execution to its end: where the data have ended it has none."""
        return self._asked > 0

    def begin(self, num_steps: int, left: int | None) -> None:
        """Notes an execution that is about to run.

        Args:
            num_steps: Steps that it has if there are data for all of them.
            left: Batches that the pass has left, or None where nobody knows.
        """
        self._asked, self._at_most = num_steps, left
        self._before = self._applied() if num_steps > 1 and left is None else None

    def end(self) -> int:
        """Returns the steps that the execution had; 0 when this was asked before."""
        asked, self._asked = self._asked, 0
        if asked <= 1:
            return asked
        if self._at_most is not None:
            return min(asked, self._at_most)
        after = self._applied()
        if self._before is None or after is None:
            return asked
        updates = after - self._before
        if self._updates_per_step is None:
            self._updates_per_step = max(1, updates // asked)
        return min(asked, updates // self._updates_per_step) or asked
