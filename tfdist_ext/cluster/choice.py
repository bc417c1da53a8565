"""Which strategy does this environment ask for, and why?

Pure: what is around is given, nothing is looked up, and TensorFlow is not imported.
"""

from __future__ import annotations

import dataclasses

from tfdist_ext.cluster.specification import ClusterSpecification

TPU = "tpu"
PARAMETER_SERVERS = "parameter_servers"
MULTI_WORKER = "multi_worker"
SEVERAL_DEVICES = "several_devices"
ONE_DEVICE = "one_device"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Surroundings:
    """What a process finds around itself.

    Attributes:
        tpu: Name or address of a TPU, `"local"` for chips in this machine, None for no TPU.
        tpu_source: What said so, for the sentence to the user.
        cluster: What TF_CONFIG describes; None if it is unset.
        num_gpus: Logical GPUs of this process.
        num_cpus: Logical CPU devices of this process; 1 unless the program made more.
    """

    tpu: str | None = None
    tpu_source: str = "an argument"
    cluster: ClusterSpecification | None = None
    num_gpus: int = 0
    num_cpus: int = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class StrategyChoice:
    """Which strategy fits, and why.

    Attributes:
        kind: `"tpu"`, `"parameter_servers"`, `"multi_worker"`, `"several_devices"` or `"one_device"`.
        reason: A sentence for the user.
        tpu: Name or address of the TPU, where there is one.
    """

    kind: str
    reason: str
    tpu: str | None = None

    def __str__(self) -> str:
        return self.reason


def choose(surroundings: Surroundings) -> StrategyChoice:
    """Chooses a strategy; the first that applies of TPU, parameter servers, several workers, several devices.

    Args:
        surroundings: What is around.

    Returns:
        The choice; its reason is one sentence.

    Example:
        >>> print(choose(Surroundings(num_gpus=4)))
        MirroredStrategy on 4 GPUs: this process sees them, and TF_CONFIG is unset.
        >>> print(choose(Surroundings()))
        MirroredStrategy on 1 CPU: no TPU and no GPU was found, and TF_CONFIG is unset.
    """
    if surroundings.tpu is not None:
        reason = (
            f"TPUStrategy on the TPU {surroundings.tpu!r}: {surroundings.tpu_source} says that there is one."
        )
        return StrategyChoice(kind=TPU, reason=reason, tpu=surroundings.tpu)
    cluster = surroundings.cluster
    if cluster is not None and cluster.has_parameter_servers:
        counts = {job: len(members) for job, members in cluster.jobs.items()}
        listed = ", ".join(f"{count} {job}" for job, count in counts.items())
        reason = f"ParameterServerStrategy as {cluster.task}: TF_CONFIG has a ps job ({listed})."
        return StrategyChoice(kind=PARAMETER_SERVERS, reason=reason)
    if cluster is not None and cluster.world_size > 1:
        reason = (
            f"MultiWorkerMirroredStrategy as {cluster.task}: TF_CONFIG has {cluster.world_size} tasks that train and "
            f"no ps; each brings its {_devices(surroundings)}."
        )
        return StrategyChoice(kind=MULTI_WORKER, reason=reason)
    return _on_this_host(surroundings, cluster)


def _on_this_host(surroundings: Surroundings, cluster: ClusterSpecification | None) -> StrategyChoice:
    alone = "TF_CONFIG is unset"
    if cluster is not None:
        evaluates = cluster.task.type == "evaluator"
        alone = "an evaluator trains with nobody" if evaluates else "TF_CONFIG names one task only"
    number = surroundings.num_gpus or surroundings.num_cpus
    if number > 1:
        seen = "this process sees them" if surroundings.num_gpus else "the program made them"
        kind = SEVERAL_DEVICES
    elif surroundings.num_gpus:
        seen, kind = "this process sees no more", ONE_DEVICE
    else:
        seen, kind = "no TPU and no GPU was found", ONE_DEVICE
    return StrategyChoice(
        kind=kind, reason=f"MirroredStrategy on {_devices(surroundings)}: {seen}, and {alone}."
    )


def _devices(surroundings: Surroundings) -> str:
    if surroundings.num_gpus:
        return f"{surroundings.num_gpus} GPU{'s' if surroundings.num_gpus > 1 else ''}"
    if surroundings.num_cpus > 1:
        return f"{surroundings.num_cpus} logical CPUs"
    return "1 CPU"
