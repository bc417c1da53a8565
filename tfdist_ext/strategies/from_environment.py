"""Which strategy should this process train under?"""

from __future__ import annotations

import tensorflow as tf
from absl import logging

from tfdist_ext import cluster as cluster_lib
from tfdist_ext.cluster import choice as choices
from tfdist_ext.cluster import environment
from tfdist_ext.strategies import tpu_connection
from tfdist_ext.strategies.gpu_memory import let_memory_grow
from tfdist_ext.strategies.mirrored import MirroredStrategy
from tfdist_ext.strategies.multi_worker import MultiWorkerMirroredStrategy
from tfdist_ext.strategies.parameter_server import ParameterServerStrategy


def choice_from_environment(*, tpu: str | None = None) -> cluster_lib.StrategyChoice:
    """Says which strategy `strategy_from_environment` would make, and why; makes and connects nothing.

    Runs on: every task.

    Args:
        tpu: Name or address of a TPU, or `"local"`; by default what the environment names, or the chips that are
            in this machine.

    Returns:
        The choice; `print` it for the reason.

    Raises:
        ClusterSpecError: TF_CONFIG describes no usable cluster.

    Example:
        >>> choice_from_environment(tpu="grpc://10.0.0.2:8470").kind
        'tpu'
    """
    source = "the argument `tpu`"
    if tpu is None:
        tpu, source = cluster_lib.find_tpu()
    text = environment.tf_config()
    let_memory_grow()
    return cluster_lib.choose(
        cluster_lib.Surroundings(
            tpu=tpu,
            tpu_source=source,
            cluster=None if text is None else cluster_lib.from_tf_config(text),
            num_gpus=_num_logical("GPU"),
            num_cpus=max(1, _num_logical("CPU")),
        )
    )


def strategy_from_environment(*, tpu: str | None = None, update_policy=None) -> tf.distribute.Strategy:
    """Makes the strategy that the environment asks for, and logs why.

    In this order: a TPU, parameter servers (TF_CONFIG with a ps job), several workers (TF_CONFIG), the GPUs of this
    process, logical CPU devices that the program made, one device. On a ps or a worker of parameter servers it serves
    and does not return, as `ParameterServerStrategy` does. Memory of GPUs grows as needed.

    Runs on: every task of the job, with the same arguments.

    Args:
        tpu: Name or address of a TPU, or `"local"`; by default what the environment names, or the chips that are
            in this machine.
        update_policy: Where there are parameter servers, what becomes of gradients; see `ParameterServerStrategy`.

    Returns:
        `tf.distribute.TPUStrategy`, `ParameterServerStrategy`, `MultiWorkerMirroredStrategy` or `MirroredStrategy`.

    Raises:
        TPUUnavailableError: There should be a TPU, and it cannot be used.
        ClusterSpecError: TF_CONFIG describes no usable cluster.

    Example:
        >>> strategy = strategy_from_environment()  # doctest: +SKIP
        >>> with strategy.scope():  # doctest: +SKIP
        ...     model = make_model()
    """
    choice = choice_from_environment(tpu=tpu)
    logging.info("%s", choice)
    if choice.tpu is not None:
        return tf.distribute.TPUStrategy(tpu_connection.connect(choice.tpu))
    if choice.kind == choices.PARAMETER_SERVERS:
        given = {} if update_policy is None else {"update_policy": update_policy}
        return ParameterServerStrategy(**given)
    if choice.kind == choices.MULTI_WORKER:
        return MultiWorkerMirroredStrategy()
    strategy = MirroredStrategy()
    strategy.note_that_it_was_made_alone()
    return strategy


def _num_logical(kind: str) -> int:
    """Counts logical devices without making them: what connects to a cluster has to come before that."""
    devices = tf.config.get_visible_devices(kind)
    return sum(len(tf.config.get_logical_device_configuration(device) or [device]) for device in devices)
