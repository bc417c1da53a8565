"""How is one worker of a cluster made slow, while training runs?

A worker's delay is a number in a resource that each worker has of its own: the training step, wherever it runs, finds
the one of its machine by name. It sleeps on the worker, in the step, where no prefetching hides it.
"""

import keras
import tensorflow as tf

_NAME = "delay_of_this_worker"


def worker_device(index: int) -> str:
    """Returns the device of a worker of a parameter-server cluster.

    Args:
        index: Number of the worker.
    """
    return f"/job:worker/replica:0/task:{index}/device:CPU:0"


def set_delay(device: str, seconds: float) -> None:
    """Has every step that begins on a device from now on sleep first.

    Runs on: chief.

    Args:
        device: Where the step runs.
        seconds: How long it sleeps.
    """
    with tf.device(device):
        tf.raw_ops.AssignVariableOp(resource=_delay(), value=tf.constant(round(1e6 * seconds), tf.int64))


class SlowedModel(keras.Model):
    """A model whose training steps sleep as `set_delay` says; set it for each device before training."""

    def train_step(self, data):
        """See `keras.Model`."""
        features, target = data
        return super().train_step((features, _after_delay(target)))


def _delay():
    return tf.raw_ops.VarHandleOp(dtype=tf.int64, shape=[], shared_name=_NAME, container="")


def _after_delay(tensor):
    """Returns the tensor, later: a dataset of one element that sleeps before it gives it."""
    once = tf.data.Dataset.from_tensors(tensor)
    sleeping = tf.raw_ops.SleepDataset(
        input_dataset=tf.data.experimental.to_variant(once),
        sleep_microseconds=tf.raw_ops.ReadVariableOp(resource=_delay(), dtype=tf.int64),
        output_types=[tensor.dtype],
        output_shapes=[tensor.shape],
    )
    # Asked for a second element, it would sleep again before it says that there is none.
    return tf.data.experimental.from_variant(sleeping, once.element_spec).take(1).get_single_element()
