"""How do I plug it into tf.distribute?"""

from tfdist_ext.strategies.from_environment import choice_from_environment, strategy_from_environment
from tfdist_ext.strategies.mirrored import MirroredStrategy
from tfdist_ext.strategies.multi_worker import MultiWorkerMirroredStrategy
from tfdist_ext.strategies.parameter_server import ParameterServerStrategy

__all__ = [
    "MirroredStrategy",
    "MultiWorkerMirroredStrategy",
    "ParameterServerStrategy",
    "choice_from_environment",
    "strategy_from_environment",
]
