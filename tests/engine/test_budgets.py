"""Budgets, in tokens and in bytes, of the engine and of `treetrain.logprobs` inside a user's own training loop."""

import copy
import re

import numpy as np
import pytest
import torch

import treetrain as tt
from support.models import make_model
from support.passes import unique_ids, watched
from treetrain.check import linear
from treetrain.check.contract import PureFloat64
from treetrain.check.forests import with_random_facts
from treetrain.core.planning.plan import Bytes

TRUNK = list(range(12))
IDS = unique_ids([[*TRUNK, 20, 21, 22], [*TRUNK, 20, 23], [*TRUNK, 24, 25], [*TRUNK[:5], 26, 27], [28, 29, 30]])
ROWS = with_random_facts(IDS, 2)
PPO = tt.losses.ppo(entropy=0.05)


@pytest.fixture(scope="module")
def model():
    return make_model("qwen3", dtype=torch.float64)


def pairs_loss(logps) -> torch.Tensor:
    """As DPO: rows are compared with each other, so that no sum over rows can express it."""
    sums = torch.stack([row.sum() for row in logps])
    return torch.nn.functional.softplus(0.5 * (sums[1::2] - sums[:-1:2])).sum()


def expected(model, loss=pairs_loss) -> torch.Tensor:
    with PureFloat64():
        return linear.gradients(model, loss(linear.score_rows(model, IDS)[0]))


@pytest.mark.slow
@pytest.mark.parametrize("budget", [1, 2, 7, 1000, np.int64(7), np.int32(7), "7", " 64 "])
def test_tokens_bound_the_graphs_that_are_alive_at_once(model, budget):
    model.zero_grad()
    engine = tt.TreeEngine(model, budget=budget)
    plan = engine.plan(ROWS)
    assert plan.peak_tokens <= int(budget)
    with PureFloat64(), watched(model) as seen:
        engine.forward_backward(ROWS, PPO)
        got = linear.gradients(model)
        model.zero_grad()
        tt.TreeEngine(model).forward_backward(ROWS, PPO)
    assert linear.relative_error(got, linear.gradients(model)) <= 1e-12
    assert max(map(len, seen.graph[:-1])) <= int(budget)
    with watched(model) as seen, PureFloat64():
        got = linear.gradients(model, pairs_loss(tt.logprobs(model, IDS, budget=budget)))
    assert linear.relative_error(got, expected(model)) <= 1e-12
    assert max(map(len, seen.graph)) <= int(budget)


@pytest.mark.parametrize("budget", [None, "1GiB", "1.5 GB", "2e9B", Bytes(1 << 30)], ids=str)
def test_a_small_batch_runs_at_once_where_memory_is_ample(model, budget):
    with watched(model) as seen, PureFloat64():
        got = linear.gradients(model, pairs_loss(tt.logprobs(model, IDS, budget=budget)))
    assert len(seen.graph) == 1 and not seen.plain
    assert linear.relative_error(got, expected(model)) <= 1e-12
    model.zero_grad()
    assert tt.TreeEngine(model, budget=budget).forward_backward(ROWS, PPO).parts == 1


def test_bytes_that_are_too_few_name_the_least_that_is_needed():
    model = make_model("qwen3")
    for run in (
        lambda budget: tt.TreeEngine(model, budget=budget).forward_backward(ROWS, PPO),
        lambda budget: tt.TreeEngine(model, budget=budget).logprobs(IDS),
        lambda budget: tt.logprobs(model, IDS, budget=budget),
    ):
        with pytest.raises(ValueError, match=r"needs .*\(\d+ bytes\)") as caught:
            run("10B")
        assert all(p.grad is None for p in model.parameters())
        least = int(re.search(r"\((\d+) bytes\)", str(caught.value))[1])
        run(f"{least}B")
        with pytest.raises(ValueError, match="bytes"):
            run(f"{least - 1}B")
        model.zero_grad()


def test_fewer_bytes_make_smaller_parts_with_the_same_gradients():
    model = make_model("qwen3")
    rows = with_random_facts(unique_ids([[*range(200), i, *range(300, 330)] for i in range(201, 206)]), 1)
    model.resize_token_embeddings(400)
    engine = tt.TreeEngine(model, budget="1GiB")
    assert engine.forward_backward(rows, PPO).parts == 1
    gradient, most = linear.gradients(model), engine.cost.peak_bytes(engine.plan(rows))
    with pytest.raises(ValueError, match="needs") as caught:
        tt.TreeEngine(model, budget="1B").plan(rows)
    least = int(re.search(r"\((\d+) bytes\)", str(caught.value))[1])
    alive = []
    for share in (0.7, 0.3):
        model.zero_grad()
        limit = int(least + share * (most - least))
        small = tt.TreeEngine(model, budget=f"{limit}B")
        result, plan = small.forward_backward(rows, PPO), small.plan(rows)
        assert result.parts == plan.num_parts > 1 and small.cost.peak_bytes(plan) <= limit
        assert linear.relative_error(linear.gradients(model), gradient) <= 1e-5
        alive.append(plan.peak_tokens)
    assert alive[0] > alive[1]


