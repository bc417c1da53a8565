"""Was a run stopped by a failure, and which of its checkpoints may the next start go on from?

A `fit` that a callback stops because the loss is not finite has not ended: what it has made is no result. Nothing is
saved of it, and what was saved since its weights went wrong is set aside under a name that no reader takes for a
checkpoint.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf
from absl import logging

from tfdist_ext.checkpoint.directory import CheckpointDirectory
from tfdist_ext.checkpoint.save_part import SHARED

# Other metrics may be what they like.
_LOSSES = ("loss", "val_loss")


def why_failed(model, logs: Mapping[str, Any] | None) -> str | None:
    """Returns what is not finite when training was stopped; None if nothing is.

    Args:
        model: Keras model.
        logs: Of the epoch.
    """
    for name in _LOSSES:
        value = (logs or {}).get(name)
        if value is not None and not np.all(np.isfinite(value)):
            return f"{name} is {float(value)}"
    return weights_not_finite(model)


def weights_not_finite(model) -> str | None:
    """Returns that a trained variable is not finite, with its path; None if all are."""
    for variable in model.trainable_variables:
        if not _is_finite(variable.numpy()):
            return f"{variable.path} is not finite"
    return None


def set_aside(state, participants, directory: CheckpointDirectory) -> tuple[list[int], int | None]:
    """Sets the newest checkpoints aside, down to the first whose trained variables are finite.

    Runs on: every worker, when nothing is being written.

    Args:
        state: `TrainingState`.
        participants: Who saves together.
        directory: Where.

    Returns:
        Steps that were set aside, and the step that the next start goes on from, or None.
    """
    moved, left = [], None
    if participants.index == 0:
        keys = state.variables().keys_of(state.model.trainable_variables)
        for record in directory.newest_first():
            if record.manifest is None:
                continue
            if _holds_finite(os.path.join(record.path, SHARED), keys):
                left = record.step
                break
            directory.set_aside(record)
            moved.append(record.step)
    moved, left = participants.gather([moved, left], "checkpoints set aside", stream="commit")[0]
    return moved, left


def warn(step: int, reason: str, moved: list[int], left: int | None, directory: str) -> None:
    """Says what a failure has left."""
    goes_on = "from the beginning" if left is None else f"from step {left}, the newest finite checkpoint"
    aside = (
        f" What was saved at step {', '.join(map(str, moved))} is not finite, and set aside." if moved else ""
    )
    logging.warning(
        "Training was stopped at step %d by a failure, %s: it is not complete, and nothing of it was saved in %s.%s "
        "Mend the cause; started again, training goes on %s.",
        step,
        reason,
        directory,
        aside,
        goes_on,
    )


def _holds_finite(prefix: str, keys: list[str]) -> bool:
    reader = tf.train.load_checkpoint(prefix)
    there = reader.get_variable_to_shape_map()
    return all(_is_finite(reader.get_tensor(key)) for key in keys if key in there)


def _is_finite(array: Any) -> bool:
    array = np.asarray(array)
    # NumPy knows of the small floats of machine learning only by way of another type.
    return array.dtype.kind in "biuSO" or bool(
        np.all(np.isfinite(array.astype(np.result_type(array, np.float32))))
    )
