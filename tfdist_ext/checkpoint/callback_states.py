"""What do a `fit`'s callbacks remember, and how do they get it back?

A callback with `state_dict` and `load_state_dict` says so itself. Of the others, the attributes that have changed
since before the `on_train_begin` of their first `fit` are their state, and those that have not are settings, which the
program that resumes gives anew. What its `on_train_begin` and `on_epoch_begin` have changed by then counts for nothing:
it may come of what was restored.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from tfdist_ext.checkpoint import plain_data
from tfdist_ext.checkpoint.callback_attributes import (
    VARIABLES,
    is_always_state,
    is_of_keras,
    is_of_model,
    is_path,
    is_reference,
    of_others,
    why_no_state,
    without_sign,
)
from tfdist_ext.checkpoint.manifest import Piece

# They say how one fit is shown.
_SHOWS_ONLY = (
    "ProgbarLogger",
    "RemoteMonitor",
    "TerminateOnNaN",
    "TensorBoard",
    "LambdaCallback",
    "CSVLogger",
)


@dataclasses.dataclass
class Attributes:
    """The attributes of a callback at one moment.

    Attributes:
        texts: Those that can be written, as text.
        references: Those that the callback only refers to.
        unwritable: Names of those that hold state and cannot be written.
    """

    texts: dict[str, bytes]
    references: dict[str, Any]
    unwritable: list[str]


# Of each callback that a program uses, what it was before its first `fit`; it is held, so that its `id` stays its own.
Baselines = dict[int, tuple[Any, Attributes]]


class CallbackStates:
    """The state of the callbacks of one `fit`.

    Args:
        callbacks: All of its callbacks, in order, before `on_train_begin`.
        own: Those that need no saving: ours.
        baselines: Of the callbacks of earlier fits; those of this one are added.
    """

    def __init__(self, callbacks: Sequence[Any], own: Sequence[Any] = (), baselines: Baselines | None = None):
        kept = [callback for callback in callbacks if callback not in own and not _shows_only(callback)]
        self._callbacks = dict(zip(_names(kept), kept, strict=True))
        baselines = {} if baselines is None else baselines
        for callback in kept:
            baselines.setdefault(id(callback), (callback, _attributes(callback)))
        self._first = {name: baselines[id(callback)][1] for name, callback in self._callbacks.items()}
        self._begun = self._first

    def begun(self) -> None:
        """Notes what the callbacks are after all `on_train_begin`."""
        self._begun = {name: _attributes(callback) for name, callback in self._callbacks.items()}

    def state(self) -> dict[str, Any]:
        """Returns the state by name of the callback, as plain data."""
        return {name: self._state_of(name) for name in self._callbacks}

    def pieces(self) -> list[Piece]:
        """Says of each callback whether it can be saved as it is now."""
        return [self._piece(name, callback) for name, callback in self._callbacks.items()]

    def load(self, state: dict[str, Any]) -> list[str]:
        """Gives the callbacks their state back.

        Returns:
            Sentences about what was not: callbacks that the program lacks, and attributes that no checkpoint may set.
        """
        unknown = sorted(name for name in set(state) - set(self._callbacks) if state[name]["state"])
        notes = [f"callback {name} is only in the checkpoint" for name in unknown]
        for name, callback in self._callbacks.items():
            own = state.get(name)
            if own is None:
                continue
            if own["kind"] == "state_dict":
                callback.load_state_dict(own["state"])
                continue
            notes += _set(callback, own["state"])
            if own["kind"] == "changed":
                _set(callback, self._unchanged(name, own["state"]))
        return notes

    def _unchanged(self, name: str, saved: dict[str, Any]) -> dict[str, Any]:
        """Returns what the run that was saved had left as it was, and something has changed here meanwhile."""
        callback = self._callbacks[name]
        first, now = self._first[name].texts, _attributes(callback).texts
        return {
            attribute: plain_data.loads(first[attribute])
            for attribute, text in now.items()
            if attribute not in saved
            and attribute in first
            and first[attribute] != text
            and not is_path(getattr(callback, attribute))
        }

    def _changed(self, name: str, now: Attributes) -> list[str]:
        """Returns the attributes that are not as before the first `fit`."""
        callback, first = self._callbacks[name], self._first[name].texts
        return [
            attribute
            for attribute, text in now.texts.items()
            if is_always_state(callback, attribute) or text != first.get(attribute)
        ]

    def _state_of(self, name: str) -> dict[str, Any]:
        callback = self._callbacks[name]
        if hasattr(callback, "state_dict"):
            return {"kind": "state_dict", "state": callback.state_dict()}
        changed = self._changed(name, _attributes(callback))
        values = {attribute: getattr(callback, attribute) for attribute in changed}
        return {
            "kind": "changed",
            "state": {
                attribute: value
                for attribute, value in values.items()
                if why_no_state(callback, attribute, value) is None
            },
        }

    def _piece(self, name: str, callback: Any) -> Piece:
        piece = f"callbacks/{name}"
        if hasattr(callback, "state_dict"):
            return Piece(name=piece, captured=True, reason="its state_dict()")
        reasons = self._not_captured(name, callback)
        if reasons:
            return Piece(
                name=piece,
                captured=False,
                reason=f"{'; '.join(reasons)}; give it state_dict and load_state_dict",
            )
        return Piece(name=piece, captured=True, reason="the attributes that `fit` changed")

    def _not_captured(self, name: str, callback: Any) -> list[str]:
        now, begun = _attributes(callback), self._begun[name]
        reasons = []
        if now.unwritable:
            unwritable = ", ".join(f"`{attribute}`" for attribute in now.unwritable)
            reasons.append(f"{unwritable} cannot be written as plain data")
        if not is_of_keras(callback):
            reasons += [
                f"`{attribute}` became a {type(value).__name__} while training, which cannot be written as plain data"
                for attribute, value in now.references.items()
                if attribute in begun.texts or begun.references.get(attribute, value) is not value
            ]
        for attribute in self._changed(name, now):
            why = why_no_state(callback, attribute, getattr(callback, attribute))
            # What `on_train_begin` sets, and nothing since, is set again by that of the run that resumes.
            if why is not None and now.texts[attribute] != begun.texts.get(attribute):
                reasons.append(f"`{attribute}` {why}, and was changed while training")
        return reasons


def _set(callback: Any, values: dict[str, Any]) -> list[str]:
    """Sets the attributes that may be state; returns sentences about the others."""
    notes = []
    for attribute, value in values.items():
        why = why_no_state(callback, attribute, value)
        if why is None:
            setattr(callback, attribute, value)
        elif attribute != "min_delta":  # Saved by an earlier version, with a sign of no meaning.
            notes.append(f"`{attribute}` of {type(callback).__name__} {why}, and stays as the program has it")
    return notes


def _shows_only(callback: Any) -> bool:
    return type(callback).__name__ in _SHOWS_ONLY and is_of_keras(callback)


def _names(callbacks: Sequence[Any]) -> list[str]:
    kinds = [type(callback).__name__ for callback in callbacks]
    return [
        f"{kind}_{kinds[:index].count(kind)}" if kinds[:index].count(kind) else kind
        for index, kind in enumerate(kinds)
    ]


def _attributes(callback: Any) -> Attributes:
    found = Attributes({}, {}, [])
    for name, value in vars(callback).items():
        if of_others(callback, name):
            continue
        if is_reference(value):
            found.references[name] = value
            continue
        if is_of_model(value, callback.model):
            continue
        try:
            if isinstance(value, VARIABLES):
                raise TypeError("Its value could be written, but an array would come back.")
            found.texts[name] = plain_data.dumps(without_sign(callback, name, value), name)
        except TypeError:
            # What else Keras' own callbacks hold is known, and none of it is state.
            if isinstance(value, (list, dict, set, tuple)) or not is_of_keras(callback):
                found.unwritable.append(name)
    return found
