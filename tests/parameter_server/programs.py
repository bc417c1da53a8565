"""What the chief of a test's cluster runs; each function returns facts for the test to compare."""

from __future__ import annotations

import os
import random
import signal
import threading
import time

import keras
import numpy as np
import tensorflow as tf

import tfdist_ext
from tests.parameter_server.counting import (
    At,
    counting_model,
    counts,
    listening_to_events,
    rows,
    say,
    send,
    strategy_of_all,
)
from tfdist_ext.training.set_delivery import ComputedSet

# The loss is a sum over rows, so that each counts 1 in a round of two batches as well.
POLICIES = {
    "Asynchronous": tfdist_ext.Asynchronous(),
    "BoundedStaleness": tfdist_ext.BoundedStaleness(4),
    "Synchronous": tfdist_ext.Synchronous(0),
}

_models = []
_functions = []


def facts(model, strategy, began, **more):
    statistics = strategy.statistics
    return {
        "counts": counts(model),
        "iterations": int(model.optimizer.iterations),
        "applied": {index: worker["applied"] for index, worker in statistics["workers"].items()},
        "total": {name: statistics["total"][name] for name in ("applied", "dropped", "lost", "num_joined")},
        "seconds": time.monotonic() - began,
        **more,
    }


def lose_workers(
    pids,
    policy,
    victims,
    returns,
    num_rows=120,
    worker_timeout_seconds=60.0,
    signum=int(signal.SIGKILL),
    at=5,
):
    """Sends a signal to workers after batch `at`, and waits there until those that return are back, if any do."""
    rule = POLICIES[policy]
    strategy = strategy_of_all(update_policy=rule, worker_timeout_seconds=worker_timeout_seconds)
    model = counting_model(strategy, num_rows)
    _models.append(model)
    seen_before = {}
    with listening_to_events() as kept:

        def await_return():
            for index in returns:
                kept.wait_for("worker_returned", f"worker:{index}")()
            seen_before.update(facts(model, strategy, 0.0)["applied"])

        actions = {at: lambda: send(pids, signum, *victims)}
        if len(victims) == 1:
            # With nobody left `fit` itself has to wait.
            actions[8] = await_return
        began = time.monotonic()
        model.fit(rows(num_rows, 0.005), verbose=0, callbacks=[At(actions)])
        return facts(model, strategy, began, applied_before=seen_before, events=sorted(set(kept.seen[:-1])))


def count_when_all_are_back(pids):
    """Counts again with the model of `lose_workers`."""
    strategy_of_all()
    return counts(_models[-1])


def send_to_a_stopped_worker(pids, what, victim=1):
    """Sends 3.0, in some form, to a worker that only a thread of this process wakes; returns what came back."""
    strategy_of_all()
    held = [tf.function(lambda: tf.constant(7.0)).get_concrete_function()]

    def function():
        return tf.function(lambda: tf.constant(3.0))()

    def end_of_a_function():
        held.clear()
        return tf.constant(3.0)

    make = {
        "constant": lambda: tf.constant(3.0),
        "variable": lambda: tf.Variable(3.0),
        "function": function,
        "end of a function": end_of_a_function,
    }[what]
    wake = threading.Timer(0.5, send, (pids, signal.SIGCONT, victim))
    send(pids, signal.SIGSTOP, victim)
    wake.start()
    with tf.device(f"/job:worker/replica:0/task:{victim}/device:CPU:0"):
        made = make()
    wake.join()
    return float(made.numpy())


def train_and_stop_a_worker(pids, victim=1, num_rows=24):
    """Stops a worker that has nothing left to do."""
    model = counting_model(strategy_of_all(), num_rows)
    model.fit(rows(num_rows), verbose=0)
    # Lives until the interpreter ends.
    _functions.append(tf.function(lambda: tf.constant(3.0)).get_concrete_function())
    send(pids, signal.SIGSTOP, victim)
    return counts(model)


def lose_a_worker_at_any_moment(pids, policy, seed, victim=1, num_rows=120):
    """Kills a worker at a random moment; it does not come back in this epoch."""
    rule = POLICIES[policy]
    strategy = strategy_of_all(update_policy=rule)
    model = counting_model(strategy, num_rows)
    delay = random.Random(seed).uniform(0.0, 0.2)
    timer = threading.Timer(delay, send, (pids, signal.SIGKILL, victim))
    began = time.monotonic()
    model.fit(rows(num_rows, 0.005), verbose=0, callbacks=[At({3: timer.start})])
    timer.join()
    return facts(model, strategy, began, delay=delay)


