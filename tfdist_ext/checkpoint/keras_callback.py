"""How does `fit` save, and go on in the middle of an epoch after a crash?

Keras knows nothing of a first step within an epoch, and calls the callbacks one after another. So the work is done
at moments when no callback, or all of them, have had their say: before and after `on_train_begin`, between two steps,
and after `on_epoch_end`. The order of callbacks then makes no difference.
"""

from __future__ import annotations

from typing import Any

import keras
from absl import logging

from tfdist_ext import compat
from tfdist_ext.checkpoint.callback_states import CallbackStates
from tfdist_ext.checkpoint.epoch_reading import EpochReading, opener
from tfdist_ext.checkpoint.failed_runs import weights_not_finite, why_failed
from tfdist_ext.checkpoint.held_state import HeldState
from tfdist_ext.checkpoint.keep_policies import BestN, KeepUnion
from tfdist_ext.checkpoint.restoring import Restored

_installed = False


def _install() -> None:
    global _installed
    if not _installed:
        _installed = True
        compat.watch_epochs(opener, lambda position: position.reading)
        compat.call_around_callbacks("on_train_begin", before="before_train_begin", after="after_train_begin")
        compat.call_around_callbacks("on_train_batch_end", after="after_train_batch_end")
        compat.call_around_callbacks("on_epoch_end", after="after_epoch_end")
        compat.call_around_callbacks("on_train_end", after="after_train_end")


