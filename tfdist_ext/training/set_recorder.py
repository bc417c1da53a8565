"""What stands in for optimizers while a worker's step is traced?"""

from __future__ import annotations

import dataclasses
from typing import Any

import keras
import tensorflow as tf

from tfdist_ext.strategies import frame as frames
from tfdist_ext.training import own_apply, set_scaling
from tfdist_ext.training.recorder import ResultNotes

# Keras' name for the state of a recurrent layer.
_STATE_OF_ROWS = "rnn_state"


@dataclasses.dataclass
class Application:
    """One call of an optimizer.

    Attributes:
        optimizer: The Keras optimizer.
        variables: Its variables that have gradients.
        gradients: Their gradients, while compute is traced.
        missing: Its variables that have none.
        all_variables: Both, in the order in which they were given.
        method: The method that was called.
        is_overridden: True where the optimizer's class applies gradients in a way of its own.
        scale: Scalar float32 tensor, the scale of the loss where that changes, while compute is traced; else None.
    """

    optimizer: keras.Optimizer
    variables: list
    gradients: list
    missing: list
    all_variables: list
    method: str = "apply"
    is_overridden: bool = False
    scale: Any = None

    def without_tensors(self) -> Application:
        """Returns what outlives the trace."""
        return dataclasses.replace(self, gradients=[], scale=None)


class SetRecorder(ResultNotes):
    """Takes the place of optimizers while a worker's step is traced.

    Args:
        is_in_order: True where each set is computed on what the one before it left.

    Attributes:
        in_place: Always False: nothing is applied inside compute.
        applications: The recorded calls, in their order.
    """

    in_place = False

    def __init__(self, is_in_order: bool = False):
        super().__init__()
        self._is_in_order = is_in_order
        self.applications: list[Application] = []
        self._applied: dict[int, str] = {}

    def record_apply(self, frame, optimizer, grads, trainable_variables=None, method="apply") -> None:
        """Keeps the gradients of one optimizer's step."""
        gradients = (
            list(grads)
            if frame is None or frame.round is None
            else frames.gradients_of_application(frame, grads)
        )
        variables = list(
            optimizer._trainable_variables if trainable_variables is None else trainable_variables
        )
        _check_can_record(optimizer)
        if any(application.optimizer is optimizer for application in self.applications):
            raise ValueError(
                f"`train_step` applies gradients with `{optimizer.name}` twice. A worker's step is applied after it "
                "returned: sum the gradients and apply them once, or use one optimizer for each."
            )
        scale = set_scaling.scale_at_compute(optimizer)
        pairs = [(g, v) for g, v in zip(gradients, variables, strict=True) if g is not None]
        kept = Application(
            optimizer,
            [v for _, v in pairs],
            [set_scaling.unscaled(g, v, scale) for g, v in pairs],
            [v for g, v in zip(gradients, variables, strict=True) if g is None],
            variables,
            method,
            own_apply.overrides_apply(optimizer),
            scale if tf.is_tensor(scale) else None,
        )
        self.applications.append(kept)
        self._applied.update({id(v): v.path for v in [*kept.variables, *optimizer.variables]})

    def check_access(self, variable, assigns: bool) -> None:
        """Refuses what depends on the outcome of a step that is applied later, or changes what only it may change."""
        if id(variable) in self._applied:
            raise ValueError(
                f"`train_step` {'assigns' if assigns else 'reads'} `{variable.path}` after applying gradients to "
                f"it. On "
                "parameter servers gradients are applied after the step has returned. Compute what depends on the "
                "new value in a callback (on_train_batch_end), or before applying."
            )
        if assigns and not self._is_in_order and variable.name == _STATE_OF_ROWS:
            raise ValueError(
                f"A recurrent layer with stateful=True keeps a state for each row of the batch in `{variable.path}`, "
                "from which the next batch goes on. Workers compute batches side by side, without a next one. "
                "Use stateful=False, or train under update_policy=BoundedStaleness(0), which takes one batch after the "
                "other; evaluate and predict without the strategy."
            )
        if assigns and variable.trainable:
            raise ValueError(
                f"A layer assigns the trainable variable `{variable.path}` in its forward pass. Workers cannot: only "
                "the optimizer changes what is trained. Keep it in a variable with trainable=False."
            )


def _check_can_record(optimizer) -> None:
    scales = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    if scales and own_apply.overrides_apply(optimizer):
        raise ValueError(
            f"The optimizer `{type(optimizer).__name__}` overrides how a LossScaleOptimizer applies gradients. On "
            "parameter servers each set is unscaled by the scale it was computed with, which is not known to it. "
            "Override an optimizer without a loss scale, and wrap that in keras.optimizers.LossScaleOptimizer."
        )
