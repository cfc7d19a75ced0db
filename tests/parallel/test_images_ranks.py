"""Rows with images on ranks that each have a model, or share one, its parts or its layers: one process's gradients."""

from typing import Any

import pytest
import torch
from rank_steps import cut, gradients
from torch.distributed.tensor import DTensor

import treetrain as tt
from support.images import (
    CONFIGURATIONS,
    IMAGE,
    Picture,
    ShardedJob,
    image,
    image_model,
    losses_of,
    plain_gradients,
    plain_scores,
    row,
    sharded_step,
    some_rows,
    step_of_ranks,
)
from treetrain.check import linear
from treetrain.check.contract import PureFloat64
from treetrain.core.planning.devices import SLACK


@pytest.mark.few(1)
@pytest.mark.parametrize("first", [3, 5])
def test_the_gradients_are_those_of_one_process(run_on_ranks, first):
    """With 5 rows on the first rank the other has text alone, and no gradient of the encoder."""
    assert max(run_on_ranks(step_of_ranks, first)) <= 1e-12


EVERY = (0, 1, 2, 3, 4, 5)
WHERE = {
    "images on both ranks": ((0, 1, 2), (3, 4, 5)),
    "images on the first rank": ((0, 1, 2, 4), (3, 5)),
    "images on the second rank": ((3, 5), (0, 1, 2, 4)),
    "no rows on the second rank": (EVERY, ()),
    "no rows on the first rank": ((), EVERY),
    "text alone": ((3,), (5,)),
}
WAYS = {
    "": {},
    ", scored": {"run": "score"},
    ", in parts": {"budget": 6},
    ", scored in parts": {"budget": 6, "run": "score"},
    ", reducing each": {"budget": 6, "reduces_each": True},
    ", in two calls": {"run": "two calls"},
    ", one shard": {"shards": "whole"},
    ", checkpointed": {"checkpointing": True, "budget": 6},
    ", frozen encoder": {"frozen": "visual"},
    ", frozen encoder in parts": {"frozen": "visual", "budget": 6},
    ", frozen embeddings": {"frozen": "embed_tokens visual.blocks", "budget": 6, "reduces_each": True},
    ", frozen layers": {"frozen": "language_model", "budget": 6},
}
JOBS = {where + way: ShardedJob(ranks=ranks, **more) for where, ranks in WHERE.items() for way, more in WAYS.items()}
JOBS |= {name: ShardedJob(family=name, ranks=WHERE["images on the first rank"], budget=6) for name in CONFIGURATIONS}


FIRST = [
    "images on the second rank, frozen embeddings",
    "images on the first rank, scored in parts",
    "no rows on the first rank, in two calls",
    "images on both ranks, frozen encoder in parts",
]
"""What `make test` runs."""


@pytest.mark.few(4)
@pytest.mark.parametrize("job", dict.fromkeys((*FIRST, *JOBS)))
def test_sharded_models_give_the_loss_and_gradients_of_plain_rows(run_on_ranks, job):
    for loss, error in run_on_ranks(sharded_step, JOBS[job]):
        assert loss <= 1e-12 and error <= 1e-12


DIVIDED = {
    f"{family}{way}": ShardedJob(family=family, ranks=(rows, rows), context=True, **{"shards": ""} | more)
    for family in CONFIGURATIONS
    for rows, way, more in [
        (EVERY, "", {}),
        (EVERY, ", scored in parts", {"budget": 3, "run": "score"}),
        (EVERY, ", in parts of shards", {"budget": 3, "shards": "blocks"}),
        (EVERY, ", frozen encoder", {"frozen": "visual vision_tower", "budget": 3}),
        ((0, 5), ", images on the first rank", {}),
    ]
}
FIRST_DIVIDED = ["Qwen3-VL, scored in parts", "Qwen3.5, in parts of shards", "Qwen2.5-VL, images on the first rank"]


@pytest.mark.few(3)
@pytest.mark.parametrize("job", dict.fromkeys((*FIRST_DIVIDED, *DIVIDED)))
def test_ranks_that_divide_parts_give_the_loss_and_gradients_of_plain_rows(run_on_ranks, job):
    for loss, error in run_on_ranks(sharded_step, DIVIDED[job]):
        assert loss <= 1e-12 and error <= 1e-12


def scores_of_five_tokens(group: Any) -> float:
    """The error of the scores of a tree whose last token is of an image, with a filler on the second rank."""
    model, cat = image_model("Qwen3-VL"), Picture(image(1).inputs, [IMAGE] * 4)
    rows = [row(3, 4, cat)]
    with PureFloat64(), torch.no_grad():
        found = tt.TreeEngine(model, context=group).score(rows).logprobs
        return max(float((a - b).abs().max()) for a, b in zip(found, plain_scores(model, rows), strict=True))


def test_fillers_of_a_share_ask_for_no_image(run_on_ranks):
    assert max(run_on_ranks(scores_of_five_tokens)) <= 1e-12


def bytes_of_encoder(group: Any) -> list[float]:
    """What the encoder needs by the errors of a process alone and of two that divide the tokens of parts."""
    found = []
    for context in (None, group):
        engine = tt.TreeEngine(image_model("Qwen3-VL", torch.float32), budget="1KB", context=context)
        with pytest.raises(ValueError, match="needs") as refused:
            engine.plan(some_rows())
        found.append(int(str(refused.value).split(" bytes)")[0].split("(")[-1]) - SLACK["cpu"][1])
    return found


def test_budgets_of_ranks_that_divide_parts_have_an_encoder_on_each(run_on_ranks):
    for alone, divided in run_on_ranks(bytes_of_encoder):
        assert divided == pytest.approx(2 * alone, rel=1e-4)


def step_of_divided_layers(group: Any, family: str) -> tuple[float, float]:
    """The errors of the loss and of the gradients of a model that transformers divides over the ranks by its plan."""
    rows, model = some_rows(family), image_model(family)
    with PureFloat64():
        loss, alone = plain_gradients(model, rows, losses_of)
        shapes = {name: p.shape for name, p in model.named_parameters()}
        engine = tt.TreeEngine(cut(image_model(family), group), budget=6)
        scored = engine.score(rows)
        total = losses_of(scored.logprobs)
        total.backward()
        scored.backward()
    found = gradients(engine.model)
    assert any(len(p.to_local()) < len(p) for p in engine.model.parameters() if isinstance(p, DTensor))
    whole = [torch.zeros(shapes[name]) if found[name] is None else found[name] for name in shapes]
    return abs(float(total) - loss) / abs(loss), linear.relative_error(torch.cat([x.flatten() for x in whole]), alone)


@pytest.mark.few(1)
@pytest.mark.parametrize("family", [name for name in CONFIGURATIONS if name != "Qwen3-VL"])  # has no plan
def test_layers_divided_over_ranks_give_the_loss_and_gradients_of_plain_rows(run_on_ranks, family):
    for loss, error in run_on_ranks(step_of_divided_layers, family):
        assert loss <= 1e-12 and error <= 1e-12
