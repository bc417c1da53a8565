"""Which process group does a strategy of this process join?

A task has one address, so all strategies of a process that name the same cluster share one group. A group
that lost a peer is left, and the next strategy forms it anew.
"""

from __future__ import annotations

import contextlib
import itertools
import threading

from absl import logging

from tfdist_ext import cluster as cluster_lib
from tfdist_ext import compat, errors
from tfdist_ext.cluster.ports import ReservedPorts
from tfdist_ext.collectives import ProcessGroup

_lock = threading.Lock()
_groups: dict[tuple, GroupMembership] = {}
# Innermost last: a callback may train another model.
_in_use: list[ProcessGroup | None] = []


class GroupMembership:
    """A process group and the counters that its members advance together.

    Attributes:
        group: The `ProcessGroup`.
    """

    def __init__(self, group: ProcessGroup, settings: dict):
        self.group = group
        self._settings = settings
        self._inputs = itertools.count()

    def check_settings(self, settings: dict) -> None:
        """Refuses a strategy that wants its links otherwise than those that are there, which it would share.

        Raises:
            ValueError: A setting differs; names it, and no secret.
        """
        for name, wanted in settings.items():
            there = self._settings[name]
            if wanted == there:
                continue
            shown = "is another" if name == "cluster_secret" else f"is {wanted!r}, and was {there!r}"
            raise ValueError(
                f"Another strategy of this process has links to the same tasks, which both share: `{name}` {shown}. "
                "Give all strategies of a process the same."
            )

    def next_input_number(self) -> int:
        """Returns a number for a new iterator; the same on all workers, which open the same iterators."""
        return next(self._inputs)


# Names under which addresses are published cannot be used twice.
_formations = itertools.count()


def published_addresses(cluster) -> list[str]:
    """Returns an address for our links on every training task, beside the one TensorFlow's server took.

    Runs on: every training task, after TensorFlow's coordination service has started.

    Args:
        cluster: `ClusterSpecification`.

    Returns:
        `host:port` by rank.
    """
    host = cluster.address_of(cluster.task).rsplit(":", 1)[0]
    reserved = ReservedPorts(1)
    own = f"{host}:{reserved.ports[0]}"
    formation = next(_formations)
    compat.publish(f"tfdist_ext/link/{formation}/{cluster.rank}", own)
    ranks = range(len(cluster.training_tasks))
    reserved.release()
    return [compat.read_published(f"tfdist_ext/link/{formation}/{rank}") for rank in ranks]


def join(
    cluster,
    *,
    addresses,
    secret,
    insecure,
    on_mismatch,
    start_timeout_seconds,
    peer_timeout_seconds,
    timeout_seconds,
):
    """Forms the group of the cluster's training tasks, or returns the one that this process is in.

    Runs on: every training task.

    Args:
        cluster: `ClusterSpecification`.
        addresses: Function that returns `host:port` of our links by rank, called where a group is formed; or None
            for the addresses of the cluster.
        secret: Cluster secret, or None for that of the environment.
        insecure: True to talk beyond loopback without a secret. A secret of the environment is used all the same.
        on_mismatch: "error" or "warn", for tasks that were started with different settings.
        start_timeout_seconds: How long to wait for all tasks.
        peer_timeout_seconds: Silence after which a task counts as lost.
        timeout_seconds: Deadline of each collective.

    Returns:
        A `GroupMembership`.

    Raises:
        StartupTimeoutError: A task did not answer.
        ConfigurationMismatchError: Two tasks differ in a setting that would train another model.
        AuthenticationError: The links leave this machine without a secret.
        ValueError: This process is in the group already, with other settings of its links; or both `secret` and
            `insecure` are given.
    """
    if not secret:
        secret = cluster_lib.environment.cluster_secret()
        # A launcher may have set it, of which the script knows nothing.
        insecure = insecure and not secret
    settings = {
        "cluster_secret": secret,
        "insecure": insecure,
        "peer_timeout_seconds": peer_timeout_seconds,
        "communication_options.timeout_seconds": timeout_seconds,
    }
    tasks = cluster.training_tasks
    key = (tuple((str(task), cluster.address_of(task)) for task in tasks), cluster.rank)
    with _lock:
        existing = _groups.get(key)
        if existing is not None and not isinstance(existing.group.last_failure, errors.PeerLostError):
            existing.check_settings(settings)
            return existing
        if existing is not None:
            logging.info("Forming the group anew after: %s", existing.group.last_failure)
            existing.group.close()
            del _groups[key]
        group = ProcessGroup.connect(
            addresses() if addresses else [cluster.address_of(task) for task in tasks],
            cluster.rank,
            task_names=[str(task) for task in tasks],
            hello=cluster_lib.describe_this_task(cluster, seed=compat.global_seed()),
            secret=secret,
            insecure=insecure,
            start_timeout_seconds=start_timeout_seconds,
            peer_timeout_seconds=peer_timeout_seconds,
            collective_timeout_seconds=timeout_seconds,
        )
        cluster_lib.check_records(group.hellos, on_mismatch=on_mismatch)
        _groups[key] = GroupMembership(group, settings)
        return _groups[key]


@contextlib.contextmanager
def in_use(group: ProcessGroup | None):
    """Makes `group` the current one while Keras works on a model of its strategy; None for any other model."""
    _in_use.append(group)
    try:
        yield
    finally:
        _in_use.remove(group)


def current_group() -> ProcessGroup | None:
    """Returns the group of the model that Keras works on, or None where that is of one process.

    Keras' shuffles of NumPy and PyDataset input ask it: they know of no strategy, and some run on threads of
    the input pipeline.
    """
    return _in_use[-1] if _in_use else None


def is_in_a_group() -> bool:
    """Returns True where this process trains together with others that are still there."""
    return any(membership.group.last_failure is None for membership in _groups.values())
