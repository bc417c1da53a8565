"""How much of its speed does each policy keep when one worker is slow?

Every step sleeps on its worker; the slow worker sleeps ten times as long.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator

import keras
import numpy as np
import tensorflow as tf

import tfdist_ext
from benchmarks.parameter_server_contestants import OurLoop, StockLoop, medians, steps_for
from benchmarks.parameter_server_models import BATCH_SIZE, Size, dense_model, endless


def sleeping(x, y, delay_microseconds):
    """Sleeps on the worker, in C++ and in the step itself, where no prefetching hides it; returns `(x, y)`."""
    following = tf.data.Dataset.from_tensors(x)
    variant = tf.raw_ops.SleepDataset(
        input_dataset=tf.data.experimental.to_variant(following),
        sleep_microseconds=delay_microseconds[0],
        output_types=[x.dtype],
        output_shapes=[x.shape],
    )
    # Asked for a second element, the dataset would sleep again before it says that there is none.
    slow = tf.data.experimental.from_variant(variant, following.element_spec).take(1)
    return slow.get_single_element(), y


def delayed_data(strategy, delays_seconds: list[float | None]):
    """Returns data whose batches say for how long their worker sleeps; a worker with None has no batch at all."""

    def dataset_of(context):
        delay = delays_seconds[context.input_pipeline_id]
        batch = batch_with_delay(0.0 if delay is None else delay)
        dataset = tf.data.Dataset.from_tensors(batch)
        return dataset.take(0) if delay is None else dataset.repeat()

    return strategy.distribute_datasets_from_function(dataset_of)


def batch_with_delay(seconds: float) -> tuple:
    """Returns `(x, y, microseconds)`, all with one entry a row."""
    x = np.random.default_rng(4).normal(size=(BATCH_SIZE, 16)).astype(np.float32)
    microseconds = np.full([BATCH_SIZE], round(1e6 * seconds), np.int64)
    return x, x[:, :4], microseconds


class Policy:
    """One policy on this cluster, with data for every set of delays."""

    def __init__(self, policy, delays: dict[str, list[float | None]]):
        strategy = tfdist_ext.ParameterServerStrategy(update_policy=policy)
        data = {name: delayed_data(strategy, seconds) for name, seconds in delays.items()}
        self._loop = OurLoop(strategy, small_model, next(iter(data.values())), sleeping)
        self._iterators = {name: self._loop.iterate(one) for name, one in data.items()}
        self._num_steps: dict[str, int] = {}
        self.strategy = strategy
        self.rates: dict[str, list[float]] = {name: [] for name in delays}

    def take_turn(self, seconds: float, num_tried: int) -> None:
        """Measures every set of delays once, beginning with a try."""
        for name, iterator in self._iterators.items():
            self._loop.use(iterator)
            if name not in self._num_steps:
                self._loop.run(num_tried)
                self._num_steps[name] = steps_for(seconds, self._loop, num_tried)
            self.rates[name].append(self._loop.updates_per_second(self._num_steps[name]))


def small_model() -> keras.Model:
    """Returns a model that costs nothing beside the sleep."""
    return dense_model(16, [4])


def measure_delays(size: Size) -> Iterator[dict]:
    """Yields a result for each policy: one of all workers sleeps longer."""
    strategy = tfdist_ext.ParameterServerStrategy()
    num_workers = strategy.num_workers
    plain: list[float | None] = [size.sleep_seconds] * num_workers
    delays = {"even": plain, "slow": [*plain[:-1], size.slow_seconds]}
    policies = {
        "Synchronous(0)": Policy(tfdist_ext.Synchronous(0), {**delays, "fewer": [*plain[:-1], None]}),
        "Synchronous(1)": Policy(tfdist_ext.Synchronous(1), delays),
        f"BoundedStaleness({4 * num_workers})": Policy(tfdist_ext.BoundedStaleness(4 * num_workers), delays),
        "Asynchronous": Policy(tfdist_ext.Asynchronous(), delays),
    }
    batch = (array[None] for array in batch_with_delay(size.sleep_seconds))
    stock = StockLoop(strategy, small_model, endless(*batch), sleeping)
    num_tried = num_workers
    stock.run(num_tried)
    stock_rates = []
    for _ in range(size.num_rounds):
        for policy in policies.values():
            policy.take_turn(size.turn_with_delays_seconds, num_tried)
        stock_steps = math.ceil(size.turn_with_delays_seconds * num_workers / size.sleep_seconds)
        stock_rates.append(stock.updates_per_second(stock_steps))
    fewer = medians(policies["Synchronous(0)"].rates)["fewer"]
    for name, policy in policies.items():
        stock_rate = statistics.median(stock_rates) if name == "Asynchronous" else None
        yield from delay_results(name, policy, size, num_workers, fewer, stock_rate)


def delay_results(name, policy, size: Size, num_workers: int, fewer: float, stock_rate) -> list[dict]:
    """Makes the results of one policy, without and with the slow worker.

    Args:
        name: The policy.
        policy: The `Policy` that was measured.
        size: How it was measured.
        num_workers: Workers.
        fewer: Updates per second of `Synchronous(0)` without the slow worker.
        stock_rate: Updates per second of TensorFlow's own loop without delays; None where there is nothing like it. Its
            input function is not told which worker it is for, so that it cannot have one slow worker.
    """
    median = medians(policy.rates)
    settings = {"sleep_seconds": size.sleep_seconds, "policy": name}
    even = {"case": f"no delay {name}", "updates_per_second": median["even"], **settings}
    if stock_rate is not None:
        even |= {
            "stock_updates_per_second": stock_rate,
            "ratio_to_stock": median["even"] / stock_rate,
        }
    even["updates_per_second_by_round"] = policy.rates["even"]
    slow = {
        "case": f"one slow worker {name}",
        "updates_per_second": median["slow"],
        **settings,
        "slow_seconds": size.slow_seconds,
        "ratio_to_no_delay": median["slow"] / median["even"],
        f"synchronous_updates_per_second_of_{num_workers - 1}_workers": fewer,
        "ratio_to_workers_that_are_not_slow": median["slow"] / fewer,
        "updates_per_second_by_round": policy.rates["slow"],
    }
    return [even, slow]
