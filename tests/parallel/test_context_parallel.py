"""Ranks that divide the tokens of every part take the step of one process, whatever the parts are."""

import dataclasses

import pytest
import torch
import torch.distributed as dist
from rank_steps import KEYS, Job, check, rows_of, scored_step

import treetrain as tt
from support.models import make_model


@pytest.mark.few(1)
@pytest.mark.parametrize("shape", ["1 part", "one segment per part", "chunks of 2", "shared prefill"])
@pytest.mark.parametrize("keep", ["none", "all", "mixed"])
@pytest.mark.parametrize("loss", ["ppo entropy", "gspo", "dpo", "own contrast"])
def test_a_step_under_any_plan(run_on_ranks, shape, keep, loss):
    check(run_on_ranks, Job("context", loss, changes=KEYS, shapes=((shape, keep),) * 2))


SMALL_PARTS = (("chunks of 2", "mixed"),) * 2


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("family", "changes"),
    [
        pytest.param("gemma2", (), marks=pytest.mark.slow),  # windows, capped scores and logits
        ("gpt_oss", ()),  # sinks, windows, experts
        pytest.param("qwen3_moe", (), marks=pytest.mark.slow),
        ("qwen3_5_deep", ()),  # recurrent layers above and below attention
        pytest.param("bamba_deep", (), marks=pytest.mark.slow),
        pytest.param("falcon_h1", (), marks=pytest.mark.slow),
        pytest.param("qwen3_next", (), marks=pytest.mark.slow),
        pytest.param("olmo_hybrid", (), marks=pytest.mark.slow),
        pytest.param("lfm2", (), marks=pytest.mark.slow),  # convolutions with a bias
        pytest.param("llama", (("tie_word_embeddings", True),), marks=pytest.mark.slow),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_kinds_of_layers(run_on_ranks, family, changes):
    check(run_on_ranks, Job("context", "ppo entropy", family=family, changes=KEYS + changes, shapes=SMALL_PARTS))


AUXILIARY = (("output_router_logits", True), ("router_aux_loss_coef", 0.7))


@pytest.mark.slow
def test_the_routers_auxiliary_loss_and_recorded_experts(run_on_ranks):
    job = Job("context", "ppo entropy", family="qwen3_moe", changes=KEYS + AUXILIARY)
    for shape in ("1 part", "chunks of 7", "shared prefill"):
        check(run_on_ranks, dataclasses.replace(job, shapes=((shape, "mixed"),) * 2, checkpointing=shape == "1 part"))
    check(run_on_ranks, dataclasses.replace(job, changes=KEYS, recorded=True, budget=4))
    check(run_on_ranks, dataclasses.replace(job, recorded=True, beside="shards", budget=4), size=4)
    for beside in ("shards", "ddp"):  # one context group has no rows
        check(run_on_ranks, dataclasses.replace(job, beside=beside, budget=4, split="first has all"), size=4)


@pytest.mark.slow
def test_values_checkpointed_layers_and_several_calls(run_on_ranks):
    check(run_on_ranks, Job("context", "value", changes=KEYS, value_head=True, budget=4))
    check(run_on_ranks, Job("context", "ppo entropy", changes=KEYS, checkpointing=True, budget=4))
    check(run_on_ranks, Job("context", "sft", changes=KEYS, calls=3, budget=4))
    check(run_on_ranks, Job("context", "grpo", changes=KEYS, dtype=torch.float32, budget=4))
    check(run_on_ranks, Job("context", "grpo", changes=KEYS, lora=True, budget=4))


BESIDE = {
    "shards": Job(shapes=(("chunks of 7", "mixed"), ("chunks of 2", "none"))),
    "hybrid": Job(
        loss="gspo",
        shapes=(("1 part", "all"), ("chunks of 7", "none")),
        split="halves",
        family="qwen3_5_deep",
        lora=True,
    ),
    "group": Job(loss="dpo", budget=3),
    "ddp": Job(loss="ppo entropy", budget=3, family="qwen3_5_deep"),
}


@pytest.mark.parametrize(
    "beside", [pytest.param(each, marks=[pytest.mark.slow] * (each != "hybrid")) for each in BESIDE]
)
def test_on_a_mesh_of_data_and_context(run_on_ranks, beside):
    job = dataclasses.replace(BESIDE[beside], parallel="context", beside=beside, changes=KEYS)
    check(run_on_ranks, job, size=4)
    if beside in ("shards", "group"):
        check(run_on_ranks, dataclasses.replace(job, loss="sft", calls=3, split="first has all"), size=4)


@pytest.mark.slow
def test_four_ranks(run_on_ranks):
    four = (("num_key_value_heads", 4),)
    check(run_on_ranks, Job("context", "ppo entropy", changes=four, budget=3), size=4)
    # Parts of fewer tokens than ranks: some have nothing to score.
    small = (("chunks of 2", "mixed"),) * 4
    check(run_on_ranks, Job("context", "value", changes=four, value_head=True, shapes=small), size=4)


heads_that_ranks_do_not_divide = pytest.mark.parametrize(
    ("family", "changes", "size"),
    [
        ("qwen3", (("num_attention_heads", 6), ("num_key_value_heads", 3)), 2),
        pytest.param("qwen3", KEYS, 4, marks=pytest.mark.slow),
        pytest.param("qwen3", (("num_key_value_heads", 1),), 4, marks=pytest.mark.slow),
        pytest.param(  # copies of 2 heads on each rank
            "qwen3", (("num_attention_heads", 6), ("num_key_value_heads", 2)), 3, marks=pytest.mark.slow
        ),
        pytest.param("gpt_oss", KEYS, 4, marks=pytest.mark.slow),  # sinks, windows, experts
    ],
)
WAYS = [{"dtype": torch.float32, "lora": True}, {"budget": 4}, {"shapes": (("chunks of 7", "mixed"),) * 4}]


@pytest.mark.few(2)
@pytest.mark.parametrize("way", WAYS, ids=str)
@heads_that_ranks_do_not_divide
def test_heads_of_keys_and_values_are_repeated_for_ranks_that_do_not_divide_them(
    run_on_ranks, family, changes, size, way
):
    check(run_on_ranks, Job("context", "ppo entropy", family=family, changes=changes, **way), size=size)


@pytest.mark.few(1)
@pytest.mark.parametrize("keeps", ["kept", "recomputed"])
@heads_that_ranks_do_not_divide
def test_repeated_heads_are_scored_now_and_run_backward_later(run_on_ranks, family, changes, size, keeps):
    plans = (("chunks of 2", "mixed"),) * size
    for outcome in run_on_ranks(scored_step, "context", plans, (keeps,), 2, "round", (family, changes), size=size):
        assert outcome["error"] <= 1e-12, outcome


@pytest.mark.slow
@pytest.mark.parametrize("keeps", ["partly", "kept", "recomputed"])
def test_score_now_and_backward_later(run_on_ranks, keeps):
    plans = (("chunks of 7", "mixed"),) * 2
    for outcome in run_on_ranks(scored_step, "context", plans, (keeps,), 2, "round", ("qwen3", KEYS)):
        assert outcome["error"] <= 1e-12, outcome
    plans = (("chunks of 7", "mixed"), ("chunks of 2", "none"))
    for outcome in run_on_ranks(scored_step, "mesh", plans, (keeps, "kept"), 2, "round", ("qwen3", KEYS), size=4):
        assert outcome["error"] <= 1e-12, outcome


def _budget(group) -> tuple[int, int]:
    engine = tt.TreeEngine(make_model("qwen3", num_key_value_heads=2), budget=5, context=group)
    return engine.plan(rows_of(0, "sft")).peak_tokens, tt.TreeEngine(
        make_model("qwen3", num_key_value_heads=2), budget=10
    ).plan(rows_of(0, "sft")).peak_tokens


def test_a_budget_is_that_of_each_rank(run_on_ranks):
    for together, alone in run_on_ranks(_budget):
        assert together == alone


def _refused(group, family: str, changes: dict, sharing: str = "") -> str:
    others = {"group": dist.new_group([dist.get_rank()], use_local_synchronization=True)} if sharing else {}
    try:
        tt.TreeEngine(make_model(family, **changes), context=group, **others)
    except tt.UnsupportedModel as error:
        return str(error)
    return "nothing"


def test_what_cannot_be_divided_is_refused_by_name_before_any_work(run_on_ranks):
    for outcome in run_on_ranks(_refused, "qwen3", {"num_attention_heads": 3, "num_key_value_heads": 3}):
        assert "it has 3 heads, which 2 ranks cannot share evenly; groups of 1, 3 can: pass one" in outcome
    for outcome in run_on_ranks(_refused, "qwen3", {"num_attention_heads": 2, "num_key_value_heads": 1}, size=4):
        assert "it has 2 heads, which 4 ranks cannot share evenly; groups of 1, 2 can: pass one" in outcome
    heads = {"linear_num_key_heads": 1, "linear_num_value_heads": 2}
    for outcome in run_on_ranks(_refused, "qwen3_5_text", {"num_key_value_heads": 2, **heads}):
        assert "1 key heads of recurrent layers, which 2 ranks cannot share evenly; groups of 1 can" in outcome
    for outcome in run_on_ranks(_refused, "bamba", {"num_key_value_heads": 2, "mamba_n_groups": 1}):
        assert "1 groups of heads of recurrent layers, which 2 ranks cannot share evenly" in outcome
    for outcome in run_on_ranks(_refused, "qwen3", {"num_key_value_heads": 2}, "half of them"):
        assert "do not divide among them: every process of a context group must be in group=" in outcome


def _trapped(group, trap: str) -> str:
    engine = tt.TreeEngine(make_model("qwen3", num_key_value_heads=2), context=group, budget=4)
    rows = rows_of(0, "sft")
    if dist.get_rank(group) == 1:
        traps = {"other rows": rows[:-1], "bad row": [*rows, tt.Trajectory([1, 10_000])]}
        rows = traps.get(trap) or [row.replace(advantages=None) for row in rows]
    try:
        engine.forward_backward(rows, tt.losses.grpo())
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def test_an_error_on_one_rank_ends_all_of_them_with_its_message(run_on_ranks):
    first, second = run_on_ranks(_trapped, "bad row")
    assert first.startswith("RanksDisagree") and "rank 1" in first and "10000" in first
    assert "10000" in second
    for outcome in run_on_ranks(_trapped, "other rows"):
        assert outcome.startswith("RanksDisagree: the ranks differ in their rows"), outcome
    first, second = run_on_ranks(_trapped, "no advantages")
    assert first.startswith("RanksDisagree: forward_backward stopped on all ranks, because of rank 1")
    assert second.startswith("DataError") and "advantages" in second
