"""Functions for several ranks where something is wrong with one of them, or with how the model is wrapped."""

import copy
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import treetrain as tt
from support.models import make_model
from support.rank_work import Rows, gradients, relative_error, rows_of, sharded
from support.tensor_parallel import cut
from treetrain.testing.contract import PureFloat64

DISAGREEMENTS = {
    "temperature": ("differ in the temperature: rank 0 has 1.0, rank 1 0.5", "rank 1 0.5"),
    "loss": ('differ in loss: rank 0 has "SFTLoss', "PolicyLoss"),
    "frozen": ("differ in the weights' shapes and kinds", "differ in the weights' shapes and kinds"),
    "normaliser": ("differ in a normaliser: rank 0 has None, rank 1 3.0", "rank 1 3.0"),
    "call": ("differ in the call: rank 0 has 'forward_backward', rank 1 'router_balance'", "'router_balance'"),
    "id": ("token id 99 at position 1 is outside", "because of rank 1 of 2: DataError: trajectory number 0"),
    "nothing": ("nothing to train: the loss weights of all rows on all 2 ranks", "on all 2 ranks"),
}
"""Words in the errors of rank 1 and of rank 0, by what rank 1 does differently."""


def _model(parallel: str, group: Any, **changes: Any) -> tuple[nn.Module, dict[str, Any]]:
    model = make_model("qwen3", num_key_value_heads=2, **changes)
    if parallel == "mesh":
        mesh = DeviceMesh("cpu", torch.arange(4).view(2, 2), mesh_dim_names=("data", "context"))
        return sharded(model, mesh), {"context": mesh.get_group("context")}
    if parallel in ("fsdp", "tensor"):
        return (sharded if parallel == "fsdp" else cut)(model, group), {}
    return model, {"context" if parallel == "context" else "group": group}


def told_by(run: Callable[[], Any]) -> str:
    """The error that something ends with."""
    try:
        run()
    except Exception as error:
        return "\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", [])])
    return "no error"


def disagreeing(group: Any, parallel: str, case: str) -> str:
    """Return this rank's error; a step after that must go well."""
    other = dist.get_rank(group) == 1
    model, sharing = _model(parallel, group)
    rows: Rows = [tt.Trajectory([1, 2, 3 + dist.get_rank(group)], advantages=1.0, old_logprobs=[-3.0] * 3)]
    good = tt.TreeEngine(model, **sharing)
    engine = tt.TreeEngine(model, temperature=0.5 if other and case == "temperature" else 1.0, **sharing)
    loss = tt.losses.ppo() if other and case == "loss" else tt.losses.sft()
    given = rows
    if case == "nothing":
        given = [row.replace(loss_weights=0.0) for row in rows]
    if other and case == "id":
        given = [tt.Trajectory([1, 99])]
    if other and case == "frozen":
        next(model.parameters()).requires_grad_(False)
    normaliser = 3.0 if other and case == "normaliser" else None
    if other and case == "call":
        told = told_by(lambda: engine.ranks.agree("router_balance", lambda: (None, None)))
    else:
        told = told_by(lambda: engine.forward_backward(given, loss, normaliser))
    assert all(p.grad is None for p in model.parameters())
    for p in model.parameters():
        p.requires_grad_(True)
    good.forward_backward(rows, tt.losses.sft())
    assert all(p.grad is not None for p in model.parameters())
    return told


class Oops(Exception):
    """An error in a user's loss or model."""


def raising_in_the_middle(group: Any, parallel: str, scope: str = "trajectory") -> tuple[str, bool]:
    """Return this rank's error, and whether a step after that is right."""
    rank = dist.get_rank(group)
    model, sharing = _model(parallel, group, dtype=torch.float64)
    alone = make_model("qwen3", dtype=torch.float64, num_key_value_heads=2)
    engine, rows = tt.TreeEngine(model, budget=7, **sharing), rows_of(0, "sft")
    own = rows[engine.ranks.data_rank :: engine.ranks.data_size]
    calls: list[int] = []

    def loss(logprobs, entropies, row):
        calls.append(1)
        if rank == 1 and len(calls) == (1 if scope == "batch" else 3):
            raise Oops("in row 2")
        return -sum(x.sum() for x in ([logprobs] if scope == "trajectory" else logprobs)), {}

    loss.normaliser, loss.scope = lambda rows: 1.0, scope  # type: ignore[attr-defined]
    told = told_by(lambda: engine.forward_backward(own, loss))
    with PureFloat64():
        engine.forward_backward(own, tt.losses.sft())
        tt.TreeEngine(alone).forward_backward(rows, tt.losses.sft())
    return told, relative_error(gradients(model), gradients(alone)) <= 1e-12


def broken_pass(group: Any) -> list[str]:
    """Return this rank's errors when a pass fails (on both ranks, at the same place), and when it tries again."""
    model, _ = _model("fsdp", group)
    engine = tt.TreeEngine(model)

    def broken(*_: Any) -> None:
        raise Oops("in the second layer")

    hook = model.model.layers[1].register_forward_hook(broken)  # type: ignore[union-attr, index]
    told = [told_by(lambda: engine.forward_backward([[1, 2, 3]], tt.losses.sft()))]
    hook.remove()
    return [*told, told_by(lambda: engine.forward_backward([[1, 2, 3]], tt.losses.sft()))]


