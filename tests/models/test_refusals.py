"""Whatever would be silently wrong on a tree is refused by name, before any work or at least before any gradient."""

import copy

import pytest
import torch
import transformers
from torch import nn
from transformers.modeling_outputs import CausalLMOutput

import treetrain as tt
from support.models import BASE, build, make_model
from treetrain.core.errors import DataError, UnsupportedModel

ROWS = [[1, 2, 3, 4, 5], [1, 2, 6], [1, 2, 3, 7, 7]]
MAMBA = {"state_size": 8, "num_heads": 4, "head_dim": 12, "n_groups": 1, "expand": 2}
# Name -> (class prefix, changes to the small configuration, what the message must say).
BEFORE_WORK = {
    "mamba": ("Mamba", {}, "linear_attention|Mamba"),
    "mamba2": ("Mamba2", MAMBA, "linear_attention|Mamba|interface"),
    "rwkv": ("Rwkv", {}, "interface"),
    "bloom": ("Bloom", {"n_layer": 2, "n_head": 4}, "interface"),
    "bart decoder": ("Bart", {"d_model": 32, "decoder_layers": 1, "decoder_attention_heads": 4}, "position_ids"),
    "xlstm": ("xLSTM", {}, "interface|attention|position"),
}


def small(prefix: str, changes: dict, **options) -> nn.Module:
    config_prefix, _, model_prefix = prefix.partition(":")
    config_class = getattr(transformers, f"{config_prefix}Config", None)
    model_class = getattr(transformers, f"{model_prefix or prefix}ForCausalLM", None)
    if config_class is None or model_class is None:
        pytest.skip(f"this transformers has no {prefix}")
    base = {k: v for k, v in BASE.items() if k not in ("intermediate_size",) or "Mamba" not in prefix}
    return build(model_class, config_class(**(base | changes)), **options)


def watch(model: nn.Module) -> list[str]:
    """Modules whose forward starts from now on."""
    started: list[str] = []
    for module in model.modules():
        module.register_forward_pre_hook(lambda m, _: started.append(type(m).__name__))
    return started


def trajectories() -> list[tt.Trajectory]:
    return [tt.Trajectory(row) for row in ROWS]


@pytest.mark.parametrize("name", BEFORE_WORK)
def test_a_model_that_is_not_exact_on_a_tree_is_refused_by_name_before_work(name):
    prefix, changes, says = BEFORE_WORK[name]
    model = small(prefix, changes)
    started = watch(model)
    for call in (lambda: tt.TreeEngine(model), lambda: tt.logprobs(model, ROWS)):
        with pytest.raises(UnsupportedModel, match=says):
            call()
    assert started == []


def test_an_encoder_decoder_is_refused():
    config = transformers.T5Config(vocab_size=37, d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2)
    model = transformers.T5ForConditionalGeneration(config)
    with pytest.raises(UnsupportedModel, match="encoder-decoder"):
        tt.TreeEngine(model)


@pytest.mark.parametrize("prefix", ["Roberta", "RobertaPreLayerNorm", "XLMRoberta", "Camembert", "Data2VecText"])
def test_a_decoder_that_numbers_positions_by_itself_is_refused(prefix):
    # Its positions begin behind its padding id: with positions from 0 it computes something else, without complaint.
    model = small(prefix, {"is_decoder": True, "pad_token_id": 1, "max_position_embeddings": 64})
    ids = torch.tensor([ROWS[0]])
    own = model(input_ids=ids, use_cache=False).logits
    assert (model(input_ids=ids, position_ids=torch.arange(5)[None], use_cache=False).logits - own).abs().max() > 1e-3
    with pytest.raises(UnsupportedModel, match=r"embeddings .* numbers the positions of a row by itself"):
        tt.TreeEngine(model)


def test_a_module_that_is_no_language_model_is_refused():
    with pytest.raises(UnsupportedModel, match="head"):
        tt.TreeEngine(nn.Linear(2, 2))


DROPOUTS = {
    "llama attention": ("Llama", {"attention_dropout": 0.1}),
    "gpt2 residual": ("GPT2", {"n_embd": 24, "n_layer": 1, "n_head": 4, "attn_pdrop": 0.0, "embd_pdrop": 0.0}),
    "opt hidden": ("OPT", {"ffn_dim": 32, "word_embed_proj_dim": 24, "dropout": 0.1, "attention_dropout": 0.0}),
    "opt layers": ("OPT", {"ffn_dim": 32, "word_embed_proj_dim": 24, "dropout": 0.0, "layerdrop": 0.5}),
    "starcoder2 residual": ("Starcoder2", {"sliding_window": None, "residual_dropout": 0.1}),
    "starcoder2 embedding": ("Starcoder2", {"sliding_window": None, "embedding_dropout": 0.1}),
    "phi residual": ("Phi", {"hidden_size": 32, "resid_pdrop": 0.1}),
    "gpt_neox hidden": ("GPTNeoX", {"hidden_dropout": 0.1}),
}


