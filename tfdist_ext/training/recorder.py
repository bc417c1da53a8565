"""What stands in for the optimizer, the variables and the metrics while a replica computes?

Compute assigns no variable: gradients are recorded instead of applied, and whatever layers and metrics assign
is caught by a `keras.StatelessScope` and handed out as values.
"""

from __future__ import annotations

import contextlib

import keras
import tensorflow as tf

from tfdist_ext.strategies import frame as frames
from tfdist_ext.training.missing_gradients import warn_once


class NeedsInPlace(Exception):  # noqa: N818 - a signal between two traces, not an error
    """This train_step cannot be deferred: it does something with what applying gradients changed."""


def _leaves(structure, path=()):
    if isinstance(structure, dict):
        for key, value in structure.items():
            yield from _leaves(value, (*path, key))
    elif isinstance(structure, (list, tuple)):
        for key, value in enumerate(structure):
            yield from _leaves(value, (*path, key))
    else:
        yield path, structure


class ResultNotes:
    """Remembers which tensors of a step's logs are results of which metric.

    Attributes:
        results: Maps `id(tensor)` to `(metric, path)` for every metric result drawn while tracing.
    """

    def __init__(self):
        self.results: dict = {}
        self._kept: list = []

    def note_result(self, metric, result) -> None:
        """Remembers which tensors of the logs are results of `metric`."""
        for path, leaf in _leaves(result):
            if tf.is_tensor(leaf):
                self.results[id(leaf)] = (metric, path)
                self._kept.append(leaf)


class Recorder(ResultNotes):
    """Takes the place of `optimizer.apply` in one replica's compute.

    Attributes:
        optimizer: The compiled optimizer; None when nothing may be applied (evaluation).
        in_place: True to sum and apply at once instead of recording.
        applied: True once gradients were recorded.
        method: The method of the optimizer that was called.
        gradients: Recorded gradients, without the None ones.
        variables: The variable of each recorded gradient.
    """

    def __init__(self, optimizer, in_place: bool):
        super().__init__()
        self.optimizer = optimizer
        self.in_place = in_place
        self.applied = False
        self.method = "apply"
        self.gradients: list = []
        self.variables: list = []

    def record_apply(self, frame, optimizer, gradients, variables, method: str = "apply"):
        """Keeps the gradients of the compiled optimizer's only step.

        Raises:
            NeedsInPlace: A second step, or one of another optimizer.
        """
        if optimizer is not self.optimizer:
            raise NeedsInPlace(f"it applies gradients with `{optimizer.name}`, not the compiled optimizer")
        if self.applied:
            raise NeedsInPlace("it applies gradients more than once in a step")
        variables = list(optimizer._trainable_variables if variables is None else variables)
        pairs = [(g, v) for g, v in zip(gradients, variables, strict=True) if g is not None]
        if not pairs:
            raise ValueError(
                "No gradient reaches any trainable variable. Check that the loss of `train_step` depends on the "
                "model's output."
            )
        warn_once(optimizer, [v for g, v in zip(gradients, variables, strict=True) if g is None])
        self.applied, self.method = True, method
        self.variables = [variable for _, variable in pairs]
        weighted = frames.gradients_of_application(frame, [gradient for gradient, _ in pairs])
        self.gradients = [_shaped(g, v) for g, v in zip(weighted, self.variables, strict=True)]


def _shaped(gradient, variable):
    """Returns the gradient with its variable's shape, which some gradients know only when they run."""
    if isinstance(gradient, tf.IndexedSlices) or gradient.shape.is_fully_defined():
        return gradient
    return tf.ensure_shape(gradient, variable.shape)


class RecordingScope(keras.StatelessScope):
    """A stateless scope that remembers the variables assigned in it, and reads that come too late."""

    def __init__(self, recorder: Recorder, forbidden_after_apply):
        super().__init__(collect_losses=True, initialize_variables=False)
        self._recorder = recorder
        self._forbidden = {id(variable) for variable in forbidden_after_apply}
        self.assigned: dict[int, keras.Variable] = {}

    def add_update(self, update):
        """See `keras.StatelessScope`."""
        variable, value = update
        if id(variable) in self._forbidden:
            if self._recorder.applied and not self._recorder.in_place:
                raise NeedsInPlace(f"it assigns `{variable.path}` after applying gradients")
            if variable.trainable and not self._recorder.applied:
                raise NotImplementedError(
                    f"A layer assigns the trainable variable `{variable.path}` in its forward pass. The replicas of "
                    "a distributed step cannot: only the optimizer changes what is trained. Keep the value that "
                    "the layer computes in a variable with trainable=False."
                )
        self.assigned[id(variable)] = variable
        # What is read from a variable after an assignment has no gradient to what was assigned.
        super().add_update((variable, tf.stop_gradient(value)))

    def get_current_value(self, variable):
        """See `keras.StatelessScope`."""
        if self._recorder.applied and not self._recorder.in_place and id(variable) in self._forbidden:
            raise NeedsInPlace(f"it reads `{variable.path}` after applying gradients")
        value = super().get_current_value(variable)
        # Regularizers read through this method alone, and have no use for None.
        return variable._value if value is None else value


def at_path(structure, path):
    """Returns the leaf of a nested structure at a path of keys."""
    for key in path:
        structure = structure[key]
    return structure


@contextlib.contextmanager
def watching_results(metrics):
    """Notes, in the recorder of the replica that asks, each result of the metrics of a model."""

    def watch(metric):
        original = type(metric).result

        def result():
            value = original(metric)
            frame = frames.current_frame()
            if frame is not None and frame.recorder is not None:
                frame.recorder.note_result(metric, value)
            return value

        # object's own: Keras tracks attributes set the usual way.
        object.__setattr__(metric, "result", result)

    # A model may list a metric twice.
    metrics = list({id(metric): metric for metric in metrics}.values())
    for metric in metrics:
        watch(metric)
    try:
        yield
    finally:
        for metric in metrics:
            object.__delattr__(metric, "result")
