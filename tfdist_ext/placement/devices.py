"""Which devices are there, and what are they called? `CPU:1` within this process, TensorFlow's full name elsewhere."""

from __future__ import annotations

import tensorflow as tf

from tfdist_ext import compat


def short_device(device: str | None) -> str:
    """Returns a device as `CPU:1` where it is of this process, else as TensorFlow writes it; "" for none.

    Args:
        device: Any spelling that TensorFlow takes.

    Example:
        >>> short_device("/job:localhost/replica:0/task:0/device:CPU:1"), short_device("/job:ps/task:0")
        ('CPU:1', '/job:ps/replica:0/task:0/device:CPU:0')
        >>> short_device("cpu:1"), short_device(None)
        ('CPU:1', '')
    """
    if not device:
        return ""
    try:
        spec = tf.DeviceSpec.from_string(device if device.startswith("/") else f"/device:{device}")
    except ValueError:
        return device
    kind, index = spec.device_type or "CPU", spec.device_index or 0
    is_here = spec.job in (None, "localhost") and not spec.task and not spec.replica
    if is_here or (spec.job, spec.task or 0) == compat.local_task():
        return f"{kind}:{index}"
    return spec.replace(
        replica=spec.replica or 0, task=spec.task or 0, device_type=kind, device_index=index
    ).to_string()


def long_device(device: str) -> str:
    """Returns a short name as operations spell it.

    Example:
        >>> long_device("CPU:1")
        '/device:CPU:1'
    """
    return device if device.startswith("/") else f"/device:{device}"


def all_devices() -> list[str]:
    """Returns the short names of all logical CPUs, GPUs and TPUs that this process reaches."""
    kinds = ("GPU", "TPU", "CPU")
    return [short_device(device.name) for kind in kinds for device in tf.config.list_logical_devices(kind)]


def local_devices() -> list[str]:
    """Returns the short names of the logical CPUs, GPUs and TPUs of this process."""
    return [name for name in all_devices() if not name.startswith("/")]


def default_device() -> str:
    """Returns where TensorFlow puts an operation without a request."""
    return local_devices()[0]


def require_device(device: str) -> str:
    """Returns the short name of a device.

    Raises:
        ValueError: There is none of this name; the message lists those that there are.
    """
    name = short_device(device)
    if name not in all_devices():
        raise ValueError(
            f"There is no device {device!r}; there are {', '.join(all_devices())}. Try one of these, or make more with "
            "tf.config.set_logical_device_configuration before TensorFlow starts."
        )
    return name