def refused(group: Any) -> dict[str, str]:
    """How uses are refused that cannot be exact."""
    model, _ = _model("fsdp", group)
    rows = [[1, 2, 3]]
    told = {"live logprobs": told_by(lambda: tt.logprobs(model, rows))}
    rank = dist.get_rank(group)
    alone = dist.new_group([rank], use_local_synchronization=True)
    told["another group"] = told_by(lambda: tt.TreeEngine(model, group=alone))
    mesh = DeviceMesh.from_group(group, "cpu")
    two = make_model("qwen3")
    fully_shard(two.model.layers[0], mesh=DeviceMesh.from_group(alone, "cpu"))  # type: ignore[union-attr, index]
    fully_shard(two, mesh=mesh)
    told["two meshes"] = told_by(lambda: tt.TreeEngine(two))
    parallel = make_model("qwen3")
    weight = parallel.model.layers[0].mlp.up_proj.weight  # type: ignore[union-attr, index]
    parallel.model.layers[0].mlp.up_proj.weight = nn.Parameter(  # type: ignore[union-attr, index]
        distribute_tensor(weight.detach(), mesh, [Shard(0)])
    )
    told["tensor parallel"] = told_by(lambda: tt.TreeEngine(parallel))
    model.set_gradient_divide_factor(1.0)  # type: ignore[operator]
    told["divided gradients"] = told_by(lambda: tt.TreeEngine(model))
    return told


def scores_without_gradients(group: Any) -> float:
    """How far log-probabilities and values of a sharded model are from those of a whole one."""
    model, _ = _model("fsdp", group, dtype=torch.float64)
    alone = make_model("qwen3", dtype=torch.float64, num_key_value_heads=2)
    rows = [row.ids for row in rows_of(1, "sft")] if dist.get_rank(group) == 0 else [[5, 6, 7]]
    torch.manual_seed(0)
    head = nn.Linear(24, 1, dtype=torch.float64)
    with torch.no_grad(), PureFloat64():
        found = tt.logprobs(model, rows, budget=6) + tt.values(model, rows, 6, head=head)
        truth = tt.logprobs(alone, rows) + tt.values(alone, rows, head=head)
    return max(float((a - b).abs().max()) for a, b in zip(found, truth, strict=True) if len(a))


WRAPPED = {
    "lora": 1e-12,
    "replicas of shards": 1e-12,
    "DistributedDataParallel": 1e-12,
    "offloaded": 1e-12,
    "kept whole after forward": 1e-12,
    "bfloat16 in passes": 0.05,
    "hooks on weights": 1e-12,
    "gradients of earlier calls": 1e-12,
}
"""Kinds and the largest relative error of their gradients."""


def wrapped(group: Any, kind: str) -> float:
    """The gradients' error of a step on a model that is wrapped in some way."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    dtype = torch.float32 if kind == "bfloat16 in passes" else torch.float64
    model = make_model("qwen3", dtype=dtype)
    if kind == "lora":
        model = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False))
        model = model.to(dtype)
    alone = copy.deepcopy(model)
    rows, loss = rows_of(4, "sft"), tt.losses.sft()
    seen: list[int] = []
    if kind == "DistributedDataParallel":
        model = DistributedDataParallel(model, process_group=group)
    elif kind == "replicas of shards":
        mesh = DeviceMesh("cpu", torch.arange(size).view(2, -1), mesh_dim_names=("replicate", "shard"))
        for layer in model.base_model.layers:  # type: ignore[union-attr]
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    else:
        options: dict[str, Any] = {
            "offloaded": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
            "kept whole after forward": {"reshard_after_forward": False},
            "bfloat16 in passes": {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)},
        }.get(kind, {})
        model = sharded(model, group, **options)
    engine = tt.TreeEngine(model, budget=9)
    reference = tt.TreeEngine(alone)
    if kind == "hooks on weights":
        watched = model.get_output_embeddings().weight  # type: ignore[operator]
        watched.register_post_accumulate_grad_hook(lambda p: seen.append(1))
    with PureFloat64() if dtype == torch.float64 else torch.enable_grad():
        if kind == "gradients of earlier calls":
            engine.forward_backward(rows[rank::size][:2], loss)
            reference.forward_backward([row for r in range(size) for row in rows[r::size][:2]], loss)
        engine.forward_backward(rows[rank::size], loss)
        reference.forward_backward(rows, loss)
    assert kind != "hooks on weights" or len(seen) == 1, seen
    found = {name.removeprefix("module."): grad for name, grad in gradients(model).items()}
    return relative_error(found, gradients(alone))


def left_alone(group: Any, parallel: str, killed: bool) -> str:
    """Return this rank's error when the model of another rank raises during a pass, or its process is killed."""
    model, sharing = _model(parallel, group)
    engine = tt.TreeEngine(model, **sharing)
    group.get_group_store().delete_key("treetrain error")  # of an earlier test in these processes

    def broken(*_: Any) -> None:
        if killed:
            os._exit(0)
        raise Oops("in the second layer")

    if dist.get_rank(group) == 1:
        model.model.layers[1].register_forward_hook(broken)  # type: ignore[union-attr, index]
    told = told_by(lambda: engine.forward_backward([[1, 2, 3]], tt.losses.sft()))
    if dist.get_rank(group) == 1:
        assert "Oops" in told and "in the middle of a pass" in told
        os._exit(0)  # as a process does whose error nobody catches
    return told
