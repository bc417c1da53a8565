"""What does the environment say?

The only file of the package that touches environment variables. Arguments beat every one of them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

TF_CONFIG = "TF_CONFIG"
CLUSTER_SECRET = "TFDIST_EXT_CLUSTER_SECRET"
# Characters; fewer can be found by trying.
MIN_SECRET_LENGTH = 16
RESTART_COUNT = "TFDIST_RESTART_COUNT"
# Who sets them: Google Kubernetes Engine, the user (TensorFlow reads it too), the older Colab.
TPU_NAMES = ("KUBE_GOOGLE_CLOUD_TPU_ENDPOINTS", "TPU_NAME", "COLAB_TPU_ADDR")
GPU_GROWTH = "TF_FORCE_GPU_ALLOW_GROWTH"


def tf_config(environ: Mapping[str, str] | None = None) -> str | None:
    """Reads TF_CONFIG.

    Args:
        environ: Variables to read instead of the process's.

    Returns:
        The text, or None if it is unset or blank.
    """
    text = variable(TF_CONFIG, environ)
    return text if text and text.strip() else None


def cluster_secret(environ: Mapping[str, str] | None = None) -> str | None:
    """Reads the secret that all tasks of a cluster share, TFDIST_EXT_CLUSTER_SECRET.

    Args:
        environ: Variables to read instead of the process's.

    Returns:
        The secret, or None if it is unset or empty.
    """
    return variable(CLUSTER_SECRET, environ) or None


def restart_count(environ: Mapping[str, str] | None = None) -> int:
    """Reads how often `tfdist-ext run --max-restarts` started this group again, TFDIST_RESTART_COUNT.

    Args:
        environ: Variables to read instead of the process's.

    Returns:
        0 in the first attempt, and without that launcher.
    """
    text = variable(RESTART_COUNT, environ) or ""
    return int(text) if text.isdecimal() else 0


def tpu_name(environ: Mapping[str, str] | None = None) -> tuple[str | None, str]:
    """Reads which TPU the environment names.

    Args:
        environ: Variables to read instead of the process's.

    Returns:
        Its name or address, and the variable that has it; (None, "") without one.
    """
    for source in TPU_NAMES:
        text = (variable(source, environ) or "").strip()
        if text:
            # Colab gave host and port alone.
            bare = source == "COLAB_TPU_ADDR" and "://" not in text
            return (f"grpc://{text}" if bare else text), source
    return None, ""


def forbids_memory_growth(environ: Mapping[str, str] | None = None) -> bool:
    """Says whether TF_FORCE_GPU_ALLOW_GROWTH asks TensorFlow to take the whole memory of a GPU at once.

    Args:
        environ: Variables to read instead of the process's.

    Returns:
        True for "false" and "0" alone.
    """
    return (variable(GPU_GROWTH, environ) or "").strip().lower() in ("false", "0")


def variable(name: str, environ: Mapping[str, str] | None = None) -> str | None:
    """Reads one variable.

    Args:
        name: Name of the variable.
        environ: Variables to read instead of the process's.

    Returns:
        Its text, or None if it is unset.
    """
    return (os.environ if environ is None else environ).get(name)


def inherited() -> dict[str, str]:
    """Copies the environment, to be changed and given to a child process.

    Returns:
        A new dictionary.
    """
    return dict(os.environ)


def set_variable(name: str, value: str | None) -> None:
    """Sets a variable of this process: what a launcher would have given it.

    Args:
        name: Name of the variable.
        value: Its text; None unsets it.
    """
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value
