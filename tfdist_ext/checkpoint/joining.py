"""How do the workers of a job come together on a checkpoint directory?"""

from __future__ import annotations

import dataclasses
import os
import secrets

from tfdist_ext import errors
from tfdist_ext.checkpoint import owner_lock
from tfdist_ext.checkpoint.file_system import explain
from tfdist_ext.checkpoint.participants import Participants


@dataclasses.dataclass(frozen=True)
class Joined:
    """What all workers know of each other.

    Attributes:
        token: Of the saves of this job.
        sees_directory: By worker, whether it sees the chief's directory.
    """

    token: str
    sees_directory: list[bool]


def join(participants: Participants, directory: str) -> Joined:
    """Agrees with the other workers on the token of saves, and finds out who sees the directory.

    Runs on: every worker. A reader may do so too.

    Raises:
        CheckpointError: The chief cannot write there.
    """
    token, problem = secrets.token_hex(4), None
    several = len(participants.task_names) > 1
    probe = os.path.join(directory, f".probe-{token}")
    if participants.index == 0 and several:
        try:
            os.makedirs(directory, exist_ok=True)
            with open(probe, "xb"):
                pass
        except OSError as error:
            problem = str(explain(error, directory))
    token, problem = participants.gather([token, problem], "checkpoint directory", stream="join")[0]
    _raise(problem, participants, directory)
    sees = os.path.exists(os.path.join(directory, f".probe-{token}")) or not several
    sees_directory = participants.gather(sees, "who sees the directory", stream="join")
    if participants.index == 0 and several:
        os.unlink(probe)
    return Joined(token, sees_directory)


def require_own(participants: Participants, directory: str, holder: object) -> None:
    """Makes this job the only one that writes to the directory; the chief holds the lock for all.

    Runs on: every worker.

    Args:
        participants: Who saves together.
        directory: The chief's.
        holder: Whose end gives the lock back.

    Raises:
        CheckpointError: Another job has it; all raise it.
    """
    problem = None
    if participants.index == 0:
        try:
            owner_lock.hold(directory, participants.task_names[0], holder)
        except errors.CheckpointError as error:
            problem = str(error)
    (problem, *_) = participants.gather(problem, "who writes to the checkpoint directory", stream="join")
    _raise(problem, participants, directory)


def _raise(problem: str | None, participants: Participants, directory: str) -> None:
    if problem is not None:
        raise errors.CheckpointError(f"{participants.task_names[0]}: {problem}", path=directory)
