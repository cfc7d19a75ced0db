"""Ranks that transformers divides a model over by its `tp_plan` take the step of one process."""

import dataclasses

import pytest
import torch

import treetrain as tt
from support import tensor_parallel
from support.models import make_model
from support.pairwise import pairwise
from support.rank_work import KEYS, Job, check
from support.score_work import scored_step

AUXILIARY = (("output_router_logits", True), ("router_aux_loss_coef", 0.7))
WHOLE = {f"model.layers.*.self_attn.{name}": "replicate" for name in ("q_norm", "k_norm", "o_proj")} | {
    f"model.layers.*.self_attn.{name}_proj": "replicate" for name in "qkv"
}
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
        ("glm4_moe", ()),  # its plan leaves the norms of queries and keys out
        ("qwen3_5_text", ()),  # recurrent layers
        ("llama", (("tie_word_embeddings", True),)),
        ("qwen3", (("vocab_size", 41),)),  # the last rank has a token less
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_kinds_of_layers_and_heads(run_on_ranks, family, changes):
    check(run_on_ranks, Job("tensor", "ppo entropy", family=family, changes=KEYS + changes, budget=4))


@pytest.mark.parametrize(
    ("family", "changes", "divided"),
    [
        ("qwen3_moe", AUXILIARY, ()),
        ("qwen3_moe", AUXILIARY, (("ep_implementation", "all_reduce"),)),
        ("qwen3_moe", (), (("tp_plan", WHOLE),)),  # only the experts are divided, and embedding and head
        ("mixtral", (), ()),
        ("gpt_oss", (), (("ep_implementation", "all_to_all"),)),
        ("qwen3_next", (), ()),  # recurrent layers, shared experts
        ("deepseek_v3", (("num_key_value_heads", 4),), ()),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_experts_divided_over_ranks(run_on_ranks, family, changes, divided):
    check(run_on_ranks, Job("expert", "ppo entropy", family=family, changes=KEYS + changes, divided=divided, budget=4))


def test_divided_experts_with_values_checkpointed_layers_and_several_calls(run_on_ranks):
    job = Job("expert", "sft", family="qwen3_moe", changes=KEYS, budget=4)
    check(run_on_ranks, dataclasses.replace(job, loss="value", value_head=True, checkpointing=True))
    check(run_on_ranks, dataclasses.replace(job, calls=3, dtype=torch.float32))
    for told in run_on_ranks(
        scored_step, "expert", (("chunks of 7", "mixed"),) * 2, (False,), 2, "round", ("qwen3_moe", KEYS)
    ):
        assert told["error"] <= 1e-12, told


@pytest.mark.parametrize("tokens", [1, 2])
def test_an_expert_or_a_rank_without_tokens(run_on_ranks, tokens):
    for told in run_on_ranks(tensor_parallel.few_tokens, tokens):
        assert told <= 1e-12


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
        assert wrong > 0.1, (
            "transformers accumulates them rightly now: `tensor_parallel_mode` may not be needed any more"
        )
        # A plain backward after ours multiplies what it finds in the same way: out of our hands.
        told.pop("tree, plain")
        assert max(told.values()) <= 1e-12, told


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_lora_on_column_and_row_wise_layers_and_recorded_experts(run_on_ranks, family):
    pytest.importorskip("peft")
    assert max(run_on_ranks(tensor_parallel.adapted, family)) <= 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "gpt_oss"])
def test_a_model_that_from_pretrained_divides_over_four_ranks(run_on_ranks, tmp_path, family):
    make_model(family, vocab_size=40, num_attention_heads=4, num_key_value_heads=4).save_pretrained(tmp_path / family)
    for told in run_on_ranks(tensor_parallel.loaded, str(tmp_path / family), size=4):
        assert told["gradients"] <= 1e-5 and told["verified"], told
        assert told["peaks"][0] == told["peaks"][1], told


def test_what_cannot_be_exact_is_refused_by_name_before_any_work(run_on_ranks):
    for case, size, words in (
        ("heads", 2, "3 heads, 3 heads of keys and values and a vocabulary of 37, which 2 tensor-parallel ranks"),
        ("heads", 2, "tp_size=1 or 3 can"),
        ("vocabulary", 4, "a vocabulary of 5, which 4 tensor-parallel ranks cannot share; tp_size=1 or 2 can"),
        ("style", 2, "divides model.norm by the style 'sequence_parallel'"),
        ("group", 2, "data parallel (group="),
        ("context", 2, "context parallel (context=)"),
        ("compiled", 2, "compile_layers=True"),
        ("LoRA of the head", 2, "lm_head has 37 outputs, its adapter"),
        ("LoRA of experts", 2, "adapts gate_up_proj, which is divided over the ranks"),
        ("expert style", 2, "the ep_plan of Qwen3MoeForCausalLM divides"),
        ("kernel", 2, "ep_implementation='deepgemm_megamoe'"),
        ("eager gpt-oss", 2, "take experts_implementation='grouped_mm'"),
        ("expert ranks of their own", 2, "tp_size=1, ep_size=2, pp_size=1, fsdp_size=2"),
        ("other heads", 2, "holds model.layers.0.self_attn.q_layernorm.weight whole, but the sizes of its gradient"),
        ("other seeds", 2, "make new weights, such as an adapter's, from the same seed on every rank"),
    ):
        for told in run_on_ranks(tensor_parallel.refused, case, size=size):
            assert words in told, (case, told)
    model = make_model("qwen3")
    model._tp_size = 2  # type: ignore[assignment]
    with pytest.raises(tt.UnsupportedModel, match="its weights lie on those of none"):
        tt.TreeEngine(model)


def test_an_error_on_one_rank_ends_all_of_them_with_its_message(run_on_ranks):
    for trap, words in (("bad row", "10000"), ("other rows", "rows")):
        for rank, told in enumerate(run_on_ranks(tensor_parallel.trapped, trap)):
            assert words in told and (told.startswith("RanksDisagree") or rank == 1), (trap, rank, told)
