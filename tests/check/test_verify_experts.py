"""`verify` on mixtures of experts: the auxiliary loss and recorded experts are on the plain side, too."""

import pytest
import torch

import treetrain as tt
from support import moe
from support.models import make_model
from treetrain.check.forests import with_random_facts
from treetrain.core.errors import UnsupportedModel
from treetrain.layers.experts.experts import Experts

IDS = [[1, 2, 3, 4, 5, 6], [1, 2, 3, 7, 8], [1, 2, 3, 7, 8], [1, 9], [4], [], [9, 8, 7, 7, 2], [1, 2, 3, 4]]
ROWS = with_random_facts(IDS, 3)


@pytest.mark.few(2)
@pytest.mark.parametrize(("family", "recorded"), [("qwen3_moe", True), ("glm4_moe", False), ("gpt_oss", False)])
def test_a_mixture_of_experts_passes(family, recorded):
    model = make_model(family, **moe.AUXILIARY)
    rows = moe.at_random(ROWS, len(moe.routers_of(model))) if recorded else ROWS
    report = tt.verify(model, rows, budget=5)
    assert report.passed, report.verdict


def test_choices_of_experts_that_rounding_changes_are_refused():
    with pytest.raises(UnsupportedModel, match="Load the model in float32"):
        tt.verify(make_model("qwen3_moe", torch.bfloat16), ROWS)


def test_a_step_that_forgets_the_auxiliary_gradient_does_not(monkeypatch):
    model = make_model("qwen3_moe", **moe.AUXILIARY)
    assert tt.verify(model, ROWS).passed
    slope = Experts.slope
    monkeypatch.setattr(Experts, "slope", lambda self, counts: 0.0 * slope(self, counts))
    assert not tt.verify(model, ROWS).passed


def test_routes_that_the_tree_forgets_are_seen(monkeypatch):
    model = make_model("qwen3_moe")
    rows = moe.at_random(ROWS, 2)
    assert tt.verify(model, rows).passed
    monkeypatch.setattr("treetrain.layers.experts.experts.by_place", lambda experts, recorded: None)
    assert not tt.verify(model, rows).passed
