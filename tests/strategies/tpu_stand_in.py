"""TensorFlow's own `TPUStrategy`, as far as it goes without a TPU: its replicas live on logical CPU devices.

Devices, variables, their saving and restoring, input, reductions in cross-replica context and Keras' `fit` are the
real ones. What compiles a step for the TPU and runs it there is replaced by the threads of `MirroredStrategy`, and
reads of variables inside a step by reads of the device's own copy.
"""

import collections

import tensorflow as tf
from tensorflow.python.distribute import mirrored_run, tpu_strategy, tpu_values
from tensorflow.python.tpu import tpu_system_metadata

Device = collections.namedtuple("Device", "name")
HOST = "/job:localhost/replica:0/task:0"


class Assignment:
    """What maps replicas to cores; here to logical CPU devices."""

    num_cores_per_replica = 1

    def __init__(self, num_replicas):
        self.num_replicas = num_replicas

    def tpu_device(self, replica, logical_core, job):
        return f"{HOST}/device:CPU:{replica}"

    def host_device(self, replica):
        return f"{HOST}/device:CPU:0"


class Resolver(tf.distribute.cluster_resolver.TPUClusterResolver):
    """Names a TPU of a few cores that nobody has to find."""

    def __init__(self, tpu="stand-in", num_cores=4):
        self._tpu = tpu
        self._num_cores = num_cores
        self.task_type, self.task_id = "localhost", 0

    def get_tpu_system_metadata(self):
        return tpu_system_metadata.TPUSystemMetadata(
            num_cores=self._num_cores,
            num_hosts=1,
            num_of_cores_per_host=self._num_cores,
            topology=None,
            devices=[Device(f"{HOST}/device:TPU:{core}") for core in range(self._num_cores)],
        )

    def cluster_spec(self):
        return tf.train.ClusterSpec({})

    def master(self, *arguments, **named):
        return ""


def make_strategy(monkeypatch, num_replicas=4):
    """Makes a `TPUStrategy` on logical CPU devices; `monkeypatch` undoes what it replaces."""
    extended = tpu_strategy.TPUExtended
    monkeypatch.setattr(extended, "tpu_run", run_on_threads)
    monkeypatch.setattr(extended, "_get_replica_id_in_sync_group", lambda self, i: i, raising=False)
    for name in ("value", "read_value", "_dense_var_to_tensor"):
        monkeypatch.setattr(tpu_values.TPUVariableMixin, name, reading_own_copy(name))
    strategy = tf.distribute.TPUStrategy(
        Resolver(num_cores=num_replicas), experimental_device_assignment=Assignment(num_replicas)
    )
    # One handle for all copies exists only where TPUs are.
    strategy._enable_packed_variable_in_eager_mode = False
    return strategy


def run_on_threads(self, fn, args, kwargs, options=None):
    return mirrored_run.call_for_each_replica(self._container_strategy(), fn, args, kwargs or {})


def reading_own_copy(name):
    original = getattr(tpu_values.TPUVariableMixin, name)

    def read(self, *args, **kwargs):
        if not tf.distribute.has_strategy() or tf.distribute.get_replica_context() is None:
            return original(self, *args, **kwargs)
        value = self._read_variable_op()
        dtype = kwargs.get("dtype")
        return value if dtype is None or dtype == value.dtype else tf.cast(value, dtype)

    return read
