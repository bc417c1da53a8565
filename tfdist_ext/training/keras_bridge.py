"""Where does Keras meet our strategies?

`install()` replaces a few methods of Keras by ones that ask whether the model belongs to a strategy of this
package, and otherwise do exactly what they did. It is called once, when the first strategy is imported.
"""

from __future__ import annotations

import contextlib
import functools
import inspect

import keras
import tensorflow as tf
from absl import logging

from tfdist_ext import compat
from tfdist_ext.strategies import frame as frames
from tfdist_ext.strategies import groups
from tfdist_ext.strategies.synchronous_strategy import SynchronousStrategy
from tfdist_ext.training import (
    agreement,
    batching,
    belonging,
    building,
    losses,
    optimizers,
    replica_collectives,
    row_states,
    saving,
    unread_logs,
    without_chance,
    worker_functions,
)
from tfdist_ext.training import embedding_rows as rows_of_embeddings
from tfdist_ext.training import parameter_server_bridge as parameter_servers
from tfdist_ext.training.predict_step import PredictStep
from tfdist_ext.training.step import TestStep, TrainStep

_installed = False
# Weyl sequence: slots get seeds far apart. Slot 0 keeps the one device's.
_GOLDEN_RATIO = 0x9E3779B9


def strategy_of(model):
    """Returns the strategy of this package under whose scope the model was made, or None."""
    strategy = getattr(model, "_distribute_strategy", None)
    return strategy if isinstance(strategy, SynchronousStrategy) else None


def install() -> None:
    """Replaces the seams of Keras; calling it again does nothing."""
    global _installed
    if _installed:
        return
    _installed = True
    trainer = compat.TensorFlowTrainer
    for name in (
        "make_train_function",
        "make_test_function",
        "make_predict_function",
        "_maybe_symbolic_build",
    ):
        _replace(trainer, name, _MAKERS[name])
    for name in ("fit", "evaluate", "predict", "train_on_batch", "test_on_batch", "predict_on_batch"):
        _replace(trainer, name, _translating)
    for name in ("save", "save_weights"):
        _replace(keras.Model, name, lambda original: saving.atomically(original, strategy_of))
    _replace(trainer, "compile", _compile)
    optimizers.install()
    _replace(keras.random.SeedGenerator, "next", _next_seed)
    for name, make in replica_collectives.REPLACEMENTS.items():
        _replace(tf.distribute.ReplicaContext, name, make)
    compat.let_keras_variables_be_sharded()
    iterator = compat.KerasEpochIterator
    iterator._enumerate_iterator = parameter_servers.enumerate_steps(iterator._enumerate_iterator)
    iterator.num_batches = parameter_servers.num_batches(iterator.num_batches)
    _replace(keras.layers.Embedding, "call", rows_of_embeddings.look_up)
    _replace(keras.callbacks.CallbackList, "on_train_batch_end", unread_logs.tell_only_listeners)
    _replace(keras.metrics.Metric, "add_variable", building.add_variable)
    losses.install()
    without_chance.install()
    agreement.install()


def _replace(owner, name: str, make) -> None:
    original = getattr(owner, name)
    replacement = make(original)
    functools.update_wrapper(replacement, original)
    # Where it is defined: Keras asks whether a model's class overrides what its base class has.
    definer = next(kind for kind in owner.__mro__ if name in vars(kind))
    setattr(definer, name, replacement)


def _make_train_function(original):
    def make_train_function(self, force=False):
        servers = parameter_servers.strategy_of(self)
        if servers is not None and (self.train_function is None or force):
            self.train_function = worker_functions.TrainFunction(self, servers)
            return None
        strategy = strategy_of(self)
        if strategy is None or (self.train_function is not None and not force):
            return original(self, force)
        agreement.check_model(strategy, self)
        self.train_function = self._make_function(TrainStep(self))
        return None

    return make_train_function


def _make_test_function(original):
    def make_test_function(self, force=False):
        servers = parameter_servers.strategy_of(self)
        if servers is not None and (self.test_function is None or force):
            self.test_function = worker_functions.TestFunction(self, servers)
            return None
        if strategy_of(self) is None or (self.test_function is not None and not force):
            return original(self, force)
        self.test_function = self._make_function(TestStep(self))
        return None

    return make_test_function


def _make_predict_function(original):
    def make_predict_function(self, force=False):
        servers = parameter_servers.strategy_of(self)
        if servers is not None and (self.predict_function is None or force):
            self.predict_function = worker_functions.PredictFunction(self, servers)
            return None
        strategy = strategy_of(self)
        if strategy is None or (self.predict_function is not None and not force):
            return original(self, force)
        row_states.check(self, strategy)
        step = PredictStep(self)
        predict_one = self._autoconvert_optionals(lambda data: strategy.run(step, args=(data,)))

        @tf.autograph.experimental.do_not_convert
        def predict_batches(data):
            outputs = [predict_one(batch) for batch in data]
            if len(outputs) == 1:
                return outputs[0]
            return keras.tree.map_structure(lambda *parts: tf.concat(parts, axis=0), *outputs)

        if not self.run_eagerly:
            predict_batches = tf.function(predict_batches, reduce_retracing=True)
        self.predict_function = predict_batches
        return None

    return make_predict_function