@pytest.mark.few(1)
@pytest.mark.parametrize("name", DROPOUTS)
def test_dropout_in_training_mode_is_refused_and_fine_in_eval_mode(name):
    prefix, changes = DROPOUTS[name]
    config = getattr(transformers, f"{prefix}Config")(**(BASE | changes))
    model = build(getattr(transformers, "GPT2LMHeadModel" if prefix == "GPT2" else f"{prefix}ForCausalLM"), config)
    tt.logprobs(model, ROWS)
    model.train()
    started = watch(model)
    with pytest.raises(UnsupportedModel, match=r"drop.*0\.[15]"):
        tt.TreeEngine(model)
    assert started == []


def test_dropout_switched_on_after_the_engine_was_made_is_refused_too():
    model = make_model("llama", attention_dropout=0.1)
    engine = tt.TreeEngine(model)
    model.train()
    for call in (lambda: engine.forward_backward(trajectories(), tt.losses.sft()), lambda: engine.logprobs(ROWS)):
        with pytest.raises(UnsupportedModel, match="dropout"):
            call()


def check_refused_at_the_first_call(model: nn.Module, says: str) -> None:
    for loss in (tt.losses.sft(), tt.losses.reinforce(entropy=0.1)):
        rows = [row.replace(advantages=1.0) for row in trajectories()]
        with pytest.raises(UnsupportedModel, match=says):
            tt.TreeEngine(model).forward_backward(rows, loss)
    with pytest.raises(UnsupportedModel, match=says):
        tt.logprobs(model, ROWS)
    assert all(p.grad is None for p in model.parameters())
    assert type(model).forward is model.forward.__func__
    assert "forward" not in model.get_output_embeddings().__dict__
    assert model.config._attn_implementation == "sdpa"


class MeanOverThePast(nn.Module):
    """Mixes tokens without the attention interface, and its name does not say so."""

    def forward(self, hidden_states, **kwargs):
        steps = torch.arange(1, hidden_states.shape[1] + 1)
        return hidden_states.cumsum(1) / steps[None, :, None], None


def test_a_layer_that_mixes_tokens_outside_attention_is_refused_before_any_gradient():
    model = make_model("llama")
    model.model.layers[1].self_attn = MeanOverThePast()
    check_refused_at_the_first_call(model, "1 of 2 layers")


class ScaledAfterTheHead(transformers.LlamaForCausalLM):
    def forward(self, *args, **kwargs):
        out = super().forward(*args, **kwargs)
        return CausalLMOutput(logits=out.logits * 0.5)


class WithoutALayersKeywords(transformers.LlamaForCausalLM):
    def forward(self, input_ids=None, position_ids=None, attention_mask=None, use_cache=None, **kwargs):
        return super().forward(input_ids=input_ids, position_ids=position_ids, use_cache=use_cache)


class HeadCalledTwice(transformers.LlamaForCausalLM):
    def forward(self, *args, **kwargs):
        super().forward(*args, **kwargs)
        return super().forward(*args, **kwargs)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("model_class", "says"),
    [
        (ScaledAfterTheHead, "what its head gives"),
        (WithoutALayersKeywords, "without the tree run"),
        (HeadCalledTwice, "called 2 times|several times in a forward"),
    ],
)
def test_a_forward_that_does_more_than_ours_can_follow_is_refused_before_any_gradient(model_class, says):
    check_refused_at_the_first_call(build(model_class, transformers.LlamaConfig(**BASE)), says)


@pytest.mark.parametrize("family", ["StableLm", "Nemotron"])
def test_families_whose_forward_cannot_be_followed_are_refused_before_any_gradient(family):
    check_refused_at_the_first_call(small(family, {}), "what its head gives|without the tree run")


class ScaledTheOtherWay(transformers.GraniteForCausalLM):
    def forward(self, *args, **kwargs):
        out = super().forward(*args, **kwargs)
        return CausalLMOutput(logits=out.logits * self.config.logits_scaling**2)


class CutToHalf(transformers.GraniteForCausalLM):
    def forward(self, *args, **kwargs):
        out = super().forward(*args, **kwargs)
        return CausalLMOutput(logits=out.logits[:, ::2])


class CappedToo(transformers.GraniteForCausalLM):
    def forward(self, *args, **kwargs):
        out = super().forward(*args, **kwargs)
        return CausalLMOutput(logits=out.logits.clamp(-50, 50))


class InPlace(transformers.GraniteForCausalLM):
    def forward(self, *args, **kwargs):
        def halve(module, given, out):
            out.detach().mul_(0.5)

        handle = self.lm_head.register_forward_hook(halve)
        try:
            return super().forward(*args, **kwargs)
        finally:
            handle.remove()


@pytest.mark.parametrize("model_class", [ScaledTheOtherWay, CutToHalf, CappedToo, InPlace])
def test_logits_that_are_not_changed_as_the_configuration_says_are_refused_before_any_gradient(model_class):
    config = transformers.GraniteConfig(**(BASE | {"logits_scaling": 4.0}))
    check_refused_at_the_first_call(build(model_class, config), "what its head gives, over 4.0")


