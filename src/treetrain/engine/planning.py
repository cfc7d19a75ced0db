"""The plan of a batch on a model under a budget."""

import warnings
from collections.abc import Callable, Iterable

from torch import nn

from treetrain.engine.formula import compute_dtype, is_checkpointed
from treetrain.engine.memory import free_bytes
from treetrain.engine.packed import model_device
from treetrain.errors import UnsupportedModel
from treetrain.models.capability import causal_lm
from treetrain.planning.budget import Bytes
from treetrain.planning.cost import ModelShape
from treetrain.planning.make import PART_TOKENS, make_plan
from treetrain.planning.partition import partition
from treetrain.planning.plan import Plan
from treetrain.planning.price import CostModel
from treetrain.tree.layout import PackedLayout

AMPLE = 2
"""If so many times the peak by formula is free, a batch fits, and nothing is measured."""
LAST_RESORT_TOKENS = 256
"""The budget that is tried if no plan is predicted to fit into free memory."""
PASS_TOKENS, FORWARD_SHARE = 40.0, 0.35
"""For an architecture whose cost is not known: a pass costs as much as so many tokens, and a forward is this share of a
step. Every plan within a budget is exact, so a wrong guess costs time only."""


def plan_within(
    layout: PackedLayout,
    budget: int | Bytes | None,
    model: nn.Module,
    cost: Callable[[], CostModel],
    *,
    free: int | None = None,
) -> Plan:
    """The fastest plan within a budget.

    Args:
        budget: tokens, bytes, or None for what the device has free.
        cost: measures the cost model; called only where bytes must be predicted.
        free: bytes that the device has free, where there is no budget; None if that is unknown.

    Raises:
        ValueError: bytes that no plan fits into.
        UnsupportedModel: bytes, and an architecture whose cost is not known.
    """
    if isinstance(budget, Bytes):
        return make_plan(layout, cost(), budget=budget)
    formula = formula_cost(model)
    if formula is None:
        # Its memory is not known either: as many tokens at once as run well.
        tokens, target = (max(layout.num_tokens, 1), PART_TOKENS) if budget is None else (budget, None)
        return partition(layout, tokens, _seconds_of_any_model, part_tokens=target)
    plan = make_plan(layout, formula, budget=budget)
    if budget is None and free is not None and AMPLE * formula.peak_bytes(plan) > free:
        measured = cost()
        try:
            return make_plan(layout, measured, free_bytes=free)
        except ValueError as error:
            # Nobody asked for this bound, and predictions err: it is tried, and out of memory is handled.
            warnings.warn(f"more memory is predicted than is free ({error}); small parts are tried", stacklevel=2)
            return make_plan(layout, measured, budget=LAST_RESORT_TOKENS)
    return plan


def device_free_bytes(model: nn.Module) -> int | None:
    """Bytes that a plan may use now; None where the system does not tell, and a budget must be given to bound it."""
    return free_bytes(model_device(model))


def gradient_bytes_to_come(parameters: Iterable[nn.Parameter]) -> int:
    """Bytes of the gradients that a step will make on this rank (``zero_grad`` sets them to None)."""
    absent = (p for p in parameters if p.requires_grad and p.grad is None)
    return sum(local.numel() * local.element_size() for local in (getattr(p, "_local_tensor", p) for p in absent))


def formula_cost(model: nn.Module) -> CostModel | None:
    """The cost model by a model's shape, dtype and checkpointing; None for an architecture that is not known."""
    try:
        shape = ModelShape.from_config(causal_lm(model).config.to_dict())  # type: ignore[operator, union-attr]
    except UnsupportedModel:
        return None
    device = model_device(model)
    return CostModel.from_shape(
        shape,
        device="cuda" if device.type == "cuda" else "cpu",
        dtype_bytes=compute_dtype(model, device).itemsize,
        checkpointing=is_checkpointed(model),
    )


def formula_cost_of(model: nn.Module) -> CostModel:
    """`formula_cost`. Raises UnsupportedModel for an architecture that is not known."""
    cost = formula_cost(model)
    if cost is None:
        raise UnsupportedModel(
            f"what passes of {type(model).__name__} cost is not known, and a sharded model cannot be measured by one "
            "rank, so bytes cannot be predicted: give the budget in tokens."
        )
    return cost


def _seconds_of_any_model(plan: Plan) -> float:
    passes = plan.num_parts + FORWARD_SHARE * plan.num_prefills
    return PASS_TOKENS * passes + plan.layout.num_tokens + FORWARD_SHARE * plan.recomputed_tokens
