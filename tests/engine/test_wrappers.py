"""Wrapped models stay exact: autocast, gradient checkpointing, adapters, frozen parts."""

import copy
import warnings

import pytest
import torch
from torch import nn

import treetrain as tt
from support.models import make_model
from support.plans import planned
from treetrain.check import linear
from treetrain.check.contract import PureFloat64
from treetrain.check.forests import with_random_facts

peft = pytest.importorskip("peft")
warnings.filterwarnings("ignore", module="peft")

IDS = [[1, 2, 3, 4, 5, 6], [1, 2, 3, 7, 8], [1, 2, 3, 7, 8], [1, 9], [4], [], [9, 8, 7], [9, 8, 7, 7, 2], [1, 2, 3, 4]]
ROWS = with_random_facts(IDS, 3)
LOSSES = {
    "sft": (tt.losses.sft(), lambda logp, entropy, facts: -logp),
    "ppo": (
        tt.losses.ppo(entropy=0.05),
        lambda logp, entropy, facts: linear.clipped(logp, facts, 0.2, 0.2) - 0.05 * entropy,
    ),
}
both_losses = pytest.mark.parametrize("loss", LOSSES)


def expected(model: nn.Module, loss: str) -> torch.Tensor:
    scores = linear.score_rows(model, [row.ids.tolist() for row in ROWS])
    return linear.gradients(model, linear.batch_loss(scores, ROWS, LOSSES[loss][1]))


def by_engine(model: nn.Module, loss: str, plan: tuple | None = None) -> torch.Tensor:
    model.zero_grad()
    engine = tt.TreeEngine(model) if plan is None else planned(*plan)(model)
    engine.forward_backward(ROWS, LOSSES[loss][0])
    gradient = linear.gradients(model)
    model.zero_grad()
    return gradient


def by_primitive(model: nn.Module, loss: str, budget: int | None = None) -> torch.Tensor:
    model.zero_grad()
    scores = tt.logprobs(model, ROWS, budget=budget, return_entropy=True)
    linear.batch_loss(scores, ROWS, LOSSES[loss][1]).backward()
    gradient = linear.gradients(model)
    model.zero_grad()
    return gradient


WAYS = {
    "engine": by_engine,
    "primitive": by_primitive,
    "primitive under a budget": lambda model, loss: by_primitive(model, loss, 4),
    "engine, parts recomputed": lambda model, loss: by_engine(model, loss, ("chunks of 2", "none")),
    "engine, parts kept": lambda model, loss: by_engine(model, loss, ("chunks of 2", "all")),
}
every_way = pytest.mark.parametrize("way", WAYS)


def check_exact(model: nn.Module, loss: str, way: str) -> None:
    with PureFloat64():
        truth = expected(model, loss)
        assert truth.norm() > 1e-3
        assert linear.relative_error(WAYS[way](model, loss), truth) <= 1e-12


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_gradient_checkpointing_changes_nothing(reentrant, training, loss, way):
    model = make_model("qwen3", dtype=torch.float64)
    with PureFloat64():
        truth = expected(model, loss)
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.train(training)
        got = WAYS[way](model, loss)
    assert linear.relative_error(got, truth) <= 1e-12


@pytest.fixture
def not_compared(monkeypatch):
    """Without the comparison at first use, whose passes a test would count."""
    monkeypatch.setattr("treetrain.check.first_use.compare_first_use", lambda engine, call, tree: None)


def test_gradient_checkpointing_does_run_layers_again(not_compared):
    model = make_model("qwen3")
    calls = []
    model.model.layers[0].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    model.gradient_checkpointing_enable({"use_reentrant": False})
    by_engine(model.train(), "sft")
    assert len(calls) == 2


@pytest.mark.few(1)
@both_losses
@every_way
def test_tied_embeddings_and_grouped_heads_are_exact(loss, way):
    for heads in (1, 2, 4):
        model = make_model("qwen2", dtype=torch.float64, tie_word_embeddings=True, num_key_value_heads=heads)
        assert model.lm_head.weight is model.model.embed_tokens.weight
        check_exact(model, loss, way)


