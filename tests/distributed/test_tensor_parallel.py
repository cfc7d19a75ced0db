"""Ranks that transformers divides a model over by its `tp_plan` take the step of one process."""

import pytest
import torch

import treetrain as tt
from support import tensor_parallel
from support.models import make_model
from support.pairwise import pairwise
from support.rank_work import KEYS, Job, check
from support.score_work import scored_step

pytest.importorskip("transformers.distributed.tensor_parallel", reason="this transformers cuts models in another way")


@pairwise(
    shape=["1 part", "one segment per part", "chunks of 7", "shared prefill"],
    keep=["none", "all", "mixed"],
    loss=["sft", "ppo entropy", "gspo", "dpo"],
)
def test_a_step_under_any_plan(run_on_ranks, shape, keep, loss):
    check(run_on_ranks, Job("tensor", loss, changes=KEYS, shapes=((shape, keep),) * 2))


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("gemma2", ()),  # windows, capped scores and logits
        ("gpt_oss", ()),  # sinks, windows, experts
        ("qwen3_moe", (("output_router_logits", True),)),
        ("qwen3_5_text", ()),  # recurrent layers
        ("llama", (("tie_word_embeddings", True),)),
        ("qwen3", (("vocab_size", 41),)),  # the last rank has a token less
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_kinds_of_layers_and_heads(run_on_ranks, family, changes):
    check(run_on_ranks, Job("tensor", "ppo entropy", family=family, changes=KEYS + changes, budget=4))


def test_values_checkpointed_layers_and_several_calls(run_on_ranks):
    check(run_on_ranks, Job("tensor", "value", changes=KEYS, value_head=True, budget=4))
    check(run_on_ranks, Job("tensor", "ppo entropy", changes=KEYS, checkpointing=True, budget=4))
    check(run_on_ranks, Job("tensor", "sft", changes=KEYS, calls=3, budget=4))
    check(run_on_ranks, Job("tensor", "grpo", changes=KEYS, dtype=torch.float32, budget=4))


@pytest.mark.parametrize("keeps", [True, False], ids=["kept", "recomputed"])
def test_score_now_and_backward_later(run_on_ranks, keeps):
    plans = (("chunks of 7", "mixed"),) * 2
    for told in run_on_ranks(scored_step, "tensor", plans, (keeps,), 2, "round", ("qwen3", KEYS)):
        assert told["error"] <= 1e-12, told


def test_log_probabilities_within_autograd_and_statistics(run_on_ranks):
    assert max(run_on_ranks(tensor_parallel.live)) <= 1e-12


def test_gradients_of_norms_accumulate_over_calls_where_plain_transformers_counts_the_first_twice(run_on_ranks):
    for told in run_on_ranks(tensor_parallel.accumulated):
        wrong = told.pop("plain, plain")
        assert wrong > 0.1, "transformers accumulates them rightly now: `summed_gradients` may not be needed any more"
        # A plain backward after ours multiplies what it finds in the same way: out of our hands.
        told.pop("tree, plain")
        assert max(told.values()) <= 1e-12, told


def test_lora(run_on_ranks):
    pytest.importorskip("peft")
    assert max(run_on_ranks(tensor_parallel.adapted)) <= 1e-12


@pytest.mark.slow
def test_a_model_that_from_pretrained_divides_over_four_ranks(run_on_ranks, tmp_path):
    make_model("qwen3", vocab_size=40, num_attention_heads=4, num_key_value_heads=4).save_pretrained(tmp_path)
    for told in run_on_ranks(tensor_parallel.loaded, str(tmp_path), size=4):
        assert told["gradients"] <= 1e-5 and told["verified"], told


def test_what_cannot_be_exact_is_refused_by_name_before_any_work(run_on_ranks):
    for case, size, words in (
        ("heads", 2, "3 heads, 3 heads of keys and values and a vocabulary of 37, which 2 tensor-parallel ranks"),
        ("heads", 2, "tp_size=1 or 3 can"),
        ("vocabulary", 4, "a vocabulary of 5, which 4 tensor-parallel ranks cannot share; tp_size=1 or 2 can"),
        ("style", 2, "divides model.norm by the style 'sequence_parallel'"),
        ("group", 2, "data parallel (group="),
        ("context", 2, "context parallel (context=)"),
        ("compiled", 2, "compile_layers=True"),
        ("rowwise LoRA", 2, "has in_features=16, one rank's share of its weight's 32 columns"),
        ("other seeds", 2, "make new weights, such as an adapter's, from the same seed on every rank"),
    ):
        for told in run_on_ranks(tensor_parallel.refused, case, size=size):
            assert words in told, (case, told)
    model = make_model("qwen3")
    model._tp_size = 2  # type: ignore[assignment]
    with pytest.raises(tt.UnsupportedModel, match="lie on 0 device meshes"):
        tt.TreeEngine(model)


def test_an_error_on_one_rank_ends_all_of_them_with_its_message(run_on_ranks):
    for trap, words in (("bad row", "10000"), ("other rows", "rows")):
        for rank, told in enumerate(run_on_ranks(tensor_parallel.trapped, trap)):
            assert words in told and (told.startswith("RanksDisagree") or rank == 1), (trap, rank, told)
