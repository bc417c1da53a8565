"""How does `tf.distribute` reach our collectives? Through a `CrossDeviceOps`."""

from __future__ import annotations

import tensorflow as tf

from tfdist_ext import compat
from tfdist_ext.collectives import local


class RingAllReduce(tf.distribute.CrossDeviceOps):
    """Sums over local replicas in their order, then over workers by the ring of a `ProcessGroup`.

    Runs on: every worker.

    Args:
        host: `HostCollectives` of the group; None for one process.
        num_local: Number of local replicas.

    Example:
        >>> RingAllReduce(None, num_local=2).num_workers
        1
    """

    def __init__(self, host=None, num_local: int = 1):
        super().__init__()
        self._host = host
        self._num_local = num_local
        self.num_workers = host.num_workers if host else 1

    @property
    def _num_between_graph_workers(self):
        # TensorFlow takes a shortcut for a single value when this is 1.
        return self.num_workers

    def sum_over_replicas(self, per_replica, name: str = "sum", counts_step: bool = False) -> list:
        """Sums many values at once.

        Args:
            per_replica: For each value the list of its local replicas' tensors or `tf.IndexedSlices`.
            name: Name for messages.
            counts_step: See `HostCollectives.sum`.

        Returns:
            The sums, each on the first replica's device; sparse ones with unique row indices.
        """
        sums = [local.sum_replicas(values) for values in per_replica]
        sparse = {i for i, value in enumerate(sums) if isinstance(value, tf.IndexedSlices)}
        if self._host is not None:
            dense = [i for i in range(len(sums)) if i not in sparse]
            totals = self._host.sum([sums[i] for i in dense], name, counts_step) if dense else []
            for i, total in zip(dense, totals, strict=True):
                sums[i] = total
            for i in sorted(sparse):
                sums[i] = self._gather_rows(sums[i], f"{name}/rows/{i}")
        return [local.sum_duplicate_rows(v) if i in sparse else v for i, v in enumerate(sums)]

    def _gather_rows(self, value, name):
        # Rows summed here first: less to send, and no more than the rows touched.
        value = local.sum_duplicate_rows(value)
        rows = self._host.gather(value.values, f"{name}/values")
        indices = self._host.gather(value.indices, f"{name}/indices")
        return tf.IndexedSlices(tf.concat(rows, axis=0), tf.concat(indices, axis=0), value.dense_shape)

    # --- tf.distribute.CrossDeviceOps ----------------------------------------------------------------------------
    def reduce_implementation(self, reduce_op, per_replica_value, destinations, options):
        """See `tf.distribute.CrossDeviceOps`."""
        return self.batch_reduce_implementation(reduce_op, [(per_replica_value, destinations)], options)[0]

    def batch_reduce_implementation(self, reduce_op, value_destination_pairs, options):
        """See `tf.distribute.CrossDeviceOps`."""
        del options
        per_replica = [list(value.values) for value, _ in value_destination_pairs]
        sums = self.sum_over_replicas(per_replica, name="reduce")
        if reduce_op == tf.distribute.ReduceOp.MEAN:
            num_values = len(per_replica[0]) * self.num_workers
            sums = [_divided(value, num_values) for value in sums]
        return [
            compat.broadcast_to_devices(value, destinations, always_mirrored=True)
            for value, (_, destinations) in zip(sums, value_destination_pairs, strict=True)
        ]

    def _gather_implementation(self, per_replica_value, destinations, axis, options):
        # In the order of replica ids, as tf.distribute promises.
        del options
        values = [tf.convert_to_tensor(value) for value in per_replica_value.values]
        gathered = self.gather(values, axis)
        return compat.broadcast_to_devices(gathered, destinations, always_mirrored=True)

    def gather(self, values, axis):
        """Concatenates the tensors of all replicas, slot by slot.

        Args:
            values: Local replicas' tensors, of one rank >= 1.
            axis: Dimension to concatenate along; the only one in which sizes may differ.

        Returns:
            One tensor.
        """
        if self._host is None:
            return tf.concat(values, axis=axis)
        rank = values[0].shape.rank
        # Unequal sizes are exchanged along the first dimension.
        order = [axis, *(i for i in range(rank) if i != axis)]
        by_slot = []
        for value in values:
            by_slot += self._host.gather(tf.transpose(value, order), "gather")
        return tf.transpose(tf.concat(by_slot, axis=0), tf.math.invert_permutation(order))


def _divided(value, count: int):
    if isinstance(value, tf.IndexedSlices):
        return tf.IndexedSlices(_divided(value.values, count), value.indices, value.dense_shape)
    if value.dtype.is_integer:
        return value // count
    return value / tf.cast(count, value.dtype)