def lose_a_worker_with_its_set(pids, moment, victim=1, num_rows=120):
    """Kills a worker while a set of it is held, or at the moment when one is brought to the ps."""
    strategy = strategy_of_all(update_policy=tfdist_ext.BoundedStaleness(1))
    model = counting_model(strategy, num_rows)
    original, killed = ComputedSet.deliver, threading.Event()

    def kill_once():
        if not killed.is_set():
            killed.set()
            send(pids, signal.SIGKILL, victim)

    def deliver(computed, worker):
        if moment == "delivered" and computed.worker == victim and int(model.optimizer.iterations) > 3:
            kill_once()
        original(computed, worker)

    class KillHolder(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            worker = strategy.statistics["workers"].get(victim)
            if moment == "held" and worker is not None and worker["held"] and batch > 3:
                kill_once()

    ComputedSet.deliver = deliver
    try:
        began = time.monotonic()
        model.fit(rows(num_rows, 0.005), verbose=0, callbacks=[KillHolder()])
    finally:
        ComputedSet.deliver = original
    return facts(model, strategy, began, killed=killed.is_set())


def evaluate_while_a_worker_dies(pids, victim=1, num_rows=80):
    """Lets the worker come back before the end."""
    strategy = strategy_of_all()
    model = counting_model(strategy, num_rows)
    with listening_to_events() as kept:
        back = kept.wait_for("worker_returned", f"worker:{victim}")
        actions = At({3: lambda: send(pids, signal.SIGKILL, victim), 8: back})
        return model.evaluate(rows(num_rows, 0.005), verbose=0, callbacks=[actions], return_dict=True)["mae"]


def predict_while_a_worker_dies(pids, victim=1, num_rows=80):
    strategy = strategy_of_all()
    model = counting_model(strategy, num_rows)
    model.set_weights([np.arange(num_rows, dtype=np.float32)[:, None]])
    kill = At({3: lambda: send(pids, signal.SIGKILL, victim)})
    return model.predict(rows(num_rows, 0.005), verbose=0, callbacks=[kill])[:, 0].tolist()


def fail_in_user_code(pids, num_rows=24):
    """Returns what `fit` raised for three faults of a user, and how training goes on after each."""
    strategy = strategy_of_all()
    outcomes = {}

    class Checking(keras.Sequential):
        limit = 0.0

        def train_step(self, data):
            tf.debugging.assert_less(tf.reduce_max(data[1]), self.limit, message="labels are too large")
            return super().train_step(data)

    with strategy.scope():
        checking = Checking([keras.layers.Input((num_rows,)), keras.layers.Dense(1, use_bias=False)])
        checking.compile(keras.optimizers.SGD(0.0), loss="mse")
    model = counting_model(strategy, num_rows)

    def odd(inputs, labels):
        ok = tf.debugging.assert_none_equal(labels, 13.0, message="row 13 is odd")
        with tf.control_dependencies([ok]):
            return tf.identity(inputs), labels

    def wrong(inputs, labels):
        raise KeyError("no such feature")

    class Wrong(keras.Sequential):
        def train_step(self, data):
            wrong(*data)

    with strategy.scope():
        untraceable = Wrong([keras.layers.Input((num_rows,)), keras.layers.Dense(1)])
        untraceable.compile("sgd", "mse")
    faults = {
        "train_step": lambda: checking.fit(rows(num_rows, 0.002), verbose=0),
        "input": lambda: model.fit(rows(num_rows, 0.002).map(odd), verbose=0),
        "tracing": lambda: untraceable.fit(rows(num_rows), verbose=0),
    }
    for name, fault in faults.items():
        began = time.monotonic()
        try:
            fault()
        except Exception as error:
            outcomes[name] = {
                "type": type(error).__name__,
                "text": str(error),
                "seconds": time.monotonic() - began,
            }
        before = int(model.optimizer.iterations)
        model.set_weights([np.zeros([num_rows, 1])])
        model.fit(rows(num_rows), verbose=0)
        outcomes[name]["afterwards"] = [counts(model), int(model.optimizer.iterations) - before]
        outcomes[name]["workers"] = sorted(strategy.statistics["workers"])
    return outcomes


def watch_the_fences(pids, policy, num_rows=48):
    """Looks at the version before and after pauses of callbacks, and stops in mid-epoch."""
    rule = POLICIES[policy]
    strategy = strategy_of_all(update_policy=rule)
    model = counting_model(strategy, num_rows)
    version, pauses = int(strategy.version_variable()), []

    class Pause(keras.callbacks.Callback):
        def look(self):
            return (
                int(strategy.version_variable()),
                int(model.optimizer.iterations),
                model.get_weights()[0].sum().item(),
            )

        def pause(self):
            before = self.look()
            time.sleep(
                0.15
            )  # Long enough for every worker to compute several sets: what is looked for is a change.
            pauses.append([before, self.look()])

        def on_train_batch_end(self, batch, logs=None):
            if batch in (1, 5):
                self.pause()

        def on_epoch_begin(self, epoch, logs=None):
            self.pause()

        def on_epoch_end(self, epoch, logs=None):
            self.pause()

    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            self.model.stop_training = batch == 3

    model.fit(rows(num_rows, 0.002), epochs=2, verbose=0, callbacks=[Pause()])
    complete = [counts(model), int(model.optimizer.iterations)]
    model.set_weights([np.zeros([num_rows, 1])])
    model.fit(rows(num_rows, 0.002), epochs=3, verbose=0, callbacks=[Stop()])
    stopped = [-model.get_weights()[0].sum().item(), int(model.optimizer.iterations) - complete[1]]
    model.set_weights([np.zeros([num_rows, 1])])
    model.fit(rows(num_rows, 0.002), verbose=0)
    return {
        "version_at_first": version,
        "pauses": pauses,
        "complete": complete,
        "stopped": stopped,
        "after": counts(model),
    }


def train_and_lose_a_ps(pids, index, num_rows=400):
    """Kills a ps in mid-epoch; returns what `fit` raised, and after how many seconds."""
    strategy = tfdist_ext.ParameterServerStrategy()
    return _fate_without_a_ps(strategy, num_rows, pids[f"ps:{index}"], signal.SIGKILL)


def _fate_without_a_ps(strategy, num_rows, group, signum):
    model = counting_model(strategy, num_rows)
    gone = []

    def lose():
        os.killpg(group, signum)
        gone.append(time.monotonic())

    try:
        model.fit(rows(num_rows, 0.005), verbose=0, callbacks=[At({5: lose})])
    except Exception as error:
        fact = {"type": type(error).__name__, "text": str(error), "task": getattr(error, "task", None)}
        fact |= {"step": getattr(error, "step", None), "seconds": time.monotonic() - gone[0]}
        try:
            model.evaluate(rows(num_rows), verbose=0)
        except Exception as second:
            fact["evaluate"] = [type(second).__name__, getattr(second, "task", None)]
        return fact
    raise AssertionError("Nobody missed the ps.")


def train_while_a_ps_is_stopped(pids, num_rows=40):
    """Stops a ps in mid-epoch; the test wakes it."""
    strategy = strategy_of_all()
    model = counting_model(strategy, num_rows)

    def stop():
        os.killpg(pids["ps:0"], signal.SIGSTOP)
        say("stopped ps:0")

    began = time.monotonic()
    model.fit(rows(num_rows, 0.005), verbose=0, callbacks=[At({5: stop})])
    return facts(model, strategy, began)


def train_and_stop_a_ps(pids, index, patience_seconds, num_rows=400):
    """Stops a ps in mid-epoch for good; returns what `fit` raised, and after how many seconds."""
    strategy = tfdist_ext.ParameterServerStrategy()
    strategy.patience_seconds = patience_seconds
    return _fate_without_a_ps(strategy, num_rows, pids[f"ps:{index}"], signal.SIGSTOP)


def train_for_ever(pids):
    strategy = tfdist_ext.ParameterServerStrategy()
    model = counting_model(strategy, 8)
    data = rows(8, 0.002).repeat()
    model.fit(data, steps_per_epoch=10**6, verbose=0, callbacks=[At({5: lambda: say("in mid-epoch")})])
