"""Which build of TensorFlow is installed?

TensorFlow comes under several names (`tensorflow`, `tensorflow-cpu`, `tensorflow-tpu`, vendors' own) that all write the
same files. This package requires none of them, so that installing it touches no TensorFlow that is there.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util

MISSING = (
    "TensorFlow is not installed. Install the build for this machine: `pip install 'tfdist_ext[cpu]'`, "
    "`'tfdist_ext[cuda]'` or `'tfdist_ext[tpu]'`."
)


def installed_builds() -> dict[str, str]:
    """Finds the distributions that own the module `tensorflow`, without importing it.

    Returns:
        Their versions by name; empty where TensorFlow is missing or was not installed by a package manager of Python.
    """
    names = importlib.metadata.packages_distributions().get("tensorflow", ())
    found = {name.lower().replace("_", "-"): importlib.metadata.version(name) for name in names}
    return dict(sorted(found.items()))


def is_missing() -> bool:
    """Says whether `import tensorflow` would find nothing."""
    return importlib.util.find_spec("tensorflow") is None


def complaint_about(builds: dict[str, str]) -> str | None:
    """Says what is wrong with several builds in one environment; pure.

    Args:
        builds: Versions by name.

    Returns:
        A sentence with the fix; None for one build or none.

    Example:
        >>> complaint_about({"tensorflow": "2.21.0"}) is None
        True
    """
    if len(builds) < 2:
        return None
    listed = " and ".join(f"{name} {version}" for name, version in builds.items())
    return (
        f"This environment has {len(builds)} builds of TensorFlow, {listed}, which overwrote each other's files. "
        f"Keep one: `pip uninstall -y {' '.join(builds)}`, then install it again."
    )
