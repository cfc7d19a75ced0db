"""Rows with images on several ranks: DistributedDataParallel is exact, sharded models refuse them."""

import pytest

from support.images import refusal_of_ranks, step_of_ranks


@pytest.mark.few(1)
@pytest.mark.parametrize("first", [3, 5])
def test_the_gradients_are_those_of_one_process(run_on_ranks, first):
    """With 5 rows on the first rank the other has text alone, and no gradient of the encoder."""
    assert max(run_on_ranks(step_of_ranks, first)) <= 1e-12


def test_a_sharded_model_refuses_images_by_name(run_on_ranks):
    for message in run_on_ranks(refusal_of_ranks, size=4):
        assert "rows with images on a model that processes divide" in message
