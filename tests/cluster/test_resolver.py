"""The argument beats TF_CONFIG, and TF_CONFIG beats one task."""

import os
import subprocess
import sys

import pytest
import tensorflow as tf

from tfdist_ext.cluster import ClusterSpecification, Task, as_tf_resolver, from_tf_config, resolve
from tfdist_ext.cluster import environment as environment_lib
from tfdist_ext.errors import ClusterSpecError

ENVIRON = {"TF_CONFIG": '{"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 1}}'}
OTHER = ClusterSpecification.from_jobs({"worker": ["x:1", "y:1", "z:1"]}, task=Task("worker", 2))


def test_precedence():
    assert resolve(OTHER, environ=ENVIRON) is OTHER
    assert resolve(environ=ENVIRON).task == Task("worker", 1)
    assert resolve(environ={}) == resolve(environ={"TF_CONFIG": " "}) == ClusterSpecification()


def test_a_broken_tf_config_is_not_skipped():
    with pytest.raises(ClusterSpecError, match="not JSON"):
        resolve(environ={"TF_CONFIG": "{"})


def test_tensorflow_resolvers_are_read_and_written():
    assert resolve(as_tf_resolver(OTHER)) == ClusterSpecification.from_jobs(
        {"worker": ["x:1", "y:1", "z:1"]}, task=Task("worker", 2), rpc_layer="grpc"
    )


def test_the_tf_config_resolver_is_read(monkeypatch):
    import tensorflow as tf

    monkeypatch.setenv("TF_CONFIG", ENVIRON["TF_CONFIG"])
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    found = resolve(resolver, environ={})
    assert (found.task, found.world_size) == (Task("worker", 1), 2)


def test_a_resolver_that_does_not_know_its_task():
    import tensorflow as tf

    def simple(jobs):
        return tf.distribute.cluster_resolver.SimpleClusterResolver(tf.train.ClusterSpec(jobs))

    assert resolve(simple({"worker": ["a:1"]})).address == "a:1"
    assert resolve(simple({})).world_size == 1
    with pytest.raises(ClusterSpecError, match="SimpleClusterResolver does not say which task.*task_type"):
        resolve(simple({"worker": ["a:1", "b:1"]}))
    with pytest.raises(ClusterSpecError, match="From the SimpleClusterResolver: .*banana"):
        resolve(simple({"banana": ["a:1"]}))


def test_something_else_is_a_type_error():
    with pytest.raises(TypeError, match="from_tf_config"):
        resolve('{"cluster": {}}')


def test_environment_variables():
    assert environment_lib.cluster_secret({"TFDIST_EXT_CLUSTER_SECRET": "s"}) == "s"
    assert environment_lib.cluster_secret({"TFDIST_EXT_CLUSTER_SECRET": ""}) is None
    copy = environment_lib.inherited()
    copy["TF_CONFIG"] = "changed"
    assert environment_lib.tf_config() != "changed"


def test_importing_the_package_and_the_cluster_leaves_tensorflow_alone():
    code = (
        "import sys, tfdist_ext, tfdist_ext.cluster as c; c.resolve(environ={});"
        "c.describe_this_task(c.ClusterSpecification());"
        "sys.exit(sum(name in sys.modules for name in ('tensorflow', 'keras', 'numpy')))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_from_tf_config_and_resolve_agree():
    assert resolve(environ=ENVIRON) == from_tf_config(ENVIRON["TF_CONFIG"])


@pytest.fixture
def slurm(monkeypatch):
    """Three tasks on two hosts without GPUs, as Slurm describes them; this is the second."""
    variables = {
        "PROCID": "1",
        "STEP_NUM_TASKS": "3",
        "STEP_NODELIST": "n[1-2]",
        "STEP_TASKS_PER_NODE": "2,1",
    }
    for name, value in variables.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "as it was")
    return monkeypatch


def test_h25_slurm_on_hosts_without_gpus(slurm):
    resolver = tf.distribute.cluster_resolver.SlurmClusterResolver(gpus_per_node=0)
    cluster = resolve(resolver)
    assert [address for _, address in cluster.members] == ["n1:8888", "n1:8889", "n2:8888"]
    assert str(cluster.task) == "worker:1"
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "as it was"
    assert resolve(resolver) == cluster


def test_h25_a_damaged_slurm_environment_is_one_sentence(slurm):
    slurm.setenv("SLURM_PROCID", "7")
    resolver = tf.distribute.cluster_resolver.SlurmClusterResolver(gpus_per_node=3)
    with pytest.raises(
        ClusterSpecError, match="SlurmClusterResolver cannot say which tasks there are"
    ) as caught:
        resolve(resolver)
    assert "\n" not in str(caught.value)
    without = tf.distribute.cluster_resolver.SlurmClusterResolver(gpus_per_node=0)
    with pytest.raises(ClusterSpecError, match="does not say which task this process is"):
        resolve(without)
