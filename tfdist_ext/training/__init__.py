"""What is one step, and what happens between steps?

Importing this folder installs the bridge to Keras.
"""

from tfdist_ext.strategies import (
    MirroredStrategy,
    MultiWorkerMirroredStrategy,
    ParameterServerStrategy,
    choice_from_environment,
    strategy_from_environment,
)
from tfdist_ext.training.coordinator import ClusterCoordinator
from tfdist_ext.training.delay_compensation import DelayCompensation
from tfdist_ext.training.keras_bridge import install
from tfdist_ext.training.predict_step import PredictStep
from tfdist_ext.training.scaling import ScaledSettings, scaled_settings
from tfdist_ext.training.step import TestStep, TrainStep
from tfdist_ext.training.update_logs import UpdateLogs

install()

__all__ = [
    "ClusterCoordinator",
    "DelayCompensation",
    "MirroredStrategy",
    "MultiWorkerMirroredStrategy",
    "ParameterServerStrategy",
    "PredictStep",
    "ScaledSettings",
    "TestStep",
    "TrainStep",
    "UpdateLogs",
    "choice_from_environment",
    "install",
    "scaled_settings",
    "strategy_from_environment",
]
