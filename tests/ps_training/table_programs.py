"""Runs on the chief: embedding tables on parameter servers, and what they must equal."""

import keras
import numpy as np
import tensorflow as tf

import tfdist_ext
from tests.ps_training import models
from tfdist_ext.ps import BoundedStaleness

ROWS, WIDTH = 9000, 8  # 576 kB in double precision: large enough to travel by rows.
OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.1),
    "adagrad": lambda: keras.optimizers.Adagrad(0.1),
    "adam": lambda: keras.optimizers.Adam(0.01),
    "momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    "clipped": lambda: keras.optimizers.Adam(0.01, global_clipnorm=0.01),
    "decayed": lambda: keras.optimizers.AdamW(0.01, weight_decay=0.1),
}


def _clicks(batch=8, steps=6, rows=ROWS, seed=3):
    """Returns ids with repetitions inside a row and a batch, and targets."""
    generator = np.random.default_rng(seed)
    ids = generator.integers(0, rows, (batch * steps, 3))
    ids[:, 1] = ids[:, 0]
    ids[::2, 2] = 5
    return ids, generator.normal(size=(batch * steps, 1))


def _ranker(optimizer, make_table):
    ids = keras.Input((3,), dtype="int32")
    rows = keras.layers.Flatten()(make_table()(ids))
    model = keras.Model(ids, keras.layers.Dense(1)(rows))
    model.compile(OPTIMIZERS[optimizer](), "mse")
    return model


def _embedding():
    return keras.layers.Embedding(ROWS, WIDTH, name="table")


def against_a_dense_gradient(cluster, optimizer, num_shards):
    """Trains a table under the strategy, and on one device with the gradient of the whole table."""
    models.in_double_precision()
    partitioner = tf.distribute.experimental.partitioners.FixedShardsPartitioner(num_shards)
    placed = models.strategy(cluster, BoundedStaleness(0), partitioner if num_shards > 1 else None)
    data = models.batched(_clicks(), 8)  # Connecting to a cluster makes what was there before unusable.
    with placed.scope():
        model = _ranker(optimizer, _embedding)
    model.fit(data, epochs=2, verbose=0)
    models.in_double_precision()
    one = _ranker(optimizer, _embedding)
    one.optimizer.build(one.trainable_variables)

    @tf.function
    def step(ids, targets):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(one(ids, training=True) - targets))
        gradients = tape.gradient(loss, one.trainable_variables)
        one.optimizer.apply([tf.convert_to_tensor(g) for g in gradients], one.trainable_variables)

    for _ in range(2):
        for ids, targets in data:
            step(ids, targets)
    total = placed.statistics["total"]
    table = model.get_layer("table")._embeddings._value
    return {
        "distributed": [np.asarray(w) for w in model.get_weights()],
        "alone": [np.asarray(w) for w in one.get_weights()],
        "pulled": total["bytes_pulled"] / total["applied"], "pushed": total["bytes_pushed"] / total["applied"],
        "shards": len(table.variables) if num_shards > 1 else 1, "placement": str(placed.placement),
    }  # fmt: skip


def lazy_adam(cluster):
    """Trains a table whose rows move only when they are touched; returns it and what NumPy says."""
    models.in_double_precision()
    ids, targets = _clicks(rows=40)
    placed = models.strategy(cluster, BoundedStaleness(0))
    with placed.scope():
        layer = tfdist_ext.layers.ShardedEmbedding(40, 2, lazy=True, name="table")
        numbers = keras.Input((3,), dtype="int32")
        total = keras.layers.Lambda(lambda rows: keras.ops.sum(rows, axis=(1, 2))[:, None])(layer(numbers))
        model = keras.Model(numbers, total)
        model.compile(keras.optimizers.Adam(0.1), "mse")
    start = np.array(model.get_weights()[0])
    model.fit(models.batched((ids, targets), 8), verbose=0)
    return {
        "table": np.asarray(model.get_weights()[0]),
        "expected": _lazy_adam_by_hand(start, ids, targets, 8, 0.1),
    }


