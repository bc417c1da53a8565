"""Four logical devices, for what runs in the test process itself."""

from tests.four_devices import NUM_DEVICES

__all__ = ["NUM_DEVICES"]
