"""A score on several ranks has the gradients of the mean over ranks, as DistributedDataParallel gives them."""

import copy
import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_steps import parallel_model, scored_step
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import treetrain as tt
from support.models import make_model

QWEN3 = ("qwen3", ())
PLANS = (("one segment per part", "mixed"), ("chunks of 2", "none"))


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
    engine = tt.TreeEngine(parallel_model(model, how, group), context=group if how == "context" else None)
    scored = engine.score([[1, 2, 3], [1, 2, 4]])
    sum(row.sum() for row in scored.logprobs).backward()  # type: ignore[union-attr]
    if dist.get_rank(group) == 1:
        scored._spent = True
    try:
        scored.backward()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def a_forgotten_backward(group: Any, how: str) -> str:
    """Return the error of an optimizer that steps before `Scored.backward`; after it, the step is made."""
    model = parallel_model(make_model("qwen3", num_key_value_heads=2), how, group)
    optimizer = torch.optim.AdamW(model.parameters())
    scored = tt.TreeEngine(model).score([[1, 2, 3], [1, 2, 4 + dist.get_rank(group)]])
    sum(row.sum() for row in scored.logprobs).backward()  # type: ignore[union-attr]
    try:
        optimizer.step()
        said = "nothing"
    except RuntimeError as error:
        said = str(error)
    scored.backward()
    optimizer.step()
    assert optimizer.state
    return said


def experts_without_rows(group: Any, how: str) -> float:
    """How far gradients are from those of one process if rank 1 has no rows, and so no loss, of a model of experts."""
    model = make_model("qwen3_moe", torch.float64, output_router_logits=True, router_aux_loss_coef=0.7)
    rows, rank = [[1, 2, 3, 4], [1, 2, 4, 5], [1, 2, 3]], dist.get_rank(group)

    def loss_of(scored: Any) -> Any:
        return sum(row.sum() for row in scored.logprobs)  # without the auxiliary loss

    alone = tt.TreeEngine(copy.deepcopy(model))
    expected = alone.score(rows)
    loss_of(expected).backward()
    expected.backward(sync=False)
    wrapped = parallel_model(model, how, group)
    scored = tt.TreeEngine(wrapped).score([] if rank else rows)
    loss = loss_of(scored)
    if not rank:
        loss.backward()
    scored.backward()
    whole = [2 * getattr(p.grad, "full_tensor", lambda p=p: p.grad)() for p in wrapped.parameters()]
    wanted = [p.grad for p in alone.parameters]
    return float(sum((a - b).norm() for a, b in zip(whole, wanted)) / sum(b.norm() for b in wanted))


def check(run_on_ranks, how, *, keeps=("kept",), calls=1, split="round", changes=QWEN3, shapes=PLANS, size=2):
    found = run_on_ranks(scored_step, how, shapes, keeps, calls, split, changes, size=size)
    for outcome in found:
        assert outcome["error"] <= 1e-12, found
    return [outcome["scores_first"] for outcome in found]


KEEPS = ("kept", "partly", "recomputed")


def alternating(cases):
    """Each case is fast under one way and with some graphs kept, the next under the other and with others."""
    return [
        pytest.param(
            how, case, keeps, marks=() if number % 2 == (how == "fsdp") and fast == keeps else pytest.mark.slow
        )
        for number, (case, fast) in enumerate(zip(cases, itertools.cycle(KEEPS)))
        for how in ("ddp", "fsdp")
        for keeps in KEEPS
    ]


@pytest.mark.few(1)
@pytest.mark.parametrize(("how", "split", "keeps"), alternating(["round", "halves", "first has all", "last has all"]))
def test_ranks_have_rows_of_their_own_or_none(run_on_ranks, how, split, keeps):
    check(run_on_ranks, how, keeps=(keeps,), split=split)


@pytest.mark.slow
def test_ranks_of_a_sharded_model_all_keep_their_graphs_or_none_does(run_on_ranks):
    assert check(run_on_ranks, "fsdp", keeps=("kept", "recomputed")) == [["recomputed"]] * 2
    assert check(run_on_ranks, "fsdp", keeps=("kept", "kept")) == [["kept"]] * 2
    assert check(run_on_ranks, "ddp", keeps=("kept", "recomputed")) == [["kept"], ["recomputed"]]


@pytest.mark.slow
@pytest.mark.parametrize("keeps", [("partly", "kept"), ("kept", "partly"), ("partly", "partly")])
def test_ranks_of_a_sharded_model_may_keep_the_graphs_of_other_parts(run_on_ranks, keeps):
    assert check(run_on_ranks, "fsdp", keeps=keeps, split="halves") == [["kept"]] * 2


@pytest.mark.few(1)
@pytest.mark.parametrize("keeps", KEEPS)
@pytest.mark.parametrize("how", ["ddp", "fsdp"])
def test_a_step_may_be_accumulated(run_on_ranks, how, keeps):
    check(run_on_ranks, how, keeps=(keeps,), calls=3)


@pytest.mark.few(1)
@pytest.mark.parametrize(("how", "family", "keeps"), alternating(["qwen3_5_text", "qwen3_moe", "gemma3_text"]))
def test_kinds_of_models(run_on_ranks, how, family, keeps):
    check(run_on_ranks, how, keeps=(keeps,), changes=(family, ()), split="halves")


@pytest.mark.slow
@pytest.mark.parametrize("how", ["ddp", "fsdp"])
def test_four_ranks(run_on_ranks, how):
    for keeps in (("kept",), ("partly",), ("recomputed",)):
        check(run_on_ranks, how, keeps=keeps, calls=2, size=4)


def test_live_log_probabilities_are_refused_where_nobody_would_synchronise_them(run_on_ranks):
    for said in run_on_ranks(live_is_refused):
        assert len(said) == 4
        for outcome in said:
            assert "not be synchronised over the" in outcome
            assert "scored.backward(), which averages gradients over the ranks" in outcome


@pytest.mark.parametrize("how", ["ddp", "fsdp", "context", "tensor"])
def test_an_error_on_one_rank_ends_all_of_them(run_on_ranks, how):
    outcome = run_on_ranks(an_error_on_one_rank, how)
    assert "a second backward through TreeEngine.score" in outcome[1]
    assert outcome[0].startswith("RanksDisagree") and "a second backward" in outcome[0]


@pytest.mark.parametrize("how", ["ddp", "fsdp"])
def test_a_forgotten_backward_is_an_error_on_every_rank(run_on_ranks, how):
    for said in run_on_ranks(a_forgotten_backward, how):
        assert "have not gone through the tree" in said


@pytest.mark.parametrize("how", ["ddp", "fsdp"])
def test_a_rank_without_rows_runs_with_the_others_though_experts_have_an_auxiliary_loss(run_on_ranks, how):
    assert max(run_on_ranks(experts_without_rows, how)) <= 1e-12
