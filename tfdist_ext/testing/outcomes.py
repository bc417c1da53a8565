"""What became of a function on each worker?"""

from __future__ import annotations

import dataclasses
import traceback as traceback_lib
from collections.abc import Mapping, Sequence
from typing import Any

from tfdist_ext.errors import TfdistError
from tfdist_ext.testing import messages


@dataclasses.dataclass(frozen=True, kw_only=True)
class Failure:
    """An exception of another process.

    Attributes:
        type_name: Name of its class.
        module: Module of its class.
        message: Its text.
        traceback: Its traceback, as Python prints it.
        attributes: Public attributes, of an error of `tfdist_ext.errors`.
        bases: Full names of its class and of all classes that this one inherits from.
    """

    type_name: str
    module: str
    message: str
    traceback: str
    attributes: Mapping[str, Any]
    bases: tuple[str, ...]

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """Describes an exception of this process.

        Args:
            error: The exception.

        Returns:
            Its description, which can cross to another process.
        """
        kinds = [f"{kind.__module__}.{kind.__qualname__}" for kind in type(error).__mro__]
        return cls(
            type_name=type(error).__name__,
            module=type(error).__module__,
            message=str(error),
            traceback="".join(traceback_lib.format_exception(error)),
            attributes=_public_attributes(error) if isinstance(error, TfdistError) else {},
            bases=tuple(kinds),
        )

    def is_a(self, kind: type[BaseException]) -> bool:
        """Says whether `isinstance` was true of the exception.

        Args:
            kind: A class of exceptions.

        Returns:
            True if it was of this class or of one that inherits from it.

        Example:
            >>> Failure.of(KeyError("x")).is_a(LookupError)
            True
        """
        return f"{kind.__module__}.{kind.__qualname__}" in self.bases


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of the function on one worker: a result, a failure, a dead process, or nothing in time.

    Attributes:
        rank: The worker.
        result: What the function returned.
        failure: The exception that it raised, or None.
        exit_code: Of a process that died before it answered, else None; negative for a signal.
        timed_out: Whether no answer came in time.
        stacks: Python stacks of all its threads at that time.
        last_lines: The last lines that the process wrote, if there was no result.
    """

    rank: int
    result: Any = None
    failure: Failure | None = None
    exit_code: int | None = None
    timed_out: bool = False
    stacks: str = ""
    last_lines: tuple[str, ...] = ()

    @property
    def succeeded(self) -> bool:
        """Whether the function returned."""
        return self.failure is None and self.exit_code is None and not self.timed_out


class WorkerJobError(RuntimeError):
    """A function did not return on every worker.

    Attributes:
        outcomes: What became of it on each worker, by rank.
    """

    def __init__(self, message: str, outcomes: Sequence[Outcome] = ()):
        super().__init__(message)
        self.outcomes = list(outcomes)


class WorkerJobTimeout(WorkerJobError, TimeoutError):
    """A worker did not answer in time."""


def results_of(outcomes: Sequence[Outcome], job: str) -> list[Any]:
    """Takes the results out of the outcomes.

    Args:
        outcomes: One of each worker.
        job: What an error calls the job.

    Returns:
        The results by rank.

    Raises:
        WorkerJobTimeout: A worker did not answer in time; the text has the stacks of all that did not.
        WorkerJobError: The function raised on a worker, or a process died.
    """
    if all(outcome.succeeded for outcome in outcomes):
        return [outcome.result for outcome in outcomes]
    parts = [text for outcome in outcomes for text in _describe(outcome)]
    kind = WorkerJobTimeout if any(outcome.timed_out for outcome in outcomes) else WorkerJobError
    raise kind(f"{job} did not return on every worker.\n" + "\n".join(parts), outcomes)


def _describe(outcome: Outcome) -> list[str]:
    name = f"worker {outcome.rank}"
    if outcome.succeeded:
        return [f"--- {name} returned"]
    lines = "\n".join(outcome.last_lines)
    said = f"\n--- the last lines of {name}:\n{lines}" if lines else ""
    if outcome.failure is not None:
        return [f"--- {name} raised {outcome.failure.type_name}:\n{outcome.failure.traceback}{said}"]
    if outcome.timed_out:
        return [f"--- {name} did not answer in time; its stacks:\n{outcome.stacks or '(none)'}{said}"]
    return [f"--- {name} died with exit code {outcome.exit_code}{said}"]


def _public_attributes(error: BaseException) -> dict[str, Any]:
    found = {}
    for name, value in vars(error).items():
        if name.startswith("_"):
            continue
        try:
            messages.encode(value)
        except TypeError:
            value = repr(value)
        found[name] = value
    return found
