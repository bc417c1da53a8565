"""Runs on the chief: training whose result is known."""

import dataclasses

import keras
import numpy as np
import tensorflow as tf
from tensorflow.python.data.experimental.ops import testing as tf_data_testing

import tfdist_ext
from tests.ps_training import models
from tests.single_host import oracle
from tfdist_ext.ps import BoundedStaleness, Status, Synchronous
from tfdist_ext.ps.deadlines import DeadlineRule


def against_one_device(cluster, policy, randomness, batch_size, one_device_batch_size, rows=22):
    """Trains under a policy and on one device, in double precision."""
    models.in_double_precision()
    data = oracle.regression_data(rows)
    placed = models.strategy(cluster, policy)
    with placed.scope():
        model = models.network(randomness=randomness)
    history = model.fit(models.batched(data, batch_size), epochs=3, verbose=0)
    distributed = models.run_of(model, history)
    distributed["evaluation"] = model.evaluate(models.batched(data, 5), verbose=0, return_dict=True)
    distributed["prediction"] = model.predict(models.batched(data[0], 5), verbose=0)
    models.in_double_precision()
    one = models.network(randomness=randomness)
    history = one.fit(models.batched(data, one_device_batch_size), epochs=3, verbose=0)
    alone = models.run_of(one, history)
    alone["evaluation"] = one.evaluate(models.batched(data, 5), verbose=0, return_dict=True)
    alone["prediction"] = one.predict(models.batched(data[0], 5), verbose=0)
    return {"distributed": distributed, "alone": alone, "statistics": _plain(placed.statistics["total"])}


def _plain(total):
    return {**total, "ages": {str(age): count for age, count in total["ages"].items()}}


def synchronous_with_randomness(cluster):
    """Trains synchronously a network with batch normalization and dropout, of batches of 4 rows."""
    models.in_double_precision()
    placed = models.strategy(cluster, "synchronous")
    with placed.scope():
        model = models.network()
    return models.run_of(model, model.fit(models.batched(oracle.regression_data(24), 4), epochs=2, verbose=0))


def mirrored_with_randomness():
    """Does the same with two replicas, on global batches of 8 rows."""
    models.in_double_precision()
    with tfdist_ext.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
        model = models.network()
    return models.run_of(
        model, model.fit(models.batched(oracle.regression_data(24), 8), epochs=2, verbose=0, shuffle=False)
    )


class PatientRule(DeadlineRule):
    """Applies nothing while a worker computes.

    A set's age counts from its dispatch; a worker that begins late would read variables that are newer than that.
    """

    def next_apply(self, state):
        return [] if state.with_status(Status.IN_FLIGHT) else super().next_apply(state)


@dataclasses.dataclass(frozen=True)
class PatientStaleness(BoundedStaleness):
    """A bound under which the order of events is known."""

    def rule(self, num_workers, too_few_workers):
        return PatientRule(self.max_staleness)


def delayed_by_one(cluster, damping=None, compensation=None, steps=8):
    """Trains w with gradients that are one step old, in an order that is known; returns w after each step."""
    models.in_double_precision()
    strength = (
        {} if compensation is None else {"delay_compensation": tfdist_ext.DelayCompensation(compensation)}
    )
    half = {} if damping is None else {"damping": lambda staleness: 1.0 if staleness == 0 else damping}
    placed = models.strategy(cluster, PatientStaleness(1, **half), **strength)
    with placed.scope():
        model = models.weight_only(learning_rate=0.5)
    ones = np.ones((steps, 1))
    weights = models.Weights()
    model.fit(models.batched((ones, ones), 1), verbose=0, callbacks=[weights])
    return {"weights": weights.seen, "ages": _plain(placed.statistics["total"])["ages"]}


def rows_applied(cluster, policy, lengths, requeue=False, batch_size=1, epochs=1):
    """Returns how often each row was applied, when worker i reads `lengths[i]` rows."""
    models.in_single_precision()
    total = sum(lengths)
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    placed = models.strategy(cluster, policy, requeue_dropped=requeue)
    with placed.scope():
        model = models.row_counter(total)

    def rows_of(context):
        mine = context.input_pipeline_id
        rows = models.numbered_rows(total, 1).unbatch()
        return rows.skip(starts[mine]).take(lengths[mine]).batch(batch_size)

    history = model.fit(placed.distribute_datasets_from_function(rows_of), epochs=epochs, verbose=0)
    return {
        "counts": model.get_weights()[0].ravel(),
        "iterations": int(model.optimizer.iterations.numpy()),
        "statistics": _plain(placed.statistics["total"]),
        "epochs": len(history.history["loss"]),
    }


