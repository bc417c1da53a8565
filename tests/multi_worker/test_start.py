"""How does a job start? Whom it waits for, whom it refuses, what it says of a difference, and the secret."""

import contextlib
import json
import os
import sys

import keras
import pytest
import tensorflow as tf
import zmq

import tfdist_ext
from tests.multi_worker.agreement import (
    assert_identical,
    facts_of,
    linear_model,
    logged,
    make_strategy,
    pairs,
)
from tfdist_ext.errors import ClusterSpecError, TfdistError

UNUSED = "127.0.0.1:1"  # Nobody listens on port 1 (tcpmux) of this machine.


def weight_after_one_step(strategy):
    """2 * mean(1, 3) = 4, from zero."""
    model = linear_model(strategy)
    model.fit(pairs([1, 3], 2), verbose=0)
    return model.get_weights()[0].item()


def wait_for_a_worker_that_never_starts():
    config = json.loads(os.environ["TF_CONFIG"])
    config["cluster"]["worker"].append(UNUSED)
    os.environ["TF_CONFIG"] = json.dumps(config)
    with logged() as lines:
        try:
            make_strategy(start_timeout_seconds=5.5)
        except TfdistError as error:
            return facts_of(error), lines
    return None, lines


def test_M8_an_absent_worker_is_named_within_five_seconds_and_at_the_deadline(worker_pool):
    # TF#39922.
    ((error, lines),) = worker_pool.run(wait_for_a_worker_that_never_starts, num_workers=1)
    assert error["type"] == "StartupTimeoutError"
    assert error["missing"] == (f"worker:1 at {UNUSED}",)
    assert 5.5 <= error["waited_seconds"] < 7.0
    assert [line for line in lines if "has waited 5 s for" in line] == [
        f"worker:0 has waited 5 s for worker:1 at {UNUSED}."
    ]


def use_tensorflow_first():
    tf.constant(1.0) + 1.0
    tf.random.normal([3])
    return weight_after_one_step(make_strategy())


def test_M10_operations_before_the_strategy_are_harmless(worker_pool):
    # TF#30551.
    assert worker_pool.run(use_tensorflow_first) == [4.0, 4.0]


def test_M11_a_chief_in_a_cluster_of_workers(monkeypatch):
    config = {"cluster": {"worker": ["127.0.0.1:1", "127.0.0.1:2"]}, "task": {"type": "chief", "index": 0}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))
    with pytest.raises(ClusterSpecError, match=r"chief:0.*worker \(2 tasks: 0, 1\)"):
        make_strategy()


def test_M12_a_misspelled_job(monkeypatch):
    config = {"cluster": {"worker_hosts": ["127.0.0.1:1"]}, "task": {"type": "worker", "index": 0}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))
    with pytest.raises(ClusterSpecError, match="Did you mean 'worker'?"):
        make_strategy()


def train_beside_an_evaluator(in_cluster):
    config = json.loads(os.environ["TF_CONFIG"])
    workers = config["cluster"]["worker"]
    if in_cluster:
        config["cluster"]["evaluator"] = [UNUSED]
    if config["task"]["index"] == 2:
        # The third process is the evaluator; the others are two workers.
        config["task"] = {"type": "evaluator", "index": 0}
    config["cluster"]["worker"] = workers[:2]
    os.environ["TF_CONFIG"] = json.dumps(config)
    strategy = make_strategy()
    return strategy.num_replicas_in_sync, weight_after_one_step(strategy)


@pytest.mark.parametrize("in_cluster", [False, True])
def test_M14_an_evaluator_runs_alone_and_nobody_waits_for_it(worker_pool, in_cluster):
    # TF#46169. No server listens at the evaluator's address.
    results = worker_pool.run(train_beside_an_evaluator, num_workers=3, in_cluster=in_cluster)
    assert results == [(2, 4.0), (2, 4.0), (1, 4.0)]


# --- Differences between tasks -------------------------------------------------------------------------------------


def start_with(seed=7, script=None, units=4, floatx="float32", on_mismatch="error"):
    """Starts, builds a model and trains; returns the error, or the warnings and the loss."""
    keras.utils.set_random_seed(seed)
    keras.config.set_floatx(floatx)
    main = sys.modules["__main__"]
    original = main.__file__
    main.__file__ = script or original
    try:
        with logged() as lines:
            strategy = make_strategy(on_mismatch=on_mismatch)
        with strategy.scope():
            model = keras.Sequential([keras.layers.Dense(units), keras.layers.Dense(1)])
            model.compile("sgd", "mse")
        loss = model.fit(pairs([1, 3], 2), verbose=0).history["loss"]
        return {"warnings": [line for line in lines if " differ in " in line], "loss": loss}
    except TfdistError as error:
        return facts_of(error)
    finally:
        main.__file__ = original


def test_preflight_names_both_tasks_and_the_field(worker_pool, tmp_path):
    script = tmp_path / "other.py"
    script.write_text("another script")
    differences = {
        "seed": {"seed": 8},
        "main_script_sha256": {"script": str(script)},
        "keras_floatx": {"floatx": "float64"},
    }
    for field, arguments in differences.items():
        results = worker_pool.run(start_with, num_workers=3, per_worker=[{}, {}, arguments])
        assert_identical(results)
        assert results[0]["type"] == "ConfigurationMismatchError"
        assert (results[0]["field"], results[0]["tasks"]) == (field, ("worker:0", "worker:2"))
        assert all(part in results[0]["message"] for part in (field, "worker:0", "worker:2"))


