"""On real GPUs: NCCL is chosen, memory grows, training equals one CPU device, and state moves to a CPU."""

import subprocess
import sys

import keras
import pytest
import tensorflow as tf

import tfdist_ext
from tests.single_host import oracle
from tfdist_ext.checkpoint import TrainingCheckpointManager, TrainingState

GPUS = tf.config.list_physical_devices("GPU")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not GPUS, reason="about GPUs, and none is visible")]

# Sums of the oracle's bound in yet another order, and tanh of another library that is off by a few last bits:
# 50 times the bound. A missing factor shows as 1e-3 or more.
TOLERANCE = 50 * oracle.TOLERANCE

GROWTH = """
import tensorflow as tf, tfdist_ext
print(tfdist_ext.choice_from_environment())
tfdist_ext.strategy_from_environment()
assert all(tf.config.experimental.get_memory_growth(gpu) for gpu in tf.config.list_physical_devices("GPU"))
"""


@pytest.fixture(autouse=True)
def float64():
    keras.config.set_floatx("float64")
    yield
    keras.config.set_floatx("float32")


def make_model():
    model = keras.Sequential(
        [keras.Input((3,)), keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(1)]
    )
    model.compile(keras.optimizers.SGD(0.1, momentum=0.5), "mse", metrics=["mae"])
    return model


def dataset():
    return oracle.batched(oracle.regression_data(), 8)


def test_memory_grows_in_a_new_process():
    done = subprocess.run([sys.executable, "-c", GROWTH], capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr[-3000:]
    plural = "s" if len(GPUS) > 1 else ""
    assert f"MirroredStrategy on {len(GPUS)} GPU{plural}:" in done.stdout


def test_all_gpus_train_as_one_cpu_device():
    strategy = tfdist_ext.MirroredStrategy()
    assert strategy.num_replicas_in_sync == len(tf.config.list_logical_devices("GPU"))
    if strategy.num_replicas_in_sync > 1:
        options = strategy.extended._communication_options
        assert options.implementation == tf.distribute.experimental.CommunicationImplementation.NCCL
    with tf.device("CPU:0"):
        expected = oracle.train(tfdist_ext.MirroredStrategy(["CPU:0"]), make_model, dataset)
    oracle.assert_same_run(oracle.train(strategy, make_model, dataset), expected, TOLERANCE)


def test_the_state_of_gpus_is_restored_on_a_cpu(tmp_path):
    strategy = tfdist_ext.MirroredStrategy()
    trained = oracle.train(strategy, make_model, dataset)["model"]
    TrainingCheckpointManager(TrainingState(trained, dataset()), tmp_path).save()
    elsewhere = tfdist_ext.MirroredStrategy(["CPU:0"])
    with elsewhere.scope():
        model = make_model()
    TrainingCheckpointManager(TrainingState(model, dataset()), tmp_path).restore_or_initialize()
    for ours, theirs in zip(model.get_weights(), trained.get_weights(), strict=True):
        assert (ours == theirs).all()
