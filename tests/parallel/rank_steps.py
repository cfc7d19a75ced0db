"""Functions for several ranks: a step there against the same step by one process, and against every row alone."""

import copy
import dataclasses
import functools
from collections.abc import Callable, Sequence
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
from support.plans import calls_answer, planned
from support.plans import keeping_graphs as choice_of
from treetrain.check.contract import PureFloat64
from treetrain.check.forests import VOCAB, whole_pairs, with_random_facts
from treetrain.check.linear_engine import LinearEngine
from treetrain.layers.trajectory import Trajectory

Parallel = Literal["ddp", "fsdp", "context", "tensor", "expert"]
Reduces = Literal["each", "last"]
"""Under FSDP2: which backwards reduce gradients."""
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
    reduce: Reduces = "each"
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
    "masked ppo": tt.losses.ppo(clip=0.2, entropy=0.05),
    "masked dpo": tt.losses.dpo(beta=0.3),
    "masked own": OwnLoss(),
    "topk": tt.losses.distill_topk(divergence="jensen_shannon"),
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
    dressed = with_random_facts(rows, seed)
    if loss == "value":
        facts = [{name: rng.normal(size=len(row)) for name in ("values", "returns")} for row in dressed]
        dressed = [row.replace(**own) for row, own in zip(dressed, facts)]
    if loss.startswith("masked") or loss == "topk":
        dressed = [with_sets(row, rng) for row in dressed]
        return whole_pairs(dressed) if loss == "masked dpo" else dressed
    return cases[loss].prepare(dressed) if loss in cases else dressed


def with_sets(row: Trajectory, rng: np.random.Generator) -> Trajectory:
    """The row with kept ids and a teacher's at each token; a quarter of the tokens kept all ids."""
    sets = [rng.choice(VOCAB, rng.integers(1, 9), replace=False).tolist() for _ in row.ids]
    kept = [None if rng.random() < 0.25 else [*({*x} - {int(token)}), token] for x, token in zip(sets, row.ids)]
    logprobs = [np.log(rng.dirichlet(np.ones(len(x) + 1))[1:]) for x in sets]
    return row.replace(sampling_mask=kept, teacher_topk=(sets, logprobs))


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


def cut(model: Any, group: Any, **experts: Any) -> nn.Module:
    """Divide a model over a group by its own plans, as `from_pretrained` does over all processes there are."""
    from transformers.distributed import DistributedConfig
    from transformers.distributed.expert_parallel import apply_expert_parallelism
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    size, head = dist.get_world_size(group), model.get_output_embeddings()
    head.weight = nn.Parameter(head.weight.detach().clone())  # tied again below, as after loading
    settings = DistributedConfig(tp_size=size, **{"tp_plan": "auto"} | experts)
    model.config.distributed_config = settings
    plan, ep_plan, _ = model._resolve_parallel_plans(settings)
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("tp",))
    apply_tensor_parallelism(model, mesh, plan)
    ep_mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("ep",))
    apply_expert_parallelism(model, ep_mesh, mesh, ep_plan, settings.ep_implementation)
    model._tp_size, model._device_mesh = size, mesh
    model.tie_weights()
    return model


def with_lora(model: Any, *targets: str, seed: int = 0, **options: Any) -> nn.Module:
    """The model with a LoRA that is not zero."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(seed)
    settings = LoraConfig(r=4, target_modules=list(targets), init_lora_weights=False, **options)
    return get_peft_model(model, settings).eval()


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
    """How far a step on several ranks is from the same step by one process; every rank returns what it saw."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    mesh = None
    if job.beside:
        mesh = DeviceMesh("cpu", torch.arange(size).view(2, -1), mesh_dim_names=("data", "context"))
        rank, size = rank // (size // 2), 2
    model, head, rows = _made(job)
    if job.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
    sharing: dict[str, Any] = {"group": group}
    if job.parallel == "fsdp":
        model, sharing = sharded(model, group, head=job.head_shard), {}
    elif mesh is not None:
        model, sharing = _beside(model, job, group, mesh)
    elif job.parallel == "context":  # every rank has all rows
        sharing = {"context": group}
    elif job.parallel in ("tensor", "expert"):
        experts = {"ep_size": size} if job.parallel == "expert" else {}
        model, sharing = cut(model, group, **experts, **dict(job.divided)), {}
    kind = planned(*job.shapes[rank]) if job.shapes else tt.TreeEngine
    engine = kind(model, budget=job.budget, temperature=job.temperature, value_head=head, **sharing)
    reducing(engine, job.reduce)

    def own_of(all_rows: list[Any]) -> list[Any]:
        whole = job.parallel in ("context", "tensor", "expert") and mesh is None
        return all_rows if whole else split_of(all_rows, rank, size, job.split)

    with PureFloat64() if job.dtype == torch.float64 else torch.enable_grad():
        results = _accumulated(engine, own_of(rows), rows, LOSSES[job.loss], job.calls)
        scores = engine.logprobs(own_of(rows)) if job.loss != "value" else []
    expected, truth, truth_scores = _alone(
        dataclasses.replace(
            job, parallel="ddp", shapes=(), budget=None, reduce="each", calls=1, divided=(), head_shard=False, split="",
            checkpointing=False, beside="",
        )
    )  # fmt: skip
    found = {name.removeprefix("module."): grad for name, grad in gradients(model).items()}
    found |= gradients(head) if head is not None else {}
    pairs = zip(scores, own_of(truth_scores))
    return {
        "gradients": relative_error(found, expected),
        "loss": abs(sum(result.loss for result in results) - truth.loss) / max(abs(truth.loss), 1e-3),
        "metrics": _metric_error(results[0].metrics, truth.metrics) if job.calls == 1 else 0.0,
        "scores": max((float((a - b).abs().max()) for a, b in pairs if len(a)), default=0.0),
        "flat_tokens": sum(result.flat_tokens for result in results) == truth.flat_tokens,
        "parts": results[0].parts,
    }


