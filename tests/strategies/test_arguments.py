"""What does not fit is refused at once, with a name and a fix."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist_ext
from tfdist_ext.launch import run
from tfdist_ext.training.batching import check_batched


def two_workers():
    # Nobody listens there: a refusal has to come before the wait.
    jobs = {"chief": ["localhost:9"], "worker": ["localhost:10", "localhost:11"], "ps": ["localhost:12"]}
    return tfdist_ext.cluster.from_tf_config({"cluster": jobs, "task": {"type": "chief", "index": 0}})


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (tfdist_ext.BoundedStaleness, "`update_policy` must be a policy such as .*received <class"),
        (4, "`update_policy` must be a policy such as .*received 4"),
        (tfdist_ext.Synchronous(num_backup_workers=2), "received 2 for 2 workers. Try 1"),
    ],
)
def test_a_policy_that_cannot_work_is_refused_by_the_constructor(policy, message):
    with pytest.raises(ValueError, match=message):
        tfdist_ext.ParameterServerStrategy(two_workers(), update_policy=policy)


def test_parameter_servers_without_a_cluster_say_how_to_get_one(monkeypatch):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    with pytest.raises(tfdist_ext.ClusterSpecError, match="--chief --workers 2 --ps 1 .*in_process"):
        tfdist_ext.ParameterServerStrategy()


def test_a_missing_secret_is_asked_for_by_the_name_it_has():
    jobs = {"worker": ["10.255.0.1:2222", "10.255.0.2:2222"]}
    cluster = tfdist_ext.cluster.from_tf_config({"cluster": jobs, "task": {"type": "worker", "index": 0}})
    with pytest.raises(
        tfdist_ext.AuthenticationError, match="TFDIST_EXT_CLUSTER_SECRET.*`cluster_secret`.*`insecure=True`"
    ):
        tfdist_ext.MultiWorkerMirroredStrategy(cluster)


def test_a_dataset_of_single_rows_is_named():
    strategy = tfdist_ext.MirroredStrategy(["CPU:0"])
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    rows = tf.data.Dataset.from_tensor_slices((np.zeros((8, 4), "float32"), np.zeros((8, 1), "float32")))
    with pytest.raises(ValueError, match=r"not batched: an element has the shape \(4,\).*dataset.batch"):
        model.fit(rows, verbose=0)


def test_a_batch_of_numbers_for_rows_of_one_number_is_a_batch():
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    check_batched(model, (tf.TensorSpec([1]), tf.TensorSpec([1])))
    other = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    check_batched(other, (tf.TensorSpec([None, 4]), tf.TensorSpec([None])))
    with pytest.raises(ValueError, match="not batched"):
        check_batched(other, tf.TensorSpec([4]))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--workers", "2", "python", "x.py"],
            "unrecognized arguments: python x.py. Write the command after `--`",
        ),
        (["--workerz", "2", "--", "python", "x.py"], "unrecognized arguments: --workerz 2.\n"),
    ],
)
def test_a_command_without_the_two_dashes(capsys, flags, message):
    with pytest.raises(SystemExit):
        run.main(flags)
    assert message in capsys.readouterr().err
