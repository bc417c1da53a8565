"""Which placement is good? One planner a file; `auto` tries them all."""

from tfdist_ext.placement.planners.auto import METHODS, plan_graph

__all__ = ["METHODS", "plan_graph"]
