"""What is said of trainable variables that get no gradient?"""

from __future__ import annotations

import weakref

_told: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def warn_once(optimizer, missing) -> None:
    """Warns in Keras' own words, once for each optimizer and set of variables.

    Args:
        optimizer: Keras optimizer.
        missing: Those of its variables that have no gradient.
    """
    paths = frozenset(getattr(variable, "path", variable.name) for variable in missing)
    told = _told.setdefault(optimizer, set())
    if paths and paths not in told:
        told.add(paths)
        # Something must be left for Keras to go on with.
        optimizer._filter_empty_gradients([*[None] * len(missing), 0.0], [*missing, missing[0]])
