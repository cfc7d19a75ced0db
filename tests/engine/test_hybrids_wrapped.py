"""Recurrent layers under checkpointing, adapters, frozen parts, autocast and too little memory: all stays exact."""

import gc
import inspect
import itertools
import warnings

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper

import treetrain as tt
from support.models import make_model
from support.passes import unique_ids
from support.plans import planned
from support.shortage import Shortage
from treetrain.check import linear
from treetrain.check.contract import PPO, SFT, PureFloat64
from treetrain.check.forests import with_random_facts
from treetrain.core.errors import UnsupportedModel
from treetrain.layers.recurrence.recurrent_layers import kind_of

peft = pytest.importorskip("peft")
warnings.filterwarnings("ignore", module="peft")

TRUNK = list(range(10))
IDS = unique_ids([[*TRUNK, 20, 21, 22], [*TRUNK, 20, 23, 24], [*TRUNK, 25, 26], [*TRUNK[:4], 27, 28, 29], [30, 31, 32]])
ROWS = with_random_facts(IDS, 4)
PLANS = [("1 part", "none"), ("chunks of 2", "mixed")]
WHOLE = planned(*PLANS[0])


def expected(model: nn.Module) -> torch.Tensor:
    scores = linear.score_rows(model, IDS, PPO.temperature)
    return linear.gradients(model, linear.batch_loss(scores, ROWS, PPO.per_token))


def by_engine(model: nn.Module, engine=WHOLE) -> torch.Tensor:
    model.zero_grad()
    engine(model, temperature=PPO.temperature).forward_backward(ROWS, PPO.loss)
    gradient = linear.gradients(model)
    model.zero_grad()
    return gradient


def check(model: nn.Module, truth: torch.Tensor | None = None) -> None:
    with PureFloat64():
        truth = expected(model) if truth is None else truth
        assert truth.norm() > 1e-4
        for plan in PLANS:
            assert linear.relative_error(by_engine(model, planned(*plan)), truth) <= 1e-12


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "reentrant"),
    [
        *(("qwen3_5_deep", True), ("bamba_deep", False), ("zamba2", True)),
        ("qwen3_5_deep", False),
    ],
)
def test_gradient_checkpointing_changes_nothing(family, reentrant):
    model = make_model(family, dtype=torch.float64)
    with PureFloat64():
        truth = expected(model)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    check(model.train(), truth)


