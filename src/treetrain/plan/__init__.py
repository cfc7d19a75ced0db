"""What a batch costs on a model of a given shape. Numpy only."""

from treetrain.plan.cost import ModelShape, step_flops
from treetrain.plan.ideal import ideal_speedup

__all__ = ["ModelShape", "ideal_speedup", "step_flops"]
