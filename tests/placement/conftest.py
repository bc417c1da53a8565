"""Four logical devices."""

from tests.four_devices import NUM_DEVICES, clean_keras

__all__ = ["NUM_DEVICES", "clean_keras"]
