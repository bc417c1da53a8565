"""Which devices of this process did the user mean, and are they there?"""

from __future__ import annotations

import tensorflow as tf

from tfdist_ext import compat


def checked(devices) -> list[str]:
    """Returns the names of the devices of a mirrored strategy.

    Args:
        devices: Names ("GPU:0", "/device:CPU:1"), or objects of `tf.config.LogicalDevice`; all GPUs, else all CPUs,
            for None and an empty list.

    Raises:
        ValueError: A device is not there, is named twice, or is no device; lists those that are there.
    """
    if devices is None or (isinstance(devices, (list, tuple)) and not devices):
        return compat.all_local_devices()
    if isinstance(devices, str) or not isinstance(devices, (list, tuple)):
        raise ValueError(
            f'Argument `devices` must be a list such as ["GPU:0", "GPU:1"]; received {devices!r}.'
        )
    there = [
        device.name
        for device in tf.config.list_logical_devices()
        if device.device_type in ("CPU", "GPU", "TPU")
    ]
    names = [str(getattr(device, "name", device)) for device in devices]
    short = [_short(name) for name in names]
    known = {device for device in map(_short, there) if device is not None}
    for name, device in zip(names, short, strict=True):
        if device not in known:
            raise ValueError(
                f"Argument `devices` names {name!r}, which this process does not have. It has "
                f"{', '.join(sorted(known))}; `tf.config.set_logical_device_configuration` makes more of one CPU."
            )
        if short.count(device) > 1:
            raise ValueError(f"Argument `devices` names {name!r} twice; each device holds one replica.")
    return names


def _short(name) -> str | None:
    """Returns "CPU:0" for any of TensorFlow's ways to say so, None for what is no device."""
    try:
        spec = tf.DeviceSpec.from_string(_with_slash(name))
    except (ValueError, TypeError, AttributeError):
        return None
    if spec.device_type is None:
        return None
    return f"{spec.device_type.upper()}:{spec.device_index or 0}"


def _with_slash(name: str) -> str:
    return name if name.startswith("/") else f"/{name}"
