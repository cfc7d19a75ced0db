"""Tensor parallel models are refused by name: a rank holds a part of every layer."""

import pytest

import treetrain as tt
from support.models import make_model
from support.tensor_parallel import refusals
from treetrain.errors import UnsupportedModel

pytest.importorskip("transformers.distributed.tensor_parallel", reason="this transformers cuts models in another way")


def test_a_model_loaded_by_its_tp_plan_is_refused_on_every_rank(run_on_ranks, tmp_path) -> None:
    make_model("qwen3", vocab_size=40, num_attention_heads=4, num_key_value_heads=4).save_pretrained(tmp_path)
    for said in run_on_ranks(refusals, str(tmp_path), 4, size=4):
        assert said.keys() == {"engine", "logprobs", "verify"}
        for message in said.values():
            assert "Qwen3ForCausalLM is tensor parallel over 4 ranks (transformers' tp_plan)" in message
            assert "fully_shard" in message


def test_one_whose_weights_are_plain_tensors_is_refused_too() -> None:
    model = make_model("qwen3")
    model._tp_size = 2  # type: ignore[assignment]
    with pytest.raises(UnsupportedModel, match="tensor parallel over 2 ranks"):
        tt.TreeEngine(model)
    model._tp_size = 1  # type: ignore[assignment]
    tt.TreeEngine(model)
