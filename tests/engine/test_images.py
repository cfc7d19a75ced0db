"""Images in shared prefixes: trees give what the plain model gives on every row with its own images."""

import functools
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch import Tensor

import treetrain as tt
from support.images import (
    CONFIGURATIONS,
    IMAGE,
    LINES,
    SIGLIP,
    TEXT,
    TILES,
    Picture,
    image,
    image_model,
    joined,
    plain_gradients,
    plain_scores,
    row,
)
from support.models import make_model
from support.plans import KEEPS, SHAPES, keeping_graphs, on_plan, planned
from treetrain.check import linear
from treetrain.check.contract import PureFloat64
from treetrain.core.engine.engine_model import Call
from treetrain.core.engine.model_passes import ModelPasses
from treetrain.layers.images.encoders import arguments_of, encoder_modules, image_encoder, path_positions
from treetrain.layers.images.image_rows import SIZES, tree_images

CAT, DOG, WIDE = image(1), image(2), image(3, 2, 4)


@functools.cache
def rows_of(family: str) -> list[tt.Trajectory]:
    cat, dog, wide = image(1, family=family), image(2, family=family), image(3, 2, 4, family=family)
    return [
        row(3, 4, cat, 5, 6, 7),
        row(3, 4, cat, 5, 8),  # an image in a shared prefix
        row(3, 4, dog, 5, 6, 7),  # a fork at the image: equal ids, another image
        row(3, 4, 5, 6),  # a row of text between them
        row(3, 4, cat, 9, cat, 10, 11),  # the same image twice
        row(3, 4, cat, 9, wide, 10, 11),  # two images in a row, and a fork at the second one
        row(3, 4, cat, 9, wide, 10, 12, 13, cat),
        row(wide, 3, 4),  # a fork at the first token
        row(3, 4),  # a prefix of other rows
        row(3, 4, cat, 5, 6, 7),  # a duplicate
        row(7),
    ]


ROWS = rows_of("Qwen3-VL")
FAMILIES = list(CONFIGURATIONS)
WITHOUT_EXPERTS = (
    "Qwen2-VL",
    "Qwen2.5-VL",
    "Qwen3.5",
    "Mistral 3",
    "InternVL",
    "LLaVA",
    "Pixtral",
)  # rounding changes the choice of experts
ONE_FAST = [name if name == "Qwen3-VL" else pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES]


def loss_of(scores: Any) -> Tensor:
    """A loss whose gradient differs from row to row and from token to token."""
    total = torch.zeros((), dtype=scores[0].dtype)
    for number, one in enumerate(scores):
        weights = torch.linspace(0.5, 2.0, len(one), dtype=one.dtype)
        weights[1::3] = 0.0
        total = total - (1 + number) * (weights * one).sum()
    return total / 40


def by_score(model: Any, rows: Any = ROWS, engine: Any = tt.TreeEngine, **options: Any) -> tuple[float, Tensor]:
    """The loss and its gradient by `TreeEngine.score`."""
    model.zero_grad()
    scored = engine(model, **options).score(rows)
    loss = loss_of(scored.logprobs)
    loss.backward()
    scored.backward()
    return float(loss.detach()), linear.gradients(model)


def by_step(model: Any, rows: Any = ROWS, engine: Any = tt.TreeEngine, **options: Any) -> tuple[float, Tensor]:
    """The same by `TreeEngine.forward_backward`."""
    number = {id(one): at for at, one in enumerate(rows)}

    def loss(logprobs: Tensor, _entropies: Any, one: tt.Trajectory) -> tuple[Tensor, dict]:
        weights = torch.linspace(0.5, 2.0, len(logprobs), dtype=logprobs.dtype)
        weights[1::3] = 0.0
        return -(1 + number[id(one)]) * (weights * logprobs).sum(), {}

    model.zero_grad()
    result = engine(model, **options).forward_backward(rows, loss, normaliser=40.0)
    return result.loss, linear.gradients(model)


@functools.cache
def reference(name: str, temperature: float = 1.0) -> tuple[Any, float, Tensor]:
    model = image_model(name)
    if name == "Pixtral" and SIZES not in arguments_of(image_encoder(model)):
        pytest.skip("this transformers does not name the sizes of images among LLaVA's arguments")
    with PureFloat64():
        return model, *plain_gradients(model, rows_of(name), loss_of, temperature)


def check(found: tuple[float, Tensor], loss: float, gradient: Tensor, tolerance: float = 1e-12) -> float:
    assert abs(found[0] - loss) <= tolerance * abs(loss)
    error = linear.relative_error(found[1], gradient)
    assert error <= tolerance
    return error


