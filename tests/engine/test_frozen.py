"""Frozen parameters: gradients reach what is trained, also where only tokens above a part depend on it."""

from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from examples.own_model import Decoder
from hypothesis import given
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

import treetrain as tt
from support.images import CONFIGURATIONS, image, image_model, plain_gradients, row
from support.models import make_model
from support.plans import KEEPS, SHAPES, keeping_graphs, on_plan
from treetrain.check import linear
from treetrain.check.contract import PureFloat64
from treetrain.check.forests import VOCAB, forests, runs, seeded
from treetrain.core.attention.kv_cache import _Attend
from treetrain.core.engine.engine_model import Call
from treetrain.core.hf.capability import causal_lm
from treetrain.core.hf.frozen_layers import frozen_layers
from treetrain.layers.finders import check_model
from treetrain.layers.images.encoders import encoder_modules, image_encoder

SOFT = 7
"""The token whose embedding is a trained vector of its own."""
TREE = [
    [SOFT, 1, 2, 3, 4],
    [SOFT, 1, 2, 5, 6],
    [SOFT, 1, 2, 5, 4, 4],
    [1, 2, 3, 4, 5],
    [1, 2, SOFT, 4],
    [1, 2, SOFT, 3],
]


def loss_of(scores: Any) -> Tensor:
    """A loss whose gradient differs from row to row and from token to token."""
    total = torch.zeros((), dtype=torch.float64)
    for number, one in enumerate(scores):
        total = total - ((1 + number) * torch.linspace(0.5, 2.0, len(one), dtype=one.dtype) * one).sum()
    return total / 40


def by_step(model: nn.Module, rows: Any, engine: Any) -> Tensor:
    """The gradient by `TreeEngine.forward_backward`."""
    rows = [one if isinstance(one, tt.Trajectory) else tt.Trajectory(one) for one in rows]
    number = {id(one): at for at, one in enumerate(rows)}

    def loss(logprobs: Tensor, _entropies: Any, one: tt.Trajectory) -> tuple[Tensor, dict]:
        weights = torch.linspace(0.5, 2.0, len(logprobs), dtype=logprobs.dtype)
        return -(1 + number[id(one)]) * (weights * logprobs).sum(), {}

    engine(model).forward_backward(rows, loss, normaliser=40.0)
    return linear.gradients(model)


def by_score(model: nn.Module, rows: Any, engine: Any, graphs: str = "kept") -> Tensor:
    """The gradient by `TreeEngine.score`; `graphs` says how many of them are kept."""
    with mock.patch.object(Call, "plan_keeping_graphs", lambda _self, plan: keeping_graphs(graphs)(plan)):
        scored = engine(model).score(rows)
        loss_of(scored.logprobs).backward()
        scored.backward()
    return linear.gradients(model)


def check(model: nn.Module, rows: Any, expected: Tensor, shape: str, keep: Any) -> None:
    """Compare both ways of a plan with the gradients of rows alone."""
    engine = on_plan(lambda layout: SHAPES[shape](layout, keep))
    graphs = {"none": "recomputed", "all": "kept", "mixed": "partly"}[keep]
    with PureFloat64():
        for run in (by_step, lambda *given: by_score(*given, graphs)):
            model.zero_grad()
            found = run(model, rows, engine)
            # Of a row of one token the gradients of queries and keys are zero.
            assert (found - expected).norm() <= 1e-12 * expected.norm() + 1e-15, (shape, keep, expected.norm())


def trained(model: nn.Module) -> Iterator[nn.Parameter]:
    """The trained parameters."""
    return (p for p in model.parameters() if p.requires_grad)


def alone(model: nn.Module, rows: list[list[int]]) -> Tensor:
    """The gradient of rows alone, by the plain model; zero if they depend on nothing trained."""
    with PureFloat64():
        loss = loss_of(linear.score_rows(model, rows)[0])
        return linear.gradients(model, loss if loss.requires_grad else 0 * next(trained(model)).sum())


