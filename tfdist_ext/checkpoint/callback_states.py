"""What do a `fit`'s callbacks remember, and how do they get it back?

A callback with `state_dict` and `load_state_dict` says so itself. Of the others, the attributes that have changed since
`fit` began are their state, and those that have not are settings, which the program that resumes gives anew.
"""

from __future__ import annotations

import enum
import functools
import logging
import pathlib
import re
import types
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist_ext.checkpoint import plain_data
from tfdist_ext.checkpoint.manifest import Piece

# What Keras sets on every callback, and what says how one fit is shown.
_NOT_STATE = frozenset({"model", "_model", "params", "validation_data"})
_SHOWS_ONLY = (
    "ProgbarLogger",
    "RemoteMonitor",
    "TerminateOnNaN",
    "TensorBoard",
    "LambdaCallback",
    "CSVLogger",
)
# What has variables, which the model may own or not.
_OWNERS = (keras.layers.Layer, keras.metrics.Metric, keras.optimizers.Optimizer)
_VARIABLES = (keras.Variable, tf.Variable)
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
# Changed by the first `on_train_begin` of these, before the states are compared.
_ALWAYS = {
    "EarlyStopping": ("wait", "stopped_epoch", "best", "best_weights", "best_epoch"),
    "ReduceLROnPlateau": ("wait", "best", "cooldown_counter"),
    "ModelCheckpoint": (
        "best",
        "epochs_since_last_save",
        "_last_batch_seen",
        "_batches_seen_since_last_saving",
    ),
    "History": ("epoch", "history"),
}


class CallbackStates:
    """The state of the callbacks of one `fit`.

    Args:
        callbacks: All of its callbacks, in order, after `on_train_begin`.
        own: Those that need no saving: ours.
    """

    def __init__(self, callbacks: Sequence[Any], own: Sequence[Any] = ()):
        kept = [callback for callback in callbacks if callback not in own and not _shows_only(callback)]
        self._callbacks = dict(zip(_names(kept), kept, strict=True))
        self._first = {name: _encoded(callback)[0] for name, callback in self._callbacks.items()}

    def state(self) -> dict[str, Any]:
        """Returns the state by name of the callback, as plain data."""
        return {name: self._state_of(name) for name in self._callbacks}

    def pieces(self) -> list[Piece]:
        """Says of each callback whether it can be saved."""
        return [self._piece(name, callback) for name, callback in self._callbacks.items()]

    def load(self, state: dict[str, Any]) -> list[str]:
        """Gives the callbacks their state back; returns the names that only one side has."""
        for name, callback in self._callbacks.items():
            own = state.get(name)
            if own is None:
                continue
            if own["kind"] == "state_dict":
                callback.load_state_dict(own["state"])
                continue
            for attribute, value in own["state"].items():
                setattr(callback, attribute, value)
        return sorted(set(state) ^ set(self._callbacks))

    def _state_of(self, name: str) -> dict[str, Any]:
        callback = self._callbacks[name]
        if hasattr(callback, "state_dict"):
            return {"kind": "state_dict", "state": callback.state_dict()}
        now, first = _encoded(callback)[0], self._first[name]
        always = _attributes_always_saved(callback)
        return {
            "kind": "attributes",
            "state": {
                attribute: getattr(callback, attribute)
                for attribute, text in now.items()
                if attribute in always or text != first.get(attribute)
            },
        }

    def _piece(self, name: str, callback: Any) -> Piece:
        if hasattr(callback, "state_dict"):
            return Piece(name=f"callbacks/{name}", captured=True, reason="its state_dict()")
        unwritable = _encoded(callback)[1]
        if unwritable:
            return Piece(
                name=f"callbacks/{name}",
                captured=False,
                reason=f"{', '.join(unwritable)} cannot be written as plain data; give it state_dict and "
                "load_state_dict",
            )
        return Piece(name=f"callbacks/{name}", captured=True, reason="the attributes that `fit` changed")


def _shows_only(callback: Any) -> bool:
    return type(callback).__name__ in _SHOWS_ONLY and type(callback).__module__.startswith("keras")


def _names(callbacks: Sequence[Any]) -> list[str]:
    kinds = [type(callback).__name__ for callback in callbacks]
    return [
        f"{kind}_{kinds[:index].count(kind)}" if kinds[:index].count(kind) else kind
        for index, kind in enumerate(kinds)
    ]


def _attributes_always_saved(callback: Any) -> tuple[str, ...]:
    for kind in type(callback).__mro__:
        if kind.__module__.startswith("keras") and kind.__name__ in _ALWAYS:
            return _ALWAYS[kind.__name__]
    return ()


def _encoded(callback: Any) -> tuple[dict[str, bytes], list[str]]:
    """Returns the attributes of a callback as text, and the names of those that hold state and cannot be."""
    texts, unwritable = {}, []
    for name, value in vars(callback).items():
        if name in _NOT_STATE or _is_reference(value) or _is_of_model(value, callback.model):
            continue
        try:
            if isinstance(value, _VARIABLES):
                raise TypeError("Its value could be written, but an array would come back.")
            texts[name] = plain_data.dumps(value, name)
        except TypeError:
            # What else Keras' own callbacks hold is known, and none of it is state.
            if isinstance(value, (list, dict, set, tuple)) or not _is_of_keras(callback):
                unwritable.append(f"`{name}`")
    return texts, unwritable


def _is_reference(value: Any) -> bool:
    # The manager and the state are named by their module: they import this one.
    own = type(value).__module__.startswith("tfdist_ext.")
    return own or isinstance(value, _REFERENCES)


def _is_of_model(value: Any, model: Any) -> bool:
    """Whether a variable, or all variables of a layer, a model, a metric or an optimizer, are saved with the model."""
    if not isinstance(value, _OWNERS + _VARIABLES):
        return False
    variables = value.variables if isinstance(value, _OWNERS) else [value]
    owned = [*model.variables, *model.metrics_variables, *getattr(model.optimizer, "variables", ())]
    ids = {id(one) for variable in owned for one in (variable, variable.value)}
    return all(id(variable) in ids for variable in variables)


def _is_of_keras(callback: Any) -> bool:
    return type(callback).__module__.split(".")[0] == "keras"
