"""What just happened, for whoever cares to know?

Parts of the package emit small named events; diagnostics and tests subscribe. The emitter neither knows nor
waits for its listeners, and no fault of a listener reaches it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

Listener = Callable[[str, Mapping[str, Any]], None]

_lock = threading.Lock()
# A tuple that is replaced, never changed: emit reads it without the lock.
_listeners: tuple[Listener, ...] = ()


def subscribe(listener: Listener) -> Listener:
    """Calls `listener` for every event from now on.

    Args:
        listener: Called as `listener(name, fields)` on the thread that emits; it should return at once. A
            listener that is subscribed already is not called twice.

    Returns:
        The same `listener`, so that this function can decorate it.

    Example:
        >>> seen = []
        >>> listener = subscribe(lambda name, fields: seen.append((name, dict(fields))))
        >>> emit("peer_lost", task="worker:1")
        >>> unsubscribe(listener)
        >>> seen
        [('peer_lost', {'task': 'worker:1'})]
    """
    global _listeners
    with _lock:
        if listener not in _listeners:
            _listeners = (*_listeners, listener)
    return listener


def unsubscribe(listener: Listener) -> None:
    """Stops calling `listener`; one that is not subscribed is no error.

    Args:
        listener: What was given to `subscribe`.
    """
    global _listeners
    with _lock:
        _listeners = tuple(other for other in _listeners if other != listener)


def emit(name: str, /, **fields: Any) -> None:
    """Tells every listener that `name` happened.

    Args:
        name: What happened, in the past tense where there is one, for instance `"peer_lost"`.
        **fields: Facts about it; listeners must not change them.
    """
    for listener in _listeners:
        try:
            listener(name, fields)
        except Exception:
            # Imported here: the stream itself costs nothing while nobody fails.
            from absl import logging

            logging.exception("A listener of the event %r failed; training goes on.", name)
