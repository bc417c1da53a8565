"""What does one process of `verify_resume` do?"""

from __future__ import annotations

import hashlib
import importlib
import json
import pathlib
import sys
from typing import Any

import keras
import tensorflow as tf

from tfdist_ext import events
from tfdist_ext.checkpoint import plain_data
from tfdist_ext.checkpoint.manager import TrainingCheckpointManager
from tfdist_ext.checkpoint.save_policies import EverySteps

_NEVER = EverySteps(2**31)


class _EnoughSteps(Exception):
    """Leaves the loop; it is caught in this file."""


class _Records:
    """What a run read and logged, and when it is to end."""

    def __init__(self):
        self.rows: list[Any] = []
        self.logs: list[Any] = []

    def read(self, batch) -> None:
        """Notes a batch that a loop has taken."""
        digest = hashlib.sha256()
        for tensor in tf.nest.flatten(batch, expand_composites=True):
            digest.update(plain_data.dumps(tensor.numpy() if hasattr(tensor, "numpy") else tensor))
        self.rows.append(digest.hexdigest()[:16])

    def heard(self, name: str, fields) -> None:
        """Notes the batches of an update on parameter servers."""
        if name == "step_applied":
            self.rows.append([[*batch] for applied in fields["sets"] for batch in applied.batches])


class _Recorder(keras.callbacks.Callback):
    """Writes the logs of `fit` down; it has no state that a checkpoint should keep."""

    def __init__(self, records: _Records):
        super().__init__()
        self._logs = records.logs

    def state_dict(self) -> dict:
        return {}

    def load_state_dict(self, state: dict) -> None:
        del state

    def on_train_batch_end(self, batch, logs=None):
        self._logs.append({"batch": batch, **_numbers(logs)})

    def on_epoch_end(self, epoch, logs=None):
        self._logs[-1]["epoch"] = {"number": epoch, **_numbers(logs)}


class _CutManager(TrainingCheckpointManager):
    """Ends the run at a step, after saving if so told."""

    last_step = 0
    saves_last = False

    def save_if_due(self, step, metrics=None):
        """Counts a step."""
        super().save_if_due(step, metrics)
        self._end_at(step)
        return False

    def save(self, step=None, metrics=None, *, wait=False):
        """Counts the last step of an epoch."""
        self._end_at(self.state.step if step is None else step)

    def _end_at(self, step: int) -> None:
        if step >= self.last_step:
            if self.saves_last:
                super().save(step, wait=True)
            raise _EnoughSteps


def main() -> None:
    """Runs one worker of one run, and writes what it saw."""
    job = json.loads(sys.argv[1])
    module, function = job["make_state"].split(":")
    made = getattr(importlib.import_module(module), function)()
    state, train = made if isinstance(made, tuple) else (made, None)
    records = _Records()
    events.subscribe(records.heard)
    directory = pathlib.Path(job["folder"], "whole" if job["run"] == "whole" else "cut")
    checkpoints = _CutManager(state, directory, save=_NEVER, stop_on_sigterm=False)
    checkpoints.last_step = job["k"] if job["run"] == "first" else job["k"] + job["n"]
    checkpoints.saves_last = job["run"] == "first"
    if state.position is not None:
        state.position.observers.append(records.read)
    try:
        if train is not None:
            train(state, checkpoints)
        else:
            _fit(state, checkpoints, records, job["fit"])
    except _EnoughSteps:
        pass
    result = {"rows": records.rows, "logs": records.logs, "state": _final(state)}
    name = f"{job['run']}-{job['worker']}.json"
    pathlib.Path(job["folder"], name).write_bytes(plain_data.dumps(result))


def _fit(state, checkpoints, records: _Records, arguments) -> None:
    arguments = {"epochs": 1000, "verbose": 0, **arguments}
    state.model.fit(state.dataset, callbacks=[checkpoints.keras_callback(), _Recorder(records)], **arguments)


def _final(state) -> dict[str, Any]:
    """Returns all state by name."""
    final = {
        f"{entry.key.removesuffix('/.ATTRIBUTES/VARIABLE_VALUE')} {entry.slice_spec}".strip(): entry.tensor.numpy()
        for entry in state.variables().snapshot().entries
    }
    python = state.python_state()
    position = python.pop("input") or {}
    final |= {f"input/{name}": value for name, value in position.items()}
    final |= {name: value for name, value in python.items() if name != "callbacks"}
    for name, callback in (python["callbacks"] or {}).items():
        final |= {f"callbacks/{name}/{key}": value for key, value in callback["state"].items()}
    return final


def _numbers(logs) -> dict[str, float]:
    return {name: float(value) for name, value in (logs or {}).items()}


if __name__ == "__main__":
    main()