def with_soft_token(model: nn.Module) -> nn.Module:
    """The model, with a trained vector in the place of the embedding of `SOFT`."""
    embedding = model.get_input_embeddings()  # type: ignore[operator]
    torch.manual_seed(5)
    model.register_parameter("soft", nn.Parameter(torch.randn(embedding.weight.shape[1], dtype=torch.float64)))

    def put(_module: nn.Module, ids: tuple[Tensor], out: Tensor) -> Tensor | None:
        here = ids[0] == SOFT
        return torch.where(here[..., None], model.soft, out) if here.any() else None

    embedding.register_forward_hook(put)
    return model


def freeze(model: nn.Module, *trained: nn.Module | nn.Parameter) -> None:
    """Train these alone."""
    model.requires_grad_(False)
    for one in trained:
        one.requires_grad_(True)


def upper(model: nn.Module) -> nn.Module:
    """The last decoder layer."""
    return next(m for m in causal_lm(model).modules() if isinstance(m, nn.ModuleList))[-1]


def subsets(model: Any) -> list[list[nn.Module | nn.Parameter]]:
    """What users train beside a soft token."""
    return [[model.soft], [model.soft, model.get_output_embeddings()], [model.soft, upper(model)]]


@pytest.mark.few(2)
@pytest.mark.parametrize("keep", KEEPS)
@pytest.mark.parametrize("shape", ["one segment per part", "N/4", "shared prefill"])
@pytest.mark.parametrize(
    "family", ["qwen3", "qwen3_5_text", "gpt_oss", pytest.param("falcon_h1", marks=pytest.mark.slow)]
)
def test_a_soft_token_above_frozen_layers_gets_its_gradient(family, shape, keep):
    model = with_soft_token(make_model(family, torch.float64, tie_word_embeddings=False))
    for chosen in subsets(model):
        freeze(model, *chosen)
        check(model, TREE, alone(model, TREE), shape, keep)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("family", "examples"),
    [
        *((family, 10) for family in ("llama", "qwen3_next", "mixtral")),
        *(
            pytest.param(family, 60, marks=pytest.mark.slow)
            for family in ("qwen3", "gpt2", "gpt_oss", "gemma3_text", "qwen3_5_text", "bamba", "zamba2", "deepseek_v3")
        ),
    ],
)
def test_any_half_of_the_parameters_may_be_frozen(family, examples):
    model = with_soft_token(make_model(family, torch.float64))
    named = [p for _, p in model.named_parameters()]

    @seeded(f"frozen {family}")
    @runs(examples, derandomize=False)
    @given(
        forests(max_rows=5, max_length=10),
        st.integers(0, 2**20),
        st.sampled_from([*SHAPES]),
        st.sampled_from(KEEPS),
        st.sampled_from([0.05, 0.5, 0.9]),
    )
    def every_half(rows, seed, shape, keep, share):
        rng = np.random.default_rng(seed)
        rows = [[SOFT if rng.random() < 0.1 else token for token in own] for own in rows]
        if all(len(own) < 2 for own in rows):
            return
        freeze(model, *([p for p in named if rng.random() < share] or [model.soft]))
        check(model, rows, alone(model, rows), shape, keep)

    every_half()


@pytest.mark.few(2)
@pytest.mark.parametrize("layers", [[0], [1], [2], [0, 2]])
@pytest.mark.parametrize("targets", [["q_proj"], ["v_proj"], ["down_proj"], ["q_proj", "k_proj", "up_proj"]])
def test_lora_may_stand_on_any_layers(targets, layers):
    model = make_model("llama", torch.float64, num_hidden_layers=3)
    torch.manual_seed(1)
    lora = LoraConfig(target_modules=targets, layers_to_transform=layers, r=2, init_lora_weights=False)
    model = get_peft_model(model, lora).double()
    for number, shape in enumerate(("one segment per part", "N/4", "shared prefill")):
        check(model, TREE, alone(model, TREE), shape, KEEPS[number % 3])
    with_soft_token(causal_lm(model))
    causal_lm(model).soft.requires_grad_(True)
    for number, shape in enumerate(("one segment per part", "N/4", "shared prefill")):
        check(model, TREE, alone(model, TREE), shape, KEEPS[number % 3])