def _lazy_adam_by_hand(table, ids, targets, batch, rate, beta1=0.9, beta2=0.999, epsilon=1e-7):
    """Adam in which the moments and the value of a row that the batch did not touch stay as they are."""
    table, first, second = table.copy(), np.zeros_like(table), np.zeros_like(table)
    for step, start in enumerate(range(0, len(ids), batch), start=1):
        some, wanted = ids[start : start + batch], targets[start : start + batch]
        error = table[some].sum(axis=(1, 2)) - wanted[:, 0]
        gradient = np.zeros_like(table)
        for row, of_row in zip(some, 2 * error / len(some), strict=True):
            for number in row:
                gradient[number] += of_row
        touched = np.unique(some)
        first[touched] += (1 - beta1) * (gradient[touched] - first[touched])
        second[touched] += (1 - beta2) * (gradient[touched] ** 2 - second[touched])
        # Keras takes these two powers of the numbers in single precision.
        power1, power2 = float(np.float32(beta1)) ** step, float(np.float32(beta2)) ** step
        scale = rate * np.sqrt(1 - power2) / (1 - power1)
        table[touched] -= scale * first[touched] / (np.sqrt(second[touched]) + epsilon)
    return table


def bytes_of_tables(cluster, sizes):
    """Trains tables of several sizes on the same number of ids a batch; returns bytes per step."""
    results = {}
    for rows in sizes:
        models.in_single_precision()
        placed = models.strategy(cluster, BoundedStaleness(0))
        with placed.scope():
            model = _small_ranker(rows)
        ids = np.arange(64, dtype="int32")[:, None] * (rows // 64)
        model.fit(models.batched((ids, np.zeros((64, 1), "float32")), 16), verbose=0)
        total = placed.statistics["total"]
        results[str(rows)] = (total["bytes_pulled"] + total["bytes_pushed"]) / total["applied"]
    return results


def _small_ranker(rows):
    ids = keras.Input((1,), dtype="int32")
    table = tfdist_ext.layers.ShardedEmbedding(rows, 32, embeddings_initializer="zeros")
    model = keras.Model(ids, keras.layers.Dense(1)(keras.layers.Flatten()(table(ids))))
    model.compile(keras.optimizers.Adagrad(0.1), "mse")
    return model


def save_in_shards_and_restore(cluster, directory):
    """Saves a table of two shards; restores it into one, into three, and into a model without a strategy."""
    models.in_double_precision()
    shards = tf.distribute.experimental.partitioners.FixedShardsPartitioner
    placed = models.strategy(cluster, BoundedStaleness(0), shards(2))
    with placed.scope():
        model = _ranker("adagrad", _embedding)
    model.fit(models.batched(_clicks(), 8), verbose=0)
    path = tf.train.Checkpoint(model=model, optimizer=model.optimizer).save(f"{directory}/table")
    model.save_weights(f"{directory}/table.weights.h5")
    expected = [np.asarray(w) for w in model.get_weights()]
    slots = [np.asarray(v) for v in model.optimizer.variables]
    results = {}
    for number in (1, 3):
        other = models.strategy(cluster, BoundedStaleness(0), shards(number) if number > 1 else None)
        with other.scope():
            restored = _ranker("adagrad", _embedding)
            restored.optimizer.build(restored.trainable_variables)
        tf.train.Checkpoint(model=restored, optimizer=restored.optimizer).restore(
            path
        ).assert_existing_objects_matched()
        same = all(
            np.array_equal(a, np.asarray(b)) for a, b in zip(expected, restored.get_weights(), strict=True)
        )
        same_slots = all(
            np.array_equal(a, np.asarray(b)) for a, b in zip(slots, restored.optimizer.variables, strict=True)
        )
        results[str(number)] = [same, same_slots]
    alone = _ranker("adagrad", _embedding)
    alone.load_weights(f"{directory}/table.weights.h5")
    results["alone"] = all(np.array_equal(a, b) for a, b in zip(expected, alone.get_weights(), strict=True))
    return results


def placed_largest_first(cluster):
    """Builds a model whose variables do not come in the order of their sizes; returns where they are."""
    models.in_single_precision()
    placed = models.strategy(cluster, BoundedStaleness(0))
    widths = [100, 200, 400, 100]
    with placed.scope():
        model = keras.Sequential([keras.Input((50,)), *[keras.layers.Dense(w) for w in widths]])
        model.compile(keras.optimizers.Adam(0.01), "mse")
    x = np.ones((8, 50), "float32")
    before = model.predict(x, verbose=0)
    model.fit(x, np.zeros((8, 100), "float32"), batch_size=4, verbose=0)
    table = placed.placement
    slots = {
        variable.path: variable._value.device
        for variable in model.optimizer.variables
        if "momentum" in variable.path
    }
    kernels = {
        variable.path.replace("/", "_"): variable._value.device for variable in model.trainable_variables
    }
    beside = [
        device == kernels[name]
        for path, device in slots.items()
        for name in kernels
        if path.endswith(f"{name}_momentum")
    ]
    return {
        "totals": list(table.totals),
        "imbalance": table.imbalance,
        "beside": beside,
        "moved": bool(before.any()),
    }
