"""Which checkpoint do all workers restore, and what if it turns out to be damaged?

The chief proposes, newest first; every worker looks whether it can read what it needs; one that is torn or damaged for
anybody is passed over by everybody, with a notice. A worker that does not see the chief's directory is sent the files.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import tempfile
from typing import Any

import tensorflow as tf
from absl import logging

from tfdist_ext import errors, events
from tfdist_ext.checkpoint import tensors
from tfdist_ext.checkpoint.directory import CheckpointDirectory
from tfdist_ext.checkpoint.manifest import CheckpointRecord
from tfdist_ext.checkpoint.save_part import SHARED, arrays_prefix, decode_python, python_file, text_of

_CHUNK_BYTES = 64 << 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class Restored:
    """What was restored.

    Attributes:
        step: Updates applied.
        epoch: Epoch that was open.
        batch: Steps of it that were done.
        path: The checkpoint.
        notes: Sentences about what was allowed to differ, or could not be restored.
        python: The Python state of this worker.
        received: Holds the files that were sent to this worker, for as long as they may be read.
    """

    step: int
    epoch: int
    batch: int
    path: str
    notes: tuple[str, ...]
    python: dict[str, Any]
    received: Any = None


class Restoring:
    """One restore on one worker.

    Args:
        state: `TrainingState`.
        participants: Who restores together.
        directory: The directory, as this worker sees it.
        sees_directory: By worker, whether it sees the chief's.
    """

    def __init__(self, state, participants, directory: CheckpointDirectory, sees_directory: list[bool]):
        self._state = state
        self._participants = participants
        self._directory = directory
        self._sees_directory = sees_directory
        self._problems: list[str] = []
        self._has_vanished = False
        self._received: Any = None
        self._failure: Exception | None = None

    def run(self, step: int | None = None) -> Restored | None:
        """Restores the newest checkpoint that is intact for all workers; None if there is none at all.

        Args:
            step: The only one to try, or None.

        Raises:
            CheckpointCorruptError: There are checkpoints, and none is intact.
            CheckpointMismatchError: It does not fit the program.
        """
        for record in self._candidates(step):
            self._state.build()
            restored, problem, mismatch = self._try(record)
            answers = self._gather({"problem": problem, "mismatch": mismatch}, f"restored step {record.step}")
            for name, answer in zip(self._participants.task_names, answers, strict=True):
                if answer["mismatch"] is not None:
                    if self._failure is not None:
                        raise self._failure
                    raise errors.CheckpointMismatchError(f"{name}: {answer['mismatch']}")
            problems = [
                f"{name}: {answer['problem']}"
                for name, answer in zip(self._participants.task_names, answers, strict=True)
                if answer["problem"] is not None
            ]
            if restored is not None and not problems:
                for note in restored.notes:
                    logging.warning("Restored step %d, but: %s.", restored.step, note)
                events.emit("checkpoint_restored", step=restored.step, path=restored.path)
                return restored
            self._pass_over(record.path, "; ".join(problems))
        return None

    def _gather(self, value: Any, name: str) -> list[Any]:
        return self._participants.gather(value, name, stream="restore")

    def _candidates(self, step: int | None):
        """Yields the checkpoints to try, the same on all workers."""
        own = iter(self._intact(step)) if self._participants.index == 0 else iter(())
        while True:
            problem = None
            try:
                record = next(own, None)
            except Exception as error:  # noqa: BLE001 - raised on all workers
                record, problem = None, text_of(error)
            proposal = (
                None if record is None else {"name": os.path.basename(record.path), "step": record.step}
            )
            proposal, problem = self._gather([proposal, problem or self._nothing_left(step)], "proposal")[0]
            if proposal is None:
                if problem is not None:
                    raise errors.CheckpointCorruptError(problem)
                return
            yield self._local_record(proposal, record)

    def _intact(self, step: int | None):
        tried: set[str] = set()
        while True:
            self._has_vanished = False
            for record in self._directory.newest_first():
                if record.path in tried or step not in (None, record.step):
                    continue
                tried.add(record.path)
                problem = record.problem or self._directory.check(record)
                if problem is None:
                    yield record
                else:
                    self._pass_over(record.path, problem)
            if not self._has_vanished:
                return

    def _nothing_left(self, step: int | None) -> str | None:
        if step is not None and not self._problems:
            steps = [record.step for record in self._directory.records()]
            return f"There is no checkpoint of step {step} in {self._directory.path}; there are those of {steps}."
        if not self._problems:
            return None
        return (
            f"None of the checkpoints in {self._directory.path} is intact:\n  "
            + "\n  ".join(self._problems)
            + "\n"
            "Name another directory, or move this one away to train from the beginning."
        )

    def _pass_over(self, path: str, problem: str) -> None:
        if self._participants.index == 0 and not os.path.isdir(path):
            self._has_vanished = True  # Training goes on elsewhere, and there is a newer one.
            return
        self._problems.append(f"{path}: {problem}")
        logging.warning("Checkpoint %s is passed over: %s", path, problem)
        events.emit("checkpoint_passed_over", path=path, problem=problem)

    def _local_record(self, proposal, record: CheckpointRecord | None) -> CheckpointRecord:
        """Returns the chief's choice as this worker can read it, after sending it to those that cannot."""
        if all(self._sees_directory):
            return record or CheckpointRecord(
                step=proposal["step"], path=os.path.join(self._directory.path, proposal["name"]), attempt="-"
            )
        folder = None if self._sees_directory[self._participants.index] else self._received_folder()
        names = sorted(os.listdir(record.path)) if record is not None else None
        for name in self._gather(names, "files")[0]:
            source = None if record is None else os.path.join(record.path, name)
            self._send_file(source, None if folder is None else os.path.join(folder, name))
        path = folder or os.path.join(self._directory.path, proposal["name"])
        return record or CheckpointRecord(step=proposal["step"], path=path, attempt="-")

    def _received_folder(self) -> str:
        received = self._received = tempfile.TemporaryDirectory(prefix="checkpoint-")
        return received.name

    def _send_file(self, source: str | None, target: str | None) -> None:
        with open(source or os.devnull, "rb") as read, open(target or os.devnull, "wb") as write:
            while chunk := self._gather(read.read(_CHUNK_BYTES) if source else b"", "file")[0]:
                write.write(chunk)

    def _try(self, record: CheckpointRecord) -> tuple[Restored | None, str | None, str | None]:
        """Restores; returns what was, what is wrong with the checkpoint, and what does not fit the program."""
        try:
            return self._restored(record), None, None
        except errors.CheckpointMismatchError as error:
            return None, None, str(error)
        except (tf.errors.OpError, OSError, ValueError, KeyError) as error:
            return None, f"{record.path} cannot be read: {getattr(error, 'message', None) or error}", None
        except Exception as error:  # noqa: BLE001 - raised when the others know
            self._failure = error
            return None, None, text_of(error)

    def _restored(self, record: CheckpointRecord) -> Restored:
        state, index = self._state, self._participants.index
        workers = len(list(pathlib.Path(record.path).glob("worker-*.json")))
        own = index if index < workers else 0
        text = pathlib.Path(record.path, python_file(own)).read_bytes()
        python = decode_python(text)
        variables = state.variables()
        prefix = os.path.join(record.path, SHARED)

        notes = tensors.restore(variables, prefix, path_of=python["paths"], allow_missing=state.allow_missing)
        notes += state.load_python_state(python, steps_aside=index if index >= workers else 0)
        self._restore_arrays(record, workers)
        return Restored(
            step=state.step, epoch=state.epoch, batch=state.batch, path=record.path, notes=tuple(notes),
            python=python, received=self._received,
        )  # fmt: skip

    def _restore_arrays(self, record: CheckpointRecord, workers: int) -> None:
        """Gives this worker what is its own; the chief gets the sum of what no worker is there for."""
        extended, index = self._state.strategy.extended, self._participants.index
        if not hasattr(extended, "restore_compression_residuals"):
            return
        present = len(self._participants.task_names)
        mine = [worker for worker in range(workers) if worker == index or (index == 0 and worker >= present)]
        total: dict[str, Any] = {}
        for worker in mine:
            prefix = os.path.join(record.path, arrays_prefix(worker))
            if os.path.exists(f"{prefix}.index"):
                for name, array in tensors.read_arrays(prefix).items():
                    total[name] = array if name not in total else total[name] + array
        if total:
            extended.restore_compression_residuals(total)