def with_lora(model: nn.Module, **options) -> nn.Module:
    wrapped = peft.get_peft_model(model, peft.LoraConfig(r=3, lora_alpha=6, task_type="CAUSAL_LM", **options))
    torch.manual_seed(1)
    for name, parameter in wrapped.named_parameters():
        if "lora" in name or "modules_to_save" in name:
            # LoRA starts at B = 0, where half of the gradients vanish.
            parameter.data.add_(0.2 * torch.randn_like(parameter))
    return wrapped.to(torch.float64)


LORAS = {
    "attention": {"target_modules": ["q_proj", "v_proj"]},
    "everything linear": {"target_modules": "all-linear"},
    "head": {"target_modules": ["lm_head", "k_proj"]},
    "head saved": {"target_modules": ["o_proj"], "modules_to_save": ["lm_head"]},
    "embedding": {"target_modules": ["embed_tokens", "down_proj"]},
    "dora": {"target_modules": ["q_proj", "gate_proj"], "use_dora": True},
    "rslora": {"target_modules": ["q_proj", "down_proj"], "use_rslora": True, "rank_pattern": {"q_proj": 5}},
}


@pytest.mark.few(1)
@pytest.mark.parametrize("name", LORAS)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("loss", LOSSES)
def test_a_model_wrapped_by_lora_is_exact(name, loss, way):
    check_exact(with_lora(make_model("qwen3"), **LORAS[name]), loss, way)


@pytest.mark.few(2)
@pytest.mark.parametrize("reentrant", [False, True])
@every_way
def test_lora_with_gradient_checkpointing_is_exact(reentrant, way):
    model = with_lora(make_model("llama"), **LORAS["head"])
    with PureFloat64():
        truth = expected(model, "ppo")
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
        got = WAYS[way](model.train(), "ppo")
    assert linear.relative_error(got, truth) <= 1e-12


def test_adapters_that_add_tokens_of_their_own_are_refused():
    from peft import PrefixTuningConfig, PromptTuningConfig, get_peft_model

    for config in (PromptTuningConfig, PrefixTuningConfig):
        model = get_peft_model(make_model("llama"), config(task_type="CAUSAL_LM", num_virtual_tokens=3))
        with pytest.raises(tt.UnsupportedModel, match=config.__name__):
            tt.TreeEngine(model)


def test_lora_dropout_in_training_mode_is_refused():
    model = with_lora(make_model("qwen3"), target_modules=["q_proj"], lora_dropout=0.1)
    tt.TreeEngine(model.eval())
    with pytest.raises(tt.UnsupportedModel, match=r"lora_dropout.*dropout 0\.1"):
        tt.TreeEngine(model.train())


@pytest.mark.few(2)
@pytest.mark.parametrize("trained", ["lm_head", "embed_tokens", "layers.1.mlp", "layers.0.self_attn.k_proj", "norm"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("loss", LOSSES)
def test_a_model_with_all_but_some_parts_frozen_is_exact(trained, loss, way):
    model = make_model("llama", dtype=torch.float64, tie_word_embeddings=False)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trained in name)
    check_exact(model, loss, way)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("way", "where"),
    # forward_backward is one call: it is under autocast or it is not.
    [(way, where) for way in WAYS for where in ("inside", "outside") if (way, where) != ("engine", "outside")],
)
@pytest.mark.parametrize("family", [pytest.param("llama", marks=pytest.mark.slow), "qwen3"])
def test_under_autocast_the_tree_errs_no_more_than_the_rows_do(family, way, where):
    errors: dict[str, list[float]] = {"tree": [], "linear": []}
    for seed in range(2):
        model = make_model(family, seed=seed)
        for loss in LOSSES:
            truth = expected(model, loss)
            with torch.autocast("cpu", torch.bfloat16):
                own = expected(model, loss)
                got = WAYS[way](model, loss) if where == "inside" else None
            if got is None:  # the usual way: only the forward is under autocast
                got = forward_under_autocast(model, loss, way)
            errors["linear"].append(linear.relative_error(own, truth))
            errors["tree"].append(linear.relative_error(got, truth))
    assert linear.rms(errors["tree"]) > 1e-4  # autocast did something
    assert linear.rms(errors["tree"]) <= 1.5 * linear.rms(errors["linear"])


