"""The first use of a model compares a small forest with its rows one by one: what mixes tokens is refused by name."""

import inspect
import types
import warnings

import peft
import pytest
import torch
from torch import nn

import treetrain as tt
from support import images
from support.models import make_model
from treetrain.check import first_use, linear
from treetrain.core.errors import UnsupportedModel
from treetrain.layers.images.encoders import encoder_modules, image_encoder
from treetrain.layers.recurrence.recurrent_layers import kind_of

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
    before = {name: p.clone() for name, p in model.named_parameters()}
    trajectories = [tt.Trajectory(row) for row in ROWS]
    # In bfloat16 the adapter of q_proj changes scores by 0.007 alone, and gradients, which name no module, by 0.21.
    named = target == "q_proj" and dtype == torch.float32
    says = rf"adapter layer \S*{target} \(lily" if named else "small forest differ"
    for call in (
        lambda: tt.logprobs(model, ROWS),
        lambda: tt.TreeEngine(model).forward_backward(trajectories, tt.losses.sft()),
    ):
        with pytest.raises(UnsupportedModel, match=says):
            call()
    assert all(p.grad is None and torch.equal(p, before[name]) for name, p in model.named_parameters())


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


def on_mlp(change):
    """Put a forward hook on an MLP that changes its output [1, tokens, size]."""

    def put_on(model):
        def hook(module, args, output):
            return change(output)

        model.model.layers[1].mlp.register_forward_hook(hook)

    return put_on


def with_last_scaled(x):
    return torch.cat([2 * x[:, :1], x[:, 1:-1], 3 * x[:, -1:]], 1)


def by_place(x):
    return x * torch.linspace(1, 2, x.shape[1], dtype=x.dtype)[:, None]


def in_place(x):
    x.data.sub_(x.data.mean(1, keepdim=True))


def before_the_head(model):
    model.lm_head.register_forward_pre_hook(summed)


