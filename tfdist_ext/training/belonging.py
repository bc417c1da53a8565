"""Do the model, the scope, the optimizer, the metrics and the data of a call belong to one strategy?"""

from __future__ import annotations

import keras
import tensorflow as tf

from tfdist_ext import compat
from tfdist_ext.data.worker_dataset import WorkerDataset
from tfdist_ext.strategies import frame as frames
from tfdist_ext.strategies.parameter_server import ParameterServerStrategy
from tfdist_ext.strategies.synchronous_strategy import SynchronousStrategy

_OURS = (SynchronousStrategy, ParameterServerStrategy)


def strategy_outside_of_replicas():
    """Returns the strategy of several replicas in whose scope, and outside of whose replicas, this code runs, or None.

    There a function runs once, as on one device, and no replica adds to what it computes.
    """
    strategy = tf.distribute.get_strategy()
    if not isinstance(strategy, SynchronousStrategy) or frames.current_frame() is not None:
        return None
    outside = tf.distribute.in_cross_replica_context() and not compat.in_replica_update_context()
    return strategy if outside else None


def named(strategy) -> str:
    """Returns what a message calls a strategy, which may be None."""
    if strategy is None:
        return "no strategy"
    replicas = strategy.num_replicas_in_sync
    return f"the `{type(strategy).__name__}` of {replicas} replica{'s' if replicas != 1 else ''}"


def check_scope(model, doing: str) -> None:
    """Refuses to compile or run a model in the scope of a strategy that is not its own.

    Args:
        model: Keras model.
        doing: What is done with it, for the message.

    Raises:
        ValueError: Another strategy is in force, and one of the two is this package's.
    """
    current = tf.distribute.get_strategy() if tf.distribute.has_strategy() else None
    own = model._distribute_strategy
    if current is None or current is own or not any(isinstance(one, _OURS) for one in (current, own)):
        return
    if own is None:
        raise ValueError(
            f"Model `{model.name}` was made outside the scope of {named(current)} in which you {doing} it, so it would "
            "not be distributed. Build and compile it inside `with strategy.scope():`."
        )
    raise ValueError(
        f"Model `{model.name}` belongs to {named(own)}, and you {doing} it in the scope of {named(current)}. Use "
        "the scope of its own strategy, or none: a model knows the strategy in whose scope it was made."
    )


def check_compiled(model) -> None:
    """Refuses an optimizer or a metric whose variables belong to another strategy than the model's.

    Raises:
        ValueError: One does; names it.
    """
    own = model._distribute_strategy
    if any(made_in is not own for made_in in compat.strategies_of_optimizer(model.optimizer)):
        raise ValueError(
            f"The optimizer `{model.optimizer.name}` was made outside the scope of the model's strategy, so its "
            "variables are not on the strategy's devices. Make it inside `with strategy.scope():`."
        )
    compiled = model._compile_metrics
    given = [] if compiled is None else [compiled._user_metrics, compiled._user_weighted_metrics]
    for metric in keras.tree.flatten(given):
        if isinstance(metric, keras.metrics.Metric) and any(
            made_in not in (own, None) for made_in in compat.strategies_of_variables(metric.variables)
        ):
            raise ValueError(
                f"The metric `{metric.name}` was made in the scope of another strategy than the model's, {named(own)}: "
                "its variables are on other devices. Make it inside `with strategy.scope():`."
            )


def check_data(model, x=None, validation_data=None, class_weight=None) -> None:
    """Refuses a dataset that another strategy distributed, and weights of classes for one that is distributed.

    Args:
        model: Keras model.
        x: What `fit`, `evaluate` or `predict` was given.
        validation_data: Likewise, of `fit`.
        class_weight: Likewise, of `fit`.

    Raises:
        ValueError: One of the two.
    """
    own = model._distribute_strategy
    for data in (x, validation_data):
        if not isinstance(data, tf.distribute.DistributedDataset):
            continue
        made_by = data.strategy if isinstance(data, WorkerDataset) else getattr(data, "_strategy", None)
        if made_by is None and isinstance(own, ParameterServerStrategy):
            continue  # A dataset that workers open by themselves knows no strategy.
        if made_by is not own and any(isinstance(one, _OURS) for one in (made_by, own)):
            raise ValueError(
                f"Model `{model.name}` belongs to {named(own)}, and its dataset was distributed by {named(made_by)}. "
                "Give `fit`, `evaluate` and `predict` the dataset itself, or what the model's strategy distributed."
            )
    if class_weight is not None and isinstance(x, tf.distribute.DistributedDataset):
        raise ValueError(
            "Argument `class_weight` needs a dataset that is not distributed yet: give `fit` the tf.data.Dataset, "
            "or let it yield `(x, y, sample_weight)`."
        )
