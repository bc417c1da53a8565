"""May TensorFlow take all of a GPU's memory at once?"""

from __future__ import annotations

import tensorflow as tf
from absl import logging

from tfdist_ext.cluster import environment


def let_memory_grow() -> int:
    """Has TensorFlow take memory of GPUs as it needs it, so that several processes can share one.

    A GPU that the program split (`set_logical_device_configuration`) keeps its limits, and
    TF_FORCE_GPU_ALLOW_GROWTH=false turns this off. What TensorFlow has already started is left as it is.

    Runs on: every task, before TensorFlow starts its devices.

    Returns:
        On how many GPUs memory grows now.
    """
    gpus = tf.config.list_physical_devices("GPU")
    if not gpus or environment.forbids_memory_growth():
        return 0
    growing = 0
    for gpu in gpus:
        if tf.config.get_logical_device_configuration(gpu):
            logging.info("%s was configured by the program; its memory settings are left alone.", gpu.name)
            continue
        try:
            tf.config.experimental.set_memory_growth(gpu, True)
            growing += 1
        except (RuntimeError, ValueError) as error:
            # RuntimeError: devices are started. ValueError: the GPU is not among the visible ones.
            logging.info("The memory of %s does not grow: %s", gpu.name, error)
    return growing
