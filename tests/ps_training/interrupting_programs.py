"""Runs on the chief: somebody else has the workers while training has sets on its way."""

import signal

import keras
import numpy as np
import tensorflow as tf

import tfdist_ext
from tests.ps_training import models

_ROWS = 24


class At(keras.callbacks.Callback):
    """Does something after some batches of each epoch."""

    def __init__(self, action, batches=(3, 9)):
        super().__init__()
        self._action, self._batches = action, batches

    def on_train_batch_end(self, batch, logs=None):
        if batch in self._batches:
            self._action(self.model)

    def on_test_batch_end(self, batch, logs=None):
        if batch in self._batches:
            self._action(self.model)


def _counter(placed, rows=_ROWS):
    models.in_single_precision()
    with placed.scope():
        return models.row_counter(rows)


def _counts(model):
    return [float(count) for count in np.ravel(model.get_weights()[0])]


def _trained_with(cluster, action, policy="asynchronous", **arguments):
    """Returns how often each row was applied in two epochs, the steps, and the drops."""
    placed = models.strategy(cluster, policy, **arguments)
    model = _counter(placed)
    data = models.numbered_rows(_ROWS, 1)
    history = model.fit(data, epochs=2, verbose=0, callbacks=[At(action(placed))])
    return {
        "counts": _counts(model), "steps": int(model.optimizer.iterations.numpy()),
        "dropped": placed.statistics["total"]["dropped"], "applied": placed.statistics["total"]["applied"],
        "epochs": len(history.history["loss"]),
    }  # fmt: skip


def _evaluates(placed):
    return lambda model: model.evaluate(models.numbered_rows(_ROWS, 4), verbose=0)


def _predicts(placed):
    return lambda model: model.predict(models.numbered_rows(_ROWS, 4), verbose=0)


def _evaluates_another(placed):
    with placed.scope():
        other = models.row_counter(_ROWS)
    return lambda model: other.evaluate(models.numbered_rows(_ROWS, 4), verbose=0)


def _trains_another(placed):
    with placed.scope():
        other = models.row_counter(_ROWS)

    def train(model):
        before = np.sum(_counts(other))
        other.fit(models.numbered_rows(_ROWS, 4), verbose=0)
        assert np.sum(_counts(other)) == before + _ROWS

    return train


def _trains_a_batch(placed):
    features, target = np.zeros((2, _ROWS), "float32"), np.zeros((2, 1), "float32")
    return lambda model: model.train_on_batch(features, target)


def _trains_itself(placed):
    rows = np.zeros((3, _ROWS), "float32"), np.zeros((3, 1), "float32")
    return lambda model: model.fit(models.batched(rows, 1), verbose=0)


def while_training(cluster):
    """Returns the outcome of each way of interrupting `fit`, by name."""
    return {
        "evaluate": _trained_with(cluster, _evaluates),
        "predict": _trained_with(cluster, _predicts, "bounded 4"),
        "another model": _trained_with(cluster, _evaluates_another),
        "training another": _trained_with(cluster, _trains_another),
        "synchronous": _trained_with(cluster, _evaluates, "synchronous"),
        "local copies": _trained_with(cluster, _trains_another, "bounded 4", fetch_every_steps=3),
        "a batch": _trained_with(cluster, _trains_a_batch),
        "itself": _trained_with(cluster, _trains_itself),
    }


def within_evaluation(cluster):
    """Evaluates while a callback predicts; returns what `evaluate` and `predict` returned, and what is right."""
    placed = models.strategy(cluster)
    model = _counter(placed)
    model.set_weights([np.arange(1.0, _ROWS + 1, dtype="float32")[:, None]])
    seen = []

    def predict(model):
        seen.append(np.ravel(model.predict(models.numbered_rows(_ROWS, 5), verbose=0)).tolist())

    logs = model.evaluate(models.numbered_rows(_ROWS, 2), verbose=0, callbacks=[At(predict)])
    return {"loss": float(np.ravel(logs)[0]), "seen": seen}


