"""Functions for several ranks: a step there against the same step by one process, and against every row alone."""

import copy
import dataclasses
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import treetrain as tt
from support.cases import EVERY, OTHERS
from support.models import make_model
from support.moe import at_random
from support.plans import planned
from support.tensor_parallel import cut, with_lora
from treetrain.data.trajectory import Trajectory
from treetrain.engine.engine import LinearEngine
from treetrain.testing.contract import PureFloat64
from treetrain.testing.forests import VOCAB, dress

Parallel = Literal["ddp", "fsdp", "context", "tensor", "expert"]
Rows = list[Trajectory]
BOUNDS = {torch.float64: 1e-12, torch.float32: 1e-5}
KEYS = (("num_key_value_heads", 2),)
"""The tests' models have 4 heads and mostly one head of keys and values."""


@dataclasses.dataclass(frozen=True)
class Job:
    """A step on several ranks."""

    parallel: Parallel = "fsdp"
    loss: str = "sft"
    family: str = "qwen3"
    changes: tuple[tuple[str, Any], ...] = ()
    """Changes to the family's configuration."""
    split: str = "round"
    shapes: tuple[tuple[str, str], ...] = ()
    """Plan shape and what is kept, by rank; none: whatever the budget gives."""
    budget: int | None = None
    reduce: str = "part"
    dtype: torch.dtype = torch.float64
    seed: int = 0
    calls: int = 1
    """Calls that the step is accumulated over."""
    divided: tuple[tuple[str, Any], ...] = ()
    """Settings of transformers' DistributedConfig beside its sizes."""
    head_shard: bool = False
    """Whether the head is a shard of its own."""
    checkpointing: bool = False
    value_head: bool = False
    temperature: float = 1.3
    lora: bool = False
    recorded: bool = False
    """Whether rows have recorded experts."""
    beside: Literal["", "group", "ddp", "shards", "hybrid"] = ""
    """Beside context parallel, two sets of rows: how the ranks of both share the model's gradients or weights."""


class OwnLoss:
    """A loss as a user writes it: no sum over rows in its normaliser."""

    def __call__(self, logprobs: Tensor, entropies: Tensor | None, row: Trajectory) -> tuple[Tensor, dict[str, Any]]:
        weights = torch.from_numpy(np.array(row.weights[1:])).to(logprobs)
        total = -(weights * logprobs).sum() * (1.0 + len(row) / 7)
        return total, {"length": float(len(row))}

    def normaliser(self, rows: Rows) -> float:
        return float(np.sqrt(sum(len(row) ** 2 for row in rows)) + 1)


class OwnContrast(OwnLoss):
    """One over all rows of the step at once."""

    scope = "batch"

    def __call__(self, logprobs, entropies, rows):
        scores = torch.stack([row.sum() for row in logprobs])
        return scores.logsumexp(0) - scores.mean(), {"rows": float(len(rows))}

    def normaliser(self, rows: Rows) -> float:
        return float(len(rows))


LOSSES: dict[str, Any] = {
    "sft": tt.losses.sft(),
    "sft per trajectory": tt.losses.sft(reduction="trajectory"),
    "ppo entropy": tt.losses.ppo(clip=0.2, entropy=0.05),
    "grpo": tt.losses.grpo(clip=0.2, kl=0.1),
    "gspo": tt.losses.gspo(),
    "value": tt.losses.value(clip=0.2),
    "own": OwnLoss(),
    "own contrast": OwnContrast(),
} | {name: case.loss for name, case in (OTHERS | EVERY).items()}


def rows_of(seed: int, loss: str) -> Rows:
    """A branching batch: forks at the first token, prefixes of rows, duplicates, single tokens, a deep chain."""
    rng = np.random.default_rng(seed)
    trunk = rng.integers(0, VOCAB, 14).tolist()
    rows = [trunk, trunk[:5], list(trunk), [3], [3, 4]]
    for _ in range(7):
        base = rows[int(rng.integers(len(rows)))]
        at = int(rng.integers(0, len(base) + 1))
        rows.append([*base[:at], *rng.integers(0, VOCAB, int(rng.integers(1, 7))).tolist()])
    rows += [[*trunk[: i + 2], int(rng.integers(0, VOCAB))] for i in range(4)]
    cases = OTHERS | EVERY
    dressed = dress(rows, seed)
    if loss == "value":
        facts = [{name: rng.normal(size=len(row)) for name in ("values", "returns")} for row in dressed]
        dressed = [row.replace(**own) for row, own in zip(dressed, facts)]
    return cases[loss].prepare(dressed) if loss in cases else dressed


