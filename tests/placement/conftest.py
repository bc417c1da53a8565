"""Logical CPU devices, made before TensorFlow starts, and fresh names for each test."""

import keras
import pytest
import tensorflow as tf

# As many as tests/single_host makes: one process may run both.
NUM_DEVICES = 4
tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * NUM_DEVICES
)


@pytest.fixture(autouse=True)
def clean_keras():
    """Gives each test fresh layer names and a fixed global seed."""
    keras.backend.clear_session()
    keras.utils.set_random_seed(7)
    yield
    # Other folders' tests expect a process that was never seeded.
    tf.random.set_seed(None)
    keras.mixed_precision.set_global_policy("float32")
