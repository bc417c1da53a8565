"""What do `fit`, `evaluate` and `predict` do under a ParameterServerStrategy?

Keras' own loops, callbacks and progress bar stay. Their train, test and predict functions are replaced by ones that
take the next step from the workers, and an epoch ends when nothing of it is left to apply.
"""

from __future__ import annotations

import contextlib
import gc
import math
import sys
import threading
from typing import Any

import keras
import tensorflow as tf
from absl import logging

from tfdist_ext.data.worker_dataset import WorkerDataset, WorkerIterator
from tfdist_ext.ps import BoundedStaleness, Synchronous
from tfdist_ext.strategies.parameter_server import ParameterServerStrategy
from tfdist_ext.training import batching, pulled, row_update
from tfdist_ext.training.reading import leases_of
from tfdist_ext.training.worker_functions import PredictedBatch, threads_of


class _Mode(threading.local):
    """What Keras' loop on this thread is doing: "fit", "evaluate" or "predict"."""

    name = "fit"
    model: Any = None


_mode = _Mode()


def strategy_of(model) -> ParameterServerStrategy | None:
    """Returns the parameter-server strategy whose workers train a model; None for other models, and on an evaluator."""
    strategy = getattr(model, "_distribute_strategy", None)
    return strategy if isinstance(strategy, ParameterServerStrategy) and not strategy.runs_alone else None


@contextlib.contextmanager
def running(name: str, model):
    """Notes which of Keras' loops runs; `evaluate` inside `fit` is the inner one."""
    before = _mode.name, _mode.model
    _mode.name, _mode.model = name, model
    try:
        yield
    except tf.errors.OpError as error:
        lost_ps = threads_of(strategy_of(model)).lost_ps(error)
        if lost_ps is not None:
            raise lost_ps from error
        raise
    finally:
        _mode.name, _mode.model = before


# --- epochs -------------------------------------------------------------------------------------------------------
def enumerate_steps(original):
    """Returns Keras' enumeration of the steps of an epoch, for datasets that workers read."""

    def enumerate_iterator(self):
        if not isinstance(self._distributed_dataset, WorkerDataset):
            yield from original(self)
            return
        self.data_adapter.on_epoch_begin()
        data = self._current_iterator
        goes_on = data is not None and self.steps_per_epoch and data.leases_state() is not None
        if not (goes_on and leases_of(data).has_unread):
            data = self._current_iterator = iter(self._get_iterator())
        # A checkpoint may have been saved within the epoch.
        first = getattr(self, "first_step", 0)
        data.max_steps = None if self.steps_per_epoch is None else self.steps_per_epoch - first
        data.next_for_keras = _next_predicted if _mode.name == "predict" else None
        step = first
        try:
            while self.steps_per_epoch is None or step < self.steps_per_epoch:
                if step > first and not data.source.has_next(data):
                    break
                yield step, step + self.steps_per_execution - 1, data
                step += self.steps_per_execution
        finally:
            if data.source is not None:
                data.source.close(data)
        if self.steps_per_epoch and step < self.steps_per_epoch:
            self._interrupted_warning()
        if not self.steps_per_epoch and (self.data_adapter.num_batches or self._num_batches):
            # Keras opens an iterator here that it never reads. A dataset that reshuffles counts it.
            iter(self._get_iterator())
        self._num_batches = self._num_batches or step
        self.data_adapter.on_epoch_end()

    return enumerate_iterator


def num_batches(original: property) -> property:
    """Returns the property that tells the progress bar how many steps an epoch has, None where nobody knows."""

    def count(self):
        data = getattr(self, "_distributed_dataset", None)
        if not isinstance(data, WorkerDataset):
            return original.fget(self)  # type: ignore[misc]
        if self.steps_per_epoch:
            return self.steps_per_epoch
        return data.num_batches if _mode.name != "fit" else _num_steps(data, data.strategy)

    return property(count)


