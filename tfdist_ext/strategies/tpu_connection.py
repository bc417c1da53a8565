"""How does this process get to its TPU, and what is wrong if it does not?"""

from __future__ import annotations

from collections.abc import Callable

import tensorflow as tf

from tfdist_ext import builds
from tfdist_ext.cluster import listening
from tfdist_ext.errors import ClusterSpecError, TPUUnavailableError

_FIRST_ANSWER_SECONDS = 10.0
_BUILDS = "https://storage.googleapis.com/libtpu-tf-releases/index.html"


def connect(
    name: str,
    *,
    make_resolver: Callable = tf.distribute.cluster_resolver.TPUClusterResolver,
    initialize: Callable = tf.tpu.experimental.initialize_tpu_system,
) -> tf.distribute.cluster_resolver.TPUClusterResolver:
    """Connects to a TPU and initializes it.

    Runs on: the only process.

    Args:
        name: Its name, its address (`"grpc://host:port"`), or `"local"`.
        make_resolver: Makes a resolver from `tpu=name`.
        initialize: Takes the resolver and starts the TPU.

    Returns:
        The resolver, for `tf.distribute.TPUStrategy`.

    Raises:
        TPUUnavailableError: It cannot be used; one sentence says why, and one how to mend it.
    """
    address = name.removeprefix("grpc://").split(",")[0]
    if name.startswith("grpc://") and not _listens(address):
        raise TPUUnavailableError(
            f"The TPU at {address} does not answer within {_FIRST_ANSWER_SECONDS:.0f} s. Start it, or correct its "
            "address.",
            tpu=name,
        )
    try:
        resolver = make_resolver(tpu=name)
        tf.config.experimental_connect_to_cluster(resolver)
        initialize(resolver)
    except (tf.errors.OpError, ImportError, OSError, RuntimeError, TypeError, ValueError) as error:
        text = f"{type(error).__name__}: {error}"
        raise TPUUnavailableError(explain(name, text, installed_versions()), tpu=name) from None
    return resolver


def installed_versions() -> dict[str, str | None]:
    """Returns the versions of TensorFlow and of its TPU build, None for one that is not installed."""
    found = builds.installed_builds()
    tpu = found.pop("tensorflow-tpu", None)
    return {"tensorflow": next(iter(found.values()), None), "tensorflow-tpu": tpu}


def explain(name: str, failure: str, versions: dict[str, str | None]) -> str:
    """Turns what TensorFlow said into a cause and a fix; pure.

    Args:
        name: The TPU's name or address.
        failure: Type and message of the exception.
        versions: Of `tensorflow` and `tensorflow-tpu`, None for what is not installed.

    Returns:
        The sentences for the user.
    """
    own, build = versions["tensorflow"], versions["tensorflow-tpu"]
    if own and build:
        return (
            f"TensorFlow {own} and its TPU build {build} have overwritten each other's files, so that the TPU {name!r} "
            "cannot be used. Keep the TPU build alone: `pip uninstall -y tensorflow tensorflow-tpu`, then `pip install "
            f"tensorflow-tpu=={build} --find-links {_BUILDS}`."
        )
    if "ConfigureDistributedTPU" in failure:
        return (
            f"This build of TensorFlow ({own}) has no kernels for TPUs, so that the TPU {name!r} cannot be used. "
            f"Put the TPU build in its place: `pip uninstall -y tensorflow`, then `pip install tensorflow-tpu=={own} "
            f"--find-links {_BUILDS}`; where none is published for it, use a runtime with GPUs or CPUs."
        )
    if "TPUs not found in the cluster" in failure:
        return (
            f"There is no TPU behind {name!r}: TensorFlow finds none on this machine. Choose a machine or a runtime "
            "that has one, or train without it."
        )
    if "neither a type of a primitive operation" in failure:
        return (
            f"The TPU {name!r} runs another version of TensorFlow than this process ({own or build}). Start the TPU "
            f"with the software version of TensorFlow {own or build}, or install the version that it has."
        )
    if "TPU Name" in failure:
        return (
            "No TPU is named here. In Colab choose Runtime > Change runtime type > TPU; elsewhere set TPU_NAME, or "
            'pass `tpu="local"` on a machine that has TPU chips.'
        )
    if failure.startswith(("ImportError", "ModuleNotFoundError", "URLError")) or "googleapiclient" in failure:
        return (
            f"The address of the TPU {name!r} cannot be looked up from here ({_first_line(failure)}). Set TPU_NAME, or "
            "pass `tpu=`, to 'grpc://host:port', or to 'local' on the machine that has the chips; unset TPU_NAME to "
            "train without a TPU."
        )
    return f"The TPU {name!r} cannot be used ({_first_line(failure)}). Check that it is there and ready."


def _listens(address: str) -> bool:
    try:
        return listening(address if ":" in address else f"{address}:8470", _FIRST_ANSWER_SECONDS)
    except ClusterSpecError:
        return False


def _first_line(text: str, longest: int = 200) -> str:
    line = text.strip().splitlines()[0]
    return line if len(line) <= longest else line[: longest - 3] + "..."
