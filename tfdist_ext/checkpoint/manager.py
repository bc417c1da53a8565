"""When is the state saved, by whom, and which checkpoint does training start from?"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping
from typing import Any

from absl import logging

from tfdist_ext import errors, events
from tfdist_ext.checkpoint import failed_runs, joining, owner_lock, preemption, save_job, save_part
from tfdist_ext.checkpoint.background import BackgroundWriter
from tfdist_ext.checkpoint.directory import CheckpointDirectory
from tfdist_ext.checkpoint.keep_policies import KeepPolicy, LatestN
from tfdist_ext.checkpoint.manifest import Piece
from tfdist_ext.checkpoint.pace import Pace
from tfdist_ext.checkpoint.restoring import Restored, Restoring
from tfdist_ext.checkpoint.save_decision import SaveDecision
from tfdist_ext.checkpoint.save_policies import EverySteps, SavePolicy
from tfdist_ext.checkpoint.training_state import TrainingState


class TrainingCheckpointManager:
    """Saves a training state as often as its policy says, and restores it after a crash.

    Runs on: every worker, which call the same methods at the same steps; under parameter servers on the chief. An
    evaluator may open the same directory and restore from it.

    Args:
        state: What to save.
        directory: Where. If all workers see the same directory, each writes its own part there; else the chief writes
            all of it to its own.
        save: When to save: `EverySteps`, `EverySeconds`, `OverheadBudget`, joined by `|`.
        keep: What to keep: `LatestN`, `BestN`, joined by `|`.
        asynchronous: Whether to write while training goes on. It is held up for the copy only: for as long as it takes
            to read the variables, and then by what the next steps overwrite.
        stop_on_sigterm: Whether SIGTERM at any worker makes all of them save at the same step and end with exit code
            143.

    Attributes:
        statistics: Counts and seconds so far: `num_saves`, `blocking_seconds`, `waited_seconds` (for a write before),
            `persist_seconds`, `num_bytes` of the last save.

    Example:
        >>> import tempfile
        >>> import tensorflow as tf
        >>> from tfdist_ext.checkpoint import EverySteps, TrainingState
        >>> counter = tf.Variable(0)
        >>> checkpoints = TrainingCheckpointManager(
        ...     TrainingState(counter=counter, allow_missing=["input"]), tempfile.mkdtemp(), save=EverySteps(2)
        ... )
        >>> checkpoints.restore_or_initialize() is None
        True
        >>> [checkpoints.save_if_due(step) for step in (1, 2, 3, 4)]
        [False, True, False, True]
        >>> checkpoints.wait()
        >>> checkpoints.steps()
        [2, 4]

    References:
        Mohan, Phanishayee and Chidambaram, "CheckFreq: Frequent, Fine-Grained DNN Checkpointing", FAST 2021.
    """

    def __init__(
        self,
        state: TrainingState,
        directory: str | os.PathLike[str],
        *,
        save: SavePolicy | None = None,
        keep: KeepPolicy | None = None,
        asynchronous: bool = True,
        stop_on_sigterm: bool = True,
    ):
        for name, value, kind, example in (
            ("state", state, TrainingState, "TrainingState(model, dataset)"),
            ("save", save, (SavePolicy, type(None)), "EverySteps(500)"),
            ("keep", keep, (KeepPolicy, type(None)), "LatestN(3)"),
        ):
            if isinstance(value, type) or not isinstance(value, kind):
                raise TypeError(
                    f"Argument `{name}` must be like {example}; received {value!r}. Try {example}."
                )
        self.state = state
        self.directory = CheckpointDirectory(directory)
        self.save_policy = save if save is not None else EverySteps(500)
        self.keep_policy = keep if keep is not None else LatestN(3)
        self.statistics: dict[str, float] = {
            "num_saves": 0, "blocking_seconds": 0.0, "waited_seconds": 0.0, "persist_seconds": 0.0, "num_bytes": 0,
        }  # fmt: skip
        self._stop = preemption.StopRequest() if stop_on_sigterm else None
        self._participants = state.participants
        self._asynchronous = asynchronous and not self._participants.reads_together
        self._writer = BackgroundWriter()
        self._pace = Pace(time.monotonic())
        self._decision = SaveDecision(self.save_policy, self._pace, self._participants)
        self._joined: Any = None  # `joining.Joined`, once all workers have come.
        self._num_attempts = 0
        self._restored: Restored | None = None

    # --- restoring -------------------------------------------------------------------------------------------------
    def restore_or_initialize(self, step: int | None = None) -> Restored | None:
        """Restores the newest intact checkpoint, if there is one.

        Runs on: every worker, after the model was made and before the first step.

        Args:
            step: The one to restore; None for the newest intact one.

        Returns:
            What was restored, or None where there is no checkpoint yet.

        Raises:
            CheckpointCorruptError: There are checkpoints, and none of them is intact.
            CheckpointMismatchError: It does not fit the program: all names that differ.
        """
        self._writer.wait()
        self._join()
        restored = Restoring(self.state, self._participants, self.directory, self._joined.sees_directory).run(
            step
        )
        if restored is not None:
            self._pace.restored(restored.step, time.monotonic())
            self._go_to_input(restored)
            logging.info("Restored step %d from %s.", restored.step, restored.path)
        self._decision.next_check = self.state.step
        self._restored = restored
        return restored

    def begin_fit(self) -> Restored | None:
        """Restores the newest intact checkpoint for a `fit`, unless this process has restored one, or saved its own.

        Returns:
            What `fit` goes on from, whoever restored it; None for what is in memory.
        """
        if self._stop is not None:
            self._stop.listen()
        self._writer.wait()
        self._join()
        joining.require_own(self._participants, self.directory.path, self)
        if self._restored is None and not self._num_attempts:
            self.restore_or_initialize()
        return self._restored

    def _go_to_input(self, restored: Restored) -> None:
        position, saved = self.state.position, restored.python["input"]
        if position is not None and saved is not None:
            restore_iterator = save_part.iterator_restorer(restored.path, restored.python["worker"])
            position.load(saved, within=restored.python["within"], restore_iterator=restore_iterator)

    def _join(self) -> None:
        if self._joined is None:
            if self._stop is not None:
                self._stop.listen()
            self._joined = joining.join(self._participants, self.directory.path)

    def _give_directory_back(self) -> None:
        owner_lock.give_back(self.directory.path, id(self))

    # --- saving ----------------------------------------------------------------------------------------------------
    def save_if_due(self, step: int, metrics: Mapping[str, float] | None = None) -> bool:
        """Saves if the policy, another worker, or SIGTERM says so.

        Runs on: every worker, after each step.

        Args:
            step: Updates applied.
            metrics: Numbers for `BestN` and for those who list checkpoints.

        Returns:
            True if the state was saved.

        Raises:
            CheckpointError: The save before failed, or this one cannot begin.
            SystemExit: With code 143, after SIGTERM and the save.
        """
        self._join_alone_or_refuse()
        if self._stop is not None:
            self._stop.listen()
        now = time.monotonic()
        self.state.step = step
        self._pace.step_ended(step, now)
        self._writer.raise_error()
        reason, stops = self._decision.made(step, now, self._stop_requested)
        if stops:
            self._save_and_exit(metrics)
        if reason is None:
            return False
        logging.info("Saving step %d: %s.", step, reason)
        self._save(metrics)
        return True

    def save(
        self, step: int | None = None, metrics: Mapping[str, float] | None = None, *, wait: bool = False
    ) -> None:
        """Saves now.

        Runs on: every worker, at the same step.

        Args:
            step: Updates applied; None for `state.step`.
            metrics: Numbers for `BestN` and for those who list checkpoints.
            wait: Whether to return only after the commit.

        Raises:
            CheckpointError: This save or the one before failed; or, with several workers, it cannot be known whether
                the others save too.
            CheckpointIncompleteError: Something could not be captured, and is not allowed to be missing.
        """
        self._join_alone_or_refuse()
        if step is not None:
            self.state.step = step
        self._save(metrics, waits=wait)

    def failed(self, reason: str) -> None:
        """Saves nothing of a training that a failure has stopped, and says from where the next start goes on.

        Runs on: every worker.

        Args:
            reason: What went wrong, for people.
        """
        self._join_alone_or_refuse()
        self._writer.wait()
        moved, left = failed_runs.set_aside(self.state, self._participants, self.directory)
        failed_runs.warn(self.state.step, reason, moved, left, self.directory.path)

    def wait(self, timeout_seconds: float | None = None) -> None:
        """Waits until the last save is committed; raises what went wrong with it.

        Until the next save then, SIGTERM does what it did before, and another job may write to the directory.
        """
        self._writer.wait(timeout_seconds)
        self._give_directory_back()
        if self._stop is not None and not self._stop.received:
            self._stop.stop_listening()

    def end_fit(self) -> None:
        """Waits for the last save, and gives SIGTERM back: nobody would look whether it came.

        Raises:
            SystemExit: With code 143, if it came after the last step.
        """
        self._writer.wait()
        self._give_directory_back()
        if self._stop is not None:
            self._stop.stop_listening()
            if self._stop.received:
                self._stop.received = False
                getattr(self.state.strategy, "note_stop", lambda: None)()
                raise SystemExit(preemption.EXIT_CODE)

    def steps(self) -> list[int]:
        """Returns the steps of the checkpoints that are there, in their order."""
        return [record.step for record in self.directory.records() if record.problem is None]

    def keras_callback(self):
        """Returns a callback for `model.fit(state.dataset, callbacks=[...])` that restores and saves."""
        from tfdist_ext.checkpoint.keras_callback import CheckpointCallback

        return CheckpointCallback(self)

    def interrupted(self) -> None:
        """Notes that the time until the next step is not a step's: an evaluation, for instance."""
        self._pace.interrupted()

    def _join_alone_or_refuse(self) -> None:
        """A save needs all workers. Whether the others come, the chief cannot see; that they have come once, it can."""
        if self._joined is not None:
            return
        if len(self._participants.task_names) > 1:
            raise errors.CheckpointError(
                f"A checkpoint of {len(self._participants.task_names)} workers needs all of them. Call "
                "`restore_or_initialize()` on every worker before the first save, and `save` or `save_if_due` on every "
                "worker at the same steps; the chief alone writes what is shared."
            )
        self._join()

    @property
    def _stop_requested(self) -> bool:
        # Under parameter servers the signal may have come to a task that does not train.
        elsewhere = getattr(self.state.strategy, "stop_was_requested", False)
        return self._stop is not None and (self._stop.received or elsewhere)

    def _save_and_exit(self, metrics) -> None:
        logging.warning("Saving step %d and ending: SIGTERM.", self.state.step)
        if self._stop is not None:
            self._stop.stop_listening()
        self._save(metrics, waits=True)
        getattr(self.state.strategy, "note_stop", lambda: None)()
        raise SystemExit(preemption.EXIT_CODE)

    def _save(self, metrics, *, waits: bool = False) -> None:
        started = time.monotonic()
        waited = self._writer.wait()
        part, pieces, problem = self._part()

        def done(seconds: float) -> None:
            self._pace.persist_seconds = self.statistics["persist_seconds"] = seconds
            self.statistics["num_saves"] += 1

        step = self.state.step
        self._restored = None
        events.emit("checkpoint_begun", step=step)
        waits = waits or not self._asynchronous or problem is not None
        self._writer.submit(self._job(part, pieces, metrics, done).run, gives_way=not waits)
        if problem is not None:
            with contextlib.suppress(errors.CheckpointError):
                self._writer.wait()
            raise problem
        if waits:
            self._writer.wait()
        now = time.monotonic()
        self._pace.saved(step, started, now)
        self.statistics["blocking_seconds"] += now - started
        self.statistics["waited_seconds"] += waited

    def _part(self) -> tuple[save_part.Part, list[Piece], Exception | None]:
        """Returns what this worker brings, the completeness report, and what is wrong with either."""
        try:
            if self._participants.index == 0:
                owner_lock.hold(self.directory.path, self._participants.task_names[0], self)
            pieces = self.state.require_complete()
            part, problem = save_part.own_part(self.state, self._participants.index), None
        except Exception as error:
            if len(self._participants.task_names) == 1:
                raise
            # The others are saving: they hear of it when all have written.
            pieces, part, problem = [], save_part.Part(python=b"", problem=save_part.text_of(error)), error
        return save_part.with_variables(part, self.state, self._participants), pieces, problem

    def _job(self, part: save_part.Part, pieces: list[Piece], metrics, done) -> save_job.SaveJob:
        self._num_attempts += 1
        attempt = f"{self._joined.token}{self._num_attempts:04x}"
        self.statistics["num_bytes"] = 0 if part.shared is None else part.shared.num_bytes
        specs = {} if part.shared is None else part.shared.specs()
        return save_job.SaveJob(
            part=part,
            manifest=save_job.new_manifest(self.state, specs, pieces, metrics, attempt),
            attempt=attempt,
            directory=self.directory,
            directory_is_shared=all(self._joined.sees_directory),
            participants=self._participants,
            keep=self.keep_policy,
            is_first=self._num_attempts == 1,
            done=done,
        )
