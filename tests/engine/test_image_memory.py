"""What an encoder of images needs counts: predicted peaks are those of steps, and budgets in bytes hold with it."""

import re
from typing import Any
from unittest import mock

import pytest
import torch

import treetrain as tt
from support.images import CONFIGURATIONS, image, image_model, row
from support.models import needs_transformers
from treetrain.check import linear
from treetrain.core.planning.make import Bytes
from treetrain.layers.images.image_rows import tree_images
from treetrain.models import encoder_memory
from treetrain.models.meters import CountStorages

needs_transformers("5.16", "encoders of images return their outputs in other forms")
PICTURES = [*(image(seed, 8, 8) for seed in range(3)), image(9, 8, 12)]
ROWS = [row(3, 4, picture, *range(5, 25 + k)) for k, picture in enumerate(PICTURES) for _ in range(2)]
QWEN = [name for name in CONFIGURATIONS if "Qwen" in name]
FAMILIES = [name if name == "Qwen3-VL" else pytest.param(name, marks=pytest.mark.slow) for name in QWEN]


def ready(model: Any) -> Any:
    """The model with gradients of zero, which budgets do not count."""
    for p in model.parameters():
        p.grad = torch.zeros_like(p) if p.requires_grad else None
    return model


def step(engine: tt.TreeEngine) -> None:
    engine.forward_backward(ROWS, tt.losses.sft())


def score(engine: tt.TreeEngine) -> None:
    scored = engine.score(ROWS)
    torch.cat(scored.logprobs).sum().backward()
    scored.backward()


OTHERS = [(step, None), (score, None), (score, 100)]


def call_on(engine: tt.TreeEngine) -> Any:
    """A call on the rows, which knows what their images need."""
    call = engine.prepared.call()
    engine._before_plan(call, tt.build_tree(ROWS))
    return call


def check_peak(model: Any, budget: int | None, run: Any, tolerance: float = 0.1) -> dict[str, float]:
    """Check the tensors alive at the peak against what is predicted, and return that."""
    engine = tt.TreeEngine(ready(model), budget=budget)
    plan, call = engine.plan(ROWS), call_on(engine)
    plan = call.plan_keeping_graphs(plan) if run is score else plan
    predicted = call.cost.bytes_by(plan)
    with CountStorages() as meter:
        run(engine)
    assert meter.peak == pytest.approx(sum(predicted.values()) - predicted["allocator"], rel=tolerance)
    return predicted


@pytest.mark.few(1)
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("run, budget", [(step, 100), *OTHERS])
def test_the_peak_of_a_step_with_images_is_predicted_within_a_tenth(name, run, budget):
    predicted = check_peak(image_model(name, torch.float32), budget, run)
    assert predicted["beside"] > 0.3 * (sum(predicted.values()) - predicted["allocator"])


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize(
    "kind",
    ["frozen", "checkpointed", "autocast", "bfloat16"],
)
def test_the_peak_is_predicted_however_the_encoder_is_trained(name, kind):
    model = image_model(name, torch.bfloat16 if kind == "bfloat16" else torch.float32)
    if kind == "frozen":
        for p in model.model.visual.parameters():
            p.requires_grad_(False)
    elif kind == "checkpointed":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    with torch.autocast("cpu", torch.bfloat16, enabled=kind == "autocast"):
        check_peak(model, 20 if kind == "frozen" else None, step, 0.25 if kind == "checkpointed" else 0.1)


@pytest.mark.few(1)
@pytest.mark.parametrize("run", [step, score])
def test_a_budget_in_bytes_holds_with_the_encoder(run):
    model = ready(image_model("Qwen3-VL", torch.float32))
    whole = tt.TreeEngine(model)
    plan = whole.plan(ROWS)
    cost = call_on(whole).cost
    most = cost.peak_bytes(plan)
    without = tt.TreeEngine(model).cost  # counts the parts alone
    assert most - without.peak_bytes(plan) > cost.beside.held > 4e6
    run(whole)
    gradient = linear.gradients(model)
    engine = tt.TreeEngine(ready(model), budget=f"{int(most - 1e6)}B")  # the parts alone would fit as a whole
    plan = engine.plan(ROWS)
    assert plan.num_parts > 1
    first = call_on(engine).plan_keeping_graphs(plan)
    assert max(cost.peak_bytes(plan), cost.peak_bytes(first)) <= most - 1e6
    with CountStorages() as meter:
        run(engine)
    assert linear.relative_error(linear.gradients(model), gradient) <= 1e-5
    assert meter.peak <= most - 1e6 - cost.bytes_by(plan)["allocator"] + 0.1 * meter.peak
    tt.TreeEngine(model, budget=f"{int(most - 1e6)}B").forward_backward([[3, 4, 5]], tt.losses.sft())


