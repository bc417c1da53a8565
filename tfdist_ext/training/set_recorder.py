"""What stands in for optimizers while a worker's step is traced?"""

from __future__ import annotations

import dataclasses

import keras

from tfdist_ext.training.recorder import ResultNotes


@dataclasses.dataclass
class Application:
    """One call of an optimizer.

    Attributes:
        optimizer: The Keras optimizer.
        variables: Its variables that have gradients.
        gradients: Their gradients, while compute is traced.
    """

    optimizer: keras.Optimizer
    variables: list
    gradients: list


class SetRecorder(ResultNotes):
    """Takes the place of optimizers while a worker's step is traced.

    Attributes:
        in_place: Always False: nothing is applied inside compute.
        applications: The recorded calls, in their order.
    """

    in_place = False

    def __init__(self):
        super().__init__()
        self.applications: list[Application] = []
        self._applied: dict[int, str] = {}

    def record_apply(self, frame, optimizer, gradients, variables) -> None:
        """Keeps the gradients of one optimizer's step."""
        variables = list(optimizer._trainable_variables if variables is None else variables)
        pairs = [(g, v) for g, v in zip(gradients, variables, strict=True) if g is not None]
        if not pairs:
            raise ValueError(
                "No gradient reaches any trainable variable. Check that the loss of `train_step` depends on the "
                "model's output."
            )
        if any(application.optimizer is optimizer for application in self.applications):
            raise ValueError(
                f"`train_step` applies gradients with `{optimizer.name}` twice. A worker's step is applied after it "
                "returned: sum the gradients and apply them once, or use one optimizer for each."
            )
        kept = Application(optimizer, [v for _, v in pairs], [g for g, _ in pairs])
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
        if assigns and variable.trainable:
            raise ValueError(
                f"A layer assigns the trainable variable `{variable.path}` in its forward pass. Workers cannot: only "
                "the optimizer changes what is trained. Keep it in a variable with trainable=False."
            )
