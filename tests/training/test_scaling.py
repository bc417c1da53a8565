"""Batch size and learning rate of many replicas."""

import warnings

import pytest

from tfdist_ext.training import ScaledSettings, scaled_settings


@pytest.mark.parametrize(("rule", "learning_rate"), [("linear", 0.04), ("square root", 0.02), ("none", 0.01)])
def test_K5_batch_and_rate_grow_and_fewer_steps_are_told(rule, learning_rate):
    # keras-io#1507, TFRS#733: batch * N, lr * N. 1,437 rows: 45 batches of 32, 12 of 128.
    with pytest.warns(UserWarning, match="4 replicas make 12 updates an epoch where one made 45"):
        settings = scaled_settings(4, batch_size=32, learning_rate=0.01, num_rows=1437, rule=rule)
    assert settings == ScaledSettings(
        batch_size=128, learning_rate=pytest.approx(learning_rate), steps_per_epoch=12
    )


def test_one_replica_changes_nothing_and_says_nothing():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        settings = scaled_settings(1, batch_size=32, learning_rate=0.01, num_rows=1437)
        assert settings == ScaledSettings(batch_size=32, learning_rate=0.01, steps_per_epoch=45)
        # Nobody knows how many steps there are.
        assert scaled_settings(8, batch_size=32, learning_rate=0.01).steps_per_epoch is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_replicas": 0}, "`num_replicas` must be positive; received 0"),
        ({"batch_size": -1}, "`batch_size` must be positive; received -1"),
        ({"num_rows": 0}, "`num_rows` must be positive"),
        ({"rule": "cubic"}, "`rule` must be one of .*received 'cubic'"),
    ],
)
def test_wrong_arguments_are_named(change, message):
    with pytest.raises(ValueError, match=message):
        scaled_settings(**{"num_replicas": 2, "batch_size": 32, "learning_rate": 0.1, **change})
