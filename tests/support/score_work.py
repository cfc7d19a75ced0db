"""Functions that tests of `TreeEngine.score` run on several ranks."""

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

import treetrain as tt
from support.models import make_model
from support.plans import planned
from support.rank_work import gradients, relative_error, rows_of, sharded, split_of
from support.tensor_parallel import cut
from treetrain.testing.contract import PureFloat64


def own_loss(logprobs: list[Tensor], entropies: list[Tensor]) -> Tensor:
    """Not linear, and of these rows alone."""
    total = torch.zeros((), dtype=torch.float64)
    for row, entropy in zip(logprobs, entropies):
        total = total + (row.exp() + 0.1 * row.square() + 0.3 * entropy).sum()
    return total


def _parallel(model: nn.Module, how: str, group: Any) -> nn.Module:
    if how in ("tensor", "expert"):
        return cut(model, group, **{"ep_size": dist.get_world_size(group)} if how == "expert" else {})
    if how == "context":
        return model
    return sharded(model, group) if how in ("fsdp", "mesh") else DistributedDataParallel(model, process_group=group)


def scored_step(group: Any, how: str, shapes: Any, keeps: Any, calls: int, split: str, changes: Any) -> dict[str, Any]:
    """How far the gradients of a score on several ranks are from the mean of every rank's own.

    Args:
        how: ddp, fsdp, context, tensor, expert, or mesh: 2 x 2 of replicas and of shards that are context parallel.
        shapes: (shape, keep) of the plans of each rank (on a mesh, of each two).
        keeps: whether graphs fit, in the same way.
        calls: that the step is accumulated over.
        changes: the model's family, and of its configuration.
    """
    rank, size, context = dist.get_rank(group), dist.get_world_size(group), group if how == "context" else None
    mesh = group
    if how == "mesh":
        mesh = DeviceMesh("cpu", torch.arange(size).view(2, -1), mesh_dim_names=("data", "context"))
        rank, size, context = rank // 2, 2, mesh.get_group("context")
    family, options = changes
    model = make_model(family, dtype=torch.float64, **dict(options))
    alone = copy.deepcopy(model)
    rows = [list(row.ids) for row in rows_of(3, "sft")]

    class Forced(planned(*shapes[rank % len(shapes)])):
        def keeps_graphs(self, plan: Any) -> bool:
            return keeps[rank % len(keeps)]

    wrapped = _parallel(model, how, mesh)
    engine = Forced(wrapped, temperature=1.3, context=context)
    reference = tt.TreeEngine(alone, temperature=1.3)
    own, copies = (rows, 1) if how in ("context", "tensor", "expert") else (split_of(rows, rank, size, split), size)
    told = []
    with PureFloat64():
        for call in range(calls):
            scored = engine.score(own[call::calls], entropies=True)
            if own[call::calls]:
                own_loss(scored.logprobs, scored.entropies).backward()  # type: ignore[arg-type]
            told.append(scored.plan.scores_first)
            scored.backward(sync=call == calls - 1)
        whole = reference.score(rows, entropies=True)
        (own_loss(whole.logprobs, whole.entropies) / copies).backward()  # type: ignore[arg-type]
        whole.backward()
    return {"error": relative_error(gradients(model), gradients(alone)), "scores_first": told}


def live_is_refused(group: Any) -> list[str]:
    """Return the error of every way to live log-probabilities within a process group."""
    model = make_model("qwen3")
    wrapped = DistributedDataParallel(copy.deepcopy(model), process_group=group)
    rows = [[1, 2, 3], [1, 2, 4]]
    said = []

    class Inside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = copy.deepcopy(model)

        def forward(self) -> Any:
            return tt.logprobs(self.inner, rows, budget=2)

    inside = DistributedDataParallel(Inside(), process_group=group)
    for call in (
        lambda: tt.logprobs(wrapped, rows),
        lambda: tt.logprobs(wrapped.module, rows),
        lambda: inside(),
        lambda: tt.values(model, rows, head=nn.Linear(model.config.hidden_size, 1)),
    ):
        try:
            call()
            said.append("nothing")
        except tt.UnsupportedModel as error:
            said.append(str(error))
    with torch.no_grad():
        assert len(tt.logprobs(wrapped, rows)) == 2
    return said


def an_error_on_one_rank(group: Any, how: str) -> str:
    """Return this rank's error when rank 1 calls backward twice."""
    model = make_model("qwen3", num_key_value_heads=2)
    engine = tt.TreeEngine(_parallel(model, how, group), context=group if how == "context" else None)
    scored = engine.score([[1, 2, 3], [1, 2, 4]])
    sum(row.sum() for row in scored.logprobs).backward()  # type: ignore[union-attr]
    if dist.get_rank(group) == 1:
        scored._spent = True
    try:
        scored.backward()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"
