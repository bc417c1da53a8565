"""Which attributes of a callback are its state, and which are settings, or belong to somebody else?

The same answer holds when a checkpoint is saved and when one is read, which may be somebody else's: what is not state
is never set.
"""

from __future__ import annotations

import enum
import functools
import inspect
import logging
import pathlib
import re
import types
from typing import Any

import keras
import numpy as np
import tensorflow as tf

# What Keras sets on every callback.
_OF_EVERY_CALLBACK = frozenset({"model", "_model", "params", "validation_data"})
# All that Keras' own callbacks remember; the rest is settings, and what they open or show.
_OF_KERAS = {
    "BackupAndRestore": ("_current_epoch", "_last_batch_seen", "_batches_seen_since_last_saving"),
    "EarlyStopping": ("wait", "stopped_epoch", "best", "best_weights", "best_epoch"),
    "History": ("epoch", "history"),
    "ModelCheckpoint": ("best", "_current_epoch", "_last_batch_seen", "_batches_seen_since_last_saving"),
    "OrbaxCheckpoint": (
        "best",
        "_current_epoch",
        "_last_batch_seen",
        "_batches_seen_since_last_saving",
        "_total_batches_seen",
    ),
    "ReduceLROnPlateau": ("wait", "best", "cooldown_counter"),
    "SwapEMAWeights": ("_ema_weights_in_model",),
}
# A monitor sets it when it is first asked, and gives another setting its sign. A new process does the same to its own.
_SET_WHEN_FIRST_ASKED, _SIGNED_WITH_IT = "monitor_op", "min_delta"
# What a callback refers to and does not own, and what does not change: nothing of it is lost.
_REFERENCES = (
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
    types.ModuleType,
    type,
    functools.partial,
    np.ufunc,
    enum.Enum,
    pathlib.PurePath,
    re.Pattern,
    logging.Logger,
    keras.callbacks.Callback,
    keras.callbacks.CallbackList,
    keras.losses.Loss,
    tf.data.Dataset,
    tf.distribute.Strategy,
)
# What has variables, which the model may own or not.
_OWNERS = (keras.layers.Layer, keras.metrics.Metric, keras.optimizers.Optimizer)
VARIABLES = (keras.Variable, tf.Variable)


def of_others(callback: Any, name: str) -> bool:
    """Whether an attribute is Keras', and nobody's state."""
    if name in _OF_EVERY_CALLBACK:
        return True
    return name == _SET_WHEN_FIRST_ASKED and _is_monitor(callback)


def without_sign(callback: Any, name: str, value: Any) -> Any:
    """Returns the value of an attribute, without a sign that Keras has given it."""
    return abs(value) if name == _SIGNED_WITH_IT and _is_monitor(callback) else value


def is_always_state(callback: Any, name: str) -> bool:
    """Whether an attribute is state also where it has not changed: some of Keras' own."""
    return any(name in _OF_KERAS.get(kind.__name__, ()) for kind in _keras_kinds(callback))


def why_no_state(callback: Any, name: str, value: Any) -> str | None:
    """Returns why an attribute is neither saved where it has changed nor set from a checkpoint; None if it is.

    Args:
        callback: The callback.
        name: Of the attribute.
        value: What it would be set to.
    """
    kind = type(callback)
    if of_others(callback, name) or not name.isidentifier() or name.startswith("__"):
        return "is Keras' or Python's"
    if is_always_state(callback, name):
        return None
    setting_of = _class_with_setting(callback, name)
    if setting_of is not None:
        return f"is a setting of {setting_of}"
    if is_of_keras(callback):
        return f"is nothing that {kind.__name__} remembers"
    of_class = inspect.getattr_static(kind, name, None)
    if callable(of_class) or hasattr(of_class, "__get__") or hasattr(of_class, "__set__"):
        return f"is a method or a property of {kind.__name__}"
    return "is a path" if is_path(value) else None


def is_path(value: Any) -> bool:
    """Whether a value is text that may name a file elsewhere."""
    text = value.decode("latin-1") if isinstance(value, bytes) else value
    return isinstance(text, str) and (bool(set("/\\") & set(text)) or text.startswith(".."))


def is_reference(value: Any) -> bool:
    """Whether a callback holds something that is not its own, such as a function."""
    # The manager and the state are named by their module: they import this one.
    own = type(value).__module__.startswith("tfdist_ext.")
    return own or isinstance(value, _REFERENCES)


def is_of_model(value: Any, model: Any) -> bool:
    """Whether a variable, or all variables of a layer, a model, a metric or an optimizer, are saved with the model."""
    if not isinstance(value, _OWNERS + VARIABLES):
        return False
    variables = value.variables if isinstance(value, _OWNERS) else [value]
    owned = [*model.variables, *model.metrics_variables, *getattr(model.optimizer, "variables", ())]
    ids = {id(one) for variable in owned for one in (variable, variable.value)}
    return all(id(variable) in ids for variable in variables)


def is_of_keras(callback: Any) -> bool:
    """Whether a callback is one of Keras' own, and no class made of it."""
    return type(callback).__module__.split(".")[0] == "keras"


def _is_monitor(callback: Any) -> bool:
    return any(kind.__name__ == "MonitorCallback" for kind in _keras_kinds(callback))


def _keras_kinds(callback: Any) -> list[type]:
    return [kind for kind in type(callback).__mro__ if kind.__module__.split(".")[0] == "keras"]


def _class_with_setting(callback: Any, name: str) -> str | None:
    """Returns the class of Keras whose constructor takes an attribute as an argument."""
    for kind in _keras_kinds(callback):
        constructor = vars(kind).get("__init__")
        if constructor is not None and name in inspect.signature(constructor).parameters:
            return kind.__name__
    return None