LORAS = {
    "qwen3_5_deep": ["in_proj_qkv", "in_proj_a", "out_proj"],
    "bamba_deep": ["in_proj", "out_proj"],
    "falcon_h1": ["in_proj", "q_proj"],  # peft takes no output projection of this family, which kernels would skip
}
"""What recurrent layers project."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "modules"),
    [
        *(("qwen3_5_deep", "all-linear"), ("falcon_h1", LORAS["falcon_h1"])),
        *((name, LORAS[name]) for name in ("qwen3_5_deep", "bamba_deep")),
        ("bamba_deep", "all-linear"),
    ],
)
def test_a_hybrid_wrapped_by_lora_is_exact(family, modules):
    config = peft.LoraConfig(r=3, lora_alpha=6, task_type="CAUSAL_LM", target_modules=modules)
    model = peft.get_peft_model(make_model(family), config)
    torch.manual_seed(1)
    for key, parameter in model.named_parameters():
        if "lora" in key:  # LoRA starts at B = 0, where half of the gradients vanish
            parameter.data.add_(0.2 * torch.randn_like(parameter))
    check(model.to(torch.float64))


TRAINED = ("A_log", "conv1d", "dt_bias", "out_proj", "in_proj", "layers.3")


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("family", "trained"),
    [
        *(("qwen3_5_deep", "conv1d"), ("bamba_deep", "dt_bias")),
        *(pytest.param("qwen3_5_deep", name, marks=pytest.mark.slow) for name in TRAINED if name != "conv1d"),
        *(pytest.param("bamba_deep", name, marks=pytest.mark.slow) for name in TRAINED if name != "dt_bias"),
        pytest.param("bamba_deep", "mamba.D", marks=pytest.mark.slow),
    ],
)
def test_a_hybrid_of_which_little_is_trained_is_exact(family, trained):
    model = make_model(family, dtype=torch.float64)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trained in name)
    check(model)


@pytest.mark.parametrize(
    ("family", "names"),
    [
        ("qwen3_5_text", ("in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "norm", "out_proj")),
        ("bamba", ("in_proj", "norm", "out_proj")),
    ],
)
def test_hooks_on_the_layers_own_modules_run_once_per_pass(family, names):
    model = make_model(family)
    calls: list[str] = []
    [layer] = [module for module in model.modules() if kind_of(module)]
    for name in names:
        getattr(layer, name).register_forward_hook(lambda *_, name=name: calls.append(name))
    layer.register_forward_hook(lambda *_: calls.append("layer"))
    by_engine(model)
    assert sorted(calls) == sorted([*names, "layer"])


def test_the_model_is_left_as_it_was_found():
    model = make_model("qwen3_5_text")
    before = expected(model)
    layer = model.model.layers[0].linear_attn

    def stop(*_):
        raise ValueError("stopped")

    handle = layer.out_proj.register_forward_hook(stop)
    with pytest.raises(ValueError, match="stopped"):
        by_engine(model)
    handle.remove()
    assert "forward" not in vars(layer) and type(layer).forward is layer.forward.__func__
    assert torch.equal(expected(model), before)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_5_text", "bamba"])
def test_under_autocast_the_error_is_no_larger_than_that_of_rows(family):
    errors: dict[str, list[float]] = {"rows": [], "1 part": [], "chunks of 2": []}
    for seed in range(2):
        model = make_model(family, seed=seed)
        with PureFloat64():
            truth = expected(model.double())
        model.float()
        with torch.autocast("cpu", torch.bfloat16):
            errors["rows"].append(linear.relative_error(expected(model), truth))
            for plan in PLANS:
                errors[plan[0]].append(linear.relative_error(by_engine(model, planned(*plan)), truth))
    pooled = {name: linear.rms(found) for name, found in errors.items()}
    assert 1e-3 < pooled["rows"] < 0.5
    assert max(pooled["1 part"], pooled["chunks of 2"]) <= 1.5 * pooled["rows"]


LIMITS = [{"graph": 9}, {"graph": 1}, {"plain": 4, "graph": 3}, {"plain": 5}, {"alive": 4}]
SPLIT = [None, ("N/4", "none"), ("N/4", "all")]
SHORT = [
    (limits, plan, case)
    for limits, plan, case in itertools.product(LIMITS, SPLIT, [SFT, PPO])
    if plan or "graph" in limits  # one part has no pass without graph, and no other graph beside it
]


@pytest.mark.slow
@pytest.mark.parametrize(("limits", "plan", "case"), SHORT)
def test_out_of_memory_splits_stay_exact(limits, plan, case):
    model = make_model("qwen3_5_deep", dtype=torch.float64)
    gc.disable()  # what is freed must be freed at once
    try:
        with PureFloat64():
            scores = linear.score_rows(model, IDS, case.temperature)
            truth = linear.gradients(model, linear.batch_loss(scores, ROWS, case.per_token))
            engine = tt.TreeEngine if plan is None else planned(*plan)
            with Shortage(model, **limits) as shortage, warnings.catch_warnings():
                warnings.simplefilter("ignore")
                engine(model, temperature=case.temperature).forward_backward(ROWS, case.loss)
    finally:
        gc.enable()
    assert shortage.leaks == 0
    assert linear.relative_error(linear.gradients(model), truth) <= 1e-12


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("family", "reentrant"),
    [
        *(("qwen3_5_deep", True), ("lfm2", None), ("bamba_deep", False)),
        *(pytest.param("qwen3_5_deep", x, marks=pytest.mark.slow) for x in (None, False)),
        pytest.param("lfm2", False, marks=pytest.mark.slow),
    ],
)
def test_recurrent_layers_that_are_handed_no_keywords_are_told_the_run_by_what_is_around_them(
    family, reentrant, monkeypatch
):
    model = make_model(family, dtype=torch.float64)
    for mixer in [module for module in model.modules() if kind_of(module)]:
        hand_no_keywords(mixer, monkeypatch)
    with PureFloat64():
        truth = expected(model)
        if reentrant is not None:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        for plan in [("1 part", "none"), ("chunks of 2", "all"), ("one segment per part", "mixed")]:
            assert linear.relative_error(by_engine(model.train(), planned(*plan)), truth) <= 1e-12


def hand_no_keywords(mixer: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in releases of transformers whose layers hand their mixers the hidden states, a cache and a mask."""
    kind = type(mixer)
    own = kind.forward

    def forward(self, hidden_states, cache_params=None, attention_mask=None):
        return own(self, hidden_states)

    if any(p.kind is p.VAR_KEYWORD for p in inspect.signature(own).parameters.values()):
        monkeypatch.setattr(kind, "forward", forward)
    mixer.register_forward_pre_hook(
        lambda _mixer, args, given: (args or (given["hidden_states"],), {}), with_kwargs=True
    )


def test_checkpointing_around_a_recurrent_layer_alone_is_refused_where_it_is_handed_no_keywords(monkeypatch):
    model = make_model("lfm2", dtype=torch.float64)
    layer = model.model.layers[0]
    hand_no_keywords(layer.conv, monkeypatch)
    layer.conv = CheckpointWrapper(layer.conv)
    with pytest.raises(UnsupportedModel, match=r"Lfm2ShortConv was called without the tree run: .* around it alone"):
        by_engine(model)


@pytest.mark.few(1)
@pytest.mark.parametrize("family", ["nemotron_h", "qwen3_next", "qwen3_5_moe_text", "granitemoehybrid"])
def test_hybrids_with_experts_are_exact(family):
    check(make_model(family, dtype=torch.float64))


@pytest.mark.parametrize(
    "family", ["lfm2", *(pytest.param(x, marks=pytest.mark.slow) for x in ("qwen3_5_text", "granitemoehybrid"))]
)
def test_a_recurrent_layer_that_runs_twice_in_a_forward_is_refused_by_name(family):
    model = make_model(family, dtype=torch.float64)
    layer = model.model.layers[0]
    [mixer] = [module for module in layer.modules() if kind_of(module)]
    original = layer.forward

    def twice(hidden_states, **kwargs):
        return original(original(hidden_states, **kwargs), **kwargs)

    layer.forward = twice
    with pytest.raises(UnsupportedModel, match=rf"layer {mixer.layer_idx} of \w+ runs its recurrence several times"):
        by_engine(model)
    layer.forward = original
    check(model)  # and is exact as soon as it does not
