"""Gradients and rows that could go astray between the calls, tries and walks of a step over several ranks."""

import copy
import warnings
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from rank_steps import (
    LOSSES,
    Oops,
    OwnLoss,
    Reduces,
    error_of,
    gradients,
    reducing,
    relative_error,
    rows_of,
    sharded,
)
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import treetrain as tt
from support.models import make_model
from treetrain.check.contract import PureFloat64
from treetrain.core.engine.executor import Executor
from treetrain.core.engine.loss_gradients import ScoreTable
from treetrain.parallel import process_group as ranks_module


def _models(parallel: str, group: Any, **changes: Any) -> tuple[nn.Module, nn.Module, dict[str, Any]]:
    """A model on several ranks, the same alone, and what an engine must be told of the first."""
    model = make_model("qwen3", dtype=torch.float64, **changes)
    alone = copy.deepcopy(model)
    return (sharded(model, group), alone, {}) if parallel == "fsdp" else (model, alone, {"group": group})


def _instead_once(owner: Any, name: str, error: Exception) -> None:
    """Let a method raise the next time, and be itself again."""
    original = getattr(owner, name)

    def raises(*_: Any, **__: Any) -> None:
        setattr(owner, name, original)
        raise error

    setattr(owner, name, raises)


def last_call_without_rows(group: Any, parallel: str, reduce: Reduces) -> float:
    """The gradients' error of a step whose last call has rows on no rank."""
    model, alone, sharing = _models(parallel, group)
    rows, loss = rows_of(2, "sft"), tt.losses.sft()
    whole = loss.normaliser(rows)
    engine = tt.TreeEngine(model, budget=9, **sharing)
    reducing(engine, reduce)
    with PureFloat64():
        engine.forward_backward(rows[dist.get_rank(group) :: 2], loss, whole, sync=False)
        engine.forward_backward([], loss, whole)
        tt.TreeEngine(alone).forward_backward(rows, loss, whole)
    return relative_error(gradients(model), gradients(alone))


def failing_before_gradients_are_reduced(group: Any, calls: int) -> tuple[str, float]:
    """Return this rank's error when a call with sync=False fails after others, and the relative error of a new step."""
    rank = dist.get_rank(group)
    model, alone, _ = _models("fsdp", group)
    rows, loss = rows_of(2, "sft"), tt.losses.sft()
    engine = tt.TreeEngine(model, budget=7)
    seen: list[int] = []

    def bad(logprobs: Any, entropies: Any, row: Any) -> Any:
        seen.append(1)
        if rank == 1 and len(seen) == 3:
            raise Oops("in row 2")
        return -logprobs.sum(), {}

    own = rows[rank::2]
    with PureFloat64():
        for _ in range(calls):
            engine.forward_backward(own, loss, 1.0, sync=False)
        outcome = error_of(lambda: engine.forward_backward(own, bad, 1.0, sync=False))
        model.zero_grad()
        engine.forward_backward(own, loss)
        tt.TreeEngine(alone).forward_backward(rows, loss)
    return outcome, relative_error(gradients(model), gradients(alone))


def comparing_rows_while_one_fails(group: Any, parallel: str) -> tuple[str, float]:
    """Return this rank's error when rank 1 fails to score for a loss over all rows, and how exact a new step is."""
    rank = dist.get_rank(group)
    model, alone, sharing = _models(parallel, group)
    rows, loss = rows_of(2, "dpo"), LOSSES["dpo"]
    engine = tt.TreeEngine(model, **sharing)
    if rank == 1:
        _instead_once(ScoreTable, "write", Oops("while scoring"))
    outcome = error_of(lambda: engine.forward_backward(rows[rank::2], loss))
    with PureFloat64():
        engine.forward_backward(rows[rank::2], loss)
        tt.TreeEngine(alone).forward_backward(rows, loss)
    return outcome, relative_error(gradients(model), gradients(alone))


