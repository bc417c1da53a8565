"""Whose word counts about the cluster: the argument's, TF_CONFIG's, or nobody's?"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tfdist_ext.cluster import environment as environment_lib
from tfdist_ext.cluster.specification import ClusterSpecification
from tfdist_ext.cluster.tf_config import from_tf_config
from tfdist_ext.errors import ClusterSpecError

if TYPE_CHECKING:
    import tensorflow as tf


def resolve(
    cluster_resolver: Any = None, *, environ: Mapping[str, str] | None = None
) -> ClusterSpecification:
    """Finds the cluster: the argument, else TF_CONFIG, else one task.

    Args:
        cluster_resolver: A `tf.distribute.cluster_resolver.ClusterResolver`, a
            `ClusterSpecification`, or None.
        environ: Variables to read instead of the process's.

    Returns:
        The validated specification.

    Raises:
        ClusterSpecError: What counts describes no usable cluster. A broken TF_CONFIG is never skipped.
        TypeError: `cluster_resolver` is none of these.

    Example:
        >>> resolve(environ={}).world_size
        1
    """
    if isinstance(cluster_resolver, ClusterSpecification):
        return cluster_resolver
    if cluster_resolver is not None:
        return _from_tf_resolver(cluster_resolver)
    text = environment_lib.tf_config(environ)
    return ClusterSpecification() if text is None else from_tf_config(text)


def as_tf_resolver(cluster: ClusterSpecification) -> tf.distribute.cluster_resolver.ClusterResolver:
    """Shows a specification in TensorFlow's own terms.

    Args:
        cluster: The specification.

    Returns:
        A `tf.distribute.cluster_resolver.SimpleClusterResolver`.
    """
    import tensorflow as tf

    return tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec(cluster.jobs),
        task_type=cluster.task.type,
        task_id=cluster.task.index,
        environment=cluster.environment,
        rpc_layer=cluster.rpc_layer or "grpc",
    )


def _from_tf_resolver(resolver: Any) -> ClusterSpecification:
    """Reads a ClusterResolver by its public methods, so that users' own kinds work too."""
    if not callable(getattr(resolver, "cluster_spec", None)):
        raise TypeError(
            "Argument `cluster_resolver` must be a tf.distribute.cluster_resolver.ClusterResolver or a "
            f"tfdist_ext.cluster.ClusterSpecification; received {resolver!r}. For a TF_CONFIG text, use "
            "tfdist_ext.cluster.from_tf_config."
        )
    from tfdist_ext import compat

    compat.let_slurm_have_no_gpus(resolver)
    # Asked first: some resolvers (Slurm's) know their task only afterwards.
    try:
        jobs = resolver.cluster_spec().as_dict()
    except (ArithmeticError, LookupError, OSError, RuntimeError, TypeError, ValueError) as error:
        raise ClusterSpecError(
            f"The {type(resolver).__name__} cannot say which tasks there are: {type(error).__name__}: {error}. Check "
            "the environment that it reads, or set TF_CONFIG in its place."
        ) from None
    config: dict[str, Any] = {
        "cluster": jobs,
        "environment": getattr(resolver, "environment", "") or "",
        "rpc_layer": getattr(resolver, "rpc_layer", "") or "",
    }
    if resolver.task_type:
        config["task"] = {"type": resolver.task_type, "index": resolver.task_id}
    elif len(jobs) == 1 and len(next(iter(jobs.values()))) == 1:
        config["task"] = {"type": next(iter(jobs))}
    elif jobs:
        raise ClusterSpecError(
            f"The {type(resolver).__name__} does not say which task this process is. Pass it `task_type` and "
            "`task_id`."
        )
    try:
        return from_tf_config(config)
    except ClusterSpecError as error:
        raise ClusterSpecError(f"From the {type(resolver).__name__}: {error}") from None
