"""Four logical CPU devices, made before TensorFlow starts; every test begins from the same global state.

One process may run the tests of several folders: they all make as many.
"""

import keras
import pytest
import tensorflow as tf

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
    keras.mixed_precision.set_global_policy("float32" if keras.config.floatx() == "float32" else "float64")
