"""The simulator predicts the counts of a step as ranks run it; and ranks whose plans were aligned are exact."""

from typing import Any

import numpy as np
import pytest

import treetrain as tt
from support.models import make_model
from support.rank_counts import counted_step
from support.rank_work import KEYS
from treetrain.engine.costs import cost_of
from treetrain.planning.collective_order import RankPlans, plan_ranks
from treetrain.planning.devices import Device
from treetrain.planning.simulate import Split, engine_cost, simulate
from treetrain.tree.build import build_tree
from treetrain.tree.layout import pack


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
    cost = engine_cost(cost_of(make_model("qwen3", **SIZES)).counts, split, PRESET)
    return plan_ranks(build_tree(rows()), cost, split.data, aligned=split.shards > 1, **options)


@pytest.mark.parametrize(
    ("parallel", "budget", "split"),
    [
        ("ddp", 16, Split(2)),
        ("fsdp", 16, Split(2, shards=2)),
        ("fsdp", 48, Split(4, shards=4)),
        ("context", 24, Split(2, context=2)),
        ("tensor", 48, Split(2, tensor=2)),
    ],
)
def test_passes_tokens_and_bytes_of_every_rank_are_those_of_the_simulator(run_on_ranks, parallel, budget, split):
    cost, tree = cost_of(make_model("qwen3", **SIZES)), build_tree(rows())
    (expected,) = simulate(tree, cost.counts, [split], PRESET, budget=budget, planned_for=PRESET)
    plans = planned(split, budget=budget * split.context).plans
    found = run_on_ranks(counted_step, parallel, rows(), budget, size=split.ranks)
    passes = [told["passes"] for told in found]
    assert (set(passes) == {expected.passes}) if parallel == "fsdp" else (max(passes) == expected.passes)
    for told, plan, tokens in zip(found, plans, expected.tokens):
        stand_ins = told["forwards"] - plan.num_parts  # a token each
        assert stand_ins == 0 or parallel == "fsdp"
        assert parallel == "context" or told["tokens"] == tokens + stand_ins
        assert told["computed"] == sum(expected.tokens) and told["parts"] == sum(own.num_parts for own in plans)
        assert told["error"] <= 1e-5
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


def test_ranks_that_run_their_rows_in_runs_are_exact(run_on_ranks) -> None:
    batch, size, budget = rows(), 4, 48
    own, aligned = planned(Split(size), budget=budget), planned(Split(size, shards=size), budget=budget)
    tokens = [sum(plan.layout.num_tokens for plan in found.plans) for found in (own, aligned)]
    unique = own.dispatch.unique
    assert tokens[1] - unique > 2 * (tokens[0] - unique), "prompts are computed in two runs of a rank"
    for told in run_on_ranks(counted_step, "fsdp", batch, budget, size=size):
        assert told["computed"] == tokens[1] and told["error"] <= 1e-5
    whole = sum(pack(build_tree([batch[row] for row in numbers])).num_tokens for numbers in own.dispatch.trajectories)
    for told in run_on_ranks(counted_step, "fsdp", batch, budget, "own", size=size):  # whole rows
        assert told["computed"] > whole and told["error"] <= 1e-5


@pytest.mark.parametrize("budget", [None, "1GB", "8.4MB"])
def test_ranks_in_shards_are_exact_with_a_budget_in_bytes_or_none(run_on_ranks, budget) -> None:
    batch = rows()
    for told in run_on_ranks(counted_step, "fsdp", batch, budget, size=2):
        assert told["error"] <= 1e-5
        assert (told["forwards"] == 1) == (budget != "8.4MB"), "one pass where all fits"
