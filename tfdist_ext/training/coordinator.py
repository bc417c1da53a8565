"""How does a custom loop train under the strategy's update policy?

`schedule` asks for one more set, `join` applies until all that was asked for is applied or accounted for. What the
user writes is TensorFlow's own `ClusterCoordinator` loop.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf
from absl import logging

from tfdist_ext.data.worker_dataset import WorkerDataset, WorkerIterator
from tfdist_ext.training.scheduled_call import ScheduledCall
from tfdist_ext.training.set_program import SetProgram
from tfdist_ext.training.worker_functions import new_driver, threads_of, training_options, use_driver

_MANY_TRACES = 5


class RemoteValue:
    """What a scheduled step returned, once it is applied.

    Its value is on the parameter servers until `fetch` brings it to the chief.
    """

    def __init__(self, coordinator: ClusterCoordinator):
        self._coordinator = coordinator
        self._read: Any = None
        self._value: Any = None

    def fetch(self):
        """Waits until the step is applied, and returns its logs as NumPy values; None for a step that was dropped."""
        self._coordinator._advance_until(
            lambda: self._read is not None or not self._coordinator._is_pending(self)
        )
        if self._read is not None and self._value is None:
            self._value = self._read()
        return self._value


class PerWorkerIterator:
    """The iterators that all workers have over one dataset; goes into `schedule(args=...)`.

    Args:
        dataset: The dataset.
        position: Where a checkpoint's reading of it stands (`TrainingState.dataset` has it), or None.
    """

    def __init__(self, dataset: WorkerDataset, position=None):
        self.data: WorkerIterator = iter(dataset) if position is None else position.open(dataset)
        self._position = position

    def step_applied(self) -> None:
        """Counts a step for the checkpoint."""
        if self._position is not None:
            self._position.take()

    def __iter__(self):
        return self

    def __next__(self):
        raise RuntimeError(
            "The next batch is on a worker: call `next(iterator)` in the function you schedule."
        )


class PerWorkerDataset:
    """A dataset on all workers; `iter` of it goes into `schedule(args=...)`."""

    def __init__(self, dataset: WorkerDataset, position=None):
        self._dataset, self._position = dataset, position

    def __iter__(self):
        return PerWorkerIterator(self._dataset, self._position)


class _NextOnly:
    """Stands for the iterator while the step is traced: its next element is the batch of this step."""

    def __init__(self, batch):
        self._batch = batch
        self._is_taken = False

    def __iter__(self):
        return self

    def __next__(self):
        if self._is_taken:
            raise ValueError(
                "A scheduled step function takes one batch: call `next(iterator)` once in it. To sum the gradients of "
                "several batches use `push_every_steps`."
            )
        self._is_taken = True
        return self._batch

    get_next = __next__


class ClusterCoordinator:
    """Runs a custom training step on the workers, and applies its gradients as the strategy's policy says.

    Runs on: chief. The step function calls `next(iterator)` once, computes gradients with a `tf.GradientTape`, and
    applies them with `optimizer.apply_gradients(...)` once for each optimizer. It runs on a worker; gradients,
    metrics and whatever layers assign are applied on the ps when the policy admits them. `optimizer.iterations`
    counts what was applied.

    TensorFlow's own `tf.distribute.coordinator.ClusterCoordinator(strategy)` works as well; it applies without a
    policy.

    Args:
        strategy: A `tfdist_ext.ParameterServerStrategy`.

    Example:
        >>> coordinator = ClusterCoordinator(strategy)  # doctest: +SKIP
        >>> iterator = iter(coordinator.create_per_worker_dataset(dataset_fn))  # doctest: +SKIP
        >>> for _ in range(100):  # doctest: +SKIP
        ...     result = coordinator.schedule(step_fn, args=(iterator,))
        >>> coordinator.join()  # doctest: +SKIP
    """

    def __init__(self, strategy):
        self.strategy = strategy
        self._threads = threads_of(strategy)
        self._driver: Any = None
        self._running: ScheduledCall | None = None
        self._drivers: dict[Any, Any] = {}
        self._programs: dict[tuple, SetProgram] = {}
        self._pending: list[RemoteValue] = []
        self._num_scheduled = 0

    def create_per_worker_dataset(self, dataset) -> PerWorkerDataset:
        """Puts a dataset on every worker.

        Args:
            dataset: Function without arguments that returns a `tf.data.Dataset`, or a dataset: every worker reads
                all of it. What `strategy.experimental_distribute_dataset` or
                `strategy.distribute_datasets_from_function` returned is divided over the workers, each row once.
                `TrainingState.dataset` of any of them goes on where a checkpoint stood.
        """
        if callable(dataset) and not isinstance(dataset, tf.data.Dataset):
            dataset = dataset()
        position = getattr(dataset, "tfdist_position", None)
        if position is not None:
            dataset = position.plain
        if isinstance(dataset, WorkerDataset):
            return PerWorkerDataset(dataset, position)
        options = tf.data.Options()
        options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
        return PerWorkerDataset(
            WorkerDataset.from_dataset(dataset.with_options(options), self.strategy.num_workers), position
        )

    def schedule(self, fn, args=(), kwargs=None) -> RemoteValue:
        """Asks for one more step.

        Args:
            fn: Step function or `tf.function`.
            args: Its arguments, one of them a `PerWorkerIterator`. Tensors and NumPy arrays are inputs of the trace;
                with another Python value the step is traced anew, as a `tf.function` is. A `RemoteValue` is fetched. A
                step with other arguments than the one before begins when those before are applied.
            kwargs: Its keyword arguments.

        Returns:
            What it will have returned.

        Raises:
            Whatever made an earlier step fail.
        """
        call = ScheduledCall(fn, args, kwargs, PerWorkerIterator, RemoteValue)
        if not call.continues(self._running):
            self.join()
            self._start(fn, call)
        self._num_scheduled += 1
        self._driver.allow(1)
        value = RemoteValue(self)
        self._pending.append(value)
        return value

    def join(self) -> None:
        """Applies until every scheduled step is applied, or dropped and counted.

        Raises:
            tf.errors.OutOfRangeError: The data ended before as many steps as were scheduled.
        """
        self._advance_until(lambda: not self._pending)
        if self._driver is not None:
            self._driver.close()
        self._running = None

    def done(self) -> bool:
        """Returns True when nothing scheduled is left to apply; applies what is ready."""
        self._advance_until(lambda: not self._driver.is_ready() if self._driver else True)
        return not self._pending

    def fetch(self, values):
        """Returns a structure of `RemoteValue` objects as NumPy values; waits for their steps."""
        return tf.nest.map_structure(lambda v: v.fetch() if isinstance(v, RemoteValue) else v, values)

    def _is_pending(self, value: RemoteValue) -> bool:
        return any(value is other for other in self._pending)

    def _start(self, fn, call: ScheduledCall) -> None:
        program = self._programs.get(call.key)
        if program is None:
            program = self._programs[call.key] = SetProgram.of_function(
                self.strategy, call.step(_NextOnly), call.iterator.data.element_spec,
                argument_specs=call.input_specs, **training_options(self.strategy),
            )  # fmt: skip
            self._say_traces(fn)
        if fn not in self._drivers:
            self._drivers[fn] = new_driver(self.strategy, program, 0)
        self._driver = self._drivers[fn]
        self._driver.use_program(program, call.inputs)
        use_driver(self.strategy, self._driver)
        self._running = call
        self._driver.begin(call.iterator.data, 0)

    def _say_traces(self, fn) -> None:
        number = sum(key[0] is fn for key in self._programs)
        if number == _MANY_TRACES:
            logging.warning(
                "`%s` was traced %d times, for each other Python value among its arguments. Pass numbers that change "
                "as tensors or NumPy arrays.",
                getattr(fn, "__name__", fn),
                number,
            )

    def _advance_until(self, is_enough) -> None:
        while self._pending and not is_enough():
            step = self._driver.next_outputs()
            if step is None:
                dropped, self._pending = len(self._pending), []
                raise tf.errors.OutOfRangeError(
                    None, None, f"The data ended {dropped} steps before the last one that was scheduled."
                )
            self._pending.pop(0)._read = step
            if self._running is not None:
                self._running.iterator.step_applied()
