"""On what was it measured? The machine, without its name or address."""

from __future__ import annotations

import importlib.metadata
import os
import pathlib
import platform
from typing import Any

_PACKAGES = ("tensorflow", "keras", "numpy", "pyzmq")


def describe_machine() -> dict[str, Any]:
    """Describes the machine for a report; imports no TensorFlow.

    Returns:
        JSON values: system, processor, CPUs that this process may use, memory, and versions.
    """
    return {
        "system": f"{platform.system()} {platform.release()}",
        "processor": _processor(),
        "cpus": num_cpus(),
        "memory_gigabytes": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "python": platform.python_version(),
        **{package: _version(package) for package in _PACKAGES},
    }


def num_cpus() -> int:
    """Counts the CPUs that this process may use, which in a container are fewer than the machine has.

    Returns:
        The count.
    """
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _processor() -> str:
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