@pytest.mark.few(2)
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_with_images_is_exact(name, record_property):
    model, loss, gradient = reference(name)
    with PureFloat64():
        error = check(by_step(model, rows_of(name), planned("chunks of 7", "mixed")), loss, gradient)
    record_property("errors", {"float64": error})


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ONE_FAST)
@pytest.mark.parametrize("run", [by_step, by_score])
@pytest.mark.parametrize("budget, temperature", [(None, 1.0), (6, 1.3), pytest.param(1, 1.0, marks=pytest.mark.slow)])
def test_loss_and_gradients_are_those_of_the_rows_by_themselves(name, run, budget, temperature):
    model, loss, gradient = reference(name, temperature)
    with PureFloat64():
        check(run(model, rows_of(name), budget=budget, temperature=temperature), loss, gradient)


@pytest.mark.slow
@pytest.mark.parametrize("keep", KEEPS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ["Qwen3-VL", "Qwen3.5", "Mistral 3", "InternVL"])
def test_plans_of_every_shape_are_exact(name, shape, keep):
    model, loss, gradient = reference(name)
    engine = on_plan(lambda layout: SHAPES[shape](layout, keep))
    with PureFloat64():
        check(by_step(model, rows_of(name), engine), loss, gradient)
        graphs = {"none": "recomputed", "all": "kept", "mixed": "partly"}[keep]
        with mock.patch.object(Call, "plan_keeping_graphs", lambda _self, plan: keeping_graphs(graphs)(plan)):
            check(by_score(model, rows_of(name), engine), loss, gradient)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 0, 2, 3])