def rows_with_images(family: str) -> list[tt.Trajectory]:
    cat, wide = image(1, family=family), image(3, 2, 4, family=family)
    return [
        row(3, 4, cat, 5, 6, 7, 8),
        row(3, 4, cat, 5, 8, 9),
        row(3, 4, 5, 6, 7),
        row(3, 4, 5, 9),
        row(3, 4, cat, 9, wide, 10, 11),
        row(3, 4, cat, 9, wide, 10, 12, 13),
    ]


@pytest.mark.few(2)
@pytest.mark.parametrize("keep", KEEPS)
@pytest.mark.parametrize(
    "family",
    [f if f in ("LLaVA", "Qwen3.5", "Qwen3-VL") else pytest.param(f, marks=pytest.mark.slow) for f in CONFIGURATIONS],
)
def test_an_image_encoder_above_frozen_layers_gets_its_gradient(family, keep):
    model, rows = image_model(family), rows_with_images(family)
    if family == "Pixtral":
        pytest.skip("the same encoder as Mistral 3's, and its images have no sizes in some releases of transformers")
    encoder = encoder_modules(image_encoder(model))
    layers = list(image_encoder(model).language_model.layers)
    language = {
        "nothing": [],
        "head": [model.get_output_embeddings()],
        "last layer": [layers[-1]],
        "last norm": [image_encoder(model).language_model.norm],
    }
    for number, beside in enumerate(language.values()):
        freeze(model, *encoder, *beside)
        with PureFloat64():
            _, expected = plain_gradients(model, rows, loss_of)
        assert expected.norm() > 0
        check(model, rows, expected, ("one segment per part", "chunks of 7")[number % 2], keep)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_soft_token_above_checkpointed_layers_gets_its_gradient(reentrant):
    model = with_soft_token(make_model("llama", torch.float64, num_hidden_layers=3)).train()
    for chosen in subsets(model):
        freeze(model, *chosen)
        model.gradient_checkpointing_disable()
        expected = alone(model, TREE)
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        for keep in ("none", "all"):
            check(model, TREE, expected, "one segment per part", keep)


@pytest.mark.few(1)
@pytest.mark.parametrize("beside", ["nothing", "head", "last layer"])
def test_a_model_of_ones_own_may_be_frozen_below_a_soft_token(beside):
    torch.manual_seed(0)
    model: Any = Decoder(VOCAB, width=16, windows=(None, 4, None)).double()
    soft = nn.Parameter(torch.randn(16, dtype=torch.float64))
    model.soft = soft
    plain = model.embedding.forward

    def embed(ids: Tensor) -> Tensor:
        here = ids == SOFT
        return torch.where(here[:, None], soft, plain(ids)) if here.any() else plain(ids)

    model.embedding.forward = embed
    freeze(model, soft, *{"nothing": [], "head": [model.head], "last layer": [model.layers[-1]]}[beside])
    total = torch.zeros((), dtype=torch.float64)
    for number, own in enumerate(TREE):
        ids = torch.tensor(own)
        logits = model.head(model(ids, torch.arange(len(ids))))[:-1]
        chosen = logits.gather(1, ids[1:, None])[:, 0] - logits.logsumexp(-1)
        total = total - (1 + number) * chosen.sum()
    expected = linear.gradients(model, total)
    packed = tt.pack(TREE)
    weight = torch.cat([torch.full((len(own) - 1,), 1.0 + number) for number, own in enumerate(TREE)]).double()

    def loss(part: tt.PackedPart) -> Tensor:
        hidden = model(part.input_ids, part.positions, part.tree)
        return -(weight[part.predictions] * tt.prediction_logprobs(hidden, model.head, part)).sum()

    for budget in (1, 3, 6, 9, 100):
        model.zero_grad()
        packed.forward_backward(loss, budget)
        assert linear.relative_error(linear.gradients(model), expected) <= 1e-12, budget


