"""Runs on the chief: training that is cut, and goes on from a checkpoint with a new model and strategy."""

import tempfile

import keras
import tensorflow as tf

import tfdist_ext
from tests.ps_training import models
from tests.single_host import oracle
from tfdist_ext.checkpoint import EverySteps, TrainingCheckpointManager, TrainingState


class Cut(Exception):
    """Stands for the end of a process."""


class CutAt(keras.callbacks.Callback):
    """Ends `fit` when so many steps were applied and what is due is saved."""

    def __init__(self, steps):
        super().__init__()
        self._steps = steps

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass

    def on_train_batch_begin(self, batch, logs=None):
        if self._steps and int(self.model.optimizer.iterations.numpy()) >= self._steps:
            raise Cut


class Logs(keras.callbacks.Callback):
    """Keeps the logs of all steps and epochs."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass

    def on_train_batch_end(self, batch, logs=None):
        self.seen.append([float(value) for value in logs.values()])

    def on_epoch_end(self, epoch, logs=None):
        self.seen.append([epoch, *(float(value) for value in logs.values())])


def trained(make, directory, steps=0, save=None, **fit):
    """Trains what `make` makes, from the checkpoint in a directory; `steps` ends it after so many.

    Returns:
        Model, logs and manager.
    """
    model, data = make()
    state = TrainingState(model, data)
    manager = TrainingCheckpointManager(
        state, directory, save=EverySteps(save or steps or 10**6), stop_on_sigterm=False
    )
    logs = Logs()
    callbacks = [manager.keras_callback(), logs, *fit.pop("callbacks", []), CutAt(steps)]
    try:
        model.fit(state.dataset, verbose=0, callbacks=callbacks, **fit)
    except Cut:
        manager.wait()
    return model, logs.seen, manager


def random_network(cluster, policy, rows=22, batch_size=4):
    """Returns a function that makes a network with dropout and batch normalization, and reshuffled data."""

    def make():
        models.in_double_precision()
        placed = models.strategy(cluster, policy)
        with placed.scope():
            model = models.network()
        x, y = oracle.regression_data(rows)
        data = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(rows, seed=3).batch(batch_size)
        return model, data

    return make


def one_reader(cluster, policy):
    """Returns the same for a cluster whose other workers have nothing to read: one worker, whatever the policy."""
    make = random_network(cluster, policy)

    def make_distributed():
        model, data = make()
        return model, model.distribute_strategy.distribute_datasets_from_function(
            lambda context: data if context.input_pipeline_id == 0 else data.take(0)
        )

    return make_distributed


def cut_in_two(cluster, policy, cut, reader="all", callbacks=(), epochs=2):
    """Compares one run with one that was cut after `cut` steps."""
    fit = {"epochs": epochs, "callbacks": [getattr(models, name)() for name in callbacks]}
    make = one_reader(cluster, policy) if reader == "one" else random_network(cluster, policy)
    with tempfile.TemporaryDirectory() as folder:
        whole, logs, _ = trained(make, f"{folder}/whole", **fit)
        expected = {**models.run_of(whole), "logs": logs, "books": books_of(whole)}
        _, first, _ = trained(make, f"{folder}/cut", cut, **fit)
        model, second, _ = trained(make, f"{folder}/cut", **fit)
        found = {**models.run_of(model), "logs": [*first, *second], "books": books_of(model)}
    return {"expected": expected, "found": found, "num_logs_after": len(second)}


def books_of(model):
    """Returns the books of training as text."""
    return repr(model.distribute_strategy.training_books.state_dict())


def row_counts(
    cluster, policy, directory, cut, rows=24, kind="dataset", steps_per_epoch=None, lengths=(6, 18)
):
    """Trains the model that counts rows from whatever the directory has to a cut, or to the end of an epoch."""

    def make():
        models.in_single_precision()
        placed = models.strategy(cluster, policy)
        with placed.scope():
            model = models.row_counter(rows)
        data = models.numbered_rows(rows, 1).shuffle(rows, seed=5)
        if kind == "function":
            starts = [sum(lengths[:index]) for index in range(len(lengths))]
            return model, placed.distribute_datasets_from_function(
                lambda context: (
                    models.numbered_rows(rows, 1)
                    .skip(starts[context.input_pipeline_id])
                    .take(lengths[context.input_pipeline_id])
                )
            )
        if kind == "chief":
            data = data.map(_through_python)
        elif kind == "unknown":
            data = data.filter(lambda x, y: True)
        elif kind == "repeated":
            data = data.repeat()
        return model, data

    fit = {"epochs": 2, "steps_per_epoch": steps_per_epoch}
    try:
        model, logs, _ = trained(make, directory, cut, **fit)
    except tfdist_ext.errors.CheckpointMismatchError as error:
        return {"error": str(error)}
    return {
        "counts": model.get_weights()[0].ravel(),
        "iterations": int(model.optimizer.iterations.numpy()),
        "num_logs": len(logs),
    }


def _through_python(x, y):
    """Calls a Python function, so that the dataset cannot leave the chief."""
    same = tf.numpy_function(lambda value: value, [x], tf.float32)
    same.set_shape(x.shape)
    return same, y


def scheduled_steps(cluster, directory, steps, ahead=3):
    """Runs a custom loop to a number of steps, with some scheduled ahead; saves every five."""
    models.in_single_precision()
    placed = models.strategy(cluster, "bounded 4")
    with placed.scope():
        model = models.row_counter(24)
        model.optimizer.build(model.trainable_variables)
    dataset = placed.experimental_distribute_dataset(models.numbered_rows(24, 1).shuffle(24, seed=5))
    state = TrainingState(model, dataset)
    manager = TrainingCheckpointManager(state, directory, save=EverySteps(5), stop_on_sigterm=False)

    def step(iterator):
        x, y = next(iterator)
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(models.MinusOutput(reduction="sum")(y, model(x, training=True)))
        model.optimizer.apply_gradients(
            zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables, strict=True)
        )
        return loss

    manager.restore_or_initialize()
    coordinator = tfdist_ext.ClusterCoordinator(placed)
    iterator = iter(coordinator.create_per_worker_dataset(state.dataset))
    waiting = []
    while state.step < steps:
        while len(waiting) < min(ahead, steps - state.step):
            waiting.append(coordinator.schedule(step, args=(iterator,)))
        waiting.pop(0).fetch()
        manager.save_if_due(state.step + 1)
    manager.wait()
    return {
        "counts": model.get_weights()[0].ravel(),
        "version": placed.training_books.state_dict()["version"],
    }