def between_schedule_and_join(cluster):
    """Evaluates between `schedule` and `join`, and lets two coordinators take turns; returns counts and results."""
    placed = models.strategy(cluster)
    model = _counter(placed)
    model.optimizer.build(model.trainable_variables)
    coordinators = [tfdist_ext.ClusterCoordinator(placed) for _ in range(2)]
    data = placed.experimental_distribute_dataset(models.numbered_rows(_ROWS, 1))

    def step(iterator):
        features, _ = next(iterator)
        with tf.GradientTape() as tape:
            loss = -tf.reduce_sum(model(features, training=True))
        gradients = tape.gradient(loss, model.trainable_variables)
        model.optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    iterators = [iter(coordinator.create_per_worker_dataset(data)) for coordinator in coordinators]
    values = []
    for number in range(_ROWS):
        for coordinator, iterator in zip(coordinators, iterators, strict=True):
            values.append(coordinator.schedule(step, args=(iterator,)))
        if number in (3, 11, _ROWS - 1):
            model.evaluate(models.numbered_rows(_ROWS, 4), verbose=0)
    for coordinator in coordinators:
        coordinator.join()
    results = [coordinators[index % 2].fetch(value) for index, value in enumerate(values)]
    return {
        "counts": _counts(model), "steps": int(model.optimizer.iterations.numpy()),
        "results": sum(result is not None for result in results),
    }  # fmt: skip


def interrupted(cluster):
    """Interrupts `fit` at places around the commit of a step, and trains on; returns books, steps and counts."""
    return {
        where: _interrupted_at(cluster, where, policy)
        for where in (
            "before the commit",
            "after the commit",
            "in the books",
            "raised by a handler",
            "while waiting",
        )
        for policy in ("asynchronous",)
    }


def _interrupted_at(cluster, where, policy):
    placed = models.strategy(cluster, policy)
    model = _counter(placed)
    model.fit(models.numbered_rows(_ROWS, 1).take(2), verbose=0)
    driver, calls = model.train_function._driver, []

    def interrupting(original, *, after, raises=False):
        def call(*args, **kwargs):
            calls.append(1)
            strikes = len(calls) == 5
            if strikes and not after:
                _interrupt(raises)
            result = original(*args, **kwargs)
            if strikes and after:
                _interrupt(raises)
            return result

        return call

    program, ledger = driver._program, driver.ledger
    if where in ("before the commit", "after the commit", "raised by a handler"):
        commit, raises = program.commit, where == "raised by a handler"
        program.commit = lambda *a: interrupting(
            commit(*a), after=where != "before the commit", raises=raises
        )
    elif where == "in the books":
        ledger.applied = interrupting(ledger.applied, after=False)
    else:
        driver._wait_for_step = interrupting(driver._wait_for_step, after=True)
    try:
        model.fit(models.numbered_rows(_ROWS, 1), verbose=0)
        error = "none"
    except KeyboardInterrupt:
        error = "KeyboardInterrupt"
    for owner, name in ((program, "commit"), (ledger, "applied"), (driver, "_wait_for_step")):
        vars(owner).pop(name, None)
    between = [
        placed.statistics["total"]["applied"],
        int(model.optimizer.iterations.numpy()),
        sum(_counts(model)),
    ]
    model.fit(models.numbered_rows(_ROWS, 1), verbose=0)
    total = placed.statistics["total"]
    after = [total["applied"], int(model.optimizer.iterations.numpy()), sum(_counts(model))]
    return {"error": error, "between": between, "after": after}


def _interrupt(raises):
    if raises:
        raise KeyboardInterrupt
    signal.raise_signal(signal.SIGINT)


def broken_connections(cluster):
    """Trains while the call that applies the sixth step breaks, before or after it was done; returns what came."""

    def trained(after):
        placed = models.strategy(cluster, "asynchronous")
        model = _counter(placed)
        model.fit(models.numbered_rows(_ROWS, 1).take(2), verbose=0)
        program, calls = model.train_function._driver._program, []
        commit = program.commit

        def breaking(*key):
            function = commit(*key)

            def call(*arguments):
                calls.append(1)
                outputs = function(*arguments) if after or len(calls) != 6 else None
                if len(calls) == 6:
                    raise tf.errors.UnavailableError(None, None, "Connection reset by peer")
                return outputs

            return call

        program.commit = breaking
        batches = []
        seen = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: batches.append(batch))
        try:
            model.fit(models.numbered_rows(_ROWS, 1), verbose=0, callbacks=[seen])
            error = ""
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"
        return {
            "error": error, "batches": len(batches), "counts": _counts(model),
            "steps": int(model.optimizer.iterations.numpy()), "books": placed.statistics["total"]["applied"],
        }  # fmt: skip

    return {"before": trained(False), "after": trained(True)}
