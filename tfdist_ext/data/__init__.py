"""Who reads which row?

Names are loaded when they are first used: the digits need no strategy, and the arithmetic no TensorFlow.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tfdist_ext.data.digits import load_digits
    from tfdist_ext.data.distributed_dataset import DistributedDataset
    from tfdist_ext.data.sharding import rows_per_slot
    from tfdist_ext.data.sharding_policy import Sharding

_MODULE_OF = {
    "DistributedDataset": "distributed_dataset",
    "Sharding": "sharding_policy",
    "load_digits": "digits",
    "rows_per_slot": "sharding",
}

__all__ = ["DistributedDataset", "Sharding", "load_digits", "rows_per_slot"]


def __getattr__(name: str) -> Any:
    """Loads a public name when it is first used (PEP 562)."""
    if name in _MODULE_OF:
        return getattr(importlib.import_module(f"tfdist_ext.data.{_MODULE_OF[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """Lists the public names too."""
    return sorted([*globals(), *__all__])
