"""What do the two synchronous strategies do the same way?

The mixin sits between a public strategy and TensorFlow's extended object. It decides how a function runs on
the local replicas, how variables are created and updated, and how a dataset becomes a distributed one.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from tfdist_ext import compat, errors
from tfdist_ext.collectives import StreamAbandoned
from tfdist_ext.data import datasets_of_functions, distributed_dataset
from tfdist_ext.strategies import frame as frames
from tfdist_ext.strategies.metric_variable import MetricVariable


class MirroredVariable(compat.MirroredVariable):
    """TensorFlow's mirrored variable that also answers `int()` and `float()`, as `optimizer.iterations` needs it."""

    def __int__(self):
        return int(self.numpy())

    def __float__(self):
        return float(self.numpy())


_VARIABLE_CLASSES = {
    **compat.variable_class_mapping,
    tf.VariableSynchronization.ON_WRITE: MirroredVariable,
    tf.VariableSynchronization.ON_READ: MetricVariable,
}


# A type checker sees the mixins on top of what they are mixed into.
_Extended: Any = compat.MirroredExtended if TYPE_CHECKING else object


class SynchronousExtended(_Extended):
    """Mixin over TensorFlow's `MirroredExtended`; see the module docstring."""

    _updating_replica: int | None = None
    _creates_plain_variables = False
    process_group: Any = None

    # --- Who am I among the replicas? ---------------------------------------------------------------------
    @property
    def num_workers(self) -> int:
        """Number of worker processes that compute together."""
        return self.process_group.size if self.process_group else 1

    @property
    def worker_index(self) -> int:
        """Rank of this process among the workers."""
        return self.process_group.rank if self.process_group else 0

    def slot_of_local_replica(self, local_replica: int) -> int:
        """Returns the sub-batch of the global batch that a local replica computes."""
        return local_replica * self.num_workers + self.worker_index

    def exchange_input(self, stream: str, record):
        """Shows a record about this worker's input to all workers.

        Args:
            stream: Name of the iterator; the same on all workers.
            record: int64 array `[n]`.

        Returns:
            List of the workers' records, or None once this worker dropped its iterator: nobody needs them.

        Raises:
            PeerInputError: Another worker's input failed, or it left the loop.
        """
        group = self.process_group
        try:
            return group.all_gather(record, name=stream, stream=stream)
        except StreamAbandoned as abandoned:
            if abandoned.task == group.task_names[group.rank]:
                return None
            reason = (
                f"its input failed: {abandoned.reason}" if abandoned.reason else "it left the loop over it"
            )
            me = group.task_names[group.rank]
            error = errors.PeerInputError(
                f"{abandoned.task} no longer reads the dataset that {me} is reading: {reason}.",
                task=abandoned.task,
                collective=stream,
                step=group.step,
            )
            self._container_strategy().note_failure(error)
            raise error from None
        except Exception as error:
            self._container_strategy().note_failure(error)
            raise

    @property
    def local_slots(self) -> tuple[int, ...]:
        """Slots of the replicas of this process."""
        return tuple(self.slot_of_local_replica(i) for i in range(len(self.worker_devices)))

    def sum_over_replicas(self, per_replica, name: str = "sum", counts_step: bool = False) -> list:
        """Sums values over all replicas of all workers.

        Runs on: every worker, in cross-replica context.

        Args:
            per_replica: For each value the list of the local replicas' tensors or `tf.IndexedSlices`.
            name: Name for messages.
            counts_step: True where the call is one training step.

        Returns:
            For each value the list of the sum's copies on the local replicas.
        """
        raise NotImplementedError

    def sum_step(self, per_replica, name: str, variables=(), loss_scale=lambda: None) -> list:
        """Sums what one step computed: gradients, and whatever else the replicas hand over.

        Runs on: every worker, in cross-replica context.

        Args:
            per_replica: See `sum_over_replicas`; gradients come first.
            name: Name for messages.
            variables: The variable of each gradient; none where the call is no training step.
            loss_scale: Returns by how much the gradients are too large, or None; for those who keep some of them.

        Returns:
            See `sum_over_replicas`.
        """
        del loss_scale
        return self.sum_over_replicas(per_replica, name, counts_step=bool(variables))

    # --- Running a function on every local replica ---------------------------------------------------------
    def _use_merge_call(self):
        if self._updating_replica is not None:
            return False
        frame = frames.current_frame()
        if frame is not None and frame.guarded:
            raise frames.ForwardCollective()
        return True

    def _call_for_each_replica(self, fn, args, kwargs):
        if len(self.worker_devices) > 1:
            return compat.call_for_each_replica_in_threads(self._container_strategy(), fn, args, kwargs)
        # One local replica needs no thread: merge_call then also works inside tf.cond and nested functions.
        kwargs = kwargs or {}
        context = compat.ReplicaContext(
            self._container_strategy(), replica_id_in_sync_group=self._get_replica_id_in_sync_group(0)
        )
        with context, tf.device(self.worker_devices[0]):
            return fn(*compat.select_replica(0, args), **compat.select_replica(0, kwargs))

    @contextlib.contextmanager
    def _updating(self, local_replica: int):
        self._updating_replica = local_replica
        try:
            with compat.UpdateContext(local_replica), tf.device(self.worker_devices[local_replica]):
                yield
        finally:
            self._updating_replica = None

    def update_each_local_replica(self, update) -> list:
        """Calls `update(i)` once for each local replica i; variables are then that replica's components.

        Runs on: every worker, in cross-replica context.
        """
        results = []
        with frames.outside_of_replica():
            for local_replica in range(len(self.worker_devices)):
                with self._updating(local_replica):
                    results.append(update(local_replica))
        return results

    def _update(self, var, fn, args, kwargs, group):
        local = self._updating_replica
        if local is None or not isinstance(var, compat.DistributedVariable):
            return super()._update(var, fn, args, kwargs, group)
        component = var.values[local]
        with tf.device(component.device):
            return fn(component, *compat.select_replica(local, args), **compat.select_replica(local, kwargs))

    # --- Variables --------------------------------------------------------------------------------------------
    @contextlib.contextmanager
    def _creating_plain_variables(self):
        """Lets variables be those of this worker alone, on one device and mirrored nowhere."""
        self._creates_plain_variables = True
        try:
            yield
        finally:
            self._creates_plain_variables = False

    def _create_variable(self, next_creator, **kwargs):
        colocate_with = kwargs.pop("colocate_with", None)
        if self._creates_plain_variables:
            return next_creator(**kwargs)
        if isinstance(colocate_with, compat.SingleDevice):
            with tf.device(colocate_with.device):
                return next_creator(**kwargs)
        devices = self._devices if colocate_with is None else colocate_with._devices
        if kwargs.get("aggregation") == tf.VariableAggregation.MEAN and not _is_float(kwargs):
            # TensorFlow refuses to average integers. Replicas that count the same thing agree; the first speaks.
            kwargs["aggregation"] = tf.VariableAggregation.ONLY_FIRST_REPLICA

        def create_components(**kwargs):
            components: list = []
            for local, device in enumerate(devices):
                with tf.device(device):
                    primary = components[0] if components else None
                    kwargs["initial_value"] = self._get_variable_creator_initial_value(
                        replica_id=local, device=device, primary_var=primary, **kwargs
                    )
                    if primary is not None:
                        # The trailing slash makes the name absolute, as in TensorFlow's own strategy.
                        kwargs["name"] = f"{primary.name.split(':')[0]}/replica_{local}/"
                    components.append(next_creator(**kwargs))
            return components

        return compat.create_mirrored_variable(
            self._container_strategy(),
            create_components,
            _VARIABLE_CLASSES,
            compat.variable_policy_mapping,
            **kwargs,
        )

    # --- Input ----------------------------------------------------------------------------------------------------
    def _experimental_distribute_dataset(self, dataset, options):
        _refuse_per_replica_pipelines(options)
        return distributed_dataset.from_global_dataset(dataset, self._container_strategy())

    def _distribute_datasets_from_function(self, dataset_fn, options):
        if _asks_for_per_replica_pipelines(options):
            return datasets_of_functions.from_function_of_replicas(dataset_fn, self._container_strategy())
        return datasets_of_functions.from_function(dataset_fn, self._container_strategy())


def _is_float(variable_arguments) -> bool:
    dtype = variable_arguments.get("dtype")
    if dtype is None:
        value = variable_arguments.get("initial_value")
        dtype = getattr(value, "dtype", tf.float32)
    return tf.as_dtype(dtype).is_floating


def _asks_for_per_replica_pipelines(options) -> bool:
    mode = getattr(options, "experimental_replication_mode", None)
    return mode == tf.distribute.InputReplicationMode.PER_REPLICA


def _refuse_per_replica_pipelines(options) -> None:
    if _asks_for_per_replica_pipelines(options):
        raise NotImplementedError(
            "Argument `options.experimental_replication_mode=PER_REPLICA` needs a function: call "
            "`strategy.distribute_datasets_from_function(dataset_fn, options)`. A dataset is read by one pipeline a "
            "worker (PER_WORKER, the default)."
        )
