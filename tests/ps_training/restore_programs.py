"""Runs on the chief, or on a process without a cluster: variables that are saved here and restored there."""

import contextlib
import os
import tempfile

import keras
import numpy as np
import tensorflow as tf

import tfdist_ext
from tests.ps_training import models
from tfdist_ext.checkpoint import TrainingCheckpointManager, TrainingState, server_tensors

_ROWS = 30


def _strategy(cluster, where, shards):
    if where == "ps":

        def partitioner(shape, dtype):
            # Statistics of normalization, which a layer assigns, stay whole.
            return [shards, 1] if shape.rank == 2 else [1] * shape.rank

        return models.strategy(cluster, "bounded 0", partitioner if shards > 1 else None)
    if where == "mirrored":
        return tfdist_ext.MirroredStrategy(["CPU:0", "CPU:1"])
    return None


def _model(strategy, width=8):
    """Returns a model of a table, of normalization and dropout, whose variables do not exist yet."""
    with strategy.scope() if strategy is not None else contextlib.nullcontext():
        model = keras.Sequential(
            [
                keras.layers.Embedding(_ROWS, 6),
                keras.layers.Flatten(),
                keras.layers.Dense(width, activation="tanh"),
                keras.layers.BatchNormalization(),
                keras.layers.Dropout(0.3),
                keras.layers.Dense(1),
            ]
        )
        model.compile(keras.optimizers.Adam(0.05), "mse", metrics=["mae"])
    return model


def _data():
    generator = np.random.default_rng(4)
    rows = generator.integers(0, _ROWS, (24, 2))
    return models.batched((rows, generator.normal(size=(24, 1)).astype("float32")), 6)


def values_of(model):
    """Returns every variable by its path."""
    found = [*model.variables, *model.optimizer.variables, *model.metrics_variables]
    seeds = [layer.seed_generator.state for layer in model.layers if hasattr(layer, "seed_generator")]
    return [[variable.path, np.asarray(variable.numpy())] for variable in [*found, *seeds]]


def carried(where, directory, source, target, cluster=None, shards=1):
    """Restores what `source` has into a model without variables, or trains one; saves it as `target`."""
    models.in_single_precision()
    model = _model(_strategy(cluster, where, shards))
    state = TrainingState(model, _data())
    if source is None:
        model.fit(_data(), epochs=2, verbose=0)
    else:
        manager = TrainingCheckpointManager(state, f"{directory}/{source}", stop_on_sigterm=False)
        manager.restore_or_initialize()
    values = values_of(model)
    manager = TrainingCheckpointManager(state, f"{directory}/{target}", stop_on_sigterm=False)
    manager.save(8, wait=True)
    (folder,) = [name for name in os.listdir(f"{directory}/{target}") if name.startswith("checkpoint-")]
    return {"values": values, "files": sorted(os.listdir(f"{directory}/{target}/{folder}"))}


def mismatched(cluster, directory, source):
    """Restores into a model of another width; returns the error."""
    models.in_single_precision()
    model = _model(_strategy(cluster, "ps", 2), width=9)
    manager = TrainingCheckpointManager(
        TrainingState(model, _data()), f"{directory}/{source}", stop_on_sigterm=False
    )
    try:
        manager.restore_or_initialize()
    except tfdist_ext.errors.CheckpointMismatchError as error:
        return str(error)
    return ""


def through_the_chief(cluster):
    """Saves and restores with ps that do not see the directory, at most 200 bytes at a time."""
    models.in_single_precision()
    model = _model(_strategy(cluster, "ps", 2))
    model.fit(_data(), verbose=0)
    variables = TrainingState(model, _data()).variables()
    expected = values_of(model)
    snapshot = variables.snapshot()
    for weight in model.trainable_variables:
        weight.assign(tf.zeros_like(weight))
    read_on, largest = server_tensors._read_on, []

    def blind(device, prefix, targets):
        if device != server_tensors.HERE:
            raise tf.errors.NotFoundError(None, None, "not here")
        read_on(device, prefix, targets)

    save = server_tensors._save

    def watched(device, prefix, entries):
        remote = [e.num_bytes for e in entries if server_tensors.server_of(e.tensor.device) is not None]
        largest.append([device, sum(remote), len(remote)])
        save(device, prefix, entries)

    originals = {
        name: getattr(server_tensors, name)
        for name in ("_writes_to", "_read_on", "_save", "_AT_A_TIME_BYTES")
    }
    server_tensors._writes_to = lambda server, folder: False
    server_tensors._read_on, server_tensors._save, server_tensors._AT_A_TIME_BYTES = blind, watched, 200
    try:
        with tempfile.TemporaryDirectory() as folder:
            names = snapshot.write(f"{folder}/state")
            files = sorted(os.listdir(folder))
            variables.read(f"{folder}/state")
    finally:
        for name, original in originals.items():
            setattr(server_tensors, name, original)
    return {
        "expected": expected, "found": values_of(model), "names": sorted(names), "files": files, "pieces": largest,
    }  # fmt: skip


def copied_while_training_goes_on(cluster):
    """Changes variables between a copy and its writing; counts the calls that a copy takes."""
    models.in_single_precision()
    model = _model(_strategy(cluster, "ps", 3))
    model.fit(_data(), verbose=0)
    variables = TrainingState(model, _data()).variables()
    before = values_of(model)
    snapshot = variables.snapshot()
    calls = len(variables._on_servers._functions)
    model.fit(_data(), epochs=2, verbose=0)
    after = values_of(model)
    with tempfile.TemporaryDirectory() as folder:
        snapshot.write(f"{folder}/state")
        variables.read(f"{folder}/state")
    return {
        "before": before,
        "restored": values_of(model),
        "changed": not np.array_equal(before[0][1], after[0][1]),
        "calls": calls,
        "slices": sum(1 for entry in snapshot.entries if entry.slice_spec),
    }