@pytest.mark.parametrize("name", ONE_FAST)
def test_random_forests_of_rows_with_images_are_exact(name, seed):
    random = np.random.default_rng(seed)
    pictures = [image(1, family=name), image(2, family=name), image(3, 2, 4, family=name)]
    # Mistral 3 itself cannot read a single image of one token.
    pictures += [] if name in TILES else [image(4, 1, 1 + (name in LINES), family=name)]
    pool: list[Any] = [*pictures, 3, 4, 5, 6]
    rows: list[list[Any]] = [[]]
    for _ in range(14):  # deep chains and forks anywhere
        before = rows[random.integers(len(rows))]
        cut = random.integers(len(before) + 1)
        rows.append([*before[:cut], *(pool[i] for i in random.integers(len(pool), size=random.integers(1, 6)))])
    made = [row(*parts) for parts in rows[1:]]
    model = image_model(name)
    with PureFloat64():
        check(by_score(model, made, budget=[None, 5][seed % 2]), *plain_gradients(model, made, loss_of))


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ONE_FAST)
@pytest.mark.parametrize(
    "runs",
    [
        [(by_step, {"engine": planned("chunks of 7", "mixed")})],
        pytest.param([(run, {"budget": n}) for run in (by_step, by_score) for n in (None, 6)], marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("kind", ["checkpointed layers", "frozen encoder", "adapters"])
def test_other_ways_to_train_are_exact(name, kind, runs):
    model = image_model(name)
    if kind == "frozen encoder":
        for module in encoder_modules(image_encoder(model)):
            module.requires_grad_(False)
    elif kind == "adapters":  # of the language model and of the encoder
        targets = ["q_proj", "v_proj", "qkv", "linear_fc1", "gate_proj", "linear_1", "fc1"]
        model = get_peft_model(model, LoraConfig(r=2, target_modules=targets, init_lora_weights=False)).double()
    else:
        model.gradient_checkpointing_enable()
    with PureFloat64():
        expected = plain_gradients(model, rows_of(name), loss_of)
        for run, options in runs:
            check(run(model, rows_of(name), **options), *expected)


@pytest.mark.parametrize("budget", [None, 6])
@pytest.mark.parametrize("run", [by_step, by_score])
def test_the_encoder_runs_once_for_each_distinct_image_of_a_step(run, budget):
    model, loss, gradient = reference("Qwen3-VL")
    passes: list[tuple[str, int]] = []
    block = model.model.visual.blocks[0]
    hooks = [
        block.register_forward_hook(lambda _module, args, _out: passes.append(("forward", len(args[0])))),
        block.register_full_backward_hook(lambda _module, _into, out: passes.append(("backward", len(out[0])))),
    ]
    try:
        with PureFloat64():
            check(run(model, budget=budget, check=False), loss, gradient)  # a comparison runs it too
    finally:
        for hook in hooks:
            hook.remove()
    patches = 4 * (4 + 4 + 8)  # of CAT, DOG and WIDE
    assert passes == [("forward", patches), ("backward", patches)]


def test_hooks_of_the_encoders_weights_run_once_on_the_whole_gradient():
    model, _, _ = reference("Qwen2.5-VL")
    weight, seen = model.model.visual.merger.mlp[0].weight, []
    hook = weight.register_hook(seen.append)
    try:
        by_step(model, budget=6)
    finally:
        hook.remove()
    assert len(seen) == 1
    torch.testing.assert_close(seen[0], weight.grad)


def test_a_model_of_text_takes_rows_beside_no_images_and_refuses_images():
    engine = tt.TreeEngine(make_model())
    rows = [[1, 2, 3], [1, 2, 4]]
    plain, beside = engine.score(rows).logprobs, engine.score(rows, images=[None, None]).logprobs
    assert all(torch.equal(a, b) for a, b in zip(plain, beside, strict=True))
    with pytest.raises(tt.UnsupportedModel, match="images are given for Qwen3ForCausalLM, which reads text alone"):
        engine.score(rows, images=[None, image(1).inputs])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Qwen3-VL", *WITHOUT_EXPERTS])
@pytest.mark.parametrize(
    "run, options",
    [
        (by_step, {"engine": planned("chunks of 7", "mixed")}),
        *((by_score, {"budget": budget}) for budget in (None, 6)),
    ],
)
@pytest.mark.parametrize("dtype, bound", [(torch.float32, 1e-5), (torch.bfloat16, None)])
def test_lower_precisions_err_no_more_than_the_rows(name, dtype, bound, run, options):
    low = image_model(name, torch.bfloat16).to(dtype)
    wide = image_model(name, torch.bfloat16).double()
    with PureFloat64():
        _, truth = plain_gradients(wide, rows_of(name), lambda scores: loss_of([x.double() for x in scores]))
    _, rows = plain_gradients(low, rows_of(name), lambda scores: loss_of([x.float() for x in scores]))
    error = linear.relative_error(run(low, rows_of(name), **options)[1], truth)
    assert error <= (1.5 * linear.relative_error(rows, truth) if bound is None else bound)


@pytest.mark.slow
@pytest.mark.parametrize("name", ONE_FAST)
def test_scores_without_gradients_and_in_autograd(name):
    model, loss, gradient = reference(name)
    with PureFloat64():
        with torch.no_grad():
            wanted = plain_scores(model, rows_of(name))
        found = tt.TreeEngine(model, budget=6).logprobs(rows_of(name))
        for one, other in zip(found, wanted):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
        total = loss_of(tt.logprobs(model, rows_of(name), budget=6))
        model.zero_grad()
        total.backward()
        check((float(total.detach()), linear.gradients(model)), loss, gradient)


def test_images_may_be_given_beside_rows_of_ids():
    model, *_ = reference("Qwen3-VL")
    ids = [one.ids.tolist() for one in ROWS]
    images = [joined(*(each.inputs for each in one.images)) if one.images else None for one in ROWS]
    engine = tt.TreeEngine(model)
    with torch.no_grad():
        for one, other in zip(engine.score(ids, images=images).logprobs, engine.score(ROWS).logprobs):
            torch.testing.assert_close(one, other, rtol=0, atol=0)
    with pytest.raises(tt.DataError, match="images has 1 entries, the batch 11 rows"):
        engine.score(ids, images=images[:1])


@pytest.mark.parametrize("name", ONE_FAST)
def test_verify_runs_the_plain_model_with_each_rows_images(name):
    model, *_ = reference(name)
    with PureFloat64():
        report = tt.verify(model, rows_of(name), tolerance=1e-12, budget=6)
    assert report.passed, report.verdict


@pytest.mark.few(1)
@pytest.mark.parametrize("run", [by_step, by_score])
def test_a_step_that_runs_out_of_memory_starts_again_with_the_same_result(run):
    model, loss, gradient = reference("Qwen3-VL")
    backward, calls = ModelPasses.backward, []

    def fails_once(self: ModelPasses, part: Any, output: Any) -> None:
        calls.append(part)
        if len(calls) == 4:  # some parts have added to the gradients of the features
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        backward(self, part, output)

    with mock.patch.object(ModelPasses, "backward", fails_once), warnings.catch_warnings(), PureFloat64():
        warnings.simplefilter("ignore", RuntimeWarning)
        found = run(model, budget=6)
    assert len(calls) > 8
    check(found, loss, gradient)


# ---- trees


def test_tokens_of_images_are_merged_where_the_images_are_equal():
    rows = [row(3, CAT, 4), row(3, image(1), 5), row(3, DOG, 4), row(3, 4)]
    tree = tt.build_tree(rows)
    assert tree.num_tokens == 1 + 1 + 7 + 6 + 1
    images = tree_images(tree)
    assert images is not None
    assert len(images.distinct) == 2
    for number, one in enumerate(rows):
        path = tree.path(number)
        assert tree.tokens[path].tolist() == one.ids.tolist()
        features = images.feature[path][tree.tokens[path] == IMAGE]
        assert features.tolist() == ([[0, 1, 2, 3], [0, 1, 2, 3], [4, 5, 6, 7], []][number])
    assert tt.build_tree(rows, merge=False).num_tokens == sum(map(len, rows))
    assert tree_images(tt.build_tree([one.ids for one in rows])) is None


def test_one_changed_number_makes_another_image():
    other = {name: array.copy() for name, array in CAT.inputs.items()}
    other["pixel_values"][3, 2] += 1e-3
    turned = CAT.inputs | {"image_grid_thw": np.array([[1, 2, 8]])}
    for different in (other, turned):
        assert tt.build_tree([row(3, CAT), row(3, CAT._replace(inputs=different))]).num_tokens == 2 + 2 * 5
    tensors = CAT._replace(inputs={name: torch.from_numpy(array) for name, array in CAT.inputs.items()})
    assert (
        tt.build_tree(
            [row(3, CAT), tt.Trajectory(row(3, CAT).ids, images=tensors.inputs, image_token=IMAGE)]
        ).num_tokens
        == 7
    )


def test_padding_to_the_largest_image_of_a_batch_does_not_make_another_image():
    small, large = (image(seed, 2, width, family="Mistral 3") for seed, width in ((1, 2), (2, 3)))
    tree = tt.build_tree([row(3, small, large, 4), row(3, small, 4)])
    assert tree.num_tokens == 1 + 6 + 8 + 1 + 1
    images = tree_images(tree)
    assert images is not None
    assert [one.inputs["pixel_values"].shape[2:] for one in images.distinct] == [(8, 8), (8, 12)]


def test_tokens_are_divided_among_tiles_and_the_lines_of_an_image_by_pixels():
    lines, tiles = image(1, 2, 3, family="Mistral 3"), image(2, 4, 3, family="InternVL")
    one, other = (tree_images(tt.build_tree([row(3, each, 4, each)])) for each in (lines, tiles))
    assert one is not None and one.first.tolist() == [0, 6]
    assert one.feature.tolist() == [-1, *[0, 1, 2, -1, 3, 4, 5, -1], -1, *[0, 1, 2, -1, 3, 4, 5, -1]]
    assert other is not None and other.first.tolist() == [0, 4, 8, 12]
    assert other.feature.tolist() == [-1, -1, *range(12), -1, -1, -1, *range(12), -1]


def test_experts_and_images_keep_tokens_apart_together():
    experts = np.zeros((7, 1, 1), int)
    other = experts.copy()
    other[6] = 1
    rows = [row(3, CAT, experts=experts), row(3, CAT, experts=other), row(3, DOG, experts=experts)]
    tree = tt.build_tree(rows)
    assert tree.num_tokens == 2 + 5 + 1 + 5
    for number, one in enumerate(rows):
        assert tree.tokens[tree.path(number)].tolist() == one.ids.tolist()


def test_text_after_an_image_continues_from_its_largest_position():
    model, *_ = reference("Qwen3-VL")
    encoder = image_encoder(model)
    assert encoder is not None
    tree = tt.build_tree([row(3, WIDE, 4, 5)])
    positions = path_positions(encoder, tree)
    assert positions is not None
    assert positions.tolist() == [
        [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12],
        [0, 1, 2, 2, 2, 2, 2, 2, 2, 2, 6, 7, 8],
        [0, 1, 2, 2, 2, 2, 3, 3, 3, 3, 6, 7, 8],
        [0, 1, 2, 3, 4, 5, 2, 3, 4, 5, 6, 7, 8],
    ]


# ---- refusals


def cut_short() -> tt.Trajectory:
    whole = row(3, CAT)
    return tt.Trajectory(whole.ids[:4], images=whole.images, image_token=IMAGE)


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "an image too few": (
        lambda: tt.Trajectory([3, IMAGE, 4, IMAGE], images=CAT.inputs, image_token=IMAGE),
        "there are 1 images and 2 runs of image_token 60",
    ),
    "no placeholder": (lambda: tt.Trajectory([3, IMAGE], images=CAT.inputs), "without image_token"),
    "a video": (
        lambda: tt.Trajectory([3], images={"pixel_values_videos": CAT.inputs["pixel_values"]}, image_token=IMAGE),
        "pixel_values_videos: rows with videos",
    ),
    "a grid of other patches": (
        lambda: row(3, CAT._replace(inputs=CAT.inputs | {"image_grid_thw": np.array([[1, 4, 6]])})),
        r"pixel_values \[16, 12\].*does not fit the others, with 24 patches",
    ),
    "sizes beyond the pixels": (
        lambda: row(3, Picture({"pixel_values": np.zeros((1, 3, 8, 8)), "image_sizes": np.array([[8, 9]])}, [IMAGE])),
        r"image_sizes has \[8, 9\] for pixel_values \[3, 8, 8\]",
    ),
    "tokens that tiles do not divide": (
        lambda: tt.Trajectory([3, *[IMAGE] * 5], images={"pixel_values": np.zeros((2, 3, 8, 8))}, image_token=IMAGE),
        "there are 2 images and 1 runs of image_token 60",
    ),
    "objects": (lambda: tt.Trajectory([IMAGE], images=["cat.png"], image_token=IMAGE), "images hold a str"),
    "a token of an image in text": (
        lambda: tt.build_tree([row(3, CAT), tt.Trajectory([3, IMAGE, 5], id="b")]),
        "row 1 has the token 60, which stands for images in other rows, at position 1",
    ),
    "two placeholders": (
        lambda: tt.build_tree([row(3, CAT), tt.Trajectory([3, 7], images=CAT.inputs, image_token=7)]),
        "row 1 has image_token 7, an earlier row 60",
    ),
    "a model of one's own": (lambda: tt.pack([row(3, CAT)]), "the rows have images, which tt.pack"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_images_that_do_not_fit_are_refused_by_name(case):
    make, message = REFUSED[case]
    with pytest.raises(tt.DataError, match=message):
        make()


@pytest.mark.parametrize(
    "rows, message",
    [
        ([cut_short()], "has 4 features, but 2 tokens 60 stand for it"),
        ([tt.Trajectory([3, 7, 4], images=image(1, 1, 1).inputs, image_token=7)], "image_token 7, Qwen3VL.* has 60"),
        (
            [tt.Trajectory([3, IMAGE], images={"pixel_values": np.zeros((1, 3, 4, 4))}, image_token=IMAGE)],
            "an image has pixel_values; .* reads pixel_values and image_grid_thw",
        ),
    ],
)
def test_images_that_the_model_cannot_read_are_refused_before_any_work(rows, message, monkeypatch):
    model, *_ = reference("Qwen3-VL")
    engine = tt.TreeEngine(model)
    monkeypatch.setattr(model, "forward", None)
    for call in (engine.score, lambda given: engine.forward_backward(given, tt.losses.sft())):
        with pytest.raises(tt.DataError, match=message):
            call(rows)


@pytest.mark.few(1)
@pytest.mark.parametrize("family, left", [("Mistral 3", 2), ("InternVL", 3)])
def test_images_with_other_features_than_tokens_are_refused_before_the_first_part(family, left, monkeypatch):
    whole, model = image(1, family=family), image_model(family)
    monkeypatch.setattr(model, "forward", None)
    rows = [tt.Trajectory([3, *whole.tokens[: left + 1]], images=whole.inputs, image_token=IMAGE)]
    with pytest.raises(tt.DataError, match=f"has 4 features, but {left} tokens 60"):
        tt.TreeEngine(model, check=False).score(rows)  # a comparison calls the plain model


def test_families_that_are_not_proven_are_refused_by_name():
    engine = tt.TreeEngine(make_model("qwen3", dtype=torch.float64))
    rows = [tt.Trajectory([3, 5, 4], images=image(1, 1, 1).inputs, image_token=5)]
    with pytest.raises(tt.UnsupportedModel, match=r"Qwen3ForCausalLM.*not known to be exact on a tree; .*qwen3_vl"):
        engine.score(rows)


def test_gemma_3_is_refused_with_the_reason():
    text = transformers.Gemma3TextConfig(**TEXT, sliding_window=8, query_pre_attn_scalar=8)
    vision = transformers.SiglipVisionConfig(**SIGLIP, image_size=4)
    config = transformers.Gemma3Config(
        text_config=text, vision_config=vision, mm_tokens_per_image=4, image_token_id=IMAGE
    )
    engine = tt.TreeEngine(transformers.Gemma3ForConditionalGeneration(config).eval())
    with pytest.raises(
        tt.UnsupportedModel, match=r"\(gemma3\).*see each other in both directions.*leave the images out"
    ):
        engine.score([row(3, image(1, family="LLaVA"), 4, 5)])
