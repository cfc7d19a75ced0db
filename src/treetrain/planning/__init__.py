"""Cost of a batch on a model, plans that fit a budget, and balance over ranks. Numpy only."""

from treetrain.planning.cost import CostModel, ModelCounts, ModelShape
from treetrain.planning.make import Bytes, make_plan, parse_budget
from treetrain.planning.plan import Plan

__all__ = ["Bytes", "CostModel", "ModelCounts", "ModelShape", "Plan", "make_plan", "parse_budget"]