def test_a_difference_can_be_meant(worker_pool):
    arguments = [{"on_mismatch": "warn"}, {"on_mismatch": "warn", "seed": 8}]
    results = worker_pool.run(start_with, per_worker=arguments)
    assert_identical([result["loss"] for result in results])
    for result in results:
        (warning,) = result["warnings"]
        assert "worker:0 and worker:1 differ in seed" in warning


def test_models_that_differ_are_an_error_on_all_workers(worker_pool):
    results = worker_pool.run(start_with, per_worker=[{}, {"units": 5}])
    for result in results:
        assert result["type"] == "ConfigurationMismatchError"
        assert result["field"] == "model_variables"
        assert result["tasks"] == ("worker:0", "worker:1")
        assert "4" in result["message"] and "5" in result["message"]


def build_more_layers(num_layers):
    try:
        with make_strategy().scope():
            layers = [keras.layers.Dense(1) for _ in range(num_layers)]
            model = keras.Sequential([keras.Input((1,)), *layers])
            model.compile("sgd", "mse")
        model.fit(pairs([1, 3], 2), verbose=0)
    except TfdistError as error:
        return facts_of(error)
    return None


def test_a_model_with_more_layers_on_one_worker(worker_pool):
    results = worker_pool.run(
        build_more_layers, per_worker=[{"num_layers": 1}, {"num_layers": 2}], timeout_seconds=30
    )
    for result in results:
        assert result["type"] == "ConfigurationMismatchError"
        assert result["tasks"] == ("worker:0", "worker:1")


# --- The cluster secret ----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def secret_in_environment(secret):
    os.environ["TFDIST_EXT_CLUSTER_SECRET"] = secret
    try:
        yield
    finally:
        del os.environ["TFDIST_EXT_CLUSTER_SECRET"]


def train_with_secret(secret, from_environment=False):
    with logged() as lines:
        try:
            if from_environment:
                with secret_in_environment(secret):
                    strategy = make_strategy(start_timeout_seconds=3.0)
            else:
                strategy = make_strategy(cluster_secret=secret, start_timeout_seconds=3.0)
        except TfdistError as error:
            return facts_of(error), lines
    return weight_after_one_step(strategy), lines


def test_a_cluster_secret_is_the_same_from_argument_and_environment(worker_pool):
    arguments = [{"from_environment": False}, {"from_environment": True}]
    results = worker_pool.run(train_with_secret, secret="correct horse battery", per_worker=arguments)
    assert [weight for weight, _ in results] == [4.0, 4.0]


@pytest.mark.parametrize("other", ["battery staple correct", None])
def test_a_wrong_or_absent_secret_is_refused_by_both(worker_pool, other):
    results = worker_pool.run(
        train_with_secret, per_worker=[{"secret": "correct horse battery"}, {"secret": other}]
    )
    for rank, (error, _) in enumerate(results):
        assert error["type"] == "StartupTimeoutError"
        assert f"worker:{1 - rank}" in error["missing"][0]
        assert "secret" in error["message"]


def train_insecure_with_a_secret_of_the_launcher():
    with secret_in_environment("correct horse battery"):
        strategy = make_strategy(insecure=True, start_timeout_seconds=10.0)
        again = make_strategy()
        with pytest.raises(ValueError, match="`cluster_secret` is another"):
            make_strategy(insecure=True, cluster_secret="battery staple correct")
    mechanism = strategy.process_group._mesh._listener.mechanism
    return weight_after_one_step(strategy), mechanism, again.process_group is strategy.process_group


def test_g9_insecure_permits_and_does_not_forbid_a_secret_that_the_launcher_drew(worker_pool):
    expected = (4.0, zmq.CURVE, True)
    assert worker_pool.run(train_insecure_with_a_secret_of_the_launcher, num_workers=2) == [expected] * 2


def insecure_with_a_secret():
    with pytest.raises(ValueError, match="contradict each other"):
        make_strategy(insecure=True, cluster_secret="correct horse battery")


def test_g9_insecure_and_a_secret_as_arguments_contradict_each_other(worker_pool):
    worker_pool.run(insecure_with_a_secret, num_workers=2)


def other_settings():
    first = make_strategy()
    messages = []
    for arguments in ({"cluster_secret": "correct horse battery"}, {"peer_timeout_seconds": 7.0}):
        with pytest.raises(ValueError) as caught:
            make_strategy(**arguments)
        messages.append(str(caught.value))
    second = make_strategy(start_timeout_seconds=3.0)  # Of no account once the links are there.
    return messages, first.process_group is second.process_group


def test_g7_a_second_strategy_does_not_share_links_of_other_settings(worker_pool):
    for messages, is_shared in worker_pool.run(other_settings, num_workers=2):
        assert "`cluster_secret` is another" in messages[0] and "horse" not in messages[0]
        assert "`peer_timeout_seconds` is 7.0, and was 5.0" in messages[1]
        assert is_shared


def test_links_beyond_loopback_need_a_secret(monkeypatch):
    workers = [f"127.0.0.1:{port}" for port in (1, 2)] + ["192.0.2.1:2222"]
    config = {"cluster": {"worker": workers}, "task": {"type": "worker", "index": 0}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))
    monkeypatch.delenv("TFDIST_EXT_CLUSTER_SECRET", raising=False)
    with pytest.raises(tfdist_ext.AuthenticationError, match="secret"):
        make_strategy()
