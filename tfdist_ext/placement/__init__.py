"""Where does it run?

Loaded when first used: planning a graph and placing variables by their sizes do not wait for TensorFlow.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tfdist_ext.placement.explanation import explain
    from tfdist_ext.placement.machine import Device, Link, Machine
    from tfdist_ext.placement.operations import Edge, Operation, OperationGraph
    from tfdist_ext.placement.planners import METHODS, plan_graph
    from tfdist_ext.placement.plans import InfeasiblePlacementError, Plan
    from tfdist_ext.placement.report import Report
    from tfdist_ext.placement.variables import PlacementRow, PlacementTable, largest_first

_MODULE_OF = {
    "Device": "machine",
    "Edge": "operations",
    "InfeasiblePlacementError": "plans",
    "Link": "machine",
    "METHODS": "planners",
    "Machine": "machine",
    "Operation": "operations",
    "OperationGraph": "operations",
    "PlacementRow": "variables",
    "PlacementTable": "variables",
    "Plan": "plans",
    "Report": "report",
    "explain": "explanation",
    "largest_first": "variables",
    "plan_graph": "planners",
}

__all__ = [
    "Device",
    "Edge",
    "InfeasiblePlacementError",
    "Link",
    "METHODS",
    "Machine",
    "Operation",
    "OperationGraph",
    "PlacementRow",
    "PlacementTable",
    "Plan",
    "Report",
    "explain",
    "largest_first",
    "plan_graph",
]


def __getattr__(name: str) -> Any:
    """Loads a public name when it is first used (PEP 562)."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'tfdist_ext.placement' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"tfdist_ext.placement.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Lists the public names, loaded or not."""
    return sorted({*globals(), *__all__})
