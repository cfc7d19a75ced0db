"""Adapters, hooks and replaced forwards are accepted if they treat every token alone, and refused by name if not."""

import inspect
import warnings

import peft
import pytest
import torch
from torch import nn

import treetrain as tt
from support.models import make_model
from treetrain.engine.extensions import token_mixing
from treetrain.errors import UnsupportedModel
from treetrain.testing import linear

ROWS = [[1, 2, 3, 4, 5, 9], [1, 2, 6, 7], [1, 2, 3, 7, 7], [8, 9, 10]]
_SETTINGS = {
    "target_modules": ["q_proj", "down_proj"],
    "feedforward_modules": ["down_proj"],
    "r": 2,
    "rank": 2,
    "num_virtual_tokens": 2,
    "n_frequency": 20,
    "boft_block_size": 2,
    "oft_block_size": 4,
    "vector_length": 4,
    "num_vectors": 8,
    "topk": 2,
    "block_size": 4,
    "group_size": 4,
    "total_step": 10,
    "token_indices": [1, 2],
}
_OWN = {"OFT": {"r": 0}, "LN_TUNING": {"target_modules": ["input_layernorm"]}}
_CANNOT_BE_MADE = (ImportError, ValueError, TypeError)


def adapted(kind: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    """A model with an adapter of one of peft's types, which differs from its start if it is trained."""
    config_class = peft.mapping.PEFT_TYPE_TO_CONFIG_MAPPING[getattr(peft.PeftType, kind)]
    taken = inspect.signature(config_class.__init__).parameters
    settings = {name: value for name, value in (_SETTINGS | _OWN.get(kind, {})).items() if name in taken}
    model = make_model("qwen3", dtype=dtype)
    try:
        model = peft.get_peft_model(model, config_class(task_type="CAUSAL_LM", **settings)).eval()
    except _CANNOT_BE_MADE as error:
        pytest.skip(f"peft does not make it here: {error}")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.requires_grad and weight.is_floating_point():
                weight.add_(0.1 * torch.randn(weight.shape, generator=generator))
    return model


@pytest.mark.few(2)
@pytest.mark.parametrize("kind", sorted(kind.name for kind in peft.mapping.PEFT_TYPE_TO_CONFIG_MAPPING))
def test_an_adapter_of_any_type_is_exact_or_refused_by_name(kind):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = adapted(kind)
        try:
            with torch.no_grad():
                expected, _ = linear.score_rows(model, ROWS)
        except Exception as error:
            pytest.skip(f"its plain forward fails: {error}")
        try:
            found = tt.logprobs(model, ROWS)
        except UnsupportedModel as error:
            assert kind in {"LILY", "SHADOW"} or model.active_peft_config.is_prompt_learning, error
            assert len(str(error)) <= 400
            return
    for own, row in zip(found, expected, strict=True):
        torch.testing.assert_close(own, row, rtol=1e-4, atol=1e-5)


@pytest.mark.few(1)
@pytest.mark.skipif(not hasattr(peft, "LilyConfig"), reason="this peft has no such adapter")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("target", ["q_proj", "lm_head"])
def test_an_adapter_that_mixes_tokens_is_refused_before_it_has_learned_anything(target, dtype):
    config = peft.LilyConfig(r=2, target_modules=[target], task_type="CAUSAL_LM")
    model = peft.get_peft_model(make_model("qwen3", dtype=dtype), config)
    with model.disable_adapter():
        tt.logprobs(model, ROWS)
    trajectories = [tt.Trajectory(row) for row in ROWS]
    for call in (
        lambda: tt.logprobs(model, ROWS),
        lambda: tt.TreeEngine(model).forward_backward(trajectories, tt.losses.sft()),
    ):
        with pytest.raises(UnsupportedModel, match=rf"adapter layer \S*{target} \(lily\.layer\.Linear\) mixes tokens"):
            call()
    assert all(p.grad is None for p in model.parameters())


def centred(module, args, output):
    return output - output.mean(1, keepdim=True)


def summed(module, args):
    return (args[0].cumsum(1), *args[1:])


def centre(model):
    model.model.layers[1].mlp.register_forward_hook(centred)


def sum_before(model):
    model.model.layers[0].register_forward_pre_hook(summed)


def replace(model):
    norm = model.model.norm
    own = norm.forward
    norm.forward = lambda x: own(x) + x.amax(1, keepdim=True)


MIXING = {
    "a hook": (centre, r"model\.layers\.1\.mlp \(\S*Qwen3MLP\) with centred mixes tokens"),
    "a hook over the past": (sum_before, r"model\.layers\.0 \(\S*Qwen3DecoderLayer\) with summed mixes tokens"),
    "a forward": (replace, r"model\.norm \(\S*Qwen3RMSNorm\) with a forward of its own mixes tokens"),
}


@pytest.mark.parametrize("name", MIXING)
def test_a_hook_or_forward_that_mixes_tokens_is_refused_by_name(name):
    put_on, says = MIXING[name]
    model = make_model("qwen3")
    engine = tt.TreeEngine(model)
    engine.logprobs(ROWS)
    put_on(model)
    for _ in range(2):
        with pytest.raises(UnsupportedModel, match=says) as error:
            engine.score(ROWS)
        assert len(str(error.value)) <= 400


@pytest.mark.few(1)
@pytest.mark.parametrize("family", ["qwen3", "qwen3_5_moe_text", "gpt_oss"])
def test_hooks_that_treat_every_token_alone_are_exact(family):
    model = make_model(family).train()
    calls = []
    for layer in model.model.layers:
        layer.register_forward_hook(lambda module, args, output: output * 1.1)
        layer.mlp.register_forward_pre_hook(lambda module, args: calls.append(module))
    model.enable_input_require_grads()
    with torch.no_grad():
        expected, _ = linear.score_rows(model, ROWS)
    for own, row in zip(tt.logprobs(model, ROWS), expected, strict=True):
        torch.testing.assert_close(own, row, rtol=1e-4, atol=1e-5)
    before = len(calls)
    tt.logprobs(model, ROWS)
    assert len(calls) == before + len(model.model.layers)  # the probe runs once, whatever engines there are


def test_a_probe_leaves_the_model_and_the_generators_as_they_were():
    model = peft.get_peft_model(
        make_model("qwen3"), peft.LoraConfig(r=2, target_modules=["q_proj"], lora_dropout=0.0, task_type="CAUSAL_LM")
    ).train()
    norm = model.base_model.model.model.norm
    norm.register_buffer("seen", torch.zeros((), dtype=torch.int64))
    norm.register_forward_hook(lambda module, args, output: module.seen.add_(output.shape[1]) and None)
    state = {name: x.clone() for name, x in model.state_dict().items()}
    before = torch.get_rng_state()
    with pytest.raises(tt.DataError, match="vocabulary"):
        tt.TreeEngine(model).score([[1, 99]])
    engine = tt.TreeEngine(model)
    tokens = tt.build_tree(ROWS).num_tokens
    computed = engine.score(ROWS).computed_tokens
    assert computed <= tokens and int(norm.seen) == computed
    norm.seen.zero_()
    assert all(torch.equal(x, state[name]) for name, x in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), before) and model.training
    assert all(p.grad is None for p in model.parameters())


