"""What does one worker bring to a checkpoint, and in which files does it lie?"""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import tensorflow as tf

from tfdist_ext.checkpoint import plain_data
from tfdist_ext.checkpoint.tensors import Snapshot, VariableList
from tfdist_ext.errors import CheckpointIncompleteError, TfdistError

SHARED = "state"


def python_file(worker: int) -> str:
    """Returns the name of the file with the Python state of a worker."""
    return f"worker-{worker:05d}.json"


def arrays_prefix(worker: int) -> str:
    """Returns the prefix of the files with the arrays that are a worker's own."""
    return f"worker-{worker:05d}-arrays"


def iterator_prefix(worker: int) -> str:
    """Returns the prefix of the files with the state of a worker's iterator."""
    return f"worker-{worker:05d}-iterator"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    """What one worker brings to a checkpoint.

    Attributes:
        python: Its Python state as text.
        own: Arrays that are its own, or None.
        iterator: State of its `tf.data` iterator, or None where the input is replayed.
        shared: The variables; only the chief's part has them.
        problem: What of it could not be read, or None.
    """

    python: bytes
    own: Snapshot | None = None
    iterator: Snapshot | None = None
    shared: Snapshot | None = None
    problem: str | None = None

    def bundles(self, worker: int) -> dict[str, Snapshot]:
        """Returns what is written for a worker besides text, by prefix."""
        own = {arrays_prefix(worker): self.own, iterator_prefix(worker): self.iterator}
        return {prefix: snapshot for prefix, snapshot in own.items() if snapshot is not None}


def own_part(state, index: int) -> Part:
    """Returns what a worker has of its own; nobody else is needed for it.

    Args:
        state: `TrainingState`.
        index: Of the worker.

    Raises:
        TypeError: Something of the Python state cannot be written.
        CheckpointIncompleteError: The state of the iterator cannot be saved.
    """
    python = {**state.python_state(), "paths": state.variables().paths(), "worker": index}
    own = dict(getattr(state.strategy.extended, "compression_residuals", None) or {})
    iterator = None if state.position is None else state.position.iterator_to_save()
    return Part(
        python=plain_data.dumps(python),
        own=Snapshot.of_arrays({name: value.read_value() for name, value in own.items()}) if own else None,
        iterator=iterator_snapshot(iterator),
    )


def with_variables(part: Part, state, participants) -> Part:
    """Returns the part with what the chief adds, in which all take part.

    Args:
        part: Of this worker.
        state: `TrainingState`.
        participants: Who saves together.
    """
    variables = state.variables()
    try:
        if participants.index == 0 or participants.reads_together:
            shared = variables.snapshot()
            return dataclasses.replace(part, shared=shared if participants.index == 0 else None)
        variables.take_part_in_snapshot()
    except Exception as error:  # noqa: BLE001 - told to all when they have written
        return dataclasses.replace(part, problem=text_of(error))
    return part


def text_of(error: BaseException) -> str:
    """Returns what an error says, with its type where that says more."""
    if isinstance(error, tf.errors.OpError):
        return error.message
    return str(error) if isinstance(error, (TfdistError, OSError)) else f"{type(error).__name__}: {error}"


def iterator_snapshot(iterator) -> Snapshot | None:
    """Reads the state of a `tf.data` iterator; None for None.

    Raises:
        CheckpointIncompleteError: A step of its pipeline has state that cannot be saved, such as a Python function.
    """
    if iterator is None:
        return None
    try:
        return VariableList(tf.train.Checkpoint(iterator=iterator)).snapshot()
    except tf.errors.OpError as error:
        raise CheckpointIncompleteError(
            f"The state of the tf.data iterator cannot be saved: {error.message.splitlines()[0]} Pass "
            'input_position="replay" to TrainingState; the order of the data must then be the same each time.'
        ) from error


def iterator_restorer(folder: str, worker: int):
    """Returns a function that gives an iterator the state that was saved for a worker."""
    prefix = os.path.join(folder, iterator_prefix(worker))

    def restore(iterator) -> None:
        tf.train.Checkpoint(iterator=iterator).read(prefix).assert_consumed()

    return restore


def decode_python(text: bytes) -> dict[str, Any]:
    """Returns the Python state in a worker's file."""
    return plain_data.loads(text)
