"""Is a save due, or has somebody asked to stop: the same answer on all workers?"""

from __future__ import annotations

from tfdist_ext.checkpoint.pace import Pace
from tfdist_ext.checkpoint.participants import Participants
from tfdist_ext.checkpoint.save_policies import SavePolicy, SaveUnion


class SaveDecision:
    """Decides after each step.

    Args:
        policy: Says when to save.
        pace: Of the training.
        participants: Who saves together.

    Attributes:
        next_check: Step at which the workers ask each other again.
    """

    def __init__(self, policy: SavePolicy, pace: Pace, participants: Participants):
        self._policy = policy
        self._pace = pace
        self._participants = participants
        self.next_check = 0

    def made(self, step: int, now: float, stop_requested: bool) -> tuple[str | None, bool]:
        """Returns why to save now, or None, and whether to stop.

        Args:
            step: Updates applied.
            now: Seconds.
            stop_requested: Whether this task was asked to stop.
        """
        progress = self._pace.progress(step, now)
        if len(self._participants.task_names) == 1:
            return self._policy.is_due(progress), stop_requested
        for policy in _members(self._policy):
            # These need no clock: everybody comes to the same answer.
            reason = None if policy.needs_clock else policy.is_due(progress)
            if reason is not None:
                return reason, False
        if step < self.next_check:
            return None, False
        own = {
            "reason": self._policy.is_due(progress),
            "stops": stop_requested,
            "next": step + self._pace.steps_between_checks(),
        }
        answers = self._participants.gather(own, f"checkpoint due at step {step}")
        self.next_check = answers[0]["next"]
        return answers[0]["reason"], any(answer["stops"] for answer in answers)


def _members(policy: SavePolicy) -> tuple[SavePolicy, ...]:
    return policy.policies if isinstance(policy, SaveUnion) else (policy,)