@pytest.mark.parametrize(
    "bad", [0, -1, "0", 2.5, True, "many", "8 XB", "-3GiB", [4], float("nan"), "", "0.1B"], ids=repr
)
def test_a_budget_that_is_neither_tokens_nor_bytes_is_refused_at_once(model, bad):
    for run in (lambda: tt.TreeEngine(model, budget=bad), lambda: tt.logprobs(model, IDS, budget=bad)):
        with watched(model) as seen, pytest.raises(ValueError, match="budget="):
            run()
        assert not seen.graph and not seen.plain


def train(budget, steps: int, dtype=torch.float64, autocast: bool = False) -> tuple[list[float], torch.Tensor]:
    """A user's loop: two calls accumulate into one backward each step; losses and weights afterwards."""
    model = make_model("llama", dtype=dtype)
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
    losses = []
    for _ in range(steps):
        optimiser.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            first = pairs_loss(tt.logprobs(model, IDS[:4], budget=budget))
            second = tt.logprobs(model, IDS[1:], budget=budget, temperature=0.9)
            loss = first - 0.1 * sum(row.mean() for row in second)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        losses.append(float(loss.detach()))
    return losses, torch.cat([p.detach().double().flatten() for p in model.parameters()])


@pytest.mark.slow
@pytest.mark.parametrize("budget", [3, 9, 1])
def test_a_loop_with_an_optimiser_makes_the_same_steps_under_a_budget(budget):
    with PureFloat64():
        losses, weights = train(None, 5)
        got_losses, got = train(budget, 5)
    assert losses[-1] < losses[0] - 0.1
    assert got_losses == pytest.approx(losses, rel=1e-10)
    assert linear.relative_error(got, weights) <= 1e-10


@pytest.mark.slow
def test_one_backward_for_each_of_two_calls_adds_up_like_one_backward_for_both(model):
    with PureFloat64():
        model.zero_grad()
        calls = [pairs_loss(tt.logprobs(model, IDS, budget=b)) for b in (3, 9)]
        sum(calls).backward()
        together = linear.gradients(model)
        model.zero_grad()
        # Both forwards first; the backwards in the other order.
        calls = [pairs_loss(tt.logprobs(model, IDS, budget=b)) for b in (3, 9)]
        calls[1].backward()
        calls[0].backward()
    assert linear.relative_error(linear.gradients(model), together) <= 1e-13
    assert linear.relative_error(together, 2 * expected(model)) <= 1e-12
    model.zero_grad()


@pytest.mark.parametrize("budget", [12, 3])
def test_a_second_backward_and_weights_that_changed_raise_and_leave_gradients_alone(budget):
    model = make_model("qwen3")
    loss = pairs_loss(tt.logprobs(model, IDS, budget=budget))
    loss.backward(retain_graph=True)
    before = linear.gradients(model)
    with pytest.raises(RuntimeError, match="second backward"):
        loss.backward()
    assert torch.equal(before, linear.gradients(model))
    loss = pairs_loss(tt.logprobs(model, IDS, budget=budget))
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    with pytest.raises(RuntimeError, match="weights have changed"):
        loss.backward()
    assert torch.equal(before, linear.gradients(model))


def test_a_copy_of_the_model_may_be_the_reference_policy_under_its_own_budget(model):
    reference = copy.deepcopy(model).requires_grad_(False)
    with watched(reference) as seen, PureFloat64():
        rows = tt.logprobs(reference, IDS, budget=3)
        scores = linear.score_rows(model, IDS)[0]
    assert not seen.graph and max(map(len, seen.plain[: -len(IDS)])) <= 3
    for row, other in zip(rows, scores):
        assert not row.requires_grad
        torch.testing.assert_close(row, other.detach(), rtol=1e-12, atol=1e-12)


def test_gradients_that_are_still_to_come_are_not_free_memory(monkeypatch):
    model = make_model("qwen3")
    engine = tt.TreeEngine(model)
    monkeypatch.setattr("treetrain.core.engine.engine_model.free_bytes", lambda device: 10_000_000)
    whole = sum(p.numel() * 4 for p in model.parameters())
    assert engine.prepared.free_bytes() == 10_000_000 - whole
    next(model.parameters()).requires_grad_(False)
    engine.prepared.read()
    some = next(model.parameters()).numel() * 4
    assert engine.prepared.free_bytes() == 10_000_000 - whole + some
    engine.forward_backward([[1, 2, 3]], tt.losses.sft())
    assert engine.prepared.free_bytes() == 10_000_000
