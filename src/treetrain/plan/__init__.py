"""What a batch costs on a model of a given shape, and how it is cut to fit a budget. Numpy only."""

from treetrain.plan.budget import Bytes, parse_budget
from treetrain.plan.cost import ModelShape, step_flops
from treetrain.plan.ideal import ideal_speedup
from treetrain.plan.make import make_plan
from treetrain.plan.plan import Plan
from treetrain.plan.price import CostModel

__all__ = ["Bytes", "CostModel", "ModelShape", "Plan", "ideal_speedup", "make_plan", "parse_budget", "step_flops"]
