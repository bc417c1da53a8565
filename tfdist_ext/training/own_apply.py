"""What if an optimizer's class overrides how gradients are applied?

`MultiOptimizer` and optimizers of a user's own then run on the parameter servers, as a whole. On the worker, where
nothing may be assigned, the outermost of their calls is recorded instead.
"""

from __future__ import annotations

import functools
from typing import Any

import keras

from tfdist_ext import compat
from tfdist_ext.strategies import frame as frames

_METHODS = ("apply", "apply_gradients")


def watch_overriding_optimizers() -> None:
    """Has all classes of optimizers record their own methods on workers; elsewhere they do what they did."""
    for kind in _subclasses(compat.KerasBaseOptimizer):
        for name in _METHODS:
            method = vars(kind).get(name)
            if (
                method is not None
                and kind is not keras.optimizers.LossScaleOptimizer
                and not _is_watched(method)
            ):
                setattr(kind, name, _recording(method, name))


def overrides_apply(optimizer) -> bool:
    """Returns True where the class of an optimizer applies gradients in a way of its own."""
    return any(_is_watched(getattr(type(optimizer), name)) for name in _METHODS)


def parts_of(optimizer) -> list:
    """Returns an optimizer and all those that it hands gradients to."""
    parts: list = []
    pending = [optimizer]
    while pending:
        part = pending.pop()
        if any(part is known for known in parts):
            continue
        parts.append(part)
        for value in list(vars(part).values()):
            held = value if isinstance(value, (list, tuple)) else [value]
            pending += [one for one in held if isinstance(one, compat.KerasBaseOptimizer)]
    return parts


def _subclasses(kind: type) -> list[type]:
    direct: list[type] = kind.__subclasses__()
    return [*direct, *(below for one in direct for below in _subclasses(one))]


def _is_watched(method) -> bool:
    return getattr(method, "_tfdist_watched", False)


def _recording(original, name: str):
    @functools.wraps(original)
    def watched(self, *args, **kwargs):
        frame = frames.current_frame()
        recorder: Any = None if frame is None else frame.recorder
        if not getattr(recorder, "records_whole_calls", False):
            return original(self, *args, **kwargs)
        if name == "apply_gradients":
            pairs = [*args, *kwargs.values()][0]
            gradients, variables = zip(*pairs, strict=True)
            return recorder.record_apply(frame, self, gradients, variables, method=name)
        return recorder.record_apply(frame, self, *args, **kwargs)

    watched._tfdist_watched = True  # type: ignore[attr-defined]
    return watched
