"""The numerics contract of the engine: gradients of tree and rows, in float64, float32 and bfloat16."""

import pytest
import torch

import treetrain as tt
from support.cases import OTHERS
from support.models import DENSE, like_real_weights, make_model
from treetrain.check.contract import PPO, SFT, PureFloat64, RoundsToFloat32, check_contract
from treetrain.check.linear_engine import LinearEngine


@pytest.mark.parametrize(
    ("family", "forests"),
    [
        ("qwen3", 6),
        *(pytest.param(name, 85, marks=pytest.mark.slow) for name in ("qwen3", "llama", "mistral", "qwen2")),
    ],
)
def test_gradients_of_sft_and_ppo_are_those_of_the_rows(family, forests, record_property):
    worst = check_contract(make_model(family), [SFT, PPO], forests)
    record_property("errors", worst)
    assert worst["distinct forests"] >= 0.55 * forests


FAST = ("gpt_neox",)


@pytest.mark.parametrize(
    "family",
    [f if f in FAST else pytest.param(f, marks=pytest.mark.slow) for f in DENSE if f != "qwen3"],
)
def test_gradients_hold_for_every_family_of_plain_attention(family, record_property):
    record_property("errors", check_contract(make_model(family), [PPO], 3))


@pytest.mark.parametrize(
    ("family", "vocabulary"),
    [("qwen3", 50_000), *(pytest.param(f, 151_936, marks=pytest.mark.slow) for f in ("qwen3", "llama", "qwen2"))],
)
def test_massive_activations_and_peaked_outputs_over_large_vocabularies_are_exact(family, vocabulary, record_property):
    model = like_real_weights(make_model(family, vocab_size=vocabulary, tie_word_embeddings=False))
    record_property("errors", check_contract(model, [SFT], 2))


@pytest.mark.few(2)
@pytest.mark.parametrize("name", OTHERS)
def test_gradients_of_every_other_loss_are_those_of_the_rows(name, record_property):
    worst = check_contract(make_model("qwen3"), [OTHERS[name]], 3)
    record_property("errors", worst)
    assert worst["distinct forests"] >= 2


@pytest.mark.slow
@pytest.mark.parametrize("case", [SFT, PPO], ids=["sft", "ppo"])
def test_the_linear_engine_meets_the_contract_too(case):
    check_contract(make_model("qwen2"), [case], 4, engines=(LinearEngine,))


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma"])
def test_pure_float64_rounds_nothing_of_ours_or_the_model_to_float32(family):
    rows = [tt.Trajectory([1, 2, 3, 4]), tt.Trajectory([1, 2, 5, 6, 7])]
    model = make_model(family, dtype=torch.float64)
    watch = RoundsToFloat32()
    with PureFloat64(), watch:
        tt.TreeEngine(model).forward_backward(rows, SFT.loss)
    assert watch.found == []


def test_nothing_of_ours_rounds_a_float64_run_without_lifting():
    # GPT-2 has no float32 casts of its own, so a pure run needs no help.
    rows = [
        tt.Trajectory([1, 2, 3, 4], advantages=1.0, old_logprobs=[-3.0] * 4),
        tt.Trajectory([1, 2, 5, 6, 7], advantages=-1.0, old_logprobs=[-3.0] * 5),
    ]
    model = make_model("gpt2", dtype=torch.float64)
    watch = RoundsToFloat32()
    with watch:
        for case in (SFT, PPO):
            tt.TreeEngine(model, temperature=case.temperature).forward_backward(rows, case.loss)
    assert watch.found == []
