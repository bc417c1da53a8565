"""Why was a function traced again? Tracing takes seconds where running takes milliseconds."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import tensorflow as tf

from tfdist_ext import compat
from tfdist_ext.placement.trace import is_plain


class RetracingError(RuntimeError):
    """A tf.function was traced more often than it may be.

    Attributes:
        arguments: Names of the arguments that differ from the most similar call before.
    """

    def __init__(self, message: str, arguments: tuple[str, ...] = ()):
        super().__init__(message)
        self.arguments = arguments


class no_retracing:
    """Fails with the argument to blame when a tf.function is traced again.

    Called in place of the function it fails before anything runs. As a context manager it watches the function where
    others call it, Keras for one, and fails at the end.

    Runs on: one process.

    Args:
        function: tf.function, or Python function, which becomes one.
        max_traces: Traces that are allowed in all; more than 1 for a function that is meant to have several, such
            as one for full batches and one for the last.

    Raises:
        RetracingError: When called, or at the end of the block.

    Example:
        >>> import tensorflow as tf
        >>> step = no_retracing(tf.function(lambda x: 2 * x))
        >>> step(tf.ones([2])).numpy().tolist()
        [2.0, 2.0]
        >>> step(tf.ones([3]))
        Traceback (most recent call last):
          ...
        tfdist_ext.placement.retracing.RetracingError: ...
    """

    def __init__(self, function, max_traces: int = 1):
        if max_traces < 1:
            raise ValueError(f"Argument `max_traces` must be at least 1; received {max_traces}.")
        self._function = tf.function(function) if is_plain(function) else function
        if not hasattr(self._function, "python_function"):
            raise TypeError(
                "Argument `function` must be a tf.function or a Python function; received "
                f"{type(function).__name__}."
            )
        self._max_traces = max_traces
        self._traced_for: list[dict[str, Any]] = []
        self._known: set[tuple] = set()
        functools.update_wrapper(self, self._function.python_function)

    def __call__(self, *args, **kwargs):
        """Calls the function, after having traced it if need be."""
        arguments = _arguments_of(self._function, args, kwargs)
        key = tuple(sorted((name, repr(spec)) for name, spec in arguments.items()))
        if key not in self._known:
            before = self._num_traces()
            self._function.get_concrete_function(*args, **kwargs)
            # The first time a function that makes variables is traced twice.
            if self._num_traces() > before or not self._known:
                if len(self._traced_for) >= self._max_traces:
                    raise _error(self._name, len(self._traced_for) + 1, arguments, self._traced_for)
                self._traced_for.append(arguments)
            self._known.add(key)
        return self._function(*args, **kwargs)

    def __enter__(self) -> no_retracing:
        self._at_first = self._num_traces()
        return self

    def __exit__(self, kind, *failure: Any) -> None:
        traces = self._num_traces()
        if kind is None and traces > max(self._at_first, self._max_traces):
            names = inspect.signature(self._function.python_function).parameters
            calls = [_named(names, *signature) for signature in compat.traced_signatures(self._function)]
            raise _error(self._name, traces, calls[-1], calls[:-1])

    @property
    def _name(self) -> str:
        return getattr(self._function.python_function, "__name__", "the function")

    def _num_traces(self) -> int:
        return self._function.experimental_get_tracing_count()


def _arguments_of(function, args, kwargs) -> dict[str, Any]:
    bound = inspect.signature(function.python_function).bind(*args, **kwargs)
    bound.apply_defaults()
    return _flat(bound.arguments)


def _named(names, args, kwargs) -> dict[str, Any]:
    return _flat({**dict(zip(names, args, strict=False)), **kwargs})


def _flat(arguments) -> dict[str, Any]:
    """Names each part of the arguments, such as `batch['image']`, and says what tracing sees of it."""
    found = {}
    for name, value in arguments.items():
        for path, part in compat.flatten_with_path(value):
            found[name + "".join(f"[{key!r}]" for key in path)] = _seen(part)
    return found


def _seen(value):
    """Returns what a trace depends on: the spec of a tensor or array, the value of everything else."""
    if isinstance(value, tf.TensorSpec):
        return tf.TensorSpec(value.shape, value.dtype)
    if isinstance(value, tf.TypeSpec):
        return value
    if isinstance(value, tf.Variable):
        return f"variable {value.name}"
    if tf.is_tensor(value):
        spec = tf.type_spec_from_value(value)
        return tf.TensorSpec(spec.shape, spec.dtype) if isinstance(spec, tf.TensorSpec) else spec
    if hasattr(value, "__array__") and hasattr(value, "shape") and hasattr(value, "dtype"):
        return tf.TensorSpec(value.shape, value.dtype)
    return value


def _error(name: str, traces: int, now: dict[str, Any], before: list[dict[str, Any]]) -> RetracingError:
    def differing(other: dict[str, Any]) -> list[str]:
        return [key for key in {**now, **other} if repr(now.get(key)) != repr(other.get(key))]

    closest = min(before, key=lambda other: len(differing(other)), default={})
    blamed = differing(closest)
    reasons = [f"argument `{key}` was {_text(closest, key)} and is {_text(now, key)}" for key in blamed]
    if not reasons:
        reasons = ["no argument differs, but the device, the strategy, or something that it captures may"]
    advice = (
        "Try tensors in place of Python numbers, batches of one size (drop_remainder=True), an input_signature, or "
        "reduce_retracing=True."
    )
    return RetracingError(f"{name} was traced {traces} times: {'; '.join(reasons)}. {advice}", tuple(blamed))


def _text(arguments: dict[str, Any], key: str) -> str:
    return repr(arguments[key]) if key in arguments else "absent"
