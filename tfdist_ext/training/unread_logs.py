"""When do the logs of a step travel from the ps to the chief?

When somebody looks at them. Fetching them in every step costs the chief as much as half of an update, and most of them
nobody reads: without a progress bar or a callback that hears of batches only those of an epoch's last step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tfdist_ext import compat


class UnreadLogs(dict):
    """The logs of a step, fetched at the first look at them.

    Args:
        read: Function that fetches them.

    Example:
        >>> logs = UnreadLogs(lambda: {"loss": 0.5})
        >>> dict(logs), len(logs), logs["loss"]
        ({'loss': 0.5}, 1, 0.5)
    """

    def __init__(self, read: Callable[[], Mapping]):
        super().__init__()
        self._read: Callable[[], Mapping] | None = read

    def _fetch(self) -> None:
        read = self._read
        if read is not None:
            super().update(read())
            self._read = None


def _fetching(name: str):
    original = getattr(dict, name)

    def method(self, *args, **kwargs):
        self._fetch()
        return original(self, *args, **kwargs)

    method.__name__ = name
    return method


# Also `__iter__`: without it `dict(logs)` would copy what is there without asking.
_LOOKS = "contains delitem eq getitem iter len ne or repr reversed ror setitem".split()
_METHODS = "clear copy get items keys pop popitem setdefault update values".split()
for _name in [*(f"__{look}__" for look in _LOOKS), *_METHODS]:
    setattr(UnreadLogs, _name, _fetching(_name))


def tell_only_listeners(original):
    """Returns Keras' `CallbackList.on_train_batch_end`, which reads the logs only where a callback hears of batches."""

    def on_train_batch_end(self, batch, logs=None):
        if not isinstance(logs, UnreadLogs) or any(map(_listens, self.callbacks)):
            original(self, batch, logs)
            return
        for callback in self.callbacks:
            # Those that want to know of a step, and not what is in its logs.
            if hasattr(callback, "after_train_batch_end"):
                callback.after_train_batch_end(self.callbacks, batch, logs)

    return on_train_batch_end


def _listens(callback) -> bool:
    methods = callback.on_train_batch_end, callback.on_batch_end
    return not all(map(compat.is_default_callback, methods))
