"""Which ps does not answer, since when, and when is it given up?"""

from __future__ import annotations

from collections.abc import Mapping

from tfdist_ext.cluster import Task

_SAY_AFTER_SECONDS = 5.0
_SAY_AGAIN_SECONDS = 30.0


class SilentServers:
    """Keeps account of the ps that do not answer; pure.

    Args:
        addresses: The ps, and where they are.
        started: The time, in seconds.
    """

    def __init__(self, addresses: Mapping[Task, str], started: float):
        self._addresses = dict(addresses)
        self._answered = dict.fromkeys(addresses, started)
        self._silence = dict.fromkeys(addresses, 0.0)
        self._next_words = dict.fromkeys(addresses, started + _SAY_AFTER_SECONDS)

    def heard(self, task: Task, answers: bool, now: float, patience_seconds: float) -> str | None:
        """Takes in whether a ps answers.

        Args:
            task: The ps.
            answers: Whether it does.
            now: The time, in seconds.
            patience_seconds: How long one may be silent.

        Returns:
            The sentence to announce: after 5 seconds of silence, then every 30; else None.
        """
        if answers:
            self._answered[task], self._silence[task] = now, 0.0
            self._next_words[task] = now + _SAY_AFTER_SECONDS
            return None
        self._silence[task] = now - self._answered[task]
        if now < self._next_words[task]:
            return None
        self._next_words[task] = now + _SAY_AGAIN_SECONDS
        return (
            f"{task} at {self._addresses[task]} does not answer ({self._silence[task]:.0f} s); training waits "
            f"{patience_seconds:g} s for it."
        )

    def given_up(self, patience_seconds: float) -> dict[Task, float]:
        """Returns the ps that had been silent for longer than that when they were last asked, and for how many seconds.

        Args:
            patience_seconds: How long one may be silent.
        """
        return {task: seconds for task, seconds in self._silence.items() if seconds > patience_seconds}
