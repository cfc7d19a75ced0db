"""A step over several ranks is the step of one process on all rows, whatever each rank has to do."""

import dataclasses

import numpy as np
import pytest
import torch
from rank_steps import KEYS, Job, bfloat16_errors, check

from support.cases import EVERY


@pytest.mark.few(1)
@pytest.mark.parametrize("split", ["round", "halves", "first has all", "last has all"])
@pytest.mark.parametrize("parallel", ["fsdp", "ddp"])
@pytest.mark.parametrize("size", [2, 4])
def test_rows_may_be_split_in_any_way(run_on_ranks, parallel, split, size) -> None:
    check(run_on_ranks, Job(parallel, "ppo entropy", split=split), size=size)


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["fsdp", "ddp"])
def test_one_rank_is_a_process_alone(run_on_ranks, parallel) -> None:
    for loss in ("sft", "ppo entropy", "dpo"):
        check(run_on_ranks, Job(parallel, loss, budget=9), size=1)


MIXED_PLANS = {
    "kept beside recomputed": (("one segment per part", "all"), ("one segment per part", "none")),
    "whole beside chunks": (("1 part", "none"), ("chunks of 2", "mixed")),
    "shared prefill beside quarters": (("shared prefill", "mixed"), ("N/4", "all")),
    "small chunks": (("chunks of 2", "none"), ("chunks of 2", "all")),
}


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("plans", "reduce", "loss"),
    [
        pytest.param(plans, reduce, loss, marks=() if number % 2 == (reduce == "each") == seed else pytest.mark.slow)
        for number, plans in enumerate(MIXED_PLANS)
        for reduce in ("each", "last")
        for seed, loss in enumerate(("ppo entropy", "sft"))
    ],
)
def test_ranks_may_have_plans_of_different_shapes(run_on_ranks, plans, reduce, loss) -> None:
    check(run_on_ranks, Job("fsdp", loss, shapes=MIXED_PLANS[plans], reduce=reduce, seed=int(loss == "sft")))


@pytest.mark.slow
def test_four_ranks_keep_and_recompute_in_one_step(run_on_ranks) -> None:
    shapes = (("chunks of 7", "none"), ("one segment per part", "all"), ("1 part", "all"), ("chunks of 2", "mixed"))
    for split in ("round", "first has all"):
        check(run_on_ranks, Job("fsdp", "grpo", shapes=shapes, split=split), size=4)


@pytest.mark.few(1)
@pytest.mark.parametrize("loss", ["sft per trajectory", "gspo", "dpo", "own", "own contrast"])
@pytest.mark.parametrize("parallel", ["fsdp", "ddp"])
def test_losses_over_several_rows_see_those_of_all_ranks(run_on_ranks, loss, parallel) -> None:
    check(run_on_ranks, Job(parallel, loss, budget=9))


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["fsdp", "ddp"])
@pytest.mark.parametrize("loss", EVERY)
def test_every_loss_of_the_library(run_on_ranks, loss, parallel) -> None:
    for seed, split in ((2, "round"), (3, "first has all")):
        check(run_on_ranks, Job(parallel, loss, budget=9, seed=seed, split=split))


@pytest.mark.few(4)
@pytest.mark.parametrize("parallel", ["ddp", "fsdp", "context", "tensor"])
@pytest.mark.parametrize("loss", ["masked ppo", "masked dpo", "masked own", "topk"])
def test_ranks_with_sets_of_ids_at_each_token_train_as_one_process(run_on_ranks, loss, parallel, record_property):
    found = check(run_on_ranks, Job(parallel, loss, changes=KEYS, budget=9))
    record_property("errors", {"float64": max(seen["gradients"] for seen in found)})


@pytest.mark.few(1)
@pytest.mark.parametrize("parallel", ["fsdp", "ddp"])
def test_a_step_may_take_several_calls(run_on_ranks, parallel) -> None:
    for reduce in ("each", "last"):
        check(run_on_ranks, Job(parallel, "sft", calls=3, budget=9, reduce=reduce))


@pytest.mark.few(1)
@pytest.mark.parametrize("parallel", ["fsdp", "ddp"])
def test_a_step_in_float32(run_on_ranks, parallel) -> None:
    check(run_on_ranks, Job(parallel, "grpo", dtype=torch.float32, budget=12))


SHAPES_OF_MODELS = {
    "a value head beside the model": Job(family="qwen3", loss="value", value_head=True),
    "tied head": Job(family="qwen3", changes=(("tie_word_embeddings", True),)),
    "a head of its own shard": Job(family="qwen3", head_shard=True, changes=(("tie_word_embeddings", False),)),
    "activation checkpointing": Job(family="qwen3", checkpointing=True),
    "capped logits and windows": Job(family="gemma3_text"),
    "gated DeltaNet": Job(family="qwen3_5_text"),
    "experts": Job(family="qwen3_moe"),
    "experts with the auxiliary loss": Job(
        family="qwen3_moe", changes=(("output_router_logits", True), ("router_aux_loss_coef", 0.7))
    ),
}


@pytest.mark.few(2)
@pytest.mark.parametrize("kind", SHAPES_OF_MODELS)
@pytest.mark.parametrize(
    "way", [("fsdp", "halves"), ("ddp", "halves"), ("fsdp", "first has all"), ("ddp", "first has all")]
)
def test_kinds_of_models(run_on_ranks, kind, way) -> None:
    parallel, split = way
    check(run_on_ranks, dataclasses.replace(SHAPES_OF_MODELS[kind], parallel=parallel, budget=9, split=split))


@pytest.mark.slow
@pytest.mark.parametrize(
    "parallel",
    ["ddp", "fsdp", "context"],
)
def test_in_bfloat16_the_error_is_that_of_rows_alone(run_on_ranks, parallel) -> None:
    for shape in ("1 part", "chunks of 2"):
        errors = np.array(run_on_ranks(bfloat16_errors, parallel, 3, shape)[0])
        pooled = np.sqrt((errors**2).mean(0))
        assert pooled[0] <= 1.5 * pooled[1], (shape, pooled)
