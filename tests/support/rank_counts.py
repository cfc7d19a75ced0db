"""Counts of a step on several ranks, taken at the model: calls with graph and without, their tokens, and the bytes that
collectives moved."""

from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

import treetrain as tt
from support.models import make_model
from support.rank_work import KEYS, LOSSES, gradients, relative_error, sharded
from support.tensor_parallel import cut
from treetrain.engine.costs import cost_of
from treetrain.planning.balance import dispatch
from treetrain.tree.build import build_tree


class Moved(TorchDispatchMode):
    """Adds up the bytes of the whole tensors in floating-point collectives, by operation."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            tensors = [x for x in _pytree.tree_leaves(args) if isinstance(x, torch.Tensor)]
            if tensors and tensors[0].is_floating_point():
                self.bytes[func._overloadpacket.__name__] += max(x.nbytes for x in tensors)
        return func(*args, **(kwargs or {}))


def counted_step(
    group: Any, parallel: str, rows: list[tt.Trajectory], budget: int | str | None, loss: str = "sft"
) -> dict[str, Any]:
    """One step on rows that are dispatched over the ranks, as counted on this one."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    sizes: dict[str, Any] = dict(KEYS, num_attention_heads=4, vocab_size=40)
    model, alone = make_model("qwen3", **sizes), make_model("qwen3", **sizes)
    own = range(len(rows))
    sharing: dict[str, Any] = {"context": group} if parallel == "context" else {}
    if parallel == "fsdp":
        model = sharded(model, group)
    elif parallel == "tensor":
        model = cut(model, group)
    elif parallel == "ddp":
        sharing = {"group": group}
    if parallel in ("ddp", "fsdp"):
        own = dispatch(build_tree(rows), cost_of(alone), size)[rank]
    calls: list[tuple[bool, int]] = []

    def count(module: Any, arguments: Any, named: dict[str, Any]) -> None:
        calls.append((torch.is_grad_enabled(), named["input_ids"].shape[1]))

    # On a module that runs once per call, whatever wraps the model.
    handle = model.base_model.register_forward_pre_hook(count, with_kwargs=True)  # type: ignore[union-attr]
    engine = tt.TreeEngine(model, budget=budget, **sharing)
    with Moved() as moved:
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
        "bytes": moved.bytes,
        "error": relative_error(gradients(model), gradients(alone)),
    }