def comparing_rows_while_one_starts_over(group: Any) -> float:
    """The same where memory runs out in a backward of one rank."""
    rank = dist.get_rank(group)
    model, alone, sharing = _models("ddp", group)
    rows, loss = rows_of(2, "dpo"), LOSSES["dpo"]
    if rank == 1:
        _instead_once(Executor, "_backward", torch.OutOfMemoryError("CUDA out of memory"))
    with PureFloat64(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        tt.TreeEngine(model, **sharing).forward_backward(rows[rank::2], loss)
        tt.TreeEngine(alone).forward_backward(rows, loss)
    assert any("started over" in str(one.message) for one in caught) == (rank == 1)
    return relative_error(gradients(model), gradients(alone))


def _one(logprobs: Any, entropies: Any, row: Any) -> Any:
    return -logprobs.sum(), {}


def _two(logprobs: Any, entropies: Any, row: Any) -> Any:
    return -2 * logprobs.sum(), {}


def different_losses_of_ones_own(group: Any) -> tuple[str, str]:
    """Return this rank's errors when the ranks' functions differ, and when the attributes of one function do."""
    rank = dist.get_rank(group)
    model, _, sharing = _models("ddp", group)
    engine = tt.TreeEngine(model, **sharing)
    rows = [[1, 2, 3 + rank]]
    other = error_of(lambda: engine.forward_backward(rows, (_one, _two)[rank], 1.0))
    _one.needs = ("logprobs", "entropies")[: 1 + rank]  # type: ignore[attr-defined]
    return other, error_of(lambda: engine.forward_backward(rows, _one, 1.0))


def value_head_in_other_hands(group: Any, kind: str) -> float:
    """The error of the second of two steps, an update and values between them, with a value head that is wrapped."""
    rank = dist.get_rank(group)
    parallel = "ddp" if kind == "DistributedDataParallel" else "fsdp"
    model, alone, sharing = _models(parallel, group)
    torch.manual_seed(3)
    head: nn.Module = nn.Linear(24, 1, dtype=torch.float64)
    other = copy.deepcopy(head)
    if kind == "DistributedDataParallel":
        head, sharing = DistributedDataParallel(head, process_group=group), {}
    else:
        fully_shard(head, mesh=DeviceMesh.from_group(group, "cpu"))
    rows = rows_of(4, "value")
    with PureFloat64():
        for trained, beside, own, options in ((model, head, rows[rank::2], sharing), (alone, other, rows, {})):
            engine = tt.TreeEngine(trained, value_head=beside, budget=9, **options)
            engine.forward_backward(own, LOSSES["value"])
            with torch.no_grad():
                tt.values(trained, [row.ids for row in own], head=beside)
                for p in engine.parameters:
                    if p.grad is not None:
                        p -= p.grad
                        p.grad = None
            engine.forward_backward(own, LOSSES["value"])
    found = {name.removeprefix("module."): grad for name, grad in gradients(head).items()}
    return max(relative_error(gradients(model), gradients(alone)), relative_error(found, gradients(other)))


def outputs_cast_by_fsdp(group: Any, family: str) -> tuple[float, float]:
    """The gradients' errors of a step with passes in bfloat16, with outputs left as they are and cast to that too."""
    rank, mesh = dist.get_rank(group), DeviceMesh.from_group(group, "cpu")
    rows, loss = rows_of(4, "sft"), tt.losses.sft()
    found = []
    for output in (None, torch.bfloat16):
        model = make_model(family)
        alone = copy.deepcopy(model)
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, output_dtype=output)
        for layer in model.base_model.layers:  # type: ignore[union-attr]
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        tt.TreeEngine(model, budget=7).forward_backward(rows[rank::2], loss)
        tt.TreeEngine(alone).forward_backward(rows, loss)
        found.append(relative_error(gradients(model), gradients(alone)))
    return found[0], found[1]


class _OtherNormaliser(OwnLoss):
    def __init__(self, rank: int):
        self._rank = rank

    def normaliser(self, rows: Any) -> float:
        return 1.0 + self._rank


def calls_that_differ(group: Any, parallel: str) -> dict[str, str]:
    """Return this rank's errors when calls differ in sync, in the loss's normaliser or in the router balance."""
    rank = dist.get_rank(group)
    model, _, sharing = _models(parallel, group)
    rows, loss = rows_of(4, "sft")[rank::2], tt.losses.sft()
    engine = tt.TreeEngine(model, **sharing)
    outcome = {
        "sync": error_of(lambda: engine.forward_backward(rows, loss, sync=rank == 0)),
        "normaliser": error_of(lambda: engine.forward_backward(rows, _OtherNormaliser(rank))),
    }
    changes = {"output_router_logits": True, "router_aux_loss_coef": 0.5}
    experts = make_model("qwen3_moe", **changes)
    balance = tt.TreeEngine(experts).router_balance(rows)
    if parallel == "fsdp":
        sharded(experts, group)
    balanced = tt.TreeEngine(experts, **sharing)
    outcome["balance"] = error_of(lambda: balanced.forward_backward(rows, loss, balance=balance))
    return outcome


