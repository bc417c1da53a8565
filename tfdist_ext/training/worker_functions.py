"""What takes the place of Keras' train, test and predict functions, and has workers do their work?"""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from tfdist_ext.data.worker_dataset import WorkerDataset, WorkerIterator
from tfdist_ext.ps import Asynchronous, ResumableLedger, Synchronous
from tfdist_ext.training import batching, step_trial
from tfdist_ext.training.ordered_reader import OrderedReader
from tfdist_ext.training.predict_program import PredictProgram
from tfdist_ext.training.set_driver import SetDriver
from tfdist_ext.training.set_program import SetProgram
from tfdist_ext.training.unread_logs import UnreadLogs
from tfdist_ext.training.worker_threads import WorkerThreads


def threads_of(strategy) -> WorkerThreads:
    """Returns the threads of the strategy's workers, started at first use and shared by all strategies."""
    if strategy._threads is None:
        strategy._threads = WorkerThreads.shared(strategy.specification, strategy.server_def)
    return strategy._threads


class TrainFunction:
    """Applies the next step of training; Keras calls it in place of its own train function."""

    def __init__(self, model, strategy):
        self._model, self._strategy = model, strategy
        self._driver: Any = None
        self._spec: Any = None

    def __call__(self, iterator):
        """Returns the logs of the next steps, or raises StopIteration."""
        if not isinstance(iterator, WorkerIterator):
            return self._train_on_batch(next(iter(iterator)))
        if iterator.source is None or not iterator.source.is_open_on(iterator):
            self._driver_for(iterator.element_spec).begin(iterator, iterator.max_steps)
            iterator.source = self._driver
        elif self._strategy._counts is not self._driver.counts:
            use_driver(self._strategy, self._driver)  # Another model was trained in the meantime.
        read = None
        for _ in range(self._model.steps_per_execution):
            following = self._driver.next_outputs()
            if following is None:
                break
            read = following
        if read is None:
            raise StopIteration
        return UnreadLogs(read) if self._driver.logs_are_named else read()

    def _train_on_batch(self, batch):
        data = _single_batch(batch, self._strategy)
        driver = self._driver_for(data.element_spec)
        driver.begin(data, None)
        try:
            return driver.next_step()
        finally:
            driver.close()

    def _driver_for(self, spec) -> SetDriver:
        if self._driver is None:
            self._driver = self._new_driver(spec)
        elif not _same_spec(spec, self._spec):
            self._driver.use_program(_train_program(self._model, self._strategy, spec))
        self._spec = spec
        use_driver(self._strategy, self._driver)
        return self._driver

    def _new_driver(self, spec) -> SetDriver:
        program = _train_program(self._model, self._strategy, spec)
        return new_driver(self._strategy, program, int(self._model.optimizer.iterations.numpy()))


def new_driver(strategy, program: SetProgram, version: int) -> SetDriver:
    """Returns what trains with a program under the strategy's policy.

    Args:
        strategy: `ParameterServerStrategy`.
        program: The traced step.
        version: Updates that were applied before.
    """

    def make_ledger(version):
        return ResumableLedger(
            strategy.update_policy, strategy.num_workers, too_few_workers=strategy.too_few_workers,
            requeue_dropped=strategy.requeue_dropped, fetch_every_steps=strategy.fetch_every_steps,
            push_every_steps=strategy.push_every_steps, version=version,
        )  # fmt: skip

    return SetDriver(
        threads_of(strategy), program, make_ledger, version, strategy.worker_timeout_seconds,
        strategy.patience_seconds,
    )  # fmt: skip


def use_driver(strategy, driver: SetDriver) -> None:
    """Makes a driver the one that trains under a strategy; one that goes on from a checkpoint gets its books."""
    if strategy.training_books.has_restored:
        driver.close()
    # The strategy outlives the model, which the driver holds.
    strategy._counts = driver.counts
    strategy.training_books.attach(driver.ledger, driver.lock)


def _train_program(model, strategy, spec) -> SetProgram:
    options = training_options(strategy)
    if options["round_size"] > 1 and step_trial.is_users_own(model, "train_step"):
        options["verdict"] = step_trial.verdict_of(strategy, model, model.train_step, spec)
    return SetProgram(
        strategy, model.train_step, spec, [*model.variables, *model.metrics_variables], model.metrics,
        trains=True, **options,
    )  # fmt: skip


def training_options(strategy) -> dict:
    """Returns the keyword arguments of a `SetProgram` that follow from the strategy."""
    policy = strategy.update_policy
    always_admitted = isinstance(policy, Asynchronous) or (
        isinstance(policy, Synchronous) and policy.num_backup_workers == 0
    )
    return {
        "pushes": always_admitted and strategy.push_every_steps == 1,
        "caches": strategy.fetch_every_steps > 1 or strategy.push_every_steps > 1,
        "compensation": strategy.delay_compensation,
        "round_size": strategy.num_workers - policy.num_backup_workers
        if isinstance(policy, Synchronous)
        else 1,
    }


