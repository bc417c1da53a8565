"""How is a cluster with parameter servers plugged into tf.distribute?

Only the chief runs the program: it makes variables on the ps and sends traced functions to the workers. A ps or a
worker that makes the strategy serves until the chief's process ends, and then ends itself.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from typing import Any

import tensorflow as tf
from absl import logging

from tfdist_ext import cluster as clusters
from tfdist_ext import compat, errors
from tfdist_ext.cluster import environment
from tfdist_ext.cluster.goodbye import say_goodbye_at_exit
from tfdist_ext.cluster.reachability import wait_for_tasks
from tfdist_ext.cluster.serving import serve_until_chief_ends
from tfdist_ext.cluster.stopping import asked_to_stop, stop_all_at_exit
from tfdist_ext.data.worker_dataset import WorkerDataset
from tfdist_ext.placement import PlacementTable
from tfdist_ext.ps import Asynchronous, Synchronous
from tfdist_ext.strategies.parameter_server_variables import VariablePlacer, device_of_task
from tfdist_ext.strategies.training_books import TrainingBooks

_TOO_FEW = ("wait", "shrink", "fail")


class ParameterServerExtended(compat.ParameterServerExtended):
    """Puts variables on the least loaded ps, and gives `fit` its data as `WorkerDataset`s."""

    def __init__(self, strategy, resolver, variable_partitioner):
        super().__init__(strategy, resolver, variable_partitioner)
        # Workers and their threads belong to the strategy; TensorFlow's own coordinator is not needed for `run`.
        self._allow_run_without_coordinator = True
        self.placer = VariablePlacer(self._num_ps, variable_partitioner)
        self._applying = threading.local()

    @contextlib.contextmanager
    def applying(self):
        """Lets optimizers update variables directly, outside of any replica: there is one sum and one copy."""
        self._applying.now = True
        try:
            with self._container_strategy().scope():
                yield
        finally:
            self._applying.now = False

    def _use_merge_call(self):
        return not getattr(self._applying, "now", False)

    @property
    def num_workers(self) -> int:
        """Number of workers of the cluster."""
        return self._num_workers

    def _create_variable(self, next_creator, **kwargs):
        if kwargs.pop("per_worker_variable", False):
            return self._create_per_worker_variable(next_creator, **kwargs)
        return self.placer.create(next_creator, kwargs)

    def _validate_colocate_with_variable(self, colocate_with_variable):
        if not isinstance(colocate_with_variable, compat.ShardedVariable):
            super()._validate_colocate_with_variable(colocate_with_variable)

    def _experimental_distribute_dataset(self, dataset, options):
        if tf.inside_function():
            return super()._experimental_distribute_dataset(dataset, options)
        return self._owned(WorkerDataset.from_dataset(dataset, self._num_workers))

    def _distribute_datasets_from_function(self, dataset_fn, options):
        if tf.inside_function():
            return super()._distribute_datasets_from_function(dataset_fn, options)
        return self._owned(WorkerDataset.from_function(dataset_fn, self._num_workers))

    def _owned(self, dataset: WorkerDataset) -> WorkerDataset:
        dataset.strategy = self._container_strategy()
        return dataset


class ParameterServerStrategy(tf.distribute.ParameterServerStrategy):
    """Training on workers whose gradients are applied to variables on parameter servers (ps).

    Runs on: every task of the cluster, with the same script. On an evaluator it is the strategy of one device. On a
    ps or a worker the constructor serves until the chief's process ends and then ends the process: exit code 0 when
    the chief ended well, 81 when an exception ended it, 82 when it vanished, 83 when it never came. On the chief it
    connects, and Keras' `fit`, `evaluate` and `predict` of a model made in its scope run on the workers.

    One batch of the dataset is one set of gradients. `update_policy` decides which sets are applied, when, and how old
    they may be; every set that is not applied is counted (`statistics`), and announced as an event. The callbacks of
    `fit` see one version of the variables: nothing is applied while they run.

    TensorFlow's servers have neither authentication nor encryption. They belong on a trusted network.

    Args:
        cluster_resolver: A `tf.distribute.cluster_resolver.ClusterResolver`, what `tfdist_ext.cluster.in_process`
            returned, or None for TF_CONFIG.
        variable_partitioner: One of `tf.distribute.experimental.partitioners`; splits large variables into shards over
            the ps along their first dimension. None keeps each variable whole.
        update_policy: `Synchronous`, `BoundedStaleness` or `Asynchronous` (the default, what TensorFlow does).
        requeue_dropped: True computes the batches of dropped sets again, so that no row is lost.
        too_few_workers: What a round of `Synchronous` does when fewer workers live than its quorum needs: "wait" (the
            living fill the slots of the dead), "shrink" (a smaller quorum) or "fail" (a typed error).
        worker_timeout_seconds: A set that is not back in this time is lost, and its batch is computed elsewhere.
        fetch_every_steps: A worker computes this many batches on one copy of the variables (Downpour's n_fetch).
        push_every_steps: A worker sums the gradients of this many batches into one set (Downpour's n_push).
        wire_dtype: "bfloat16" lets variables and gradients travel in half the bytes, rounded.
        delay_compensation: `tfdist_ext.DelayCompensation`, or None.
        startup_timeout_seconds: Longest wait for all tasks to be there, for a step, for a ps that does not answer, and
            of a ps or worker for a chief whose machine does not answer: with the link between two hosts down both
            sides give up after this time.

    Raises:
        ClusterSpecError: The cluster has no ps or no worker.
        StartupTimeoutError: A task did not answer; names it.
        ValueError: Arguments that contradict each other.

    Example:
        >>> strategy = ParameterServerStrategy(update_policy=BoundedStaleness(8))  # doctest: +SKIP

    References:
        Dean et al., "Large Scale Distributed Deep Networks", 2012; Chen et al., "Revisiting Distributed Synchronous
        SGD", 2016 (backup workers); Ho et al., "More Effective Distributed ML via a Stale Synchronous Parallel
        Parameter Server", 2013.
    """

    _server_def: Any = None

    def __init__(
        self,
        cluster_resolver=None,
        variable_partitioner=None,
        *,
        update_policy=None,
        requeue_dropped: bool = False,
        too_few_workers: str = "wait",
        worker_timeout_seconds: float = 60.0,
        fetch_every_steps: int = 1,
        push_every_steps: int = 1,
        wire_dtype: str | None = None,
        delay_compensation=None,
        startup_timeout_seconds: float = 600.0,
    ):
        compat.check_versions()
        self.update_policy = Asynchronous() if update_policy is None else update_policy
        self.requeue_dropped = requeue_dropped
        self.too_few_workers = _one_of("too_few_workers", too_few_workers, _TOO_FEW)
        self.worker_timeout_seconds = _positive("worker_timeout_seconds", worker_timeout_seconds)
        self.fetch_every_steps = _count("fetch_every_steps", fetch_every_steps)
        self.push_every_steps = _count("push_every_steps", push_every_steps)
        self.wire_dtype = _wire_dtype(wire_dtype)
        self.delay_compensation = delay_compensation
        self._check_policy()
        specification = clusters.resolve(cluster_resolver)
        specification.require_parameter_servers()
        if not specification.jobs.get("worker"):
            raise errors.ClusterSpecError(
                "ParameterServerStrategy needs at least one worker, and the cluster has none. Add a `worker` job to "
                f"TF_CONFIG; the jobs are {', '.join(sorted(specification.jobs))}."
            )
        # Refuses here what does not fit the number of workers, and not when training begins.
        self.update_policy.rule(len(specification.jobs["worker"]), too_few_workers)
        self.specification = specification
        self.runs_alone = False
        self.training_books = TrainingBooks()
        self._counts: Any = None
        self._threads: Any = None
        self._version: tf.Variable | None = None
        # What `version_variable` must be, if all went well.
        self.num_steps_applied = 0
        if specification.task.type in ("ps", "worker"):
            sys.exit(serve_until_chief_ends(specification, startup_timeout_seconds=startup_timeout_seconds))
        if specification.task.type == "evaluator":
            self._run_alone()
            return
        _require_one_cluster(specification)
        wait_for_tasks(specification, timeout_seconds=startup_timeout_seconds)
        resolver = clusters.as_tf_resolver(specification)
        super().__init__(resolver, variable_partitioner)
        # Again, with an extended object of ours in place of TensorFlow's.
        tf.distribute.Strategy.__init__(self, ParameterServerExtended(self, resolver, variable_partitioner))
        _note_connection(specification)
        say_goodbye_at_exit(specification)
        self.server_def = ParameterServerStrategy._server_def
        self.patience_seconds = startup_timeout_seconds
        logging.info(
            "Training with %d worker(s) and %d ps under %s.",
            self._num_workers,
            self._num_ps,
            self.update_policy,
        )

    def _run_alone(self) -> None:
        """Makes this the strategy of one device: nobody trains with an evaluator, and nobody waits for it."""
        self.runs_alone = True
        tf.distribute.Strategy.__init__(self, compat.OneDeviceExtended(self, "/device:CPU:0"))
        logging.info(
            "%s runs alone, on one device. It finds out about training from checkpoints.",
            self.specification.task,
        )

    def _check_policy(self):
        if isinstance(self.update_policy, type) or not hasattr(self.update_policy, "rule"):
            raise ValueError(
                "Argument `update_policy` must be a policy such as tfdist_ext.BoundedStaleness(4); received "
                f"{self.update_policy!r}."
            )
        local_steps = self.fetch_every_steps > 1 or self.push_every_steps > 1
        if isinstance(self.update_policy, Synchronous) and local_steps:
            raise ValueError(
                "`fetch_every_steps` and `push_every_steps` need BoundedStaleness or Asynchronous: a round of "
                "Synchronous takes one fresh batch of each worker. Leave both at 1."
            )

    def _connect_to_cluster(self, coordinator_name: str):
        spec = self._cluster_resolver.cluster_spec()
        self._num_workers, self._num_ps = spec.num_tasks("worker"), spec.num_tasks("ps")
        # TensorFlow's own settings for this strategy: calls block their thread, one at a time for each worker. The ps
        # see each other as well, because an apply waits for what all of them have received.
        environment.set_variable("TF_ENABLE_EAGER_CLIENT_STREAMING_ENQUEUE", "False")
        environment.set_variable("TF_PS_DISABLE_ASYNC_EXECUTOR_GLOBALLY", "True")
        chief = f"/job:{coordinator_name}"
        filters = {"worker": ["/job:ps", chief], "ps": ["/job:ps", "/job:worker", chief]}
        if ParameterServerStrategy._server_def is None:
            # Once a process: connecting again makes the variables of other strategies unusable.
            compat.connect_to_cluster(spec, self._cluster_resolver.rpc_layer or "grpc", filters)
            ParameterServerStrategy._server_def = compat.whole_server_def()

    @property
    def num_workers(self) -> int:
        """Number of workers of the cluster, alive or not."""
        return self._num_workers

    @property
    def num_ps(self) -> int:
        """Number of parameter servers of the cluster."""
        return self._num_ps

    def version_variable(self) -> tf.Variable:
        """Returns the variable on ps:0 that counts the steps applied in this cluster."""
        if self._version is None:
            with tf.device(device_of_task(0)):
                self._version = tf.Variable(0, dtype=tf.int64, trainable=False, name="applied_steps")
        return self._version

    @property
    def stop_was_requested(self) -> bool:
        """True once SIGTERM has come to a worker or a ps.

        Who asks is expected to save and to end this process: from then on the tasks only note the signal.
        """
        return not self.runs_alone and asked_to_stop(self.specification) is not None

    def note_stop(self) -> None:
        """Has the workers and ps end with exit code 143 when this process ends."""
        if not self.runs_alone:
            stop_all_at_exit()

    @property
    def statistics(self) -> dict:
        """Counts of the last training, in all and per worker (dispatched, applied, dropped, held, ages, waits, bytes).

        Plain data, the same as `Statistics.as_dict()`; empty before the first step. After a `fit` that
        `steps_per_epoch` ended, the sets that were in flight then are among the dropped.
        """
        return {} if self._counts is None else self._counts.as_dict()

    @property
    def placement(self) -> PlacementTable:
        """Which ps holds which variable, how many bytes, and how even that is; prints as a table."""
        return self.extended.placer.table()


_connected: Any = None


def _require_one_cluster(specification) -> None:
    """Lets a process connect to one cluster only: another would take the variables of the first one away."""
    if _connected is not None and _connected != specification:
        raise RuntimeError(
            "This process is connected to another cluster already; connecting to a second one would make its variables "
            "unusable. Use one cluster a process."
        )
    if _connected is None and compat.is_context_initialized():
        logging.warning(
            "TensorFlow operations ran before the ParameterServerStrategy was made. Connecting to the cluster makes "
            "tensors and variables from before unusable (not datasets); make the strategy first."
        )


def _note_connection(specification) -> None:
    global _connected
    _connected = specification


def _one_of(name: str, value: str, choices: tuple[str, ...]) -> str:
    if value not in choices:
        raise ValueError(f"Argument `{name}` must be one of {', '.join(choices)}; received {value!r}.")
    return value


def _positive(name: str, value: float) -> float:
    if not value > 0:
        raise ValueError(f"Argument `{name}` must be a number of seconds above 0; received {value!r}.")
    return value


def _count(name: str, value: int) -> int:
    if not isinstance(value, int) or value < 1:
        raise ValueError(f"Argument `{name}` must be a number of steps from 1; received {value!r}.")
    return value


def _wire_dtype(name: str | None) -> tf.DType | None:
    if name is None:
        return None
    dtype = tf.as_dtype(name)
    if not dtype.is_floating:
        raise ValueError(
            f'Argument `wire_dtype` must be a float such as "bfloat16", or None; received {name!r}.'
        )
    return dtype