class CheckpointCallback(keras.callbacks.Callback):
    """Restores at the beginning of `fit`, and saves between steps and at the ends of epochs.

    Made by `TrainingCheckpointManager.keras_callback()`. A program that calls `fit` several times may use it in all of
    them: started again after a crash, it passes over those that were done.

    Args:
        manager: `TrainingCheckpointManager`.
    """

    def __init__(self, manager):
        super().__init__()
        _install()
        self._manager = manager
        self._reading: Any = None
        self._restored: Restored | None = None
        self._has_restored = False
        self._held: HeldState | None = None
        self._undo: Any = None
        self._saves_each_epoch = _needs_metrics(manager.keep_policy)

    # --- begin -----------------------------------------------------------------------------------------------------
    def before_train_begin(self, callbacks, logs=None):
        """Restores the newest intact checkpoint, once in a process, unless the program has restored one by itself."""
        state = self._manager.state
        _require_same_model(state, self.model)
        _require_dataset(state)
        state.fit += 1
        fit = state.fit
        self._reading = state.position.reading = EpochReading(state.position, lambda: _applied(self.model))
        self._reading.on_step_end = self._after_step
        if not self._has_restored:
            self._has_restored = True
            self._restored = self._manager.begin_fit()
        state.fit = fit
        state.callbacks = CallbackStates(callbacks, own=[self], baselines=state.callback_baselines)
        if self._restored is not None and fit > self._restored.python["fit"]:
            self._restored = None
        if self._restored is not None:
            self._held = HeldState(state)

    def after_train_begin(self, callbacks, logs=None):
        """Goes to the place where training goes on, as if no `on_train_begin` had run."""
        state = self._manager.state
        state.callbacks.begun()
        if self._restored is not None:
            for note in self._put_back(self._restored):
                logging.warning("Restored step %d, but: %s.", self._restored.step, note)
            self._begin_restored(self._restored, state.fit)

    def _put_back(self, restored: Restored) -> list[str]:
        held, self._held = self._held, None
        if held is not None:
            held.put_back()
        if restored.python["fit"] == self._manager.state.fit:
            return self._manager.state.callbacks.load(restored.python["callbacks"] or {})
        return []

    def _begin_restored(self, restored: Restored, fit: int) -> None:
        python = restored.python
        if fit < python["fit"] or python["stopped"]:
            if python["stopped"] and fit == python["fit"] and (reason := weights_not_finite(self.model)):
                logging.warning(
                    "The run that saved step %d was stopped, and %s: that is no result. Remove %s to go on before it.",
                    python["step"],
                    reason,
                    restored.path,
                )
            # Done before the crash. Keras runs no epoch whose number is not below `epochs`.
            compat.set_first_epoch(self.model, self.params["epochs"])
            return
        if python["epoch"] >= self.params["epochs"]:
            logging.warning(
                "The checkpoint of step %d is the end of these %d epochs: nothing is left to train. Raise `epochs`, or "
                "choose another directory for a new run.",
                python["step"],
                self.params["epochs"],
            )
        compat.set_first_epoch(self.model, python["epoch"])
        self._reading.first_step = python["batch"]
        self._reading.batches_of_pass = python["batches_of_pass"]
        if python["batch"]:
            self._held = HeldState(self._manager.state)
            self._reading.on_begin = lambda: self._begin_within_epoch(restored)

    def _begin_within_epoch(self, restored: Restored) -> None:
        """Undoes what `reset_metrics` and the `on_epoch_begin` of an epoch that goes on have changed."""
        self._reading.on_begin = None
        self._put_back(restored)
        self._undo = compat.show_metrics_without_steps(self.model)

    # --- steps and epochs --------------------------------------------------------------------------------------------
    def on_epoch_begin(self, epoch, logs=None):
        """Notes the epoch."""
        state = self._manager.state
        compat.set_first_epoch(self.model, 0)
        state.epoch, state.batch = epoch, self._reading.first_step
        if self._restored is not None and not self._reading.first_step:
            self._restored = None

    def after_train_batch_end(self, callbacks, batch, logs=None):
        """Notes that a step was done; at the end of data of unknown length Keras begins one that is not."""
        self._reading.step_ends()

    def _after_step(self, num_steps: int) -> None:
        """Saves between two steps; at the last step of an epoch, when the epoch has ended."""
        state, self._restored = self._manager.state, None
        state.batch = self._reading.step
        step = state.step + num_steps
        if self.params.get("steps") is not None and state.batch >= self.params["steps"]:
            state.step = step
            return
        self._manager.save_if_due(step)

    def after_epoch_end(self, callbacks, epoch, logs=None):
        """Saves if that is due; always at the last epoch, and at each where the best are kept, but no failure."""
        state = self._manager.state
        if self._undo is not None:
            self._undo = self._undo()
        if not self._reading.has_begun:
            raise ValueError(
                "`fit` does not read the dataset of the TrainingState, so that its position cannot be saved. Pass "
                "`state.dataset` to `fit`."
            )
        state.step += self._reading.take_untold_steps()
        state.epoch, state.batch = epoch + 1, 0
        stopped = self.model.stop_training
        reason = why_failed(self.model, logs) if stopped else None
        last = epoch + 1 >= self.params["epochs"] or stopped
        if reason is not None:
            self._manager.failed(reason)
        elif last or self._saves_each_epoch:
            self._manager.save(state.step, logs)
        else:
            self._manager.save_if_due(state.step, logs)
        self._manager.interrupted()

    def after_train_end(self, callbacks, logs=None):
        """Waits for the last save, and ends the process if it was asked to."""
        compat.set_first_epoch(self.model, 0)
        state = self._manager.state
        state.position.reading = None
        state.callbacks = None
        self._manager.end_fit()


def _applied(model) -> int | None:
    iterations = getattr(model.optimizer, "iterations", None)
    return None if iterations is None else int(iterations.numpy())


def _needs_metrics(policy) -> bool:
    return isinstance(policy, BestN) or (
        isinstance(policy, KeepUnion) and any(map(_needs_metrics, policy.policies))
    )


def _require_same_model(state, model) -> None:
    if state.model is not model:
        raise ValueError(
            "The callback's TrainingState is of another model than the one that `fit` trains. Make it with "
            "`TrainingState(model=model, dataset=...)`."
        )


def _require_dataset(state) -> None:
    if state.position is None:
        raise ValueError(
            "`fit` cannot go on within an epoch without knowing what it read. Give the dataset to TrainingState and "
            "`state.dataset` to `fit`."
        )
