"""How do the devices of many hosts train together?"""

from __future__ import annotations

import tensorflow as tf
from absl import logging

from tfdist_ext import cluster as cluster_lib
from tfdist_ext import compat
from tfdist_ext.collectives import TopK
from tfdist_ext.strategies import groups, tensorflow_collectives
from tfdist_ext.strategies.gpu_memory import let_memory_grow
from tfdist_ext.strategies.mirrored import next_collective_key_base
from tfdist_ext.strategies.multi_worker_extended import MultiWorkerExtended
from tfdist_ext.strategies.synchronous_strategy import SynchronousStrategy

_DEFAULT_TIMEOUT_SECONDS = 600.0


class MultiWorkerMirroredStrategy(SynchronousStrategy, tf.distribute.MultiWorkerMirroredStrategy):
    """Synchronous training on many hosts; a drop-in for `tf.distribute.MultiWorkerMirroredStrategy`.

    Runs on: every chief and worker of the cluster, with the same script. The run is the one of a single device on
    the same global batches.

    Args:
        cluster_resolver: A `tf.distribute.cluster_resolver.ClusterResolver` or `tfdist_ext.cluster.
            ClusterSpecification`. By default TF_CONFIG, and without it one task.
        communication_options: `tf.distribute.experimental.CommunicationOptions`. `bytes_per_pack` is the size of a
            message (8 MiB by default), `timeout_seconds` the deadline of a collective (600 by default);
            `implementation=NCCL` chooses `all_reduce="tensorflow"`.
        all_reduce: Who sums gradients over workers: "ring" (our links), "tensorflow" (TensorFlow's collectives, as
            `communication_options` say), or None for "tensorflow" where replicas are on GPUs and "ring" elsewhere.
        compression: `tfdist_ext.TopK` to send the largest entries of each gradient and keep the rest for later steps;
            the result is then not that of one device. None sends all. The ring only; one task compresses nothing.
        cluster_secret: Text that all tasks share; needed as soon as an address is not on loopback, and then turns on
            encryption and authentication. By default the environment variable TFDIST_EXT_CLUSTER_SECRET.
        insecure: True to let links leave this machine without a secret; if the environment has one, it is used.
        on_mismatch: "error", or "warn" to go on when tasks were started with different versions, scripts or seeds.
        start_timeout_seconds: How long to wait for all tasks at the start.
        peer_timeout_seconds: Silence after which a task counts as lost; a closed connection counts at once.

    Raises:
        ValueError: An argument is wrong, or `compression` is to go over TensorFlow's collectives.
        ClusterSpecError: TF_CONFIG describes no usable cluster.
        StartupTimeoutError: A task did not answer in time; names it.
        ConfigurationMismatchError: Two tasks differ in a setting that would train another model.
        AuthenticationError: Links leave this machine without a secret, or gradients do over TensorFlow's collectives
            without `insecure=True`.

    Example:
        >>> strategy = MultiWorkerMirroredStrategy()      # Without TF_CONFIG: one task.
        >>> strategy.extended.num_workers
        1

    References:
        Patarasuk and Yuan, "Bandwidth Optimal All-reduce Algorithms for Clusters of Workstations", 2009 (the ring).
    """

    def __init__(
        self,
        cluster_resolver=None,
        communication_options=None,
        *,
        all_reduce: str | None = None,
        compression: TopK | None = None,
        cluster_secret: str | None = None,
        insecure: bool = False,
        on_mismatch: str = "error",
        start_timeout_seconds: float = 120.0,
        peer_timeout_seconds: float = 5.0,
    ):
        compat.check_versions()
        let_memory_grow()
        communication_options = _checked_options(communication_options)
        cluster = cluster_lib.resolve(cluster_resolver)
        _check_compression(compression, all_reduce, communication_options)
        if compression is not None:
            all_reduce = "ring"
        uses_tensorflow = (
            tensorflow_collectives.are_wanted(all_reduce, communication_options) and cluster.world_size > 1
        )
        if uses_tensorflow:
            tensorflow_collectives.check_open(cluster, cluster_secret, insecure)
            # What our own links carry keeps the secret.
            insecure = insecure and not cluster_secret

        def join(cluster):
            return groups.join(
                cluster,
                addresses=(lambda: groups.published_addresses(cluster)) if uses_tensorflow else None,
                secret=cluster_secret,
                insecure=insecure,
                on_mismatch=on_mismatch,
                start_timeout_seconds=start_timeout_seconds,
                peer_timeout_seconds=peer_timeout_seconds,
                timeout_seconds=communication_options.timeout_seconds or _DEFAULT_TIMEOUT_SECONDS,
            )

        self._collective_key_base = next_collective_key_base()
        kind = (
            tensorflow_collectives.TensorFlowCollectivesExtended if uses_tensorflow else MultiWorkerExtended
        )
        extended = kind(self, cluster, communication_options, join, compression)
        tf.distribute.Strategy.__init__(self, extended)
        if cluster_resolver is None:
            self.note_that_it_was_made_alone()
        logging.info(
            "%s is worker %d of %d, %d replica(s) each.",
            cluster.task, extended.worker_index, extended.num_workers, len(extended.worker_devices),
        )  # fmt: skip

    def next_input_number(self) -> int:
        """Returns the number of the next iterator; the same on all workers."""
        return self.extended._membership.next_input_number()

    @property
    def process_group(self):
        """The `ProcessGroup` of the workers, or None for one task."""
        return self.extended.process_group


def _check_compression(compression, all_reduce, options) -> None:
    if compression is None:
        return
    if not isinstance(compression, TopK):
        raise ValueError(
            f"Argument `compression` must be a `tfdist_ext.TopK` or None; received {compression!r}. Try "
            "`tfdist_ext.TopK(fraction=0.01)`."
        )
    if all_reduce == "tensorflow" or (all_reduce is None and tensorflow_collectives.asks_for_nccl(options)):
        raise ValueError(
            "Argument `compression` needs the ring: TensorFlow's collectives sum whole tensors. Try "
            '`all_reduce="ring"`.'
        )


def _checked_options(options):
    if options is None:
        return compat.CommunicationOptions()
    if not isinstance(options, compat.CommunicationOptions):
        raise ValueError(
            "Argument `communication_options` must be a tf.distribute.experimental.CommunicationOptions; "
            f"received {type(options).__name__}."
        )
    return options