def split_of(rows: Rows, rank: int, size: int, how: str) -> Rows:
    """The rows of a rank."""
    if how == "first has all":
        return rows if rank == 0 else []
    if how == "last has all":
        return rows if rank == size - 1 else []
    if how == "halves":
        bounds = np.linspace(0, len(rows), size + 1).astype(int)
        return rows[bounds[rank] : bounds[rank + 1]]
    return rows[rank::size]


def sharded(model: nn.Module, group: Any, *, head: bool = False, **options: Any) -> nn.Module:
    """A model in the hands of FSDP2, layer by layer."""
    mesh = group if isinstance(group, DeviceMesh) else DeviceMesh.from_group(group, "cpu")
    lm: Any = model.base_model.model if hasattr(model, "peft_config") else model
    for layer in lm.base_model.layers:
        fully_shard(layer, mesh=mesh, **options)
    if head:
        fully_shard(model.get_output_embeddings(), mesh=mesh, **options)  # type: ignore[operator]
    return fully_shard(model, mesh=mesh, **options)


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    """Whole gradients by name, on every rank."""

    def whole(p: nn.Parameter) -> Tensor | None:
        return p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad

    return {name: whole(p) for name, p in model.named_parameters()}


def relative_error(found: dict[str, Tensor | None], truth: dict[str, Tensor | None]) -> float:
    """Relative error of all gradients together; one that is there on one side only counts as wrong."""
    assert found.keys() == truth.keys()
    # A weight that no rank used has no gradient, or under FSDP2 zeros.
    missing = [name for name, x in truth.items() if x is not None and found[name] is None]
    assert not missing, f"no gradient of {missing}"
    zero = [(found[name], x) for name, x in truth.items() if found[name] is not None]
    wrong = sum(float(((f - (0 if t is None else t)).double() ** 2).sum()) for f, t in zero if f is not None)
    size = sum(float((t.double() ** 2).sum()) for t in truth.values() if t is not None)
    return (wrong / max(size, 1e-300)) ** 0.5


