"""Ranks that divide the tokens of every part take the step of one process, whatever the parts are."""

import pytest
import torch
import torch.distributed as dist

import treetrain as tt
from support.models import make_model
from support.pairwise import pairwise
from support.rank_work import KEYS, Job, check, rows_of
from support.score_work import scored_step


@pairwise(
    shape=["1 part", "one segment per part", "chunks of 2", "chunks of 7", "shared prefill"],
    keep=["none", "all", "mixed"],
    loss=["sft", "ppo entropy", "gspo", "dpo", "own contrast"],
)
def test_a_step_under_any_plan(run_on_ranks, shape, keep, loss):
    check(run_on_ranks, Job("context", loss, changes=KEYS, shapes=((shape, keep),) * 2))


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("gemma2", ()),  # windows, capped scores and logits
        ("gpt_oss", ()),  # sinks, windows, experts
        ("qwen3_moe", ()),
        ("llama", (("tie_word_embeddings", True),)),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_kinds_of_layers(run_on_ranks, family, changes):
    check(run_on_ranks, Job("context", "ppo entropy", family=family, changes=KEYS + changes, budget=4))


def test_values_checkpointed_layers_and_several_calls(run_on_ranks):
    check(run_on_ranks, Job("context", "value", changes=KEYS, value_head=True, budget=4))
    check(run_on_ranks, Job("context", "ppo entropy", changes=KEYS, checkpointing=True, budget=4))
    check(run_on_ranks, Job("context", "sft", changes=KEYS, calls=3, budget=4))
    check(run_on_ranks, Job("context", "grpo", changes=KEYS, dtype=torch.float32, budget=4))


def test_four_ranks(run_on_ranks):
    check(run_on_ranks, Job("context", "ppo entropy", changes=(("num_key_value_heads", 4),), budget=3), size=4)


@pytest.mark.parametrize("keeps", [True, False], ids=["kept", "recomputed"])
def test_score_now_and_backward_later(run_on_ranks, keeps):
    plans = (("chunks of 7", "mixed"),) * 2
    for told in run_on_ranks(scored_step, "context", plans, (keeps,), 2, "round", ("qwen3", KEYS)):
        assert told["error"] <= 1e-12, told


def _budget(group) -> tuple[int, int]:
    engine = tt.TreeEngine(make_model("qwen3", num_key_value_heads=2), budget=5, context=group)
    return engine.plan(rows_of(0, "sft")).peak_tokens, tt.TreeEngine(
        make_model("qwen3", num_key_value_heads=2), budget=10
    ).plan(rows_of(0, "sft")).peak_tokens


def test_a_budget_is_that_of_each_rank(run_on_ranks):
    for together, alone in run_on_ranks(_budget):
        assert together == alone


def _refused(group, family: str, changes: dict) -> str:
    try:
        tt.TreeEngine(make_model(family, **changes), context=group)
    except tt.UnsupportedModel as error:
        return str(error)
    return "nothing"


def test_what_cannot_be_divided_is_refused_by_name_before_any_work(run_on_ranks):
    for told in run_on_ranks(_refused, "qwen3", {"num_attention_heads": 3, "num_key_value_heads": 3}):
        assert "3 heads of keys and values" in told and "groups of 1, 3 can" in told
    for told in run_on_ranks(_refused, "qwen3_5_text", {"num_key_value_heads": 2}):
        assert "recurrent layers" in told
    for told in run_on_ranks(_refused, "qwen3_moe", {"output_router_logits": True, "num_key_value_heads": 2}):
        assert "auxiliary loss" in told


def _trapped(group, trap: str) -> str:
    engine = tt.TreeEngine(make_model("qwen3", num_key_value_heads=2), context=group, budget=4)
    rows = rows_of(0, "sft")
    if dist.get_rank(group) == 1:
        rows = rows[:-1] if trap == "other rows" else [*rows, tt.Trajectory([1, 10_000])]
    try:
        engine.forward_backward(rows, tt.losses.sft())
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def test_an_error_on_one_rank_ends_all_of_them_with_its_message(run_on_ranks):
    first, second = run_on_ranks(_trapped, "bad row")
    assert first.startswith("RanksDisagree") and "rank 1" in first and "10000" in first
    assert "10000" in second
    for told in run_on_ranks(_trapped, "other rows"):
        assert told.startswith("RanksDisagree") and "rows" in told
