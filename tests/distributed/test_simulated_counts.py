"""The simulator predicts the counts of a step as ranks run it; and ranks whose plans were aligned are exact."""

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from rank_steps import KEYS, LOSSES, cut, gradients, relative_error, sharded
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

import treetrain as tt
from support.models import make_model
from support.passes import unnoticed
from treetrain.core.planning.cost import CostModel
from treetrain.core.planning.devices import Device
from treetrain.core.tree.layout import pack
from treetrain.core.tree.token_tree import build_tree
from treetrain.models.costs import cost_of
from treetrain.parallel.balance import dispatch
from treetrain.parallel.links import sharded_links
from treetrain.simulation.rank_plans import RankPlans, plan_ranks
from treetrain.simulation.simulate import simulate
from treetrain.simulation.splits import Split


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
    handle = model.base_model.register_forward_pre_hook(unnoticed(count), with_kwargs=True)  # type: ignore[union-attr]
    engine = tt.TreeEngine(model, budget=budget, check=False, **sharing)
    with Moved() as moved:
        result = engine.forward_backward([rows[number] for number in own], LOSSES[loss])
    handle.remove()
    tt.TreeEngine(alone, check=False).forward_backward(rows, LOSSES[loss])
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


def rows(groups: int = 10) -> list[tt.Trajectory]:
    """Prompts with a few answers each; the answers are trained."""
    rng = np.random.default_rng(0)
    found = []
    for number in range(groups):
        prompt = [number, *rng.integers(0, 37, rng.integers(3, 20)).tolist()]
        for _ in range(rng.integers(1, 6)):
            answer = rng.integers(0, 37, rng.integers(2, 12)).tolist()
            weights = [0.0] * len(prompt) + [1.0] * len(answer)
            found.append(tt.Trajectory(prompt + answer, loss_weights=weights))
    return found


SIZES = dict(KEYS, num_attention_heads=4, vocab_size=40)
PRESET = Device.of_kind("cpu", 4)


def planned(split: Split, **options: Any) -> RankPlans:
    """The plans of all ranks as the engine makes them."""
    counts = cost_of(make_model("qwen3", **SIZES)).counts
    cost = CostModel.on(PRESET, counts, sharded_links(PRESET, counts, shards=split.shards, copies=split.copies))
    return plan_ranks(build_tree(rows()), cost, split.data, aligned=split.shards > 1, **options)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("parallel", "budget", "split"),
    [
        ("ddp", 16, Split(2)),
        ("fsdp", 16, Split(2, shards=2)),
        pytest.param("fsdp", 48, Split(4, shards=4), marks=pytest.mark.slow),
        pytest.param("context", 24, Split(2, context=2), marks=pytest.mark.slow),
        pytest.param("tensor", 48, Split(2, tensor=2), marks=pytest.mark.slow),
    ],
)
def test_passes_tokens_and_bytes_of_every_rank_are_those_of_the_simulator(run_on_ranks, parallel, budget, split):
    cost, tree = cost_of(make_model("qwen3", **SIZES)), build_tree(rows())
    (expected,) = simulate(tree, cost.counts, [split], PRESET, budget=budget, planned_for=PRESET)
    plans = planned(split, budget=budget * split.context).plans
    found = run_on_ranks(counted_step, parallel, rows(), budget, size=split.ranks)
    passes = [outcome["passes"] for outcome in found]
    assert (set(passes) == {expected.passes}) if parallel == "fsdp" else (max(passes) == expected.passes)
    for outcome, plan, tokens in zip(found, plans, expected.tokens):
        stand_ins = outcome["forwards"] - plan.num_parts  # a token each
        assert stand_ins == 0 or parallel == "fsdp"
        assert parallel == "context" or outcome["tokens"] == tokens + stand_ins
        assert outcome["computed"] == sum(expected.tokens) and outcome["parts"] == sum(own.num_parts for own in plans)
        assert outcome["error"] <= 1e-5
    sent, moved, n = expected.sent_bytes, found[int(np.argmax(expected.tokens))]["bytes"], split.ranks
    leaves = (n - 1) / n  # the share of a whole tensor that a rank sends
    if parallel == "fsdp":
        assert sent["weights"] == moved["_allgather_base_"] * leaves
        assert sent["gradients"] == moved["_reduce_scatter_base_"] * leaves
    elif parallel == "ddp":
        assert sent["gradients"] == moved["allreduce_"] * 2 * leaves
    elif parallel == "tensor":
        assert sent["tensor"] == moved["all_reduce"] * 2 * leaves
    else:  # each share is padded to the same number of tokens
        padded = expected.passes / 2 * (n - 1) / sum(expected.tokens)
        assert sent["context"] <= moved["alltoall_base_"] * leaves <= sent["context"] * (1 + padded)


@pytest.mark.slow
def test_ranks_that_run_their_rows_in_runs_are_exact(run_on_ranks) -> None:
    batch, size, budget = rows(), 4, 48
    own, aligned = planned(Split(size), budget=budget), planned(Split(size, shards=size), budget=budget)
    tokens = [sum(plan.layout.num_tokens for plan in found.plans) for found in (own, aligned)]
    unique = own.dispatch.unique
    assert tokens[1] - unique > 2 * (tokens[0] - unique), "prompts are computed in two runs of a rank"
    for outcome in run_on_ranks(counted_step, "fsdp", batch, budget, size=size):
        assert outcome["computed"] == tokens[1] and outcome["error"] <= 1e-5
    whole = sum(pack(build_tree([batch[row] for row in numbers])).num_tokens for numbers in own.dispatch.trajectories)
    for outcome in run_on_ranks(counted_step, "fsdp", batch, budget, "own", size=size):  # whole rows
        assert outcome["computed"] > whole and outcome["error"] <= 1e-5


@pytest.mark.few(1)
@pytest.mark.parametrize("budget", [None, "1GB", "8.4MB"])
def test_ranks_in_shards_are_exact_with_a_budget_in_bytes_or_none(run_on_ranks, budget) -> None:
    batch = rows()
    for outcome in run_on_ranks(counted_step, "fsdp", batch, budget, size=2):
        assert outcome["error"] <= 1e-5
        assert (outcome["forwards"] == 1) == (budget != "8.4MB"), "one pass where all fits"