def reducing(engine: tt.TreeEngine, reduces: Reduces) -> None:
    """Let an engine reduce gradients in these backwards, whatever memory is free."""
    calls_answer(engine, keeps_gradients=lambda plan: reduces == "last")


def _made(job: Job) -> tuple[nn.Module, nn.Module | None, Rows]:
    """The model, value head and rows of a step, the same ones in every process."""
    model, head = make_model(job.family, dtype=job.dtype, **dict(job.changes)), None
    if job.lora:
        model = with_lora(model, "q_proj", "v_proj", "down_proj").to(job.dtype)
    if job.value_head:
        torch.manual_seed(3)
        head = nn.Linear(model.config.hidden_size, 1, dtype=job.dtype)  # type: ignore[union-attr, arg-type]
    rows = rows_of(job.seed, job.loss)
    return model, head, at_random(rows, model.config.num_hidden_layers) if job.recorded else rows  # type: ignore


@functools.lru_cache(maxsize=64)
def _alone(job: Job) -> tuple[dict[str, Tensor | None], tt.StepResult, list[Tensor]]:
    """Gradients, result and scores of the step by one process; jobs that differ in how ranks share it have the same."""
    model, head, rows = _made(job)
    engine = planned("1 part", "none")(model, temperature=job.temperature, value_head=head)
    with PureFloat64() if job.dtype == torch.float64 else torch.enable_grad():
        result = engine.forward_backward(rows, LOSSES[job.loss])
        scores = engine.logprobs(rows) if job.loss != "value" else []
    return gradients(model) | (gradients(head) if head is not None else {}), result, scores


def _beside(model: nn.Module, job: Job, group: Any, mesh: DeviceMesh) -> tuple[nn.Module, dict[str, Any]]:
    """The model and the engine's settings for a mesh of (data, context)."""
    sharing: dict[str, Any] = {"context": mesh.get_group("context")}
    if job.beside == "group":
        return model, {**sharing, "group": group}
    if job.beside == "ddp":
        return DistributedDataParallel(model, process_group=group), sharing
    if job.beside == "shards":
        mesh = DeviceMesh.from_group(group, "cpu")
    return sharded(model, mesh), sharing


def check(run_on_ranks: Any, job: Job, *, size: int = 2) -> list[dict[str, Any]]:
    """Assert that every rank has the gradients, loss, metrics and scores of one process. Returns what ranks saw."""
    found = run_on_ranks(step, job, size=size)
    for rank, seen in enumerate(found):
        for name in ("gradients", "loss", "metrics", "scores"):
            assert seen[name] <= BOUNDS[job.dtype], (rank, name, seen, job)
        assert seen["flat_tokens"], (rank, seen)
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
            model, sharing = sharded(model, group), {}
        own = rows if parallel == "context" else rows[rank::size]
        engine = planned(shape, "mixed")(model, **sharing)
        reducing(engine, "each")
        engine.forward_backward(own, loss)
        LinearEngine(alone).forward_backward(rows, loss)
        truth_model.zero_grad()
        tt.TreeEngine(truth_model).forward_backward(rows, loss)
        truth = gradients(truth_model)
        found.append((relative_error(gradients(model), truth), relative_error(gradients(alone), truth)))
    return found


class Oops(Exception):
    """An error in a user's loss or model."""


def error_of(run: Callable[[], Any]) -> str:
    """The error that a call ends with."""
    try:
        run()
    except Exception as error:
        return "\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", [])])
    return "no error"


def _own_loss(scored: Any) -> Tensor:
    """Not linear, and of these rows alone."""
    total = torch.zeros((), dtype=torch.float64)
    for row, entropy, of_ids in zip(scored.logprobs, scored.entropies, scored.id_logprobs):
        total = total + (row.exp() + 0.1 * row.square() + 0.3 * entropy).sum() + 0.2 * of_ids.square().sum()
    return total


def _asked(rows: Sequence[list[int]]) -> list[list[list[int] | None]]:
    """Up to three ids for each prediction, none for some."""
    return [
        [None if x % 3 == 0 else sorted({x, (x * 7 + 3) % VOCAB, (x + at) % VOCAB}) for at, x in enumerate(row[1:])]
        for row in rows
    ]


def parallel_model(model: nn.Module, how: str, group: Any) -> nn.Module:
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
        keeps: the graphs that are kept (see `support.plans`), in the same way.
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
    rows = [row.ids.tolist() for row in rows_of(3, "sft")]

    wrapped = parallel_model(model, how, mesh)
    engine = planned(*shapes[rank % len(shapes)])(wrapped, temperature=1.3, context=context)
    calls_answer(engine, plan_keeping_graphs=choice_of(keeps[rank % len(keeps)]))
    reference = planned("1 part", "none")(alone, temperature=1.3)
    own, copies = (rows, 1) if how in ("context", "tensor", "expert") else (split_of(rows, rank, size, split), size)
    orders = []
    with PureFloat64():
        for call in range(calls):
            scored = engine.score(own[call::calls], entropies=True, ids=_asked(own[call::calls]))
            if own[call::calls]:
                _own_loss(scored).backward()
            orders.append(scored.plan.scores_first)
            scored.backward(sync=call == calls - 1)
        whole = reference.score(rows, entropies=True, ids=_asked(rows))
        (_own_loss(whole) / copies).backward()
        whole.backward()
    return {"error": relative_error(gradients(model), gradients(alone)), "scores_first": orders}