def test_a_forward_at_the_address_of_an_accepted_one_is_probed():
    model = make_model()
    mlp, engine = model.model.layers[0].mlp, tt.TreeEngine(model)
    plain = mlp.forward
    mlp.forward = lambda x: plain(x)
    engine.score(ROWS)
    del mlp.forward  # Python reuses its memory for the next function
    mlp.forward = lambda x: plain(x) + x.mean(-2, keepdim=True)
    with pytest.raises(UnsupportedModel, match=r"layers\.0\.mlp .* mixes tokens"):
        engine.score(ROWS)


@pytest.mark.parametrize("when", ["no pass", "training", "gradients"])
def test_a_hook_is_not_accepted_by_a_call_in_which_it_could_not_mix(when):
    model = make_model("qwen3")
    mixes = {
        "no pass": lambda m: True,
        "training": lambda m: m.training,
        "gradients": lambda m: torch.is_grad_enabled(),
    }

    def hook(module, args, output):
        return output - output.mean(1, keepdim=True) if mixes[when](module) else None

    model.model.layers[0].mlp.register_forward_hook(hook)
    engine = tt.TreeEngine(model.eval())
    for _ in range(2):
        engine.logprobs([] if when == "no pass" else ROWS)
    model.train()
    with pytest.raises(UnsupportedModel, match=r"layers\.0\.mlp .* mixes tokens"):
        engine.forward_backward(ROWS, tt.losses.sft())
    assert all(p.grad is None for p in model.parameters())


@pytest.fixture
def examined(monkeypatch) -> list[nn.Module]:
    """The models whose layers are examined."""
    plain, models = token_mixing.token_mixing_checked, []

    def checked(engine):
        models.append(engine.model)
        return plain(engine)

    monkeypatch.setattr(token_mixing, "token_mixing_checked", checked)
    return models


def test_a_model_is_examined_once_with_gradients_and_once_without(examined):
    engine = tt.TreeEngine(make_model("qwen3").train())
    for _ in range(3):
        engine.score(ROWS)
        engine.logprobs(ROWS)
    assert len(examined) == 2


def test_the_hook_by_which_embeddings_require_gradients_needs_no_look_however_often_it_is_set(examined):
    model = make_model("qwen3").train()
    engine = tt.TreeEngine(model)
    for _ in range(3):  # as TRL's trainers do whenever they have generated
        engine.score(ROWS)
        model.enable_input_require_grads()
    assert len(examined) == 1

    def make_inputs_require_grads(module, args, output):
        output.requires_grad_(True)
        return centred(module, args, output)

    model.model.embed_tokens.register_forward_hook(make_inputs_require_grads)
    with pytest.raises(UnsupportedModel, match=r"embed_tokens .*make_inputs_require_grads mixes tokens"):
        engine.score(ROWS)