def _maybe_symbolic_build(original):
    def build_from_specs(self, iterator=None, data_batch=None):
        servers = parameter_servers.strategy_of(self)
        if servers is not None:
            return parameter_servers.build(self, servers, iterator, data_batch)
        strategy = strategy_of(self)
        if strategy is None:
            return original(self, iterator=iterator, data_batch=data_batch)
        row_states.check(self, strategy)
        if iterator is not None:
            # Keras would draw a batch here; a dataset that reshuffles would then start one epoch late.
            specs = iterator._distributed_dataset
            specs = getattr(specs, "batch_spec", None) or specs.element_spec
            batching.check_batched(self, specs)
            data_batch = specs
        building.build(self, strategy, data_batch)
        return None

    return build_from_specs


def _compile(original):
    def compile_checked(self, *args, **kwargs):
        belonging.check_scope(self, "compile")
        servers = parameter_servers.strategy_of(self)
        if servers is not None:
            with servers.scope():
                original(self, *args, **kwargs)
            belonging.check_compiled(self)
            parameter_servers.check_compiled(self)
            return
        strategy = strategy_of(self)
        if strategy is None:
            original(self, *args, **kwargs)
            return
        with strategy.scope():
            # What is given by name is then made here, wherever the user calls `compile`.
            original(self, *args, **kwargs)
        belonging.check_compiled(self)
        if self.jit_compile is True and strategy.num_replicas_in_sync > 1:
            # XLA can neither communicate between hosts nor share variables between CPU devices.
            logging.log_first_n(
                logging.WARNING, "`jit_compile=True` has no effect on %d replicas: steps run without XLA.", 1,
                strategy.num_replicas_in_sync,
            )  # fmt: skip
            self.jit_compile = False

    return compile_checked


def _translating(original):
    def translated(self, *args, **kwargs):
        belonging.check_scope(self, original.__name__)
        given = inspect.signature(original).bind_partial(self, *args, **kwargs).arguments
        belonging.check_data(self, *(given.get(name) for name in ("x", "validation_data", "class_weight")))
        if parameter_servers.strategy_of(self) is not None:
            with parameter_servers.running(original.__name__, self):
                return original(self, *args, **kwargs)
        strategy = strategy_of(self)
        if strategy is None:
            _warn_of_lone_model(self)
            with groups.in_use(None):
                return original(self, *args, **kwargs)
        with (
            groups.in_use(strategy.extended.process_group),
            strategy.translating_failures(),
            _whole_metrics(self),
        ):
            return original(self, *args, **kwargs)

    return translated


def _warn_of_lone_model(model) -> None:
    if groups.is_in_a_group():
        logging.log_first_n(
            logging.WARNING,
            "Model `%s` belongs to no strategy: each worker runs it alone, on all of the data. Build it inside `with "
            "strategy.scope():` if it should be distributed.",
            1,
            model.name,
        )


@contextlib.contextmanager
def _whole_metrics(model):
    """Has metrics to which a custom loop adds hold the whole value while Keras' own loops run."""
    shared = [v.value for v in model.metrics_variables if getattr(v.value, "holds_parts", False)]
    for variable in shared:
        variable.become_whole()
    try:
        yield
    finally:
        # The loop's traced function goes on adding to parts.
        for variable in shared:
            variable.become_parts()


def _next_seed(original):
    """Gives each slot a stream of its own; the state stays what it is on one device, the same everywhere."""

    def next_seed(self, ordered=True):
        seed = original(self, ordered)
        frame = frames.current_frame()
        if frame is not None and frame.draw is not None:
            frame.drew = True
            offset = tf.cast((frame.draw * _GOLDEN_RATIO) % 2**31, seed.dtype)
            return seed + tf.stack([offset, tf.zeros_like(offset)])
        slot = 0 if frame is not None and frame.trial is not None else _slot_of_this_replica()
        if not slot:
            return seed
        offset = (slot * _GOLDEN_RATIO) % 2**31
        return seed + tf.constant([offset, 0], seed.dtype)

    return next_seed


def _slot_of_this_replica() -> int:
    frame = frames.current_frame()
    if frame is not None:
        return frame.slot
    context = tf.distribute.get_replica_context()
    if context is None or not isinstance(context.strategy, SynchronousStrategy):
        return 0
    return context.strategy.extended.slot_of_local_replica(context._replica_id)


_MAKERS = {
    "make_train_function": _make_train_function,
    "make_test_function": _make_test_function,
    "make_predict_function": _make_predict_function,
    "_maybe_symbolic_build": _maybe_symbolic_build,
}