def _num_steps(data: WorkerDataset, strategy) -> int | None:
    if data.num_batches is None:
        return None
    policy, push = strategy.update_policy, strategy.push_every_steps
    if isinstance(policy, Synchronous):
        return max(data.lengths) if policy.num_backup_workers == 0 else None
    drops = isinstance(policy, BoundedStaleness) and policy.late == "drop" and not strategy.requeue_dropped
    return None if drops else sum(math.ceil(length / push) for length in data.lengths)


def _next_predicted(data: WorkerIterator):
    """Returns what Keras' `predict` gets for `next(iterator)`.

    Raises:
        StopIteration: The data have ended.
    """
    function = _mode.model.predict_function
    if data.source is None:
        data.source = function.reader(data)
    return PredictedBatch(function.packed(data.source.next_result()))


# --- what Keras calls on the model ---------------------------------------------------------------------------------
def build(model, strategy, iterator, data_batch) -> None:
    """Builds model and optimizer from the types of a batch, drawing none; variables are placed between the two."""
    if iterator is not None:
        specs = iterator._distributed_dataset.element_spec
        batching.check_batched(model, specs)
        data_batch = keras.tree.map_structure(batching.symbolic_rows, specs)
    optimizer = model.optimizer
    if optimizer is not None and not optimizer.built:
        _forget_functions(model)
    # Before Keras' own graph, which it throws away, captures them.
    known = {id(variable) for variable in model.variables if not _only_its_layer_knows(variable)}
    with contextlib.ExitStack() as stack:
        stack.enter_context(strategy.scope())
        if optimizer is not None and not optimizer.built:
            original = optimizer.build

            def build_beside(variables):
                place_variables(model, strategy, known)
                original(model.trainable_variables)

            stack.enter_context(row_update.replaced(optimizer, build=build_beside))
        model._symbolic_build(data_batch=data_batch)


def check_compiled(model) -> None:
    """Refuses what cannot run on workers, at `compile`."""
    if model.jit_compile is True:
        model.jit_compile = False
    if model.run_eagerly:
        raise ValueError(
            "`run_eagerly=True` cannot be combined with parameter servers: a worker runs traced functions only. "
            "Compile "
            "with `run_eagerly=False`; to debug a step, run it without the strategy."
        )


# --- building -----------------------------------------------------------------------------------------------------
def place_variables(model, strategy, known) -> None:
    """Moves a new model's variables to where largest-first puts them, before the optimizer makes slots beside them.

    Those that something may know already stay: a function that was traced, another model, a user who took the
    variable out of the layer.

    Args:
        model: The model, not trained yet.
        strategy: `ParameterServerStrategy`.
        known: Ids of the Keras variables that stay.
    """
    placer = strategy.extended.placer
    _name_variables(model, placer)
    if strategy.extended._num_ps == 1 or (model.optimizer is not None and model.optimizer.built):
        return
    unknown = [
        variable
        for variable in model.variables
        if id(variable) not in known and not pulled.is_sharded(variable) and variable.shape.num_elements() > 1
    ]
    moved = placer.place_largest_first([variable._value for variable in unknown])
    for variable in unknown:
        new = moved.get(variable._value._unique_id)
        if new is not None:
            variable._value = new
    if moved:
        logging.info("Moved %d variables of `%s` to place them largest first.", len(moved), model.name)


def _name_variables(model, placer) -> None:
    for variable in model.variables:
        for index, shard in enumerate(pulled.shards_of(variable)):
            placer.name(
                shard, f"{variable.path}/part_{index}" if pulled.is_sharded(variable) else variable.path
            )


def _forget_functions(model) -> None:
    """Drops the model's own functions that have captured variables, so that these may still move."""
    if model.test_function is not None or model.predict_function is not None:
        model.test_function = model.predict_function = None
        gc.collect()  # Graphs are cycles.


def _only_its_layer_knows(variable) -> bool:
    """Returns True where nobody holds the `tf.Variable` of a Keras variable, and no graph has captured it."""
    if pulled.is_sharded(variable):
        return False
    value = variable._value
    # Two of the references are those of this function and of the call of `getrefcount` itself. A graph that captures a
    # variable holds its handle.
    return sys.getrefcount(value) <= 3 and sys.getrefcount(value.handle) <= 2
