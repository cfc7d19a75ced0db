"""Cost of a batch on a model, plans that fit a budget, and balance over ranks. Numpy only."""

from treetrain.planning.budget import Bytes, parse_budget
from treetrain.planning.cost import ModelCounts, ModelShape
from treetrain.planning.make import make_plan
from treetrain.planning.plan import Plan
from treetrain.planning.price import CostModel

__all__ = ["Bytes", "CostModel", "ModelCounts", "ModelShape", "Plan", "make_plan", "parse_budget"]