def with_a_slow_worker(cluster, policy, steps, slow_seconds=0.3, requeue=False):
    """Trains while the last worker takes long for each batch; returns events, counts and iterations."""
    models.in_single_precision()
    number = cluster[0]
    placed = models.strategy(cluster, policy, requeue_dropped=requeue)
    with placed.scope():
        model = models.row_counter(number * steps)

    def rows_of(context):
        mine = context.input_pipeline_id
        rows = models.numbered_rows(number * steps, 1).unbatch().shard(number, mine).batch(1)
        is_slow = mine == number - 1 and slow_seconds > 0.0
        return rows.apply(tf_data_testing.sleep(round(slow_seconds * 1e6))) if is_slow else rows

    dropped, applied = [], []

    def listen(name, fields):
        if name == "set_dropped":
            dropped.append({key: fields[key] for key in ("worker", "base_version", "version", "reason")})
        if name == "step_applied":
            applied.append([[one.worker, one.staleness, one.slot] for one in fields["sets"]])

    listener = tfdist_ext.events.subscribe(listen)
    try:
        model.fit(placed.distribute_datasets_from_function(rows_of), verbose=0)
    finally:
        tfdist_ext.events.unsubscribe(listener)
    return {
        "dropped": dropped, "applied": applied, "iterations": int(model.optimizer.iterations.numpy()),
        "counts": model.get_weights()[0].ravel(), "statistics": _plain(placed.statistics["total"]),
        "workers": {str(i): _plain(w) for i, w in placed.statistics["workers"].items()},
    }  # fmt: skip


def scheduled_steps(cluster, steps=100, stock=False):
    """Runs a custom loop of scheduled steps with Adam and a learning-rate schedule."""
    models.in_single_precision()
    placed = models.strategy(cluster)
    schedule = keras.optimizers.schedules.PiecewiseConstantDecay([steps // 2], [0.01, 0.001])
    with placed.scope():
        model = models.network(lambda: keras.optimizers.Adam(schedule))
        optimizer = model.optimizer
        optimizer.build(model.trainable_variables)
    x, y = (array.astype("float32") for array in oracle.regression_data(32))

    def step(iterator):
        features, targets = next(iterator)
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(features, training=True) - targets))
        optimizer.apply_gradients(
            zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables, strict=True)
        )
        return loss

    def data():
        return tf.data.Dataset.from_tensor_slices((x, y)).batch(4).repeat()

    if stock:
        coordinator = tf.distribute.coordinator.ClusterCoordinator(placed)
        iterator = iter(coordinator.create_per_worker_dataset(data))
        one = tf.function(lambda it: placed.run(step, args=(it,)))
    else:
        coordinator = tfdist_ext.ClusterCoordinator(placed)
        iterator, one = iter(coordinator.create_per_worker_dataset(data)), step
    values = [coordinator.schedule(one, args=(iterator,)) for _ in range(steps)]
    coordinator.join()
    losses = [float(np.asarray(value)) for value in coordinator.fetch(values)]
    return {
        "iterations": int(optimizer.iterations.numpy()), "rate": float(optimizer.learning_rate.numpy()),
        "losses": losses, "done": bool(coordinator.done()),
    }  # fmt: skip


def two_batches_a_push(cluster):
    """Trains w with sets of two batches; each set starts from fresh variables."""
    models.in_double_precision()
    placed = models.strategy(cluster, BoundedStaleness(0), push_every_steps=2)
    with placed.scope():
        model = models.weight_only(learning_rate=0.25)
    x = np.arange(1.0, 9.0)[:, None] / 8
    weights = models.Weights()
    model.fit(models.batched((x, x), 1), verbose=0, callbacks=[weights])
    return {"weights": weights.seen, "iterations": int(model.optimizer.iterations.numpy())}


def cached_for_three_steps(cluster):
    """Trains while workers compute three batches on one copy of the variables."""
    models.in_double_precision()
    placed = models.strategy(cluster, BoundedStaleness(8), fetch_every_steps=3)
    with placed.scope():
        model = models.network(randomness=False)
    plan_bytes = 8 * sum(int(np.prod(w.shape)) for w in model.get_weights())
    model.fit(models.batched(oracle.regression_data(24), 1), verbose=0)
    return {
        "statistics": _plain(placed.statistics["total"]), "model_bytes": plan_bytes,
        "iterations": int(model.optimizer.iterations.numpy()),
    }  # fmt: skip


def in_half_the_bytes(cluster, wire_dtype):
    """Trains with variables and gradients that travel shortened."""
    models.in_single_precision()
    placed = models.strategy(cluster, BoundedStaleness(0), wire_dtype=wire_dtype)
    with placed.scope():
        model = models.network(lambda: keras.optimizers.SGD(0.1), randomness=False)
    x, y = (array.astype("float32") for array in oracle.regression_data(24))
    model.fit(models.batched((x, y), 4), epochs=2, verbose=0)
    return {**models.run_of(model), "statistics": _plain(placed.statistics["total"])}


def fit_twice_with_steps(cluster):
    """Uses steps_per_epoch on endless data, EarlyStopping-like ends, and steps_per_execution."""
    models.in_single_precision()
    placed = models.strategy(cluster, Synchronous())
    with placed.scope():
        model = models.network(randomness=False)
    x, y = (array.astype("float32") for array in oracle.regression_data(24))
    history = model.fit(models.batched((x, y), 4).repeat(), steps_per_epoch=5, epochs=2, verbose=0)
    after_steps = int(model.optimizer.iterations.numpy())

    class StopAtThird(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            self.model.stop_training = batch == 2

    model.fit(models.batched((x, y), 2), epochs=3, verbose=0, callbacks=[StopAtThird()])
    after_stop = int(model.optimizer.iterations.numpy())
    with placed.scope():
        model.compile(model.optimizer, "mse", steps_per_execution=4)
    model.fit(models.batched((x, y), 2), epochs=1, verbose=0)
    return {
        "epochs": len(history.history["loss"]), "after_steps": after_steps, "after_stop": after_stop,
        "after_execution": int(model.optimizer.iterations.numpy()),
    }  # fmt: skip