def forward_under_autocast(model: nn.Module, loss: str, way: str) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        budget = 4 if "budget" in way else None
        scores = tt.logprobs(model, ROWS, budget=budget, return_entropy=True)
        total = linear.batch_loss(scores, ROWS, LOSSES[loss][1])
    total.backward()
    gradient = linear.gradients(model)
    model.zero_grad()
    return gradient


def test_a_part_is_run_again_in_the_dtype_of_its_forward(not_compared):
    model = make_model("llama")
    seen = []
    model.model.layers[0].mlp.up_proj.register_forward_hook(lambda module, args, out: seen.append(out.dtype))
    forward_under_autocast(model, "ppo", "primitive")
    once = len(seen)
    forward_under_autocast(model, "ppo", "primitive under a budget")
    assert once == 1 and len(seen) > 2 * 2 and set(seen) == {torch.bfloat16}


@pytest.mark.parametrize("shape", ["1 part", "chunks of 2"])
@pytest.mark.parametrize("loss", LOSSES)
def test_no_backward_runs_under_the_callers_autocast(loss, shape, not_compared):
    """Its products would be of 16 bits even where the forward's were of 32."""
    model, seen = make_model("qwen3"), []

    def watch(layer, arguments, output):
        if output.requires_grad:
            output.register_hook(lambda _: seen.append(torch.is_autocast_enabled("cpu")))

    model.model.layers[0].register_forward_hook(watch)  # type: ignore[union-attr]
    with torch.autocast("cpu", torch.bfloat16):
        planned(shape, "mixed")(model).forward_backward(ROWS, LOSSES[loss][0])
        logprobs = tt.logprobs(model, ROWS, budget=3)
    torch.cat(logprobs).sum().backward()
    assert len(seen) >= 2 and not any(seen)


def state_of(model: nn.Module) -> dict:
    """Everything that a call could leave changed."""
    return {
        "attention": model.config._attn_implementation,
        "own forwards": [name for name, module in model.named_modules() if "forward" in vars(module)],
        "requires grad": {name: p.requires_grad for name, p in model.named_parameters()},
        "training": {name: module.training for name, module in model.named_modules()},
        "hooks": {
            name: (list(m._forward_hooks), list(m._forward_pre_hooks), list(m._backward_hooks))
            for name, m in model.named_modules()
        },
        "attributes": {name: sorted(vars(module)) for name, module in model.named_modules()},
        "weights": {name: value.clone() for name, value in model.state_dict().items()},
    }


def assert_same_state(before: dict, after: dict) -> None:
    for name, value in before["weights"].items():
        assert torch.equal(value, after["weights"][name]), name
    for what in before.keys() - {"weights"}:
        assert before[what] == after[what], what


class Interrupted(Exception):
    pass


@pytest.mark.few(1)
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("lora", [False, True])
def test_the_model_is_left_as_it_was_found(training, attention, lora):
    model = make_model("qwen3").train(training)
    model.set_attn_implementation(attention)
    model.model.layers[0].register_forward_hook(lambda *_: None)
    model.model.norm.weight.requires_grad_(False)
    model = with_lora(model, **LORAS["head"]) if lora else model
    before = copy.deepcopy(state_of(model))
    for way in WAYS.values():
        way(model, "ppo")
        assert_same_state(before, state_of(model))
    tt.TreeEngine(model).logprobs(ROWS)
    assert_same_state(before, state_of(model))


def test_the_models_own_forward_works_between_logprobs_and_backward():
    model = make_model("qwen3", dtype=torch.float64)
    with PureFloat64():
        truth = expected(model, "sft")
        scores = tt.logprobs(model, ROWS, return_entropy=True)
        with torch.no_grad():
            model(input_ids=torch.tensor([[1, 2, 3]]))
        linear.batch_loss(scores, ROWS, LOSSES["sft"][1]).backward()
    assert linear.relative_error(linear.gradients(model), truth) <= 1e-12
