"""What is done behind training: writing, collecting what all have written, the commit, and throwing away.

Every worker does this for the same save, in the same order; where one fails, all learn of it, and the draft is gone.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf
from absl import logging

from tfdist_ext import errors, events
from tfdist_ext.checkpoint.directory import CheckpointDirectory
from tfdist_ext.checkpoint.keep_policies import KeepPolicy
from tfdist_ext.checkpoint.manifest import FileRecord, Manifest, Piece, TensorRecord
from tfdist_ext.checkpoint.participants import Participants
from tfdist_ext.checkpoint.save_part import SHARED, Part, python_file, text_of
from tfdist_ext.checkpoint.tensors import Snapshot

# How TensorFlow calls what the system says of a disk that is full, or may not be written to.
_SYSTEM_ERRORS = {
    tf.errors.ResourceExhaustedError: errno.ENOSPC,
    tf.errors.PermissionDeniedError: errno.EACCES,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class SaveJob:
    """One save.

    Attributes:
        part: Of this worker.
        manifest: As far as it is known before writing; the chief's counts.
        attempt: Token that all workers share.
        directory: Where.
        directory_is_shared: Whether all workers see it. If not, the chief writes everybody's part.
        participants: Who saves.
        keep: What to keep.
        is_first: Whether this job has saved nothing before: what earlier ones left half done is then removed.
        done: Called with the seconds it took, after the commit.
    """

    part: Part
    manifest: Manifest
    attempt: str
    directory: CheckpointDirectory
    directory_is_shared: bool
    participants: Participants
    keep: KeepPolicy
    is_first: bool
    done: Callable[[float], None]

    def run(self) -> None:
        """Writes and commits.

        Raises:
            CheckpointError: Some worker could not; all raise it, and the draft is gone.
        """
        started = time.monotonic()
        sealed, own_error = self._try(self._write) if self.part.problem is None else (None, self.part.problem)
        reports = self._gather({"files": sealed, "error": own_error, "part": self._to_send()}, "written")
        problem = _first_problem(self.participants.task_names, reports)
        path = None
        if self.participants.index == 0:
            if problem is None:
                path, problem = self._try(lambda: self._commit(reports))
            if problem is not None:
                with contextlib.suppress(errors.CheckpointError):
                    self.directory.begin(self.manifest.step, self.attempt).abandon()
        (outcome, *_) = self._gather({"path": path, "error": problem}, "committed")
        if outcome["error"] is not None:
            raise errors.CheckpointError(
                f"Step {self.manifest.step} was not saved: {outcome['error']}", path=self.directory.path
            )
        seconds = time.monotonic() - started
        self.done(seconds)
        events.emit(
            "checkpoint_committed", step=self.manifest.step, path=outcome["path"], seconds=seconds,
            num_bytes=0 if self.part.shared is None else self.part.shared.num_bytes,
        )  # fmt: skip

    def _gather(self, value: Any, name: str) -> list[Any]:
        return self.participants.gather(
            value, f"checkpoint of step {self.manifest.step} {name}", stream="commit"
        )

    def _try(self, action: Callable[[], Any]) -> tuple[Any, str | None]:
        """Returns what an action returned, or what went wrong, whatever it is: the others wait for either."""
        try:
            return action(), None
        except Exception as error:  # noqa: BLE001 - raised on all workers
            logging.exception("Step %d could not be saved.", self.manifest.step)
            return None, text_of(error)

    @property
    def _writes(self) -> bool:
        return self.directory_is_shared or self.participants.index == 0

    def _to_send(self) -> dict[str, Any] | None:
        if self._writes:
            return None
        bundles = self.part.bundles(self.participants.index)
        return {
            "python": self.part.python,
            "bundles": {prefix: snapshot.as_plain() for prefix, snapshot in bundles.items()},
        }

    def _write(self) -> list[dict[str, Any]]:
        if not self._writes:
            return []
        if self.is_first and self.participants.index == 0:
            # Not when restoring: an evaluator restores beside a job that is writing.
            self.directory.sweep(older_than_seconds=0.0, keep_attempts=[self.attempt])
        with self.directory.begin(self.manifest.step, self.attempt) as draft:
            index = self.participants.index
            names = _write_part(draft, index, self.part.python, self.part.bundles(index))
            if self.part.shared is not None:
                names += _write_bundle(draft, SHARED, self.part.shared)
            return [dataclasses.asdict(record) for record in draft.seal(names)]

    def _commit(self, reports: Sequence[Mapping[str, Any]]) -> str:
        with self.directory.begin(self.manifest.step, self.attempt) as draft:
            files = [FileRecord(**record) for report in reports for record in report["files"]]
            for worker, report in enumerate(reports):
                sent = report["part"]
                if sent is not None:
                    bundles = {prefix: Snapshot.of_arrays(plain) for prefix, plain in sent["bundles"].items()}
                    files += draft.seal(_write_part(draft, worker, sent["python"], bundles))
            record = draft.commit(dataclasses.replace(self.manifest, files=tuple(files)))
        self._throw_away()
        return record.path

    def _throw_away(self) -> None:
        records = [record for record in self.directory.records() if record.manifest is not None]
        kept = self.keep.keeps(records)
        for record in records:
            if record.step not in kept:
                with contextlib.suppress(errors.CheckpointError):  # A later save tries again.
                    self.directory.delete(record)


def _write_part(draft, worker: int, python: bytes, bundles: Mapping[str, Snapshot]) -> list[str]:
    draft.write_bytes(python_file(worker), python)
    names = [python_file(worker)]
    for prefix, snapshot in bundles.items():
        names += _write_bundle(draft, prefix, snapshot)
    return names


def _write_bundle(draft, prefix: str, snapshot: Snapshot) -> list[str]:
    with draft.explained(snapshot.num_bytes):
        try:
            return snapshot.write(draft.path(prefix))
        except tuple(_SYSTEM_ERRORS) as error:
            number = _SYSTEM_ERRORS[type(error)]
            raise OSError(number, os.strerror(number)) from error


def _first_problem(task_names: Sequence[str], reports: Sequence[Mapping[str, Any]]) -> str | None:
    for name, report in zip(task_names, reports, strict=True):
        if report["error"] is not None:
            return f"{name} could not write its part: {report['error']}"
    return None


def new_manifest(
    state, shared_specs: Mapping[str, tuple], pieces: Sequence[Piece], metrics, attempt
) -> Manifest:
    """Describes a checkpoint as far as it is known before its files are.

    Args:
        state: `TrainingState`.
        shared_specs: dtype and shape of each variable by key.
        pieces: The completeness report.
        metrics: Numbers by name.
        attempt: Token of the save.
    """
    strategy = state.strategy
    position = state.position
    return Manifest(
        step=state.step,
        attempt=attempt,
        epoch=state.epoch,
        batch=state.batch,
        created_unix_seconds=time.time(),
        metrics={name: float(value) for name, value in (metrics or {}).items() if _is_number(value)},
        tensors=tuple(
            TensorRecord(name=key, dtype=dtype, shape=tuple(shape))
            for key, (dtype, shape) in shared_specs.items()
        ),
        pieces=tuple(pieces),
        cluster={"workers": list(state.participants.task_names)},
        fingerprint={
            "tfdist_ext": sys.modules["tfdist_ext"].__version__,
            "tensorflow": tf.__version__,
            "keras": keras.__version__,
            "python": ".".join(map(str, sys.version_info[:3])),
            "strategy": type(strategy).__name__,
            "replicas": strategy.num_replicas_in_sync,
        },
        input={} if position is None else {"how": position.how, "batches": position.num_batches},
    )


def _is_number(value: Any) -> bool:
    try:
        float(value)
    except (TypeError, ValueError):
        return False
    return True
