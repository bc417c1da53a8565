"""`strategy_from_environment` makes what the environment asks for; memory of GPUs grows."""

import pathlib
import subprocess
import sys
import types

import pytest
import tensorflow as tf

import tfdist_ext
from tests.cluster.processes import environment_of_a_task
from tfdist_ext.strategies import gpu_memory, tensorflow_collectives

PROGRAM = pathlib.Path(__file__).with_name("environment_program.py")


def run(*flags):
    launcher = [sys.executable, "-m", "tfdist_ext.launch.command", "run", *flags, "--"]
    done = subprocess.run(
        [*launcher, sys.executable, str(PROGRAM)],
        env=environment_of_a_task(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return sorted(line for line in done.stdout.splitlines() if " trained " in line)


def test_the_logical_devices_of_this_process(monkeypatch):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    # tests/four_devices.py made them.
    assert str(tfdist_ext.choice_from_environment()).startswith("MirroredStrategy on 4 logical CPUs:")
    strategy = tfdist_ext.strategy_from_environment()
    assert type(strategy) is tfdist_ext.MirroredStrategy and strategy.num_replicas_in_sync == 4


def test_a_broken_tf_config_is_an_error_and_not_one_device(monkeypatch):
    monkeypatch.setenv("TF_CONFIG", '{"cluster": {"worker": ["localhost:1"]')
    with pytest.raises(tfdist_ext.ClusterSpecError):
        tfdist_ext.strategy_from_environment()


def test_tf_config_of_two_workers():
    # One step of rate 0.25 on the mean of (w - 3)^2 takes w from 0 to 1.5; the batch of two is split.
    assert run("--workers", "2") == [
        "[worker:0] MultiWorkerMirroredStrategy trained 1 step to [[1.5]]",
        "[worker:1] MultiWorkerMirroredStrategy trained 1 step to [[1.5]]",
    ]


def test_tf_config_with_a_ps():
    assert run("--chief", "--workers", "1", "--ps", "1") == [
        "[chief:0] ParameterServerStrategy BoundedStaleness trained 1 step to [[1.5]]"
    ]


@pytest.fixture
def gpus(monkeypatch):
    """Three GPUs that only `tf.config` knows: a plain one, a split one, one that is started already."""
    found = [types.SimpleNamespace(name=name) for name in ("plain", "split", "started")]
    grown = []

    def set_memory_growth(gpu, enable):
        if gpu.name == "started":
            raise RuntimeError("Physical devices cannot be modified after being initialized")
        grown.append((gpu.name, enable))

    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind=None: found if kind == "GPU" else [])
    monkeypatch.setattr(
        tf.config,
        "get_logical_device_configuration",
        lambda gpu: ["half", "half"] if gpu.name == "split" else None,
    )
    monkeypatch.setattr(tf.config.experimental, "set_memory_growth", set_memory_growth)
    return grown


def test_memory_of_gpus_grows_unless_the_program_said_otherwise(gpus):
    assert gpu_memory.let_memory_grow() == 1
    assert gpus == [("plain", True)]


def test_memory_growth_can_be_turned_off(gpus, monkeypatch):
    monkeypatch.setenv("TF_FORCE_GPU_ALLOW_GROWTH", "false")
    assert gpu_memory.let_memory_grow() == 0
    assert gpus == []


@pytest.mark.parametrize(
    ("visible", "asked", "uses_tensorflow"),
    [(["a GPU"], None, True), (["a GPU"], "ring", False), ([], None, False), ([], "tensorflow", True)],
)
def test_tensorflow_collectives_sum_where_gpus_are_visible(monkeypatch, visible, asked, uses_tensorflow):
    # They use NCCL between GPUs; asking beats what is there.
    monkeypatch.setattr(tf.config, "get_visible_devices", lambda kind: visible)
    options = tf.distribute.experimental.CommunicationOptions()
    assert tensorflow_collectives.are_wanted(asked, options) is uses_tensorflow