class TestFunction:
    """Adds the next batch to the metrics, in the order of the data."""

    __test__ = False  # Not a test class, whatever pytest thinks of its name.

    def __init__(self, model, strategy):
        self._model, self._strategy = model, strategy
        self._program: Any = None
        self._spec: Any = None

    def __call__(self, iterator):
        """Returns the logs after the next batches, or raises StopIteration."""
        if not isinstance(iterator, WorkerIterator):
            data = _single_batch(next(iter(iterator)), self._strategy)
            reader = self._reader(data)
            try:
                return self._add(reader.next_result())
            finally:
                reader.close()
        if iterator.source is None:
            iterator.source = self._reader(iterator)
        logs = self._add(iterator.source.next_result())
        for _ in range(self._model.steps_per_execution - 1):
            if not iterator.source.has_next():
                break
            logs = self._add(iterator.source.next_result())
        return logs

    def _reader(self, data) -> OrderedReader:
        if self._program is None or not _same_spec(data.element_spec, self._spec):
            self._spec = data.element_spec
            _build_layers(self._model, self._strategy, self._spec)
            variables = [*self._model.variables, *self._model.metrics_variables]
            self._program = SetProgram(
                self._strategy, self._model.test_step, self._spec, variables, self._model.metrics, trains=False,
                pushes=True,
            )  # fmt: skip
        program = self._program

        def compute(worker, data_or_iterator):
            from_iterator = isinstance(data_or_iterator, tf.data.Iterator)
            function = program.compute_next if from_iterator else program.compute_batch
            _, wires, _ = program.divide(function(data_or_iterator, [], worker.constant(0), []))
            return wires

        program.trace(data.feed is not None)
        strategy = self._strategy
        return OrderedReader(
            threads_of(strategy), data, compute, strategy.worker_timeout_seconds, strategy.patience_seconds
        )

    def _add(self, wires):
        program, factor = self._program, tf.constant(1.0)
        with tf.device("/job:ps/replica:0/task:0/device:CPU:0"):
            outputs = program.commit(1, True, False)(factor, [wires])
        return program.logs.read(outputs)


class PredictFunction:
    """Returns the outputs for the next batches, in the order of the data."""

    def __init__(self, model, strategy):
        self._model, self._strategy = model, strategy
        self._program: Any = None
        self._spec: Any = None

    def __call__(self, data):
        """Returns the outputs for a list of batches, joined."""
        parts = [self._outputs(one) for one in data]
        if len(parts) == 1:
            return parts[0]
        return keras.tree.map_structure(lambda *some: tf.concat(some, axis=0), *parts)

    def _outputs(self, batch):
        if isinstance(batch, PredictedBatch):
            return batch.outputs
        data = _single_batch(batch, self._strategy)
        reader = self.reader(data)
        try:
            return self.packed(reader.next_result())
        finally:
            reader.close()

    def packed(self, flat):
        """Returns flat arrays as the structure that `predict_step` returned."""
        return tf.nest.pack_sequence_as(self._program.structure, [tf.constant(array) for array in flat])

    def reader(self, data) -> OrderedReader:
        """Starts predicting a pass over the data."""
        if self._program is None or not _same_spec(data.element_spec, self._spec):
            self._spec = data.element_spec
            _build_layers(self._model, self._strategy, self._spec)
            self._program = PredictProgram(self._model, self._spec, self._strategy.wire_dtype)
        program = self._program

        def compute(worker, data_or_iterator):
            from_iterator = isinstance(data_or_iterator, tf.data.Iterator)
            function = program.compute_next if from_iterator else program.compute_batch
            return [tensor.numpy() for tensor in function(data_or_iterator)]

        program.trace(data.feed is not None)
        strategy = self._strategy
        return OrderedReader(
            threads_of(strategy), data, compute, strategy.worker_timeout_seconds, strategy.patience_seconds
        )


class PredictedBatch:
    """A batch of `predict` whose outputs are there already."""

    def __init__(self, outputs):
        self.outputs = outputs


def _build_layers(model, strategy, spec) -> None:
    """Makes the variables of a model that was never called: in a graph of a worker none can be made."""
    if not all(layer.built for layer in model._flatten_layers()):
        rows, *_ = keras.utils.unpack_x_y_sample_weight(
            keras.tree.map_structure(batching.symbolic_rows, spec)
        )
        with strategy.scope():
            model(rows)


def _same_spec(one, other) -> bool:
    return tf.nest.flatten(one) == tf.nest.flatten(other)


def _single_batch(batch, strategy) -> WorkerIterator:
    """Returns one pass over one batch that the chief has, for `train_on_batch` and its like."""
    batch = keras.tree.map_structure(_tensor_or_optional, batch)
    spec = keras.tree.map_structure(_spec_of_rows, batch)
    data = WorkerDataset([[batch]], spec, strategy.num_workers, None, False, "it is a single batch")
    data.lengths = [1] + [0] * (strategy.num_workers - 1)
    return iter(data)


def _tensor_or_optional(leaf):
    if leaf is None:
        return tf.experimental.Optional.empty(None)
    return leaf if isinstance(leaf, (tf.RaggedTensor, tf.SparseTensor)) else tf.convert_to_tensor(leaf)


def _spec_of_rows(leaf):
    if isinstance(leaf, tf.Tensor) and leaf.shape.rank:
        return tf.TensorSpec([None, *leaf.shape[1:]], leaf.dtype)
    return tf.type_spec_from_value(leaf)
