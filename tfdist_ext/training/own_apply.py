"""What if an optimizer's class overrides how gradients are applied?

`MultiOptimizer` and optimizers of a user's own then run on the parameter servers, as a whole: the outermost of their
calls is what a worker records.
"""

from __future__ import annotations

import keras

from tfdist_ext import compat

_METHODS = ("apply", "apply_gradients")


def overrides_apply(optimizer) -> bool:
    """Returns True where the class of an optimizer applies gradients in a way of its own."""
    bases = {compat.KerasBaseOptimizer, keras.optimizers.LossScaleOptimizer}
    return any(
        name in vars(kind) and kind not in bases for kind in type(optimizer).__mro__ for name in _METHODS
    )


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