class Mixing(nn.Module):
    """A module of a user's own around an MLP."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x) + x.mean(1, keepdim=True)


def own_module(model):
    model.model.layers[1].mlp = Mixing(model.model.layers[1].mlp)


def own_method(model):
    mlp = model.model.layers[1].mlp
    plain = type(mlp).forward
    mlp.forward = types.MethodType(lambda self, x: plain(self, x) + x.mean(1, keepdim=True), mlp)


MIXING = {
    "a hook": (centre, r"model\.layers\.1\.mlp \(\S*Qwen3MLP\) with the hook centred mixes tokens"),
    "a hook over the past": (sum_before, r"model\.layers\.0 \(\S*Qwen3DecoderLayer\) with the hook summed mixes"),
    "a forward": (replace, r"model\.norm \(\S*Qwen3RMSNorm\) with a forward of its own mixes tokens"),
    "a method": (own_method, r"layers\.1\.mlp \(\S*Qwen3MLP\) with a forward of its own mixes tokens"),
    "a shift by one": (on_mlp(lambda x: x + x.roll(1, 1)), r"layers\.1\.mlp \(\S*\) with the hook hook mixes tokens"),
    "first and last token": (on_mlp(with_last_scaled), r"layers\.1\.mlp .* mixes tokens"),
    "the place in the call": (on_mlp(by_place), r"layers\.1\.mlp .* mixes tokens"),
    "the length of the call": (on_mlp(lambda x: x / x.shape[1]), r"layers\.1\.mlp .* mixes tokens"),
    "large calls": (on_mlp(lambda x: x - x.mean(1, keepdim=True) * (x.shape[1] > 7)), r"layers\.1\.mlp .* mixes"),
    "writes through .data": (on_mlp(in_place), r"layers\.1\.mlp .* mixes tokens"),
    "a hook before the head": (before_the_head, r"small forest differ .*hook summed on lm_head"),
    "a module": (own_module, r"layers\.1\.mlp \(\S*Mixing\) with the class Mixing mixes tokens"),
}


@pytest.mark.parametrize("name", MIXING)
def test_what_mixes_tokens_is_refused_by_name_whatever_it_is(name):
    put_on, says = MIXING[name]
    model = make_model("qwen3")
    engine = tt.TreeEngine(model)
    engine.logprobs(ROWS)
    put_on(model)
    for _ in range(2):
        with pytest.raises(UnsupportedModel, match=says) as error:
            engine.score(ROWS)
        assert len(str(error.value)) <= 420 and "report" not in str(error.value)
    tt.TreeEngine(model, check=False).score(ROWS)


def test_a_class_that_was_patched_is_refused_whenever_it_was(monkeypatch):
    model = make_model("qwen3")
    engine, kind = tt.TreeEngine(model), type(model.model.layers[0].mlp)
    engine.score(ROWS)
    plain = kind.forward
    monkeypatch.setattr(kind, "forward", lambda self, x: plain(self, x) - x.mean(1, keepdim=True))
    with pytest.raises(UnsupportedModel, match=r"layers\.0\.mlp .*another forward of the class Qwen3MLP mixes tokens"):
        engine.score(ROWS)


def test_a_hook_on_all_modules_is_refused():
    model = make_model("qwen3")
    engine = tt.TreeEngine(model)
    engine.score(ROWS)

    def hook(module, args, output):
        return centred(module, args, output) if type(module).__name__ == "Qwen3MLP" else None

    handle = torch.nn.modules.module.register_module_forward_hook(hook)
    try:
        with pytest.raises(UnsupportedModel, match=r"layers\.0\.mlp .* with PyTorch's hooks on all modules mixes"):
            engine.score(ROWS)
    finally:
        handle.remove()
    engine.score(ROWS)


# ---- gradients


def doubles(gradient):
    return 2 * gradient


def head_backward_hook(model):
    model.lm_head.register_full_backward_hook(lambda module, given, output: tuple(2 * g for g in given))


def head_output_hook(model):
    def hook(module, args, output):
        if output.requires_grad:
            output.register_hook(doubles)

    model.lm_head.register_forward_hook(hook)


def logits_hook(model):
    def hook(module, args, output):
        if output.logits.requires_grad:
            output.logits.register_hook(doubles)

    model.register_forward_hook(hook)


def clamps_gradients(model):
    def hook(module, args, output):
        if output.requires_grad:
            output.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))

    model.model.layers[0].mlp.register_forward_hook(hook)


GRADIENT_HOOKS = {
    "of the head": head_backward_hook,
    "of the head's output": head_output_hook,
    "of the logits": logits_hook,
    "that are not linear": clamps_gradients,
}


@pytest.mark.parametrize(
    "name, dtype",
    [(name, torch.float32) for name in GRADIENT_HOOKS] + [("of the head", torch.bfloat16)],
)
def test_gradient_hooks_are_refused_unless_they_are_exact(name, dtype):
    model = make_model("qwen3", dtype=dtype).train()
    GRADIENT_HOOKS[name](model)
    engine = tt.TreeEngine(model)
    engine.logprobs(ROWS)  # without gradients there is nothing to hook
    for call in (lambda: engine.score(ROWS), lambda: engine.forward_backward(ROWS, tt.losses.sft())):
        with pytest.raises(UnsupportedModel, match=r"gradients of a small forest differ .* remove what is not .*hook"):
            call()
    assert all(p.grad is None for p in model.parameters())


def test_gradients_that_rounding_changes_in_the_rows_too_are_accepted_and_wrong_ones_still_refused(monkeypatch):
    """The rows' gradients differ from those in float64 by 0.09, the tree's by 0.05, and the two by 0.12."""
    rounding, asked = first_use._error_of_rounding, []
    monkeypatch.setattr(first_use, "_error_of_rounding", lambda *given: asked.append(rounding(*given)) or asked[-1])
    model = make_model("qwen3_next", dtype=torch.bfloat16, seed=3).train()
    hooks = [dict(module._forward_hooks) for module in model.modules()]
    tt.TreeEngine(model).score(ROWS)
    assert asked and all(0.06 < error < 0.2 for error in asked)
    assert hooks == [dict(module._forward_hooks) for module in model.modules()]
    head_backward_hook(model)
    with pytest.raises(UnsupportedModel, match=r"gradients of a small forest differ .* remove what is not .*hook"):
        tt.TreeEngine(model).score(ROWS)


@pytest.mark.parametrize("seed", [0, 2])
def test_a_hybrid_with_heads_of_eight_numbers_in_bfloat16_is_accepted(seed):
    """Its rows' gradients differ from those in float64 by 0.55 and 0.22."""
    model = images.image_model("Qwen3.5", torch.bfloat16, seed)
    tt.TreeEngine(model).score(ROWS)


def test_a_linear_gradient_hook_on_an_activation_is_exact():
    model = make_model("qwen3", dtype=torch.float64).train()
    layer = model.model.layers[1].mlp
    layer.register_forward_hook(
        lambda module, args, out: None if not out.requires_grad else out.register_hook(doubles) and None
    )
    truth = linear.gradients(model, sum(row.sum() for row in linear.score_rows(model, ROWS)[0]))
    scored = tt.TreeEngine(model).score(ROWS)
    sum(row.sum() for row in scored.logprobs).backward()
    scored.backward()
    assert linear.relative_error(linear.gradients(model), truth) <= 1e-6


def test_an_embedding_that_counts_the_tokens_of_a_call_is_refused_where_it_is_trained():
    model = make_model("qwen3")
    model.model.embed_tokens.scale_grad_by_freq = True
    with pytest.raises(UnsupportedModel, match=r"model\.embed_tokens .*scale_grad_by_freq=True"):
        tt.TreeEngine(model)
    model.model.embed_tokens.weight.requires_grad_(False)
    tt.TreeEngine(model)


@pytest.mark.parametrize("family", ["qwen3_next", "bamba", "lfm2"])
def test_a_forward_of_its_own_on_a_recurrent_layer_is_refused_by_name(family):
    model = make_model(family)
    engine = tt.TreeEngine(model)
    engine.logprobs(ROWS)
    name, mixer = next((n, m) for n, m in model.named_modules() if kind_of(m) is not None)
    plain = mixer.forward
    mixer.forward = lambda *args, **kwargs: 0.5 * plain(*args, **kwargs)
    with pytest.raises(UnsupportedModel, match=rf"{name} \(\w+\) has a forward of its own"):
        engine.logprobs(ROWS)


