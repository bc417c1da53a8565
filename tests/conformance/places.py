"""Where are programs run? Each place makes its strategy, and says how many processes and devices it needs."""

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import tfdist_ext
from tests.conformance.inputs import BATCH_ROWS


@dataclasses.dataclass(frozen=True)
class Place:
    """A strategy and the layout it is tried in.

    Attributes:
        title: As it stands in tables.
        make: Returns the strategy, or None.
        num_workers: Processes that run the program.
        devices: Logical devices of each.
        batches_a_step: How many batches of the dataset make one step.
        thorough: Whether models also evaluate, predict, and are saved and loaded there.
        folder: An empty one that all its processes share.
    """

    title: str
    make: Callable[[], Any]
    num_workers: int = 1
    devices: int = 3
    batches_a_step: int = 1
    thorough: bool = False
    folder: str = ""

    def scope(self, strategy):
        return contextlib.nullcontext() if strategy is None else strategy.scope()

    @property
    def batch_rows(self):
        return BATCH_ROWS // self.batches_a_step


def _mirrored(count):
    return lambda: tfdist_ext.MirroredStrategy([f"CPU:{index}" for index in range(count)])


def _servers(policy):
    def make():
        resolver = tfdist_ext.cluster.in_process(2, 2)
        return tfdist_ext.ParameterServerStrategy(resolver, update_policy=policy())

    return make


PLACES = {
    "one device": Place("one device", lambda: None, thorough=True),
    "mirrored 2": Place("`MirroredStrategy`, 2 devices", _mirrored(2), thorough=True),
    "mirrored 3": Place("`MirroredStrategy`, 3 devices", _mirrored(3)),
    "workers": Place(
        "`MultiWorkerMirroredStrategy`, 2 workers",
        lambda: tfdist_ext.MultiWorkerMirroredStrategy(),
        num_workers=2,
        devices=1,
        thorough=True,
    ),
    "rounds": Place(
        "`ParameterServerStrategy`, `Synchronous()`",
        _servers(lambda: tfdist_ext.Synchronous()),
        devices=1,
        batches_a_step=2,
    ),
    "one at a time": Place(
        "`ParameterServerStrategy`, `BoundedStaleness(0)`",
        _servers(lambda: tfdist_ext.BoundedStaleness(0)),
        devices=1,
        thorough=True,
    ),
}
DISTRIBUTED = tuple(name for name in PLACES if name != "one device")
