"""Behaviour of several ranks when one of them cannot go on, and uses that are refused by name."""

import copy
import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from rank_steps import Oops, Rows, cut, error_of, gradients, relative_error, rows_of, sharded
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import treetrain as tt
from support.models import make_model
from support.plans import calls_answer
from support.processes import RankFailed
from treetrain.check.bench import measured_cost
from treetrain.check.contract import PureFloat64

DISAGREEMENTS = {
    "temperature": ("differ in the temperature: rank 0 has 1.0, rank 1 0.5", "rank 1 0.5"),
    "loss": ('differ in loss: rank 0 has "SFTLoss', "PPOLoss"),
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


def another_call(engine: tt.TreeEngine) -> None:
    """Make a call that the other ranks do not make."""
    with engine.ranks.together("router_balance"):
        engine.ranks.exchange(None)


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
        outcome = error_of(lambda: another_call(engine))
    else:
        outcome = error_of(lambda: engine.forward_backward(given, loss, normaliser))
    assert all(p.grad is None for p in model.parameters())
    for p in model.parameters():
        p.requires_grad_(True)
    good.forward_backward(rows, tt.losses.sft())
    assert all(p.grad is not None for p in model.parameters())
    return outcome


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
    outcome = error_of(lambda: engine.forward_backward(own, loss))
    with PureFloat64():
        engine.forward_backward(own, tt.losses.sft())
        tt.TreeEngine(alone).forward_backward(rows, tt.losses.sft())
    return outcome, relative_error(gradients(model), gradients(alone)) <= 1e-12


def broken_pass(group: Any) -> list[str]:
    """Return this rank's errors when a pass fails (on both ranks, at the same place), and when it tries again."""
    model, _ = _model("fsdp", group)
    engine = tt.TreeEngine(model)

    def broken(*_: Any) -> None:
        raise Oops("in the second layer")

    hook = model.model.layers[1].register_forward_hook(broken)  # type: ignore[union-attr, index]
    outcome = [error_of(lambda: engine.forward_backward([[1, 2, 3]], tt.losses.sft()))]
    hook.remove()
    return [*outcome, error_of(lambda: engine.forward_backward([[1, 2, 3]], tt.losses.sft()))]


def refused(group: Any) -> dict[str, str]:
    """How uses are refused that cannot be exact."""
    model, _ = _model("fsdp", group)
    rows = [[1, 2, 3]]
    outcome = {"live logprobs": error_of(lambda: tt.logprobs(model, rows))}
    rank = dist.get_rank(group)
    alone = dist.new_group([rank], use_local_synchronization=True)
    outcome["another group"] = error_of(lambda: tt.TreeEngine(model, group=alone))
    mesh = DeviceMesh.from_group(group, "cpu")
    two = make_model("qwen3")
    fully_shard(two.model.layers[0], mesh=DeviceMesh.from_group(alone, "cpu"))  # type: ignore[union-attr, index]
    fully_shard(two, mesh=mesh)
    outcome["two meshes"] = error_of(lambda: tt.TreeEngine(two))
    parallel = make_model("qwen3")
    weight = parallel.model.layers[0].mlp.up_proj.weight  # type: ignore[union-attr, index]
    parallel.model.layers[0].mlp.up_proj.weight = nn.Parameter(  # type: ignore[union-attr, index]
        distribute_tensor(weight.detach(), mesh, [Shard(0)])
    )
    outcome["tensor parallel"] = error_of(lambda: tt.TreeEngine(parallel))
    model.set_gradient_divide_factor(1.0)  # type: ignore[operator]
    outcome["divided gradients"] = error_of(lambda: tt.TreeEngine(model))
    return outcome


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


def raising_the_same_error(group: Any) -> list[str]:
    """This rank's outcomes of steps; the loss of rank 1 raises one and the same error in the first two."""
    engine, error, calls = tt.TreeEngine(make_model("qwen3"), group=group), Oops("again"), []

    def loss(logprobs, entropies, row):
        calls.append(1)
        if dist.get_rank(group) == 1 and len(calls) < 3:
            raise error
        return logprobs.sum(), {}

    return [error_of(lambda: engine.forward_backward([[1, 2, 3]], loss, 1.0)) for _ in range(3)]


def interrupted(group: Any) -> str:
    """This rank's error when another rank is interrupted (Ctrl-C), goes on with the next step, and ends."""
    engine = tt.TreeEngine(make_model("qwen3"), group=group)
    group.get_group_store().delete_key("treetrain error")  # of an earlier test in these processes

    def loss(logprobs, entropies, row):
        if dist.get_rank(group) == 1:
            raise KeyboardInterrupt
        return logprobs.sum(), {}

    try:
        outcome = error_of(lambda: engine.forward_backward([[1, 2, 3]], loss, 1.0))
    except KeyboardInterrupt:
        outcome = error_of(lambda: engine.forward_backward([[1, 2, 3]], tt.losses.sft()))
        os._exit(0 if "start all processes again" in outcome else 7)
    return outcome


def planning(group: Any, parallel: str) -> tuple[str, str, int, int]:
    """This rank's errors where another rank cannot plan, and in a step after that; parts of a plan that it makes alone,
    and the bytes that the step's plan could use."""
    model, sharing = _model(parallel, group)
    engine, rank = tt.TreeEngine(model, **sharing), dist.get_rank(group)
    rows = [[1, 2, 3], [1, 2, 4]]
    if rank == 1:
        calls_answer(engine, plan=failing)
    outcome = error_of(lambda: engine.score(rows))
    assert error_of(lambda: engine.forward_backward(rows, tt.losses.sft())) == outcome.replace(
        "TreeEngine.score", "forward_backward"
    )
    calls_answer(engine)
    parts = engine.plan(rows).num_parts if rank == 0 else 1
    engine.prepared.free_bytes = lambda: 1_000_000 + rank  # type: ignore[method-assign]
    free = list[int]()
    agree = engine.sharing.agree_on_plan
    engine.sharing.agree_on_plan = lambda *facts: free.append(agree(*facts) or 0) or free[-1]  # type: ignore
    again = error_of(lambda: engine.forward_backward(rows, tt.losses.sft()))
    return outcome, again, parts, free[-1]


def failing(*_: Any) -> None:
    raise Oops("no plan")


def measuring(group: Any) -> bool:
    """Whether the passes of a sharded model can be timed, beside an engine that waits for nothing."""
    model, _ = _model("fsdp", group)
    return measured_cost(model).speeds.graph_pass >= 0


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
    outcome = error_of(lambda: engine.forward_backward([[1, 2, 3]], tt.losses.sft()))
    if dist.get_rank(group) == 1:
        assert "Oops" in outcome and "in the middle of a pass" in outcome
        os._exit(0)  # as a process does whose error nobody catches
    return outcome


@pytest.mark.parametrize("case", DISAGREEMENTS)
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_ranks_that_disagree_are_told_so_on_every_rank(run_on_ranks, parallel, case) -> None:
    outcome = run_on_ranks(disagreeing, parallel, case)
    mine, others = DISAGREEMENTS[case]
    assert mine in outcome[1] and others in outcome[0], outcome


@pytest.mark.few(1)
@pytest.mark.parametrize("parallel", ["tensor", "fsdp", "ddp", "context", "mesh"])
def test_a_loss_that_raises_in_the_middle_of_a_step_stops_all_ranks_and_leaves_them_usable(
    run_on_ranks, parallel
) -> None:
    size = 4 if parallel == "mesh" else 2
    for scope, what in (
        ("trajectory", "forward_backward" if parallel == "ddp" else "the passes"),
        ("batch", "forward_backward"),
    ):
        first, second, *others = run_on_ranks(raising_in_the_middle, parallel, scope, size=size)
        why = f"RanksDisagree: {what} stopped on all ranks, because of rank 1 of {size}: Oops: in row 2"
        assert {first, *others} == {(why, True)}
        assert second == ("Oops: in row 2", True)


def test_a_pass_that_breaks_off_is_said_to_need_a_new_start(run_on_ranks) -> None:
    for first, again in run_on_ranks(broken_pass):
        assert "Oops: in the second layer" in first
        assert "in the middle of a pass: the other ranks wait there until this process ends" in first
        assert "start all processes again" in again


@pytest.mark.parametrize(
    ("parallel", "killed"),
    [
        ("context", False),
        pytest.param("fsdp", False, marks=pytest.mark.slow),
        pytest.param("tensor", False, marks=pytest.mark.slow),
        pytest.param("fsdp", True, marks=pytest.mark.slow),
    ],
)
def test_ranks_in_a_pass_that_another_has_left_are_told_its_error_when_its_process_ends(
    run_on_ranks, parallel, killed
) -> None:
    with pytest.raises(RankFailed, match="rank 1: the process ended") as failed:
        run_on_ranks(left_alone, parallel, killed)
    assert "rank 0: RanksDisagree: another rank has left this pass" in str(failed.value)
    assert ("see what it said" if killed else "rank 1 of 2: Oops: in the second layer") in str(failed.value)


@pytest.mark.few(1)
@pytest.mark.parametrize("parallel", ["context", "tensor", "mesh"])
def test_no_rank_waits_for_the_free_bytes_of_one_that_cannot_plan_or_plans_alone(run_on_ranks, parallel) -> None:
    size = 4 if parallel == "mesh" else 2
    outcomes = run_on_ranks(planning, parallel, size=size)
    for rank, (outcome, again, parts, free) in enumerate(outcomes):
        assert outcome == "Oops: no plan" if rank == 1 else "because of rank 1 of" in outcome, outcomes
        assert again == "no error" and parts == 1
        least = 1_000_000 + rank // 2 * 2
        assert free == least * (1 if parallel == "tensor" else 2)


@pytest.mark.slow
def test_the_passes_of_a_sharded_model_can_be_timed(run_on_ranks) -> None:
    assert all(run_on_ranks(measuring))


@pytest.mark.slow
def test_a_rank_that_is_interrupted_is_out_of_step_and_says_so(run_on_ranks) -> None:
    with pytest.raises(RankFailed, match="rank 1: the process ended") as failed:
        run_on_ranks(interrupted)
    assert "rank 0: RanksDisagree: another rank has left this pass" in str(failed.value)
    assert "rank 1 of 2: KeyboardInterrupt" in str(failed.value)


def test_the_same_error_object_may_be_raised_in_several_steps(run_on_ranks) -> None:
    for outcomes in run_on_ranks(raising_the_same_error):
        assert "Oops: again" in outcomes[0] and "Oops: again" in outcomes[1] and outcomes[2] == "no error"


def test_uses_that_cannot_be_exact_on_shards_are_refused(run_on_ranks) -> None:
    for outcome in run_on_ranks(refused):
        for use, words in {
            "live logprobs": "passes of a sharded model (fully_shard), which autograd does not order",
            "another group": "the group given is not that of the model's shards",
            "two meshes": "lie on 2 device meshes",
            "tensor parallel": "DTensors that neither fully_shard",
            "divided gradients": "set_gradient_divide_factor was called",
        }.items():
            assert outcome[use].startswith("UnsupportedModel: ") and words in outcome[use]


@pytest.mark.slow
def test_scores_of_a_sharded_model_without_gradients(run_on_ranks) -> None:
    for outcome in run_on_ranks(scores_without_gradients):
        assert outcome <= 1e-12


@pytest.mark.few(2)
@pytest.mark.parametrize("kind", WRAPPED)
def test_a_step_on_a_model_that_is_wrapped_otherwise(run_on_ranks, kind) -> None:
    size = 4 if kind == "replicas of shards" else 2
    for outcome in run_on_ranks(wrapped, kind, size=size):
        assert outcome <= WRAPPED[kind], outcome
