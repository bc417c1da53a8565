"""How are three ways to train a model raced on one cluster: our loop, TensorFlow's own, and Keras' `fit`?"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import keras
import tensorflow as tf

import tfdist_ext

Name = TypeVar("Name", str, int)


class _Contestant:
    """Applies updates; `num_updates` is how many it was asked for."""

    def __init__(self, model):
        self.model = model
        self.num_updates = 0

    def updates_per_second(self, num_steps: int) -> float:
        """Returns the rate of so many updates."""
        started = time.perf_counter()
        self.run(num_steps)
        return num_steps / (time.perf_counter() - started)

    def run(self, num_steps: int) -> None:
        """Applies so many updates."""
        raise NotImplementedError

    def check(self) -> None:
        """Refuses to compare times of trainings that did not do the same work.

        Raises:
            RuntimeError: More or fewer updates were applied than asked for.
        """
        applied = int(self.model.optimizer.iterations.numpy())
        if applied != self.num_updates:
            raise RuntimeError(
                f"{type(self).__name__} applied {applied} updates in place of {self.num_updates}."
            )


class OurLoop(_Contestant):
    """A custom loop with `tfdist_ext.ClusterCoordinator`.

    Args:
        strategy: The strategy.
        make_model: Makes the model, compiled.
        data: `tf.data.Dataset` without an end, or what `strategy.distribute_datasets_from_function` returned.
        prepare: Function of a batch `(x, y, ...)`, applied on the worker, that returns `(x, y)`.
    """

    def __init__(self, strategy, make_model: Callable, data, prepare: Callable = lambda x, y: (x, y)):
        super().__init__(_built(strategy, make_model))
        self._coordinator = tfdist_ext.ClusterCoordinator(strategy)
        self._iterator = self.iterate(data)

        def step(iterator):
            return _train(self.model, *prepare(*next(iterator)))

        self._step = step

    def iterate(self, data):
        """Returns an iterator over other data of the same types, for `run`."""
        return iter(self._coordinator.create_per_worker_dataset(data))

    def use(self, iterator) -> None:
        """Goes on with what `iterate` returned."""
        self._iterator = iterator

    def run(self, num_steps: int) -> None:
        """See `_Contestant`."""
        for _ in range(num_steps):
            self._coordinator.schedule(self._step, args=(self._iterator,))
        self._coordinator.join()
        self.num_updates += num_steps


class StockLoop(_Contestant):
    """The same with `tf.distribute.coordinator.ClusterCoordinator`; each worker makes a dataset with `make_data`."""

    def __init__(
        self, strategy, make_model: Callable, make_data: Callable, prepare: Callable = lambda x, y: (x, y)
    ):
        super().__init__(_built(strategy, make_model))
        self._coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
        self._iterator = iter(self._coordinator.create_per_worker_dataset(make_data))

        @tf.function
        def step(iterator):
            return strategy.run(lambda batch: _train(self.model, *prepare(*batch)), args=(next(iterator),))

        self._step = step

    def run(self, num_steps: int) -> None:
        """See `_Contestant`."""
        for _ in range(num_steps):
            self._coordinator.schedule(self._step, args=(self._iterator,))
        self._coordinator.join()
        self.num_updates += num_steps


class Fit(_Contestant):
    """Keras' `fit`; what it costs to begin a call of it, as opening iterators on the workers, is not counted."""

    def __init__(self, strategy, make_model: Callable, data):
        super().__init__(_built(strategy, make_model))
        self._data = data

    def run(self, num_steps: int, num_epochs: int = 1, callbacks: Sequence = ()) -> None:
        """Applies so many updates in each epoch."""
        self.model.fit(
            self._data, epochs=num_epochs, steps_per_epoch=num_steps, verbose=0, callbacks=list(callbacks)
        )
        self.num_updates += num_epochs * num_steps

    def updates_per_second(self, num_steps: int) -> float:
        """Returns the rate of an epoch that goes on with the data of another one."""
        times = _EpochTimes()
        self.run(num_steps, 2, [times])
        return num_steps / times.seconds


class _EpochTimes(keras.callbacks.Callback):
    """Notes how long the last epoch took."""

    def on_epoch_begin(self, epoch, logs=None):
        self._started = time.perf_counter()

    def on_epoch_end(self, epoch, logs=None):
        self.seconds = time.perf_counter() - self._started


def _built(strategy, make_model):
    # Each contestant starts from the same weights, on the same ps.
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = make_model()
        model.optimizer.build(model.trainable_variables)
    return model


def _train(model, x, y):
    with tf.GradientTape() as tape:
        loss = model.compute_loss(x, y, model(x, training=True))
    gradients = tape.gradient(loss, model.trainable_variables)
    model.optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    return loss


def race(
    contestants: Mapping[Name, _Contestant],
    *,
    num_rounds: int,
    turn_seconds: float,
    warm_up_steps: int,
) -> dict[Name, list[float]]:
    """Lets contestants take turns on the one cluster, every second round in reverse.

    Args:
        contestants: By name.
        num_rounds: Turns of each.
        turn_seconds: How long a turn of each is to take, about.
        warm_up_steps: Updates before, in which everything is traced and sent.

    Returns:
        Updates per second of each turn, by name.

    Raises:
        RuntimeError: A contestant did not apply as many updates as it was asked for.
    """
    num_steps = {}
    for name, contestant in contestants.items():
        contestant.run(warm_up_steps)
        num_steps[name] = steps_for(turn_seconds, contestant, warm_up_steps)
    rates: dict[Name, list[float]] = {name: [] for name in contestants}
    for index in range(num_rounds):
        turns = list(contestants.items())
        for name, contestant in turns if index % 2 == 0 else reversed(turns):
            rates[name].append(contestant.updates_per_second(num_steps[name]))
    for contestant in contestants.values():
        contestant.check()
    return rates


def steps_for(seconds: float, contestant: _Contestant, num_steps: int) -> int:
    """Returns how many steps take about so long, after trying `num_steps`."""
    return max(num_steps, round(seconds * contestant.updates_per_second(num_steps)))


def medians(rates: Mapping[Name, list[float]]) -> dict[Name, float]:
    """Returns the median of each."""
    return {name: statistics.median(values) for name, values in rates.items()}
