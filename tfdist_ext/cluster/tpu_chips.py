"""Is there a TPU: named by the environment, or in this machine?"""

from __future__ import annotations

import pathlib
from collections.abc import Mapping

from tfdist_ext.cluster import environment

LOCAL = "local"
_PCI_DEVICES = "/sys/bus/pci/devices"
# Vendor and device ids as in the PCI tables of JAX's hardware detection: v2 and v3, v4, v5p, v5e, v6e.
_GOOGLE = "0x1ae0"
_TPU_IDS = frozenset(["0x0027", "0x0056", "0x005e", "0x0062", "0x0063", "0x006f"])


def find_tpu(
    environ: Mapping[str, str] | None = None, *, pci_devices: str = _PCI_DEVICES
) -> tuple[str | None, str]:
    """Finds a TPU without connecting to it.

    Args:
        environ: Variables to read instead of the process's.
        pci_devices: The folder in which the system lists PCI devices.

    Returns:
        Its name or address (`"local"` for chips in this machine, None for no TPU), and what says so.

    Example:
        >>> find_tpu({"TPU_NAME": "my-tpu"})
        ('my-tpu', 'TPU_NAME')
    """
    name, variable = environment.tpu_name(environ)
    if name is not None:
        return name, variable
    chips = num_local_chips(pci_devices)
    if chips:
        return LOCAL, f"the PCI bus, with {chips} TPU chip{'s' if chips > 1 else ''},"
    return None, ""


def num_local_chips(pci_devices: str = _PCI_DEVICES) -> int:
    """Counts the TPU chips on the PCI bus of this machine.

    Args:
        pci_devices: The folder in which the system lists them.

    Returns:
        How many; 0 where the system lists nothing.
    """
    folders = pathlib.Path(pci_devices)
    if not folders.is_dir():
        return 0
    return sum(
        _read(folder / "vendor") == _GOOGLE and _read(folder / "device") in _TPU_IDS
        for folder in folders.iterdir()
    )


def _read(path: pathlib.Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
