"""Forwards that draw random numbers, or follow the call instead of the row, are refused by name."""

import peft
import pytest
import torch
from transformers.integrations.neftune import neftune_post_forward_hook

import treetrain as tt
from support.models import make_model
from treetrain.core.errors import UnsupportedModel

ROWS = [[1, 2, 3, 4, 5], [1, 2, 6], [1, 2, 3, 7, 7]]
_TARGETS = {"target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}
# Name -> (adapter, what the message must say).
NOISY = {
    "loha ranks": (peft.LoHaConfig(r=2, rank_dropout=0.5, **_TARGETS), r"0\.5 in training mode \(rank_dropout\)"),
    "loha modules": (peft.LoHaConfig(r=2, module_dropout=0.5, **_TARGETS), r"0\.5 in training mode \(module_dropout"),
    "lokr ranks": (peft.LoKrConfig(r=2, rank_dropout=0.5, **_TARGETS), r"0\.5 in training mode \(rank_dropout\)"),
    "pvera": (peft.PveraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"), "PVeRA"),
}


@pytest.mark.few(1)
@pytest.mark.parametrize("name", NOISY)
def test_an_adapter_that_is_random_in_training_mode_is_refused_and_fine_in_eval_mode(name):
    adapter, says = NOISY[name]
    model = peft.get_peft_model(make_model("qwen3"), adapter).eval()
    tt.logprobs(model, ROWS)
    model.train()
    with pytest.raises(UnsupportedModel, match=says):
        tt.TreeEngine(model)


@pytest.mark.parametrize("kind", [peft.LoHaConfig, peft.LoKrConfig])
def test_adapters_that_draw_numbers_without_effect_are_exact_in_training_mode(kind):
    model = peft.get_peft_model(make_model("qwen3", torch.float64), kind(r=2, init_weights=False, **_TARGETS)).train()
    found = tt.logprobs(model, ROWS, budget=3)
    for row, ours in zip(ROWS, found):
        logits = model(input_ids=torch.tensor([row])).logits[0, :-1].double()
        expected = logits.log_softmax(-1).gather(-1, torch.tensor(row[1:])[:, None])[:, 0]
        torch.testing.assert_close(ours, expected, rtol=1e-10, atol=1e-10)


def test_noise_on_embeddings_is_refused_in_training_mode():
    model = make_model("qwen3")
    embeddings = model.get_input_embeddings()
    embeddings.neftune_noise_alpha = 5.0
    embeddings.register_forward_hook(neftune_post_forward_hook)
    tt.logprobs(model, ROWS)
    model.train()
    with pytest.raises(UnsupportedModel, match=r"embed_tokens.*NEFTune"):
        tt.logprobs(model, ROWS)


def test_an_activated_lora_which_begins_at_some_tokens_of_a_call_is_refused():
    model = peft.get_peft_model(make_model("qwen3"), peft.LoraConfig(r=2, alora_invocation_tokens=[2, 3], **_TARGETS))
    with pytest.raises(UnsupportedModel, match=r"alora_invocation_tokens=\[2, 3\]"):
        tt.TreeEngine(model)


@pytest.mark.parametrize("budget", [None, 3])
def test_random_numbers_that_nobody_has_announced_are_refused_at_the_first_call(budget):
    model = make_model("qwen3")
    model.model.norm.register_forward_hook(lambda _module, _args, out: out + 0.1 * torch.randn_like(out))
    with pytest.raises(UnsupportedModel, match="draws random numbers in its forward:"):
        tt.logprobs(model, ROWS, budget=budget)
    assert all(p.grad is None for p in model.parameters())


def test_a_model_that_may_skip_layers_but_never_does_is_fine_in_training_mode_unless_it_draws_all_the_same():
    model = make_model("opt", dropout=0.0, attention_dropout=0.0, layerdrop=0.0).train()
    before = torch.get_rng_state()
    model(input_ids=torch.tensor(ROWS[:1]), use_cache=False)
    if torch.equal(before, torch.get_rng_state()):
        tt.logprobs(model, ROWS)
    else:  # some releases of transformers draw for every layer whether it may be skipped or not
        with pytest.raises(UnsupportedModel, match=r"draws random numbers .* or call model\.eval"):
            tt.logprobs(model, ROWS)
    tt.logprobs(model.eval(), ROWS)


def test_dropout_switched_on_before_the_backward_is_refused_where_parts_are_run_again():
    model = make_model("gpt2", resid_pdrop=0.5, attn_pdrop=0.0, embd_pdrop=0.0)
    logprobs = tt.logprobs(model, ROWS, budget=3)
    model.train()
    with pytest.raises(UnsupportedModel, match="draws random numbers in its forward in training mode"):
        torch.stack([row.sum() for row in logprobs]).sum().backward()
    assert all(p.grad is None for p in model.parameters())
