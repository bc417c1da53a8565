"""Does anybody else use this machine while something is timed?

What tells is how busy the CPUs are, never how long the timed thing took.
"""

from __future__ import annotations

import os
import pathlib
import time
from collections.abc import Callable
from typing import TypeVar

Value = TypeVar("Value")
_MOST_SHARE_OF_OTHERS = 0.1
_PROBE_SECONDS = 0.3
_STAT = pathlib.Path("/proc/stat")


class QuietMachine:
    """Times things while nobody else takes more than a tenth of the CPUs, as far as patience goes.

    Args:
        patience_seconds: How long to wait for a quiet moment, each time; 0 takes every moment.
        most_repetitions: How often something that was disturbed is done again.

    Attributes:
        num_turns: What was timed, repetitions included.
        num_disturbed: Those during which somebody else was busy.
    """

    def __init__(self, *, patience_seconds: float = 20.0, most_repetitions: int = 4):
        self.num_turns = self.num_disturbed = 0
        self._patience_seconds = patience_seconds
        self._most_repetitions = most_repetitions if patience_seconds else 0

    def run(self, action: Callable[[], Value]) -> Value:
        """Runs an action, again if it was disturbed; returns what it returned the last time."""
        for _ in range(self._most_repetitions + 1):
            self._wait()
            total, others = _cpu_seconds()
            value = action()
            total, others = (
                after - before for after, before in zip(_cpu_seconds(), (total, others), strict=True)
            )
            self.num_turns += 1
            if others <= _MOST_SHARE_OF_OTHERS * total:
                return value
            self.num_disturbed += 1
        return value

    def _wait(self) -> None:
        deadline = time.monotonic() + self._patience_seconds
        while time.monotonic() < deadline:
            total, others = _cpu_seconds()
            time.sleep(_PROBE_SECONDS)
            total, others = (
                after - before for after, before in zip(_cpu_seconds(), (total, others), strict=True)
            )
            if others <= _MOST_SHARE_OF_OTHERS * total:
                return


def _cpu_seconds() -> tuple[float, float]:
    """Returns CPU time of all CPUs so far, and what processes that are not this one used of it."""
    if not _STAT.exists():
        return 0.0, 0.0
    ticks = [int(number) for number in _STAT.read_text().split("\n")[0].split()[1:9]]
    seconds = [number / os.sysconf("SC_CLK_TCK") for number in ticks]
    own = sum(os.times()[:2])
    return sum(seconds), sum(seconds) - seconds[3] - seconds[4] - own  # All but idle and iowait.
