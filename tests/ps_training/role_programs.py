"""Runs on tasks that are no chief of a working cluster."""

import json

import numpy as np

import tfdist_ext
from tfdist_ext.cluster.environment import set_variable

_JOBS = {"chief": ["127.0.0.1:1"], "worker": ["127.0.0.1:2"], "ps": ["127.0.0.1:3"]}


def evaluator_alone():
    """Trains and evaluates on an evaluator; none of the other tasks exists."""
    set_variable("TF_CONFIG", json.dumps({"cluster": _JOBS, "task": {"type": "evaluator", "index": 0}}))
    import keras

    strategy = tfdist_ext.ParameterServerStrategy(update_policy=tfdist_ext.Synchronous())
    with strategy.scope():
        layer = keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")
        model = keras.Sequential([keras.Input((1,)), layer])
        model.compile(keras.optimizers.SGD(0.25), "mse")
    ones = np.ones((4, 1), "float32")
    model.fit(ones, 0 * ones, batch_size=2, verbose=0)
    return {
        "weight": float(model.get_weights()[0][0, 0]),
        "loss": float(model.evaluate(ones, 0 * ones, verbose=0)),
    }


def errors_of_clusters():
    """Returns what is said about clusters that cannot train with parameter servers."""

    def text(jobs, task):
        set_variable("TF_CONFIG", json.dumps({"cluster": jobs, "task": {"type": task, "index": 0}}))
        try:
            tfdist_ext.ParameterServerStrategy(startup_timeout_seconds=0.5)
        except tfdist_ext.TfdistError as error:
            return f"{type(error).__name__}: {error}"
        return "no error"

    without_ps = {job: tasks for job, tasks in _JOBS.items() if job != "ps"}
    without_workers = {job: tasks for job, tasks in _JOBS.items() if job != "worker"}
    return {
        "no ps": text(without_ps, "chief"),
        "no worker": text(without_workers, "chief"),
        "nobody there": text(_JOBS, "chief"),
    }
