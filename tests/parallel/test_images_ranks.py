"""Rows with images on several ranks: with whole models, and with shards of one, gradients are those of one process."""

import pytest

from support.images import CONFIGURATIONS, ShardedJob, refusal_of_ranks, sharded_step, step_of_ranks


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
    for loss, gradients in run_on_ranks(sharded_step, JOBS[job]):
        assert loss <= 1e-12 and gradients <= 1e-12


def test_ranks_that_divide_parts_refuse_images_by_name(run_on_ranks):
    for message in run_on_ranks(refusal_of_ranks):
        assert "rows with images under tensor or context parallel" in message