@pytest.mark.parametrize("run", [step, pytest.param(score, marks=pytest.mark.slow)])
def test_a_budget_that_the_encoder_does_not_fit_into_is_refused_by_name(run):
    model = ready(image_model("Qwen3-VL", torch.float32))
    with pytest.raises(ValueError, match=r"the encoder of 4 images alone needs .*\(\d+ bytes\)") as caught:
        run(tt.TreeEngine(model, budget="9MB"))
    least = int(re.search(r"\((\d+) bytes\)", str(caught.value))[1])
    with pytest.raises(ValueError, match="the encoder of 4 images"):
        run(tt.TreeEngine(model, budget=f"{least - 1}B"))
    tt.TreeEngine(model, budget=f"{least}B").plan(ROWS)
    with (
        pytest.warns(UserWarning, match="more memory is predicted than is free"),
        mock.patch.object(tt.TreeEngine(model).prepared.__class__, "free_bytes", lambda _self: 9_000_000),
    ):
        run(tt.TreeEngine(model))


def test_scores_without_gradient_hold_the_features_alone():
    model = image_model("Qwen3-VL", torch.float32)
    distinct = tree_images(tt.build_tree(ROWS)).distinct
    graph = encoder_memory.encoder_memory(model, distinct)
    with torch.no_grad():
        none = encoder_memory.encoder_memory(model, distinct)
    features = 3 * 32 * 4 * (3 * 64 + 96)  # of the embeddings and of two deep layers, float32
    assert none.held == pytest.approx(features)
    assert none.held < none.peak < graph.held < graph.peak


def test_an_encoder_that_cannot_be_counted_takes_a_budget_in_tokens():
    model = ready(image_model("Qwen3-VL", torch.float32))
    with (
        mock.patch.object(encoder_memory, "_COUNTED", {}),
        mock.patch.object(encoder_memory, "without_data", side_effect=TypeError("no")),
    ):
        with pytest.raises(
            tt.UnsupportedModel, match=r"what the image encoder of Qwen3VL.* needs .*TypeError: no.*tokens"
        ):
            tt.TreeEngine(model, budget=Bytes(1 << 30)).score(ROWS)
        step(tt.TreeEngine(model, budget=100))


def test_a_want_of_memory_while_an_encoder_is_counted_is_not_remembered():
    model = image_model("Qwen3-VL", torch.float32)
    distinct = tree_images(tt.build_tree(ROWS)).distinct
    with mock.patch.object(encoder_memory, "_COUNTED", {}):
        with mock.patch.object(encoder_memory, "without_data", side_effect=MemoryError()):
            assert isinstance(encoder_memory.encoder_memory(model, distinct), tt.UnsupportedModel)
        assert encoder_memory.encoder_memory(model, distinct).held > 0


def test_an_encoder_that_reads_all_images_in_one_sequence_takes_a_budget_in_tokens():
    model, picture = image_model("Mistral 3", torch.float32), image(1, family="Mistral 3")
    rows = [row(3, picture, 4), row(3, picture, 5)]
    with pytest.raises(tt.UnsupportedModel, match=r"encoder of Mistral3.* all images of a step in one masked sequence"):
        tt.TreeEngine(model, budget=Bytes(1 << 30)).score(rows)
    tt.TreeEngine(model, budget=6).score(rows)


@pytest.mark.slow
def test_flash_attention_is_counted_as_torchs_own():
    model = image_model("Qwen2.5-VL", torch.bfloat16)
    distinct = tree_images(tt.build_tree(ROWS)).distinct
    own = encoder_memory.encoder_memory(model, distinct)
    flash = mock.patch.object(model.model.visual.config, "_attn_implementation_internal", "flash_attention_2")
    with flash, mock.patch.object(encoder_memory, "_COUNTED", {}):
        assert encoder_memory.encoder_memory(model, distinct) == own
