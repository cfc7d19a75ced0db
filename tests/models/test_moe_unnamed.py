"""Mixtures of experts in releases of transformers that do not say whose output is router logits."""

import pytest
import torch

import treetrain as tt
from support.models import make_model
from support.moe import at_random, expected
from support.plans import planned
from treetrain.check import linear
from treetrain.check.contract import SFT, measured
from treetrain.check.forests import with_random_facts
from treetrain.core.errors import UnsupportedModel
from treetrain.layers.experts.routers import experts_of

IDS = [[1, 2, 3, 4, 5, 6], [1, 2, 3, 7, 8], [1, 2, 3, 7, 8], [1, 9], [4], [9, 8, 7], [9, 8, 7, 7, 2], [1, 2, 3, 4]]


def unnamed(model, monkeypatch):
    """The model, as releases of transformers have it that do not say whose output is router logits."""
    for kind in {type(module) for module in model.modules() if getattr(module, "_can_record_outputs", None)}:
        recorded = {name: spec for name, spec in kind._can_record_outputs.items() if name != "router_logits"}
        monkeypatch.setattr(kind, "_can_record_outputs", recorded)
    return model


def test_routers_that_the_model_does_not_name_are_found_beside_its_experts(monkeypatch):
    model = unnamed(make_model("glm4_moe", torch.float64), monkeypatch)
    routers = experts_of(tt.TreeEngine(model).capabilities).routers
    assert [router.name for router in routers] == ["model.layers.1.mlp.gate"]
    rows = at_random(with_random_facts(IDS, 3), 1)
    loss, gradient = expected(model, rows, [SFT], 0.0)[0]
    found = measured(model, rows, SFT, planned("chunks of 2", "mixed"))
    assert found[0] == pytest.approx(loss, rel=1e-6) and linear.relative_error(found[1], gradient) <= 1e-6

    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["gate"])
    wrapped = peft.get_peft_model(model, config)
    routers = experts_of(tt.TreeEngine(wrapped).capabilities)
    assert {router.name for router in routers.routers} == {"model.layers.1.mlp.gate"} and routers.places == 1


def test_experts_without_a_router_that_can_be_told_are_refused(monkeypatch):
    model = unnamed(make_model("glm4_moe", torch.float64), monkeypatch)
    router = model.model.layers[1].mlp.gate
    router.__class__ = type("Gate", (type(router),), {})
    with pytest.raises(UnsupportedModel, match=r"layers\.1\.mlp\.experts belongs to .* no router beside the experts"):
        tt.TreeEngine(model)
