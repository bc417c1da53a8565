"""A TF_CONFIG that comes after the strategy is not followed, and that is said."""

import keras
import numpy as np
import pytest
from absl import logging

import tfdist_ext
from tfdist_ext.strategies import synchronous_strategy

TF_CONFIG = '{"cluster": {"worker": ["127.0.0.1:1", "127.0.0.1:2"]}, "task": {"type": "worker", "index": 0}}'


@pytest.fixture
def warnings(monkeypatch):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    said = []
    monkeypatch.setattr(
        synchronous_strategy.logging, "warning", lambda text, *values: said.append(text % values)
    )
    assert synchronous_strategy.logging is logging
    return lambda: [text for text in said if "TF_CONFIG" in text]


def fit(strategy):
    with strategy.scope():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    model.fit(np.ones([4, 1]), np.ones([4, 1]), batch_size=2, verbose=0)


@pytest.mark.parametrize(
    "make", [tfdist_ext.MultiWorkerMirroredStrategy, tfdist_ext.strategy_from_environment]
)
def test_h22_a_strategy_made_before_tf_config_is_set_warns_at_its_first_step(monkeypatch, warnings, make):
    strategy = make()
    strategy.run(lambda: 1.0)
    assert not warnings()
    monkeypatch.setenv("TF_CONFIG", TF_CONFIG)
    fit(strategy)
    (text,) = warnings()
    assert "at the first step at" in text and f"this {type(strategy).__name__} was made at" in text
    strategy.run(lambda: 1.0)
    assert len(warnings()) == 1


def test_h22_who_asked_for_devices_or_a_cluster_is_not_warned(monkeypatch, warnings):
    alone = tfdist_ext.MultiWorkerMirroredStrategy(tfdist_ext.cluster.ClusterSpecification())
    mirrored = tfdist_ext.MirroredStrategy(["CPU:0"])
    monkeypatch.setenv("TF_CONFIG", TF_CONFIG)
    alone.run(lambda: 1.0)
    mirrored.run(lambda: 1.0)
    assert not warnings()