def test_a_loss_of_ones_own_that_leaves_out_a_part_with_gradients_is_named():
    torch.manual_seed(0)
    model: Any = Decoder(VOCAB, width=16, windows=(None, None)).double()
    packed = tt.pack(TREE)

    def loss(part: tt.PackedPart) -> Tensor:
        hidden = model(part.input_ids, part.positions, part.tree)
        scores = tt.prediction_logprobs(hidden, model.head, part)
        return scores.sum() if len(part.predictions) > 2 else torch.zeros(())

    with pytest.raises(ValueError, match="the loss of a part is"):
        packed.forward_backward(loss, 2)
    model.requires_grad_(False)
    with pytest.raises(ValueError, match="the loss of no part requires a gradient"):
        packed.forward_backward(loss, 100)


def outputs_with_graph(model: nn.Module, keep: Any) -> list[int]:
    """The layers of which some attention call of a step has a graph."""
    found, plain = set(), _Attend.apply

    def apply(*given: Any) -> Tensor:
        out = plain(*given)
        found.add(given[7]) if out.requires_grad else None
        return out

    with mock.patch.object(_Attend, "apply", apply):
        by_step(model, TREE, on_plan(lambda layout: SHAPES["one segment per part"](layout, keep)))
    return sorted(found)


@pytest.mark.parametrize("keep", KEEPS)
def test_frozen_layers_below_all_that_is_trained_run_without_graph_in_every_plan(keep):
    model = with_soft_token(make_model("llama", torch.float64, num_hidden_layers=3, tie_word_embeddings=False))
    freeze(model, upper(model), model.get_output_embeddings(), model.model.norm)
    assert outputs_with_graph(model, keep) == [2]
    freeze(model, model.soft)
    assert outputs_with_graph(model, keep) == [0, 1, 2]


def test_frozen_layers_are_those_before_the_first_trained_parameter():
    model = make_model("llama", num_hidden_layers=3, tie_word_embeddings=False)
    layers, head = model.model.layers, model.get_output_embeddings()
    count = lambda *trained: freeze(model, *trained) or frozen_layers(model, check_model(model))  # noqa: E731
    assert count(head) == count(model.model.norm) == 3
    assert count(layers[2].mlp) == 2
    assert count(layers[0].self_attn.q_proj, head) == 0
    assert count(model.get_input_embeddings()) == 0
    tied = make_model("qwen2")
    freeze(tied, tied.get_output_embeddings())
    assert frozen_layers(tied, check_model(tied)) == 0


def test_what_is_trained_but_no_parameter_of_the_model_is_exact_or_named():
    model = make_model("llama", torch.float64, tie_word_embeddings=False)
    soft = torch.randn(24, dtype=torch.float64, requires_grad=True)
    model.get_input_embeddings().register_forward_hook(
        lambda _module, ids, out: torch.where((ids[0] == SOFT)[..., None], soft, out) if (ids[0] == SOFT).any() else out
    )
    freeze(model, model.get_output_embeddings())
    (expected,) = torch.autograd.grad(loss_of(linear.score_rows(model, TREE)[0]), [soft])
    by_step(model, TREE, on_plan(lambda layout: SHAPES["one segment per part"](layout, "all")))
    assert soft.grad is not None and linear.relative_error(soft.grad, expected) <= 1e-5  # transformers' float32 casts
    with pytest.raises(tt.UnsupportedModel, match=r"layer 0 needs gradients.*register_parameter"):
        by_step(model, TREE, on_plan(lambda layout: SHAPES["one segment per part"](layout, "none")))
