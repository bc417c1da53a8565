"""Trains a click model on one device, or on the workers and parameter servers that TF_CONFIG names.

The lines after `# tfdist_ext:` are all that differs from plain Keras.
"""

import keras
import tensorflow as tf

# tfdist_ext:
import tfdist_ext
from examples.click_ranking import quality

NUM_TEST_ROWS = 8_192
# How far from one device any policy may end, in nats; the README says where it comes from.
MARGIN = 0.025

# tfdist_ext: what becomes of a worker's gradients.
POLICIES = {
    "synchronous": tfdist_ext.Synchronous(),
    "backup": tfdist_ext.Synchronous(num_backup_workers=1),
    "bounded": tfdist_ext.BoundedStaleness(8),
    "asynchronous": tfdist_ext.Asynchronous(),
}


def make_strategy(policy: str):
    """Returns the strategy of this task. On a worker or a ps it serves until training ends, and never returns.

    Args:
        policy: A name in `POLICIES`.
    """
    # tfdist_ext: without a cluster in TF_CONFIG this is plain Keras on one device.
    if not tfdist_ext.cluster.resolve().jobs:
        return tf.distribute.get_strategy()
    return tfdist_ext.ParameterServerStrategy(update_policy=POLICIES[policy])


def make_model(num_users: int, num_items: int, model_class=keras.Model):
    """Builds and compiles two towers: `logit = w . [<user, item>, user, item] + b`.

    Args:
        num_users: Vocabulary of users.
        num_items: Vocabulary of items.
        model_class: Class of the model.
    """
    layers = keras.layers
    inputs, towers = {}, []
    for name, vocabulary in (("user", num_users), ("item", num_items)):
        inputs[name] = keras.Input((), dtype="int64", name=name)
        # tfdist_ext: the table is split over the ps, and only the rows of a batch travel.
        row = tfdist_ext.layers.ShardedEmbedding(vocabulary, 16, name=f"{name}_table")(inputs[name])
        hidden = layers.Dense(16, activation="relu")(row)
        towers.append(layers.Add()([row, layers.Dense(16)(hidden)]))
    similarity = layers.Dot(axes=1)(towers)
    logits = layers.Dense(1)(layers.Concatenate()([similarity, *towers]))
    model = model_class(inputs, logits)
    # Adagrad, for an id that is seldom seen keeps large steps. A row's gradient is a small part of the batch's mean:
    # beside it the accumulator's usual first value, 0.1, would be a brake.
    model.compile(
        optimizer=keras.optimizers.Adagrad(0.05, initial_accumulator_value=1e-4),
        loss=keras.losses.BinaryCrossentropy(from_logits=True),
    )
    return model


def train(strategy, clicks, *, num_rows: int, num_epochs: int, batch_size: int, verbose=2) -> dict:
    """Trains, and returns how well the model predicts held-out rows.

    Args:
        strategy: What `make_strategy` returned.
        clicks: A `clicks.Clicks` or a `movielens.Ratings`.
        num_rows: Rows of a pass.
        num_epochs: Passes.
        batch_size: Rows of which a worker makes one set of gradients.
        verbose: As for `fit`.

    Returns:
        `log_loss`, `best_log_loss` (None where nobody knows it), `baseline_log_loss` (of the mean click rate), `auc`,
        and `statistics` (the sum over all workers; None on one device).
    """
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = make_model(clicks.num_users, clicks.num_items)
    model.fit(clicks.train(num_rows, batch_size), epochs=num_epochs, shuffle=False, verbose=verbose)
    tests = clicks.test(NUM_TEST_ROWS, NUM_TEST_ROWS)
    logits = model.predict(tests, verbose=0)[:, 0]
    clicked = next(iter(tests))[1].numpy()[:, 0]
    return {
        "log_loss": quality.log_loss(logits, clicked),
        "best_log_loss": clicks.best_log_loss(NUM_TEST_ROWS),
        "baseline_log_loss": quality.entropy(clicked.mean()),
        "auc": quality.area_under_curve(logits, clicked),
        # tfdist_ext: sets of gradients applied, dropped and lost, and how stale they were.
        "statistics": getattr(strategy, "statistics", {}).get("total"),
    }
