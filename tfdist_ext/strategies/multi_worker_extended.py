"""How do the replicas of many hosts meet on our links?"""

from __future__ import annotations

import tensorflow as tf
from absl import logging

from tfdist_ext import cluster as cluster_lib
from tfdist_ext import compat, errors
from tfdist_ext.collectives.cross_device import RingAllReduce
from tfdist_ext.collectives.host_ops import HostCollectives
from tfdist_ext.strategies.compressed_sums import CompressedSums
from tfdist_ext.strategies.mirrored import copies
from tfdist_ext.strategies.synchronous_extended import SynchronousExtended

# Large enough that the number of messages costs little, small enough that a large model's first message leaves while
# the rest of the backward pass runs. On 2 processes of one host, 2, 4 and 8 MiB could not be told apart.
_DEFAULT_BYTES_PER_PACK = 8 * 1024 * 1024


class MultiWorkerExtended(SynchronousExtended, compat.CollectiveAllReduceExtended):
    """Extended object of `MultiWorkerMirroredStrategy`.

    Each process is a local mirrored strategy whose reductions go on through a process group. TensorFlow's collective
    runtime and coordination service are not started, so that a dead peer is a Python exception and not an abort.
    """

    def __init__(self, container_strategy, cluster, communication_options, join, compression=None):
        # Not CollectiveAllReduceExtended.__init__: it would start TensorFlow's server.
        tf.distribute.StrategyExtended.__init__(self, container_strategy)
        self._communication_options = communication_options
        self._collective_key_base = container_strategy._collective_key_base
        self.experimental_enable_get_next_as_optional = True
        self._use_var_policy = False
        self._initialize_devices(cluster)
        self._cluster_resolver = cluster_lib.as_tf_resolver(cluster)
        self._membership = join(cluster) if cluster.world_size > 1 else None
        self.process_group = group = self._membership.group if self._membership else None
        self._num_workers = group.size if group else 1
        self._id_in_cluster = group.rank if group else 0
        self._is_chief = cluster.is_chief
        self._host = None
        if group is not None:
            bytes_per_pack = communication_options.bytes_per_pack or _DEFAULT_BYTES_PER_PACK
            self._host = HostCollectives(group, bytes_per_pack, container_strategy.note_failure)
        self._ring = RingAllReduce(self._host, num_local=len(self.worker_devices))
        self._cross_device_ops = self._host_cross_device_ops = self._ring
        self._compressed = None
        if compression is not None and self._host is not None:
            self._compressed = CompressedSums(compression, self._host, self._ring, self._make_residual)

    def _initialize_devices(self, cluster):
        """Sets what TensorFlow's `_initialize_local` would, without its collective keys and servers."""
        devices = tuple(compat.all_local_devices())
        self._collective_keys = compat.CollectiveKeys(group_key_start=1 + self._collective_key_base)
        self._local_or_standalone_client_mode = True
        self._initialize_single_worker(devices)
        self._cluster_spec = None
        self._task_type, self._task_id = cluster.task.type, cluster.task.index
        self._worker_device = "/device:CPU:0"
        self._host_input_device = compat.SingleDevice(self._worker_device)
        self._num_devices_per_worker = len(devices)
        self._local_device_type = "GPU" if "GPU" in devices[0] else "CPU"
        self._rpc_layer = cluster.rpc_layer

    def _get_replica_id_in_sync_group(self, replica_id):
        # The slot, so that whatever depends on the id (tf.random.Generator) is the same for 1x4, 2x2 and 4x1.
        return self.slot_of_local_replica(replica_id)

    def _get_local_replica_id(self, replica_id_in_sync_group):
        return replica_id_in_sync_group // self.num_workers

    def _experimental_distribute_values_from_function(self, value_fn):
        slots = self.local_slots
        contexts = [compat.ValueContext(slot, self._num_replicas_in_sync) for slot in slots]
        return compat.regroup([value_fn(context) for context in contexts], always_wrap=True)

    def _in_multi_worker_mode(self):
        # Asked by Keras alone, to average logs over workers once more: ours are the global batch's already.
        return False

    def _get_variable_creator_initial_value(self, replica_id, device, primary_var, **kwargs):
        if replica_id > 0:
            return compat.MirroredExtended._get_variable_creator_initial_value(
                self, replica_id=replica_id, device=device, primary_var=primary_var, **kwargs
            )

        def initial_value():
            value = kwargs["initial_value"]
            value = value() if callable(value) else value
            value = getattr(value, "wrapped_value", value)
            value = tf.convert_to_tensor(value, dtype=kwargs.get("dtype"))
            if self._host is None:
                return value
            # The chief's value, so that unseeded workers start from the same weights.
            try:
                return self._host.broadcast(value, f"variable/{kwargs.get('name')}")
            except errors.SignatureMismatchError as error:
                raise self._models_differ(error) from None

        return initial_value

    def _models_differ(self, error: errors.SignatureMismatchError) -> errors.ConfigurationMismatchError:
        group = self.process_group
        own = group.task_names[group.rank]
        mismatch = errors.ConfigurationMismatchError(
            f"The workers build different models: {error} Build the model from the same code and arguments on every "
            "task.",
            field="model_variables",
            tasks=tuple(sorted((own, error.task), key=group.task_names.index)),
        )
        self._container_strategy().note_failure(mismatch)
        return mismatch

    def _replica_ctx_all_reduce(self, reduce_op, value, options=None):
        # The parent would launch TensorFlow's collectives from inside each replica.
        def merge(strategy, *values):
            return [
                strategy.extended.reduce_to(reduce_op, v, destinations=v, options=options) for v in values
            ]

        flat = tf.nest.flatten(value)
        merged = tf.distribute.get_replica_context().merge_call(merge, args=tuple(flat))
        return tf.nest.pack_sequence_as(value, merged)

    def sum_over_replicas(self, per_replica, name="sum", counts_step=False):
        """See `SynchronousExtended.sum_over_replicas`."""
        sums = self._ring.sum_over_replicas(per_replica, name, counts_step)
        return [copies(total, self.worker_devices) for total in sums]

    def sum_step(self, per_replica, name, variables=(), loss_scale=lambda: None):
        """See `SynchronousExtended.sum_step`."""
        if self._compressed is None or not variables:
            return super().sum_step(per_replica, name, variables, loss_scale)
        sums = self._compressed.sum_step(per_replica, name, variables, loss_scale())
        return [copies(total, self.worker_devices) for total in sums]

    def _make_residual(self, value, name):
        with tf.init_scope(), self._creating_plain_variables(), tf.device(self.worker_devices[0]):
            return tf.Variable(value, trainable=False, name=name)

    @property
    def compression_residuals(self) -> dict[str, tf.Variable]:
        """What this worker has not sent yet of each compressed gradient, by the path of the variable.

        Each worker has its own, and a checkpoint must keep the ones of all. They are made when the first training step
        is traced, in the dtype and shape of the gradient, without loss scale.
        """
        return self._compressed.residuals if self._compressed else {}

    def restore_compression_residuals(self, values) -> None:
        """Sets all residuals of this worker, also those that are not made yet.

        Runs on: every worker, between steps.

        Args:
            values: NumPy arrays by the path of the variable. Residuals that are not named become zero.

        Raises:
            ValueError: A value does not have the shape of its variable; for a residual that is not made yet, the
                first training step raises it.
        """
        if self._compressed is not None:
            self._compressed.restore(values)
        elif values:
            logging.warning("%d compression residuals are dropped: nothing is compressed.", len(values))

    def gather_slots(self, per_replica):
        """Concatenates outputs of all slots in the order of the slots, for each value."""
        outputs = []
        for values in per_replica:
            by_local = []
            for value in values:
                if isinstance(value, tf.RaggedTensor):
                    by_local += self._gather_ragged(value)
                    continue
                if self._host and value.dtype == tf.string:
                    raise NotImplementedError(
                        "`predict` cannot collect strings from several workers. Return numbers, and look the "
                        "strings up afterwards."
                    )
                value = value if value.shape.rank else tf.expand_dims(value, 0)
                by_local += self._host.gather(value, "predict") if self._host else [value]
            outputs.append(tf.concat(by_local, axis=0))
        return outputs

    def _gather_ragged(self, value):
        if self._host is None:
            return [value]
        lengths = [self._host.gather(part, "predict") for part in value.nested_row_lengths()]
        rows = self._host.gather(value.flat_values, "predict")
        return [
            tf.RaggedTensor.from_nested_row_lengths(flat, [part[worker] for part in lengths])
            for worker, flat in enumerate(rows)
        ]
