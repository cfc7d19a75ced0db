"""What the simulator says a step is made of is what ranks run; and ranks whose plans were aligned are exact."""

import numpy as np
import pytest

import treetrain as tt
from support.models import make_model
from support.rank_counts import counted_step
from treetrain.engine.costs import cost_of
from treetrain.planning.devices import DEVICES
from treetrain.planning.make import plan_ranks
from treetrain.planning.simulate import simulate
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


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("budget", [16, 48])
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_passes_and_tokens_of_every_rank_are_those_of_the_simulator(run_on_ranks, parallel, budget, size) -> None:
    batch = rows()
    cost = cost_of(make_model("qwen3"))
    tree, device = build_tree(batch), DEVICES["cpu"]
    expected = simulate(tree, cost.counts, size, device, cost=cost, budget=budget, parallel=parallel)
    plans = plan_ranks(tree, cost, size, budget=budget, aligned=parallel == "fsdp").plans
    found = run_on_ranks(counted_step, parallel, batch, budget, size=size)
    passes = [told["passes"] for told in found]
    assert (set(passes) == {expected.passes}) if parallel == "fsdp" else (max(passes) == expected.passes)
    for told, plan, tokens in zip(found, plans, expected.tokens):
        stand_ins = told["forwards"] - plan.num_parts  # a token each
        assert told["tokens"] == tokens + stand_ins and (stand_ins == 0 or parallel == "fsdp")
        assert told["computed"] == sum(expected.tokens) and told["parts"] == sum(own.num_parts for own in plans)
        assert told["error"] <= 1e-5


def test_ranks_that_run_their_rows_in_runs_are_exact(run_on_ranks) -> None:
    batch, size, budget = rows(), 4, 48
    tree, cost = build_tree(batch), cost_of(make_model("qwen3"))
    own = plan_ranks(tree, cost, size, budget=budget)
    aligned = plan_ranks(tree, cost, size, budget=budget, aligned=True)
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
