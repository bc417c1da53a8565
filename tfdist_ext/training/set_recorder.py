"""What stands in for optimizers while a worker's step is traced?"""

from __future__ import annotations

import dataclasses

import keras
import tensorflow as tf


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


class SetRecorder:
    """Takes the place of optimizers while a worker's step is traced.

    Attributes:
        in_place: Always False: nothing is applied inside compute.
        applications: The recorded calls, in their order.
        results: Maps `id(tensor)` to `(metric, path)` for every metric result drawn while tracing.
    """

    in_place = False

    def __init__(self):
        self.applications: list[Application] = []
        self.results: dict = {}
        self._applied: dict[int, str] = {}
        self._kept: list = []

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

    def note_result(self, metric, result) -> None:
        """Remembers which tensors of the logs are results of `metric`."""
        for path, leaf in _leaves(result):
            if tf.is_tensor(leaf):
                self.results[id(leaf)] = (metric, path)
                self._kept.append(leaf)


def _leaves(structure, path=()):
    if isinstance(structure, dict):
        for key, value in structure.items():
            yield from _leaves(value, (*path, key))
    elif isinstance(structure, (list, tuple)):
        for key, value in enumerate(structure):
            yield from _leaves(value, (*path, key))
    else:
        yield path, structure