def test_a_model_whose_attention_is_a_users_own_is_refused_by_the_attention_s_name():
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    def biased(module, query, key, value, *args, **kwargs):
        return sdpa_attention_forward(module, query, 1.5 * key, value, *args, **kwargs)

    AttentionInterface.register("biased", biased)
    model = make_model("qwen3")
    model.config._attn_implementation = "biased"
    with pytest.raises(UnsupportedModel, match="attention 'biased'") as error:
        tt.TreeEngine(model).score(ROWS)
    assert "report" not in str(error.value)


@pytest.mark.parametrize("family", ["Qwen3-VL", "LLaVA"])
def test_a_hook_that_mixes_the_images_of_a_call_is_refused(family):
    model = images.image_model(family)
    cat, dog = (images.image(seed, family=family) for seed in (1, 2))
    rows = [images.row(3, 4, cat, 5, 6), images.row(3, 4, dog, 5, 6)]
    tt.TreeEngine(model).score(rows)

    def mixes(module, args, output):
        tokens = output if isinstance(output, torch.Tensor) else output[0]
        mixed = tokens - tokens.mean(0, keepdim=True)
        return mixed if isinstance(output, torch.Tensor) else (mixed, *output[1:])

    layers = (m for encoder in encoder_modules(image_encoder(model)) for m in encoder.modules())
    next(m for m in layers if isinstance(m, nn.ModuleList))[0].register_forward_hook(mixes)
    engine = tt.TreeEngine(model)
    engine.score([[3, 4, 5], [3, 4, 6]])
    with pytest.raises(UnsupportedModel, match=r"image encoder mixes the images of a call.*hook mixes") as error:
        engine.score(rows)
    assert "report" not in str(error.value)


# ---- what it leaves, and when it runs


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
    assert len(calls) == before + len(model.model.layers)  # it compares once, whatever engines there are


def test_a_comparison_leaves_the_model_and_the_generators_as_they_were():
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


def test_a_first_use_under_autocast_leaves_no_copies_of_the_random_numbers_in_adapters():
    model, scores = adapted("LORA"), []
    assert any(p.requires_grad for p in model.parameters())  # autocast keeps their 16-bit copies until it ends
    for check in (False, True):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            scores.append(torch.cat(tt.TreeEngine(model, check=check).score(ROWS).logprobs).detach())
    torch.testing.assert_close(*scores, rtol=0, atol=1e-6)


def test_a_forward_at_the_address_of_an_accepted_one_is_compared():
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
def compared(monkeypatch) -> list[nn.Module]:
    """The models that are compared with their rows."""
    plain, models = first_use._compare, []

    def compare(engine, call):
        models.append(engine.model)
        return plain(engine, call)

    monkeypatch.setattr(first_use, "_compare", compare)
    return models


def test_a_model_is_compared_once_with_gradients_and_once_without(compared):
    model = make_model("qwen3").train()
    for engine in (tt.TreeEngine(model), tt.TreeEngine(model)):
        for _ in range(3):
            engine.score(ROWS)
            engine.logprobs(ROWS)
    assert len(compared) == 2
    tt.TreeEngine(make_model("qwen3"), check=False).score(ROWS)
    assert len(compared) == 2


def test_engines_that_distil_the_same_models_compare_each_once(compared):
    """A comparison holds gradients of the whole model, more than a step under a small budget does."""
    student, teacher = make_model("qwen3"), make_model("qwen3")
    for _ in range(2):
        tt.TreeEngine(student).distill(ROWS, tt.TreeEngine(teacher))
    assert compared == [teacher, student]


def test_the_hook_by_which_embeddings_require_gradients_needs_no_look_however_often_it_is_set(compared):
    model = make_model("qwen3").train()
    engine = tt.TreeEngine(model)
    for _ in range(3):  # as TRL's trainers do whenever they have generated
        engine.score(ROWS)
        model.enable_input_require_grads()
    assert len(compared) == 1

    def make_inputs_require_grads(module, args, output):
        output.requires_grad_(True)
        return centred(module, args, output)

    model.model.embed_tokens.register_forward_hook(make_inputs_require_grads)
    with pytest.raises(UnsupportedModel, match=r"embed_tokens .*make_inputs_require_grads mixes tokens"):
        engine.score(ROWS)


@pytest.mark.parametrize("soft", [7, 26])
def test_rows_of_the_forest_that_hold_nothing_trained_need_no_gradient(soft):
    """No row holds token 7, and some hold token 26."""
    model = make_model("qwen3")
    model.requires_grad_(False)
    model.register_parameter("soft", nn.Parameter(torch.zeros(model.config.hidden_size)))

    def put(_module, given, out):
        here = given[0] == soft
        return torch.where(here[..., None], model.soft, out) if here.any() else None

    model.get_input_embeddings().register_forward_hook(put)
    tt.TreeEngine(model).forward_backward([[soft, 2, 3]], tt.losses.sft())
    assert model.soft.grad.norm() > 0
