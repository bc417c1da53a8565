"""What a user with a strict type checker writes; `test_tools.py` checks it with mypy --strict."""

from __future__ import annotations

import pathlib

import tfdist_ext
from tfdist_ext import checkpoint, cluster, placement, ps, testing


def policies() -> list[ps.Policy]:
    """Every policy is a `Policy`."""
    return [
        tfdist_ext.Synchronous(num_backup_workers=1),
        tfdist_ext.BoundedStaleness(max_staleness=4, damping=tfdist_ext.InverseStaleness()),
        tfdist_ext.Asynchronous(),
    ]


def choice() -> str:
    """What the environment asks for."""
    found: cluster.StrategyChoice = cluster.choose(cluster.Surroundings(num_gpus=2))
    return found.reason


def specification(text: str) -> int:
    """The size of a cluster."""
    read: cluster.ClusterSpecification = cluster.from_tf_config(text)
    return read.world_size


def conforms(policy: ps.Policy) -> None:
    """Raises where it does not."""
    testing.check_update_policy(policy, max_staleness=4, num_runs=10)


def save_policies() -> checkpoint.TrainingCheckpointManager:
    """A manager as the README makes it."""
    state = checkpoint.TrainingState(None, None, allow_missing=["input"])
    save = checkpoint.EverySteps(500) | checkpoint.EverySeconds(600)
    keep = checkpoint.LatestN(3) | checkpoint.BestN("val_loss", 1)
    return checkpoint.TrainingCheckpointManager(state, pathlib.Path("checkpoints"), save=save, keep=keep)


def plan() -> placement.Plan:
    """A plan for an empty graph."""
    machine = placement.Machine(devices=(), links={})
    return placement.plan_graph(placement.OperationGraph(operations=(), edges=()), machine)
