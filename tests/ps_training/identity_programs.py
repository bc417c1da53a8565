"""Runs on the chief: variables that something else knows before a model is trained for the first time."""

import os
import tempfile

import keras
import numpy as np
import tensorflow as tf

from tests.ps_training import models
from tests.single_host.freed_programs import left_of_models
from tfdist_ext.checkpoint import TrainingState
from tfdist_ext.training.pulled import shards_of

_X = np.random.default_rng(1).normal(size=(8, 4))
_Y = np.random.default_rng(2).normal(size=(8, 4))


def _layers():
    """Returns layers of 8, 8 and 16 weights: in this order one ps gets 24 of them, the largest first 16 each."""
    return [keras.layers.Dense(width, use_bias=False) for width in (2, 4, 4)]


def _model(layers):
    inputs = outputs = keras.Input((4,))
    for layer in layers:
        outputs = layer(outputs)
    model = keras.Model(inputs, outputs)
    model.compile(keras.optimizers.Adam(0.05), "mse")
    return model


def _fit(model):
    return model.fit(models.batched((_X, _Y), 2), epochs=2, verbose=0).history["loss"]


def _loss(model):
    return float(np.mean((np.asarray(model(_X)) - _Y) ** 2))


def _where(model):
    return [shard.device for variable in model.variables for shard in shards_of(variable)]


def _new(placed):
    with placed.scope():
        return _model(_layers())


def _traced_function(placed):
    model = _new(placed)
    function = tf.function(lambda x: model(x))
    function(tf.constant(_X))
    _fit(model)
    return float(np.mean((function(tf.constant(_X)).numpy() - _Y) ** 2)), _loss(model)


def _second_model(placed):
    with placed.scope():
        layers = _layers()
        first = _model(layers)
    before = _fit(first)
    with placed.scope():
        second = _model(layers)
    _fit(second)
    after = _fit(first)
    # All three trainings are of the same weights, so that each goes on below the one before.
    assert after[-1] < before[-1], (before, after)
    return _loss(first), _loss(second)


def _held_variable(placed):
    model = _new(placed)
    held = [variable.value for variable in model.variables]
    _fit(model)
    return sum(float(tf.reduce_sum(value)) for value in held), sum(
        float(np.sum(w)) for w in model.get_weights()
    )


def _evaluated_before(placed):
    model = _new(placed)
    model.evaluate(models.batched((_X, _Y), 2), verbose=0)
    _fit(model)
    return float(model.evaluate(models.batched((_X, _Y), 2), verbose=0)), _loss(model)


def _checkpoint_before(placed):
    model = _new(placed)
    state = TrainingState(model)
    checkpoint = tf.train.Checkpoint(model=model)
    _fit(model)
    assert state is not None
    with tempfile.TemporaryDirectory() as folder:
        path = checkpoint.save(os.path.join(folder, "saved"))
        expected = _loss(model)
        model.set_weights([np.zeros_like(w) for w in model.get_weights()])
        checkpoint.restore(path)
    return _loss(model), expected


def _in_a_dataset(placed):
    model = _new(placed)
    kernel = model.layers[-1].kernel
    sums = tf.data.Dataset.range(1).map(lambda _: tf.reduce_sum(tf.identity(kernel.value)))
    concrete = tf.function(lambda: tf.reduce_sum(kernel.value)).get_concrete_function()
    _fit(model)
    assert sums is not None
    return float(concrete()), float(np.sum(kernel.numpy()))


def _one_layer_in_two(placed):
    """A model whose largest layer is another's, which was traced before."""
    with placed.scope():
        layers = _layers()
        first, other = _model(layers), _model([*_layers()[:2], layers[-1]])
    first.predict(_X, verbose=0)
    _fit(other)
    return float(np.mean((first.predict(_X, verbose=0) - _Y) ** 2)), _loss(first)


KINDS = {
    "function": _traced_function, "second model": _second_model, "held": _held_variable,
    "evaluated": _evaluated_before, "checkpoint": _checkpoint_before, "dataset": _in_a_dataset,
    "shared layer": _one_layer_in_two,
}  # fmt: skip


def identities(cluster):
    """Returns by kind what others see of the variables after training, and what is right."""
    results = {}
    for name, run in KINDS.items():
        models.in_double_precision()
        results[name] = list(run(models.strategy(cluster)))
    return results


def places(cluster):
    """Returns, for some models, what `placement` says of each variable and where it and its slots are."""
    shards = tf.distribute.experimental.partitioners.FixedShardsPartitioner(2)

    def trained(partitioner=None, known=False):
        models.in_double_precision()
        placed = models.strategy(cluster, partitioner=partitioner)
        model = _new(placed)
        functions = []
        if known:
            functions.append(tf.function(lambda x: model(x)))
            functions[0](tf.constant(_X))
        _fit(model)
        rows = {row.variable: [row.task, row.num_bytes, row.slot_bytes] for row in placed.placement.rows}
        truth = {}
        for variable in model.variables:
            for index, shard in enumerate(shards_of(variable)):
                name = variable.path if len(shards_of(variable)) == 1 else f"{variable.path}/part_{index}"
                size = 8 * shard.shape.num_elements()
                truth[name] = [tf.DeviceSpec.from_string(shard.device).task, size, 2 * size]
        loads = [0, 0]
        for task, size, _ in truth.values():
            loads[task] += size
        return {"rows": rows, "truth": truth, "loads": loads}

    return {"new": trained(), "known": trained(known=True), "shards": trained(shards)}


def models_that_are_deleted(cluster):
    """Returns how many graphs and models stay of models that were used and deleted."""
    models.in_single_precision()
    return left_of_models(models.strategy(cluster, "synchronous"))
