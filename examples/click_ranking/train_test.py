"""The rows are those of the known model; one device and a cluster reach its log-loss within the stated margin."""

import io
import pathlib
import subprocess
import sys
import urllib.error

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_datasets as tfds

from examples.click_ranking import clicks, movielens, quality, train

ROOT = pathlib.Path(__file__).parents[2]
LAUNCHER = [
    sys.executable,
    "-m",
    "tfdist_ext.launch.command",
    "run",
    "--chief",
    "--workers",
    "2",
    "--ps",
    "1",
]
PROGRAM = [sys.executable, "-m", "examples.click_ranking.main"]
SMALL = clicks.Clicks(num_users=300, num_items=100)


def rows_of(dataset):
    batches = [(x["user"], x["item"], y[:, 0]) for x, y in dataset]
    return np.stack([np.concatenate(column) for column in zip(*batches, strict=True)])


def test_a_row_is_the_same_in_any_batch_and_shard():
    whole = rows_of(SMALL.train(1000, 1000))
    np.testing.assert_array_equal(rows_of(SMALL.train(1000, 64)), whole)
    np.testing.assert_array_equal(rows_of(SMALL.train(1000, 100).shard(2, 1))[:, :100], whole[:, 100:200])
    np.testing.assert_array_equal(rows_of(SMALL.train(1000, 100).skip(7)), whole[:, 700:])
    assert not np.array_equal(
        rows_of(clicks.Clicks(num_users=300, num_items=100, seed=2).train(1000, 64)), whole
    )
    assert not np.array_equal(rows_of(SMALL.test(1000, 1000)), whole)


def test_ids_and_clicks_have_the_stated_distributions():
    """A frequency over n rows has a standard error of sqrt(p (1 - p) / n); five of them are allowed."""
    num_rows = 100_000
    users, items, clicked = rows_of(SMALL.train(num_rows, num_rows))
    for ids, vocabulary in ((users, 300), (items, 100)):
        expected = np.arange(1, vocabulary + 1) ** -1.3
        expected /= expected.sum()
        seen = np.bincount(ids.astype(int), minlength=vocabulary) / num_rows
        assert np.all(np.abs(seen - expected) < 5 * np.sqrt(expected / num_rows))
    # User and item are drawn apart: no correlation, whose standard error is 1 / sqrt(n).
    assert abs(np.corrcoef(users, items)[0, 1]) < 5 / np.sqrt(num_rows)
    chances = SMALL.chance(tf.constant(users, tf.int64), tf.constant(items, tf.int64)).numpy()
    for low in (0.0, 0.25, 0.5, 0.75):
        among = (chances >= low) & (chances < low + 0.25)
        assert abs(np.mean(clicked[among] - chances[among])) < 5 * 0.5 / np.sqrt(among.sum())
    # The log-loss of the true logits on the drawn clicks is the entropy, but for chance: logits have a spread of 2.
    reached = quality.log_loss(np.log(chances) - np.log1p(-chances), clicked)
    assert abs(reached - quality.entropy(chances)) < 5 * 2 * 0.5 / np.sqrt(num_rows)


def test_quality_by_hand():
    """Logits of 3/4 and 1/2: -log(3/4), -log(1/4), -log(1/2). Of two pairs the click is above in one."""
    logits, clicked = np.log([3.0, 3.1, 1.0]), np.array([1.0, 0.0, 0.0])
    expected = -np.mean(np.log([3 / 4, 1 / 4.1, 1 / 2]))
    assert abs(quality.log_loss(logits, clicked) - expected) < 1e-15
    assert quality.area_under_curve(logits, clicked) == 0.5
    assert abs(quality.entropy(0.5) - np.log(2)) < 1e-15


def test_a_cluster_reaches_the_log_loss_of_one_device():
    """One device here, `bounded` there; `examples/time_to_quality` compares all policies."""
    alone = train.train(
        tf.distribute.get_strategy(), clicks.Clicks(), num_rows=10_000, num_epochs=1, batch_size=64, verbose=0
    )
    assert alone["best_log_loss"] < alone["log_loss"] < alone["baseline_log_loss"] - 0.05
    flags = ["--rows", "10000", "--policy", "bounded"]
    done = subprocess.run(
        [*LAUNCHER, "--", *PROGRAM, *flags], cwd=ROOT, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stdout + done.stderr
    said = {}
    for line in done.stdout.splitlines():
        name, _, value = line.partition("[chief:0] ")[2].rpartition("  ")
        said[name.strip()] = value.strip()
    assert abs(float(said["log-loss"]) - alone["log_loss"]) < train.MARGIN
    assert float(said["best reachable"]) == round(alone["best_log_loss"], 4)
    # Each row once, and no set older than the policy says.
    assert int(said["rows_applied"]) == 10_000 and int(said["age_max"]) <= 8


def ratings():
    """200 ratings of 20 users and 10 films: users with an even number like everything."""
    numbers = np.arange(200)
    return tf.data.Dataset.from_tensor_slices(
        {
            "user_id": [str(number // 10) for number in numbers],
            "movie_id": [str(number % 10) for number in numbers],
            "user_rating": np.where(numbers // 10 % 2 == 0, 5.0, 3.0).astype(np.float32),
        }
    )


def test_movielens_in_the_form_of_tensorflow_datasets(monkeypatch, tmp_path):
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path))
    monkeypatch.setattr("urllib.request.urlopen", lambda *_, **__: io.BytesIO())
    with tfds.testing.mock_data(as_dataset_fn=lambda *_, **__: ratings()):
        data = movielens.load_ratings()
    assert (data.num_users, data.num_items, data.clicked.mean()) == (20, 10, 0.5)
    assert sum(len(y) for _, y in data.train(1000, 64)) == 160
    assert sum(len(y) for _, y in data.test(1000, 64)) == 40
    result = train.train(
        tf.distribute.get_strategy(), data, num_rows=160, num_epochs=20, batch_size=16, verbose=0
    )
    # Whoever has learnt which users like everything ranks all pairs rightly.
    assert result["auc"] > 0.99 and result["log_loss"] < result["baseline_log_loss"]
    assert result["best_log_loss"] is None


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (
            urllib.error.URLError("Name or service not known"),
            "Name or service.*TFDS_DATA_DIR.*--dataset synthetic",
        ),
        (ModuleNotFoundError("No module named 'such'", name="such"), "pip install such"),
    ],
)
def test_movielens_that_cannot_be_fetched_is_one_sentence(error, words, monkeypatch, tmp_path):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr("urllib.request.urlopen", fail)
    monkeypatch.setattr(
        tfds,
        "builder",
        lambda name: tfds.builder_cls(name.split("/")[0])(config="100k-ratings", data_dir=tmp_path),
    )
    with pytest.raises(RuntimeError, match=words):
        movielens.load_ratings()
