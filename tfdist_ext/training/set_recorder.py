"""What stands in for optimizers while a worker's step is traced?"""

from __future__ import annotations

import dataclasses

import keras

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
    """

    optimizer: keras.Optimizer
    variables: list
    gradients: list
    missing: list


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

    def record_apply(self, frame, optimizer, gradients, variables) -> None:
        """Keeps the gradients of one optimizer's step."""
        variables = list(optimizer._trainable_variables if variables is None else variables)
        pairs = [(g, v) for g, v in zip(gradients, variables, strict=True) if g is not None]
        if any(application.optimizer is optimizer for application in self.applications):
            raise ValueError(
                f"`train_step` applies gradients with `{optimizer.name}` twice. A worker's step is applied after it "
                "returned: sum the gradients and apply them once, or use one optimizer for each."
            )
        missing = [v for g, v in zip(gradients, variables, strict=True) if g is None]
        kept = Application(optimizer, [v for _, v in pairs], [g for g, _ in pairs], missing)
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
