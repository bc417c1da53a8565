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
    from tfdist_ext.placement.pinning import apply_plan, plan
    from tfdist_ext.placement.planners import METHODS, plan_graph
    from tfdist_ext.placement.plans import InfeasiblePlacementError, Plan
    from tfdist_ext.placement.report import Report
    from tfdist_ext.placement.retracing import RetracingError, no_retracing
    from tfdist_ext.placement.scope import on
    from tfdist_ext.placement.variable_placers import FairSharePartitioner, placement_table, variable_traffic
    from tfdist_ext.placement.variables import PlacementRow, PlacementTable, largest_first

_MODULE_OF = {
    "Device": "machine",
    "Edge": "operations",
    "FairSharePartitioner": "variable_placers",
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
    "RetracingError": "retracing",
    "apply_plan": "pinning",
    "explain": "explanation",
    "largest_first": "variables",
    "no_retracing": "retracing",
    "on": "scope",
    "placement_table": "variable_placers",
    "plan": "pinning",
    "plan_graph": "planners",
    "variable_traffic": "variable_placers",
}

__all__ = [
    "Device",
    "Edge",
    "FairSharePartitioner",
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
    "RetracingError",
    "apply_plan",
    "explain",
    "largest_first",
    "no_retracing",
    "on",
    "placement_table",
    "plan",
    "plan_graph",
    "variable_traffic",
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
