"""Four logical devices, and double precision for those that ask."""

import keras
import pytest

from tests.four_devices import NUM_DEVICES, clean_keras

__all__ = ["NUM_DEVICES", "clean_keras", "float64"]


@pytest.fixture
def float64():
    """Runs a test in double precision, where a difference is a fault and not rounding."""
    keras.config.set_floatx("float64")
    yield
    keras.config.set_floatx("float32")