@pytest.mark.few(1)
@pytest.mark.parametrize("field", ["logit_scale", "logits_scaling", "final_logit_softcapping"])
def test_a_scale_of_the_logits_that_the_model_does_not_apply_is_refused_before_any_gradient(field):
    check_refused_at_the_first_call(small("Llama", {field: 4.0}), "what its head gives")


def test_what_transformers_may_name_tomorrow_is_refused_by_name():
    model = make_model("llama")
    model.config.rope_parameters = {"rope_type": "spiral", "rope_theta": 1e4}
    with pytest.raises(UnsupportedModel, match="'spiral'"):
        tt.TreeEngine(model)
    model = make_model("llama")
    model.config.layer_types = ["full_attention", "attention_of_tomorrow"]
    with pytest.raises(UnsupportedModel, match="layer 1 is of kind 'attention_of_tomorrow'"):
        tt.TreeEngine(model)


def test_a_hook_that_changes_the_logits_is_refused_before_any_gradient():
    model = make_model("llama")
    model.lm_head.register_forward_hook(lambda module, args, out: out * 2)
    check_refused_at_the_first_call(model, "what its head gives")


class TwoLayerHead(nn.Module):
    def __init__(self, inner: nn.Linear):
        super().__init__()
        self.inner, self.weight = inner, inner.weight

    def forward(self, x):
        return self.inner(x.tanh())


class ScaledLinear(nn.Linear):
    def forward(self, x):
        return 0.5 * super().forward(x)


def test_an_unknown_head_is_refused_by_name():
    model = make_model("llama")
    head = model.lm_head
    model.lm_head = TwoLayerHead(head)
    with pytest.raises(UnsupportedModel, match="TwoLayerHead"):
        tt.TreeEngine(model)
    model.lm_head = ScaledLinear(24, 37)
    with pytest.raises(UnsupportedModel, match="ScaledLinear"):
        tt.TreeEngine(model)


def test_ids_outside_the_vocabulary_are_refused_naming_row_place_and_both_values():
    model = make_model("llama")
    started = watch(model)
    rows = [tt.Trajectory([1, 2, 3]), tt.Trajectory([1, 2, 37, 4], id="bad")]
    calls = (
        lambda: tt.TreeEngine(model).forward_backward(rows, tt.losses.sft()),
        lambda: tt.TreeEngine(model).logprobs(rows),
        lambda: tt.logprobs(model, rows),
    )
    for call in calls:
        with pytest.raises(DataError, match=r"'bad': token id 37 at position 2 .*vocabulary of 37"):
            call()
    assert started == []


def test_rows_longer_than_the_models_positions_are_refused():
    model = make_model("gpt2", n_positions=8, max_position_embeddings=8)
    rows = [[1, 2], [3] * 9]
    started = watch(model)
    with pytest.raises(DataError, match=r"trajectory number 1 \(from 0\) has 9 tokens, the model 8 positions"):
        tt.logprobs(model, rows)
    assert started == []
    tt.logprobs(model, [[1, 2], [3] * 8])


def test_nothing_to_train_is_an_error():
    model = make_model("llama")
    for rows in ([], [tt.Trajectory([1])], [tt.Trajectory([1, 2], loss_weights=0.0)]):
        with pytest.raises(DataError, match="nothing to train"):
            tt.TreeEngine(model).forward_backward(rows, tt.losses.sft())


def test_a_static_rotary_scaling_is_accepted():
    scaling = {"rope_type": "llama3", "factor": 2.0, "rope_theta": 1e4, "low_freq_factor": 1.0}
    scaling |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8}
    model = make_model("llama", rope_parameters=copy.deepcopy(scaling))
    row = [1, 2, 3, 4, 5]
    logits = model(input_ids=torch.tensor([row])).logits[0, :-1].log_softmax(-1)
    expected = logits.gather(1, torch.tensor(row[1:])[:, None])[:, 0]
    torch.testing.assert_close(tt.logprobs(model, [row, [1, 2, 6]])[0], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.few(1)
@pytest.mark.parametrize("where", ["wrapped", "in place", "a layer"])
def test_a_compiled_model_is_refused_by_that_name_with_what_to_do(where):
    model = make_model("qwen3")
    model.model.layers[1].mlp.compile(dynamic=True)
    tt.TreeEngine(model)  # such a module knows nothing of trees
    if where == "wrapped":
        model, message = torch.compile(model), r"the model is an OptimizedModule \(torch.compile\).*model._orig_mod"
    elif where == "in place":
        model.compile()
        message = r"the model is a Qwen3ForCausalLM after .compile\(\)"
    else:
        model.model.layers[0] = torch.compile(model.model.layers[0])
        message = r"model.layers.0 is an OptimizedModule.*compile_layers=True"
    for call in (
        lambda: tt.TreeEngine(model),
        lambda: tt.logprobs(model, ROWS),
        lambda: tt.verify(model, ROWS),
    ):
        with pytest.raises(UnsupportedModel, match=message):
            call()