def step(group: Any, job: Job) -> dict[str, Any]:
    """How far a step on several ranks is from the same step by one process; every rank tells what it saw."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    mesh = None
    if job.beside:
        mesh = DeviceMesh("cpu", torch.arange(size).view(2, -1), mesh_dim_names=("data", "context"))
        rank, size = rank // (size // 2), 2
    model = make_model(job.family, dtype=job.dtype, **dict(job.changes))
    if job.lora:
        model = with_lora(model, "q_proj", "v_proj", "down_proj").to(job.dtype)
    alone = copy.deepcopy(model)
    loss, rows = LOSSES[job.loss], rows_of(job.seed, job.loss)
    if job.recorded:
        rows = at_random(rows, model.config.num_hidden_layers)  # type: ignore[union-attr]
    heads = [None, None]
    if job.value_head:
        torch.manual_seed(3)
        heads = [nn.Linear(model.config.hidden_size, 1, dtype=job.dtype) for _ in range(2)]  # type: ignore[arg-type]
        heads[1].load_state_dict(heads[0].state_dict())  # type: ignore[union-attr]
    if job.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
    sharing: dict[str, Any] = {"group": group}
    if job.parallel == "fsdp":
        model, sharing = sharded(model, group, head=job.head_shard), {"reduce": job.reduce}
    elif mesh is not None:
        model, sharing = _beside(model, job, group, mesh)
    elif job.parallel == "context":  # every rank has all rows
        sharing = {"context": group}
    elif job.parallel in ("tensor", "expert"):
        experts = {"ep_size": size} if job.parallel == "expert" else {}
        model, sharing = cut(model, group, **experts, **dict(job.divided)), {}
    kind = planned(*job.shapes[rank]) if job.shapes else tt.TreeEngine
    options = {"temperature": job.temperature, "value_head": heads[0]}
    engine = kind(model, budget=job.budget, **options, **sharing)
    reference = tt.TreeEngine(alone, temperature=job.temperature, value_head=heads[1])
    with PureFloat64() if job.dtype == torch.float64 else torch.enable_grad():
        whole = job.parallel in ("context", "tensor", "expert") and mesh is None
        own = rows if whole else split_of(rows, rank, size, job.split)
        results = _accumulated(engine, own, rows, loss, job.calls)
        truth = reference.forward_backward(rows, loss)
        scores = engine.logprobs(own) if job.loss != "value" else []
        told = reference.logprobs(own) if own and job.loss != "value" else []
    found = {name.removeprefix("module."): grad for name, grad in gradients(model).items()}
    expected = gradients(alone)
    if heads[0] is not None and heads[1] is not None:
        found |= gradients(heads[0])
        expected |= gradients(heads[1])
    return {
        "gradients": relative_error(found, expected),
        "loss": abs(sum(result.loss for result in results) - truth.loss) / max(abs(truth.loss), 1e-3),
        "metrics": _metric_error(results[0].metrics, truth.metrics) if job.calls == 1 else 0.0,
        "scores": max((float((a - b).abs().max()) for a, b in zip(scores, told) if len(a)), default=0.0),
        "flat_tokens": sum(result.flat_tokens for result in results) == truth.flat_tokens,
        "parts": results[0].parts,
    }


def _beside(model: nn.Module, job: Job, group: Any, mesh: DeviceMesh) -> tuple[nn.Module, dict[str, Any]]:
    """The model and the engine's settings for a mesh of (data, context)."""
    sharing: dict[str, Any] = {"context": mesh.get_group("context")}
    if job.beside == "group":
        return model, {**sharing, "group": group}
    if job.beside == "ddp":
        return DistributedDataParallel(model, process_group=group), sharing
    if job.beside == "shards":
        mesh = DeviceMesh.from_group(group, "cpu")
    return sharded(model, mesh), {**sharing, "reduce": job.reduce}


def check(run_on_ranks: Any, job: Job, *, size: int = 2) -> list[dict[str, Any]]:
    """Assert that every rank has the gradients, loss, metrics and scores of one process. Returns what ranks saw."""
    found = run_on_ranks(step, job, size=size)
    for rank, told in enumerate(found):
        for name in ("gradients", "loss", "metrics", "scores"):
            assert told[name] <= BOUNDS[job.dtype], (rank, name, told, job)
        assert told["flat_tokens"], (rank, told)
    return found


def _accumulated(engine: Any, own: Rows, rows: Rows, loss: Any, calls: int) -> list[tt.StepResult]:
    if calls == 1:
        return [engine.forward_backward(own, loss)]
    normaliser = loss.normaliser(rows)
    return [engine.forward_backward(own[n::calls], loss, normaliser, sync=n == calls - 1) for n in range(calls)]


def _metric_error(found: dict[str, float], truth: dict[str, float]) -> float:
    assert found.keys() == truth.keys(), (found, truth)
    return max((abs(found[name] - value) / max(abs(value), 1.0) for name, value in truth.items()), default=0.0)


def bfloat16_errors(group: Any, parallel: Parallel, seeds: int, shape: str) -> list[tuple[float, float]]:
    """For so many batches: relative gradient errors of ranks in bfloat16, and of every row alone by one process."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    loss, found = tt.losses.sft(), []
    truth_model = make_model("qwen3", **dict(KEYS))
    for seed in range(seeds):
        rows = rows_of(seed, "sft")
        model, alone = (make_model("qwen3", dtype=torch.bfloat16, **dict(KEYS)) for _ in range(2))
        sharing: dict[str, Any] = {"context" if parallel == "context" else "group": group}
        if parallel == "fsdp":
            model, sharing = sharded(model, group), {"reduce": "part"}
        own = rows if parallel == "context" else rows[rank::size]
        planned(shape, "mixed")(model, **sharing).forward_backward(own, loss)
        LinearEngine(alone).forward_backward(rows, loss)
        truth_model.zero_grad()
        tt.TreeEngine(truth_model).forward_backward(rows, loss)
        truth = gradients(truth_model)
        found.append((relative_error(gradients(model), truth), relative_error(gradients(alone), truth)))
    return found
