"""How do the devices of one host train together?"""

from __future__ import annotations

import inspect
import itertools

import tensorflow as tf

from tfdist_ext import compat
from tfdist_ext.collectives import local
from tfdist_ext.collectives.cross_device import RingAllReduce
from tfdist_ext.strategies import local_devices
from tfdist_ext.strategies.gpu_memory import let_memory_grow
from tfdist_ext.strategies.synchronous_extended import SynchronousExtended
from tfdist_ext.strategies.synchronous_strategy import SynchronousStrategy

# TensorFlow names its collectives by group key; strategies that share keys break each other's shapes.
_key_bases = itertools.count(1)
_KEYS_PER_STRATEGY = 10_000


def next_collective_key_base() -> int:
    """Returns a first collective group key that no other strategy of this process uses."""
    return next(_key_bases) * _KEYS_PER_STRATEGY


def check_cross_device_ops(cross_device_ops) -> None:
    """Refuses what is no instance of `tf.distribute.CrossDeviceOps`.

    Args:
        cross_device_ops: The user's argument.

    Raises:
        TypeError: A class instead of an instance, or something else.
    """
    if cross_device_ops is None or isinstance(cross_device_ops, tf.distribute.CrossDeviceOps):
        return
    if inspect.isclass(cross_device_ops):
        raise TypeError(
            "Argument `cross_device_ops` must be an instance, not a class; "
            f"received the class `{cross_device_ops.__name__}`. Write `{cross_device_ops.__name__}()`."
        )
    raise TypeError(
        "Argument `cross_device_ops` must be an instance of tf.distribute.CrossDeviceOps; "
        f"received {cross_device_ops!r}."
    )


class MirroredExtended(SynchronousExtended, compat.MirroredExtended):
    """Extended object of `MirroredStrategy`."""

    def __init__(self, container_strategy, devices, cross_device_ops):
        devices = local_devices.checked(devices)
        self._own_sum = RingAllReduce(None, num_local=len(devices))
        self._chosen_ops = cross_device_ops
        on_hosts = all("GPU" not in device.upper() for device in devices)
        if cross_device_ops is None and on_hosts:
            cross_device_ops = self._own_sum
        super().__init__(container_strategy, devices=devices, cross_device_ops=cross_device_ops)
        self._sums_itself = self._cross_device_ops is self._own_sum

    def sum_over_replicas(self, per_replica, name="sum", counts_step=False):
        """See `SynchronousExtended.sum_over_replicas`."""
        del name, counts_step
        if self._sums_itself or len(self.worker_devices) == 1:
            return [
                copies(total, self.worker_devices) for total in self._own_sum.sum_over_replicas(per_replica)
            ]
        return sum_by(self._cross_device_ops, self._communication_options, per_replica, self._own_sum)

    def gather_slots(self, per_replica):
        """Concatenates outputs of all slots in the order of the slots, for each value."""
        return [
            tf.concat(values, axis=0) if values[0].shape.rank else tf.stack(values) for values in per_replica
        ]


def sum_by(cross_device_ops, options, per_replica, own_sum) -> list:
    """Sums floats by given `CrossDeviceOps` and the rest, which those do not all take, by our own.

    Args:
        cross_device_ops: A `tf.distribute.CrossDeviceOps`.
        options: `tf.distribute.experimental.CommunicationOptions`.
        per_replica: For each value the list of the local replicas' tensors.
        own_sum: Our `RingAllReduce`.

    Returns:
        For each value the list of the sum's copies on the local replicas.
    """
    results: list = [None] * len(per_replica)
    floats = [i for i, values in enumerate(per_replica) if values[0].dtype.is_floating]
    if floats:
        pairs = [(compat.PerReplica(per_replica[i]),) * 2 for i in floats]
        reduced = cross_device_ops.batch_reduce(tf.distribute.ReduceOp.SUM, pairs, options)
        for i, mirrored in zip(floats, reduced, strict=True):
            copied = mirrored.values if isinstance(mirrored, compat.DistributedValues) else [mirrored]
            results[i] = [_unique_rows(value) for value in copied]
    others = [i for i in range(len(per_replica)) if results[i] is None]
    sums = own_sum.sum_over_replicas([per_replica[i] for i in others]) if others else []
    for i, total in zip(others, sums, strict=True):
        results[i] = copies(total, [value.device for value in per_replica[i]])
    return results


def _unique_rows(value):
    return local.sum_duplicate_rows(value) if isinstance(value, tf.IndexedSlices) else value


def copies(value, devices) -> list:
    """Returns `value` on each device."""
    return [compat.copy_to_device(value, device) for device in devices] if len(devices) > 1 else [value]


class MirroredStrategy(SynchronousStrategy, tf.distribute.MirroredStrategy):
    """Synchronous training on the devices of one host; a drop-in for `tf.distribute.MirroredStrategy`.

    Runs on: the only process. With Keras `fit`, `evaluate`, `predict` and `train_on_batch` the result is the
    single device's: the last ragged batch, several losses, clipping, loss scaling, accumulation and metrics
    included.

    Args:
        devices: Device names, or objects of `tf.config.LogicalDevice`; all GPUs by default, else all (logical) CPUs.
        cross_device_ops: Instance of `tf.distribute.CrossDeviceOps` that sums gradients. By default NCCL on
            GPUs, and a sum in the fixed order of the replicas on CPUs.

    Raises:
        TypeError: `cross_device_ops` is a class or no CrossDeviceOps.
        ValueError: A device is not there or is named twice.

    Example:
        >>> strategy = MirroredStrategy(["CPU:0"])
        >>> strategy.num_replicas_in_sync
        1

    References:
        Goyal et al., "Accurate, Large Minibatch SGD", 2017 (the weighting of per-worker losses).
    """

    def __init__(self, devices=None, cross_device_ops=None):
        check_cross_device_ops(cross_device_ops)
        compat.check_versions()
        let_memory_grow()
        self._collective_key_base = next_collective_key_base()
        tf.distribute.Strategy.__init__(self, MirroredExtended(self, devices, cross_device_ops))
