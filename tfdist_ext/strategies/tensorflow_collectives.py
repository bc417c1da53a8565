"""How do TensorFlow's own collectives sum the gradients, and who may hear them?"""

from __future__ import annotations

import tensorflow as tf
from absl import logging

from tfdist_ext import cluster as cluster_lib
from tfdist_ext import errors
from tfdist_ext.cluster.addresses import is_loopback
from tfdist_ext.strategies.mirrored import sum_by
from tfdist_ext.strategies.multi_worker_extended import MultiWorkerExtended


class TensorFlowCollectivesExtended(MultiWorkerExtended):
    """The same with floats summed by TensorFlow's own collectives (NCCL on GPUs); the rest stays on our links.

    TensorFlow's server listens at the task's address in the cluster, so our links get a port of their own, which
    the tasks tell each other through TensorFlow's coordination service.
    """

    def _initialize_devices(self, cluster):
        try:
            self._initialize_multi_worker(cluster_lib.as_tf_resolver(_training_part(cluster)))
        except RuntimeError as error:
            raise RuntimeError(
                "TensorFlow's collectives must be set up before TensorFlow runs anything. Make the strategy first, "
                'before any tensor, variable or dataset; or use `all_reduce="ring"`, which does not mind.'
            ) from error
        self._tensorflow_ops = self._cross_device_ops

    def sum_over_replicas(self, per_replica, name="sum", counts_step=False):
        """See `SynchronousExtended.sum_over_replicas`."""
        del name, counts_step
        return sum_by(self._tensorflow_ops, self._communication_options, per_replica, self._ring)


def _training_part(cluster):
    jobs = {job: addresses for job, addresses in cluster.jobs.items() if job in ("chief", "worker")}
    return cluster_lib.ClusterSpecification.from_jobs(
        jobs, task=cluster.task, environment=cluster.environment, rpc_layer=cluster.rpc_layer
    )


def check_open(cluster, secret, insecure: bool) -> None:
    """Refuses to send gradients in clear beyond this machine, unless that was asked for."""
    exposed = [
        address for task in cluster.training_tasks if not is_loopback(address := cluster.address_of(task))
    ]
    if exposed and not insecure:
        raise errors.AuthenticationError(
            f"TensorFlow's collectives, which sum gradients here, neither encrypt nor ask who {exposed[0]} is, and a "
            "cluster secret does not reach them. Pass `insecure=True` on a network that you trust, or "
            '`all_reduce="ring"`, whose links keep the secret.'
        )
    if secret or cluster_lib.environment.cluster_secret():
        logging.warning(
            "The cluster secret protects the links of this package, and not the gradients: TensorFlow's collectives "
            'send them in clear. `all_reduce="ring"` keeps the secret.'
        )


def are_wanted(all_reduce, options) -> bool:
    """Returns True where TensorFlow's collectives sum the gradients.

    Args:
        all_reduce: "ring", "tensorflow" or None, as the user gave it.
        options: Communication options.
    """
    if all_reduce not in (None, "ring", "tensorflow"):
        raise ValueError(
            f'Argument `all_reduce` must be "ring", "tensorflow" or None; received {all_reduce!r}.'
        )
    if all_reduce is not None:
        return all_reduce == "tensorflow"
    return asks_for_nccl(options) or bool(tf.config.get_visible_devices("GPU"))


def asks_for_nccl(options) -> bool:
    """Returns True where the communication options name NCCL."""
    return options.implementation == tf.distribute.experimental.CommunicationImplementation.NCCL
