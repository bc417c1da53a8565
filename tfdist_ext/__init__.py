"""How do I train Keras 3 models on many machines, and trust the result?

`tfdist_ext` extends `tf.distribute`: write `tfdist_ext.MultiWorkerMirroredStrategy()` where you wrote
`tf.distribute.MultiWorkerMirroredStrategy()` and keep your `model.fit`.

Everything here is loaded when it is first used, so that `import tfdist_ext` and the shell command
`tfdist-ext` do not wait for TensorFlow.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from tfdist_ext import builds
from tfdist_ext.errors import (
    AuthenticationError,
    CheckpointCorruptError,
    CheckpointError,
    CheckpointIncompleteError,
    CheckpointMismatchError,
    ClusterSpecError,
    CollectiveError,
    CollectiveTimeoutError,
    ConfigurationMismatchError,
    ParameterServerLostError,
    PeerLostError,
    SignatureMismatchError,
    StartupTimeoutError,
    TfdistError,
    TPUUnavailableError,
    WorkersLostError,
)

if TYPE_CHECKING:
    from tfdist_ext import (
        checkpoint,
        cluster,
        collectives,
        data,
        errors,
        events,
        layers,
        placement,
        ps,
        strategies,
        testing,
        training,
        transport,
    )
    from tfdist_ext.collectives import TopK
    from tfdist_ext.ps import (
        Asynchronous,
        BoundedStaleness,
        ExponentialStaleness,
        HyperbolicStaleness,
        InverseStaleness,
        Synchronous,
    )
    from tfdist_ext.strategies import (
        MirroredStrategy,
        MultiWorkerMirroredStrategy,
        ParameterServerStrategy,
        choice_from_environment,
        strategy_from_environment,
    )
    from tfdist_ext.training import ClusterCoordinator, DelayCompensation, UpdateLogs

__version__ = "0.1.0"

_SUBMODULES = frozenset(
    [
        "checkpoint",
        "cluster",
        "collectives",
        "data",
        "errors",
        "events",
        "layers",
        "placement",
        "ps",
        "strategies",
        "testing",
        "training",
        "transport",
    ]  # fmt: skip
)
_MODULE_OF = {
    "MirroredStrategy": "tfdist_ext.training",
    "MultiWorkerMirroredStrategy": "tfdist_ext.training",
    "ClusterCoordinator": "tfdist_ext.training",
    "DelayCompensation": "tfdist_ext.training",
    "UpdateLogs": "tfdist_ext.training",
    "ParameterServerStrategy": "tfdist_ext.training",
    "choice_from_environment": "tfdist_ext.training",
    "strategy_from_environment": "tfdist_ext.training",
    "TopK": "tfdist_ext.collectives",
    "Asynchronous": "tfdist_ext.ps",
    "BoundedStaleness": "tfdist_ext.ps",
    "ExponentialStaleness": "tfdist_ext.ps",
    "HyperbolicStaleness": "tfdist_ext.ps",
    "InverseStaleness": "tfdist_ext.ps",
    "Synchronous": "tfdist_ext.ps",
}

__all__ = [
    "Asynchronous",
    "AuthenticationError",
    "BoundedStaleness",
    "CheckpointCorruptError",
    "CheckpointError",
    "CheckpointIncompleteError",
    "CheckpointMismatchError",
    "ClusterCoordinator",
    "ClusterSpecError",
    "CollectiveError",
    "CollectiveTimeoutError",
    "ConfigurationMismatchError",
    "DelayCompensation",
    "ExponentialStaleness",
    "HyperbolicStaleness",
    "InverseStaleness",
    "MirroredStrategy",
    "MultiWorkerMirroredStrategy",
    "ParameterServerLostError",
    "ParameterServerStrategy",
    "PeerLostError",
    "SignatureMismatchError",
    "StartupTimeoutError",
    "Synchronous",
    "TPUUnavailableError",
    "TfdistError",
    "TopK",
    "UpdateLogs",
    "WorkersLostError",
    "checkpoint",
    "choice_from_environment",
    "cluster",
    "collectives",
    "data",
    "errors",
    "events",
    "layers",
    "placement",
    "ps",
    "strategies",
    "strategy_from_environment",
    "testing",
    "training",
    "transport",
]


def __getattr__(name: str) -> Any:
    """Loads a public name when it is first used (PEP 562)."""
    try:
        if name in _SUBMODULES:
            return importlib.import_module(f"tfdist_ext.{name}")
        if name in _MODULE_OF:
            value = getattr(importlib.import_module(_MODULE_OF[name]), name)
            globals()[name] = value
            return value
    except ModuleNotFoundError as error:
        if error.name != "tensorflow":
            raise
        raise ModuleNotFoundError(f"`tfdist_ext.{name}`: {builds.MISSING}", name=error.name) from None
    raise AttributeError(f"module 'tfdist_ext' has no attribute {name!r}")


def __dir__() -> list[str]:
    """Lists the public names, loaded or not."""
    return sorted({*globals(), *__all__})
