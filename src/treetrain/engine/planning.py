"""The plan of a batch on a model under a budget."""

import warnings
from collections.abc import Iterable

from torch import nn

from treetrain.engine.costs import cost_if_countable, cost_of
from treetrain.engine.memory import free_bytes
from treetrain.engine.packed import model_device
from treetrain.planning.budget import Bytes
from treetrain.planning.make import PART_TOKENS, make_plan
from treetrain.planning.partition import partition
from treetrain.planning.plan import Plan
from treetrain.tree.layout import PackedLayout

AMPLE = 2
"""If this many times a predicted peak is free, the peak fits whatever the prediction's error."""
LAST_RESORT_TOKENS = 256
"""The token budget that is tried if no plan is predicted to fit into free memory."""
PASS_TOKENS, FORWARD_SHARE = 40.0, 0.35
"""For a model that cannot be counted: the fixed cost of a pass in tokens, and a forward's share of a step. Every plan
within a budget is exact, so a wrong guess costs time only."""


def plan_within(layout: PackedLayout, budget: int | Bytes | None, model: nn.Module, *, free: int | None = None) -> Plan:
    """The fastest plan within a budget.

    Args:
        budget: tokens, bytes, or None for what the device has free.
        free: bytes that the device has free, where there is no budget; None if that is unknown.

    Raises:
        ValueError: bytes that no plan fits into.
        UnsupportedModel: bytes, and a model that cannot be counted.
    """
    if isinstance(budget, Bytes):
        return make_plan(layout, cost_of(model), budget=budget)
    cost = cost_if_countable(model)
    if cost is None:
        return plan_of_any_model(layout, budget)
    try:
        return make_plan(layout, cost, budget=budget, free_bytes=free)
    except ValueError as error:
        if budget is not None:
            raise
        # The user set no bound and predictions err, so it is tried; out of memory is handled.
        warnings.warn(f"more memory is predicted than is free ({error}); small parts are tried", stacklevel=2)
        return make_plan(layout, cost, budget=LAST_RESORT_TOKENS)


def device_free_bytes(model: nn.Module) -> int | None:
    """Bytes that a plan may use now; None if unknown, then only a budget can bound it."""
    return free_bytes(model_device(model))


def gradient_bytes_to_come(parameters: Iterable[nn.Parameter]) -> int:
    """Bytes of the gradients that a step will make on this rank (``zero_grad`` sets them to None)."""
    absent = (p for p in parameters if p.requires_grad and p.grad is None)
    return sum(local.numel() * local.element_size() for local in (getattr(p, "_local_tensor", p) for p in absent))


def plan_of_any_model(layout: PackedLayout, budget: int | None) -> Plan:
    """The plan of a model that cannot be counted; without a budget in tokens, parts are of a size that runs well."""

    def seconds(plan: Plan) -> float:
        passes = plan.num_parts + FORWARD_SHARE * plan.num_prefills
        return PASS_TOKENS * passes + plan.layout.num_tokens + FORWARD_SHARE * plan.recomputed_tokens

    tokens, target = (max(layout.num_tokens, 1), PART_TOKENS) if budget is None else (budget, None)
    return partition(layout, tokens, seconds, part_tokens=target)
