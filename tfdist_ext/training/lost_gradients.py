"""Does a variable that gets no gradient on a worker get one on one device?"""

from __future__ import annotations

import keras
import tensorflow as tf

from tfdist_ext import compat
from tfdist_ext.strategies import frame as frames
from tfdist_ext.training.missing_gradients import warn_once
from tfdist_ext.training.set_recorder import SetRecorder


def check_none_lost(applications, step, batch_spec, argument_specs) -> None:
    """Looks at the variables without a gradient of a traced step; warns as Keras does where that is right.

    Outside of any graph: tapes record nothing where TensorFlow leaves one.

    Args:
        applications: What the trace recorded, `Application`s.
        step: The step that was traced, a function of a batch and of a list of other arguments.
        batch_spec: Structure of specs of one batch.
        argument_specs: Specs of the other arguments.

    Raises:
        RuntimeError: On one device a variable has a gradient that it does not have here.
        ValueError: An application has no gradient at all, on one device neither.
    """
    if not any(application.missing for application in applications):
        return
    reached = _reached_on_one_device(step, batch_spec, argument_specs)
    lost = [v.path for a in applications for v in a.missing if id(v) in reached]
    if lost:
        raise RuntimeError(
            f"The gradient of `{lost[0]}` is lost on a worker, which reads a copy of the variable; one device has it. "
            f"Nothing was trained. Lost are: {', '.join(lost)}. Read them in a layer's `call`, by the Keras "
            "variable itself, or train this model with MultiWorkerMirroredStrategy."
        )
    for application in applications:
        if not application.variables:
            raise ValueError(
                "No gradient reaches any trainable variable. Check that the loss of `train_step` depends on the "
                "model's output."
            )
        warn_once(application.optimizer, application.missing)


class _Variables(keras.StatelessScope):
    """Shows the variables themselves, and assigns none."""

    def get_current_value(self, variable):
        value = super().get_current_value(variable)
        return variable._value if value is None else value


def _reached_on_one_device(step, batch_spec, argument_specs) -> set[int]:
    """Traces the step on the variables themselves, and returns the ids of those that get a gradient."""
    recorder = SetRecorder()

    def trace(data, arguments):
        frame = frames.Frame(None, 0, 1, recorder=recorder)
        with frames.entered(frame), _Variables(collect_losses=True), compat.tracing_inner_functions_anew():
            step(data, arguments)

    tf.function(trace, autograph=False).get_concrete_function(batch_spec, argument_specs)
    return {id(variable) for application in recorder.applications for variable in application.variables}
