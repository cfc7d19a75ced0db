"""What a step on several ranks was made of, counted at the model: calls with graph and without, and their tokens."""

from typing import Any

import torch
import torch.distributed as dist

import treetrain as tt
from support.models import make_model
from support.rank_work import LOSSES, gradients, relative_error, sharded
from treetrain.engine.costs import cost_of
from treetrain.planning.balance import dispatch
from treetrain.tree.build import build_tree


def counted_step(
    group: Any, parallel: str, rows: list[tt.Trajectory], budget: int | str | None, loss: str = "sft"
) -> dict[str, Any]:
    """One step on rows that are dispatched over the ranks, as counted on this one."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    model, alone = make_model("qwen3"), make_model("qwen3")
    own = dispatch(build_tree(rows), cost_of(alone), size)[rank]
    sharing: dict[str, Any] = {"group": group}
    if parallel == "fsdp":
        model, sharing = sharded(model, group), {"reduce": "part" if isinstance(budget, int) else "auto"}
    calls: list[tuple[bool, int]] = []

    def count(module: Any, arguments: Any, named: dict[str, Any]) -> None:
        calls.append((torch.is_grad_enabled(), named["input_ids"].shape[1]))

    # On a module that runs once per call, whatever wraps the model.
    handle = model.base_model.register_forward_pre_hook(count, with_kwargs=True)  # type: ignore[union-attr]
    engine = tt.TreeEngine(model, budget=budget, **sharing)
    result = engine.forward_backward([rows[number] for number in own], LOSSES[loss])
    handle.remove()
    tt.TreeEngine(alone).forward_backward(rows, LOSSES[loss])
    graphs = [tokens for graph, tokens in calls if graph]
    return {
        "passes": 2 * len(graphs) + sum(not graph for graph, _ in calls),
        "forwards": len(graphs),
        "tokens": sum(graphs),
        "computed": result.computed_tokens,
        "parts": result.parts,
        "error": relative_error(gradients(model), gradients(alone)),
    }