def optimiser_in_backward(group: Any, parallel: str) -> str:
    """Return this rank's error when hooks of the weights make the update, or the distance to one process's weights."""
    model, alone, sharing = _models(parallel, group)

    def update(p: Any) -> None:
        with torch.no_grad():
            p -= 0.1 * p.grad
        p.grad = None

    for p in (*model.parameters(), *alone.parameters()):
        p.register_post_accumulate_grad_hook(update)
    rows, loss = rows_of(4, "sft"), tt.losses.sft()
    engine = tt.TreeEngine(model, budget=7, **sharing)
    with PureFloat64():
        outcome = error_of(lambda: engine.forward_backward(rows[dist.get_rank(group) :: 2], loss))
        tt.TreeEngine(alone).forward_backward(rows, loss)
    if parallel == "ddp":
        return outcome
    pairs = zip(model.parameters(), alone.parameters())
    far = max(float((own.full_tensor() - other).detach().abs().max()) for own, other in pairs)  # type: ignore[operator]
    return outcome if far <= 1e-12 else f"{far} away"


def groups_made(group: Any) -> int:
    """How many groups for CPU tensors several engines make beside one that has none of those."""
    made: list[int] = []
    new_group = dist.new_group

    def counted(*args: Any, **options: Any) -> Any:
        made.append(1)
        return new_group(*args, **options)

    outcome = patch.object(dist, "get_backend_config", lambda *_: "cuda:nccl")
    with outcome, patch.object(dist, "new_group", counted), patch.dict(ranks_module._MADE, clear=True):
        for _ in range(3):
            model = make_model("qwen3")
            tt.TreeEngine(model, group=group).forward_backward([[1, 2, 3]], tt.losses.sft())
    return len(made)


EXACT = 1e-12


@pytest.mark.few(1)
@pytest.mark.parametrize(("parallel", "reduce"), [("fsdp", "each"), ("fsdp", "last"), ("ddp", "each")])
def test_the_last_call_of_a_step_reduces_what_earlier_ones_left_also_without_rows(run_on_ranks, parallel, reduce):
    for error in run_on_ranks(last_call_without_rows, parallel, reduce):
        assert error <= EXACT


def test_gradients_of_a_call_that_failed_before_they_were_reduced_do_not_enter_the_next_step(run_on_ranks) -> None:
    for calls in (0, 1):
        for outcome, error in run_on_ranks(failing_before_gradients_are_reduced, calls):
            assert "Oops: in row 2" in outcome and error <= EXACT
            assert ("gradients of earlier calls waited to be reduced" in outcome) == (calls == 1)


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_a_rank_that_cannot_score_its_rows_for_a_comparison_stops_all(run_on_ranks, parallel) -> None:
    (first, after), (second, again) = run_on_ranks(comparing_rows_while_one_fails, parallel)
    what = "forward_backward" if parallel == "ddp" else "the passes"
    assert first.startswith(f"RanksDisagree: {what} stopped on all ranks, because of rank 1 of 2: Oops")
    assert second.startswith("Oops: while scoring")
    assert max(after, again) <= EXACT


def test_a_rank_may_start_over_after_rows_were_compared(run_on_ranks) -> None:
    for error in run_on_ranks(comparing_rows_while_one_starts_over):
        assert error <= EXACT


def test_losses_of_ones_own_must_be_the_same_on_all_ranks(run_on_ranks) -> None:
    for function, needs in run_on_ranks(different_losses_of_ones_own):
        assert "the ranks differ in loss" in function and "_one" in function and "_two" in function
        assert "the ranks differ in what the loss needs" in needs and "'entropies'" in needs


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["DistributedDataParallel", "shards"])
def test_a_value_head_may_be_wrapped_as_the_model_is(run_on_ranks, kind) -> None:
    for error in run_on_ranks(value_head_in_other_hands, kind):
        assert error <= EXACT


@pytest.mark.few(1)
@pytest.mark.parametrize("family", ["gemma2", "qwen3"])
def test_fsdp_may_cast_the_outputs_of_the_model(run_on_ranks, family) -> None:
    for left, cast in run_on_ranks(outputs_cast_by_fsdp, family):
        assert left == cast < 0.05


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_calls_that_differ_in_what_is_known_late_stop_on_all_ranks(run_on_ranks, parallel) -> None:
    for outcome in run_on_ranks(calls_that_differ, parallel):
        assert "the ranks differ in sync: rank 0 has True, rank 1 False" in outcome["sync"]
        assert "the normaliser that the loss gives: rank 0 has 1.0, rank 1 2.0" in outcome["normaliser"]
        assert "the ranks differ in the balance of the routers" in outcome["balance"]


def test_hooks_that_update_weights_see_the_gradients_of_all_ranks_or_are_refused(run_on_ranks) -> None:
    for outcome in run_on_ranks(optimiser_in_backward, "ddp"):
        assert outcome.startswith("UnsupportedModel: weights that every rank holds as a whole have hooks")
    assert run_on_ranks(optimiser_in_backward, "fsdp") == ["no error"] * 2


def test_engines_on_one_group_talk_over_one_group(run_on_ranks) -> None:
    assert run_on_ranks(groups_made) == [1, 1]
