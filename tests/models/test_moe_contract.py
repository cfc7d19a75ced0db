"""Mixtures of experts are exact on a tree: every family, with and without its auxiliary loss and recorded experts."""

import pytest

from support.families import make_family
from support.moe import check_experts_contract
from support.plans import planned
from treetrain.errors import UnsupportedModel
from treetrain.models.capability import check_model
from treetrain.testing.contract import PPO, SFT

FAMILIES = ("qwen3_moe", "mixtral", "glm4_moe", "deepseek_v3", "gpt_oss", "llama4_text", "llama4_tuned")
WITH_AUXILIARY = ("qwen3_moe", "mixtral", "gpt_oss")
PLANS = [("chunks of 7", "none"), ("chunks of 2", "mixed"), ("one segment per part", "all")]
MANY = [planned(shape, keep) for shape in ("N/2", "chunks of 7", "chunks of 2") for keep in ("none", "all", "mixed")]
MANY += [planned("one segment per part", "mixed"), planned("shared prefill", "none")]


FAST = ("deepseek_v3", "gpt_oss", "llama4_text")  # the tests below have others


@pytest.mark.parametrize(
    "family", [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES]
)
def test_a_tree_equals_its_rows(family):
    check_experts_contract(family, [PPO], 2)


@pytest.mark.parametrize("family", ("qwen3_moe", pytest.param("gpt_oss", marks=pytest.mark.slow)))
def test_a_tree_in_parts_equals_its_rows_with_the_auxiliary_loss_of_all_of_them(family):
    engines = [planned(shape, keep) for shape, keep in PLANS]
    check_experts_contract(family, [SFT], 2, engines=engines, auxiliary=True)


@pytest.mark.parametrize("family", ("mixtral", "glm4_moe", "llama4_text"))
def test_recorded_experts_are_used_again_in_a_tree_as_in_its_rows(family):
    engines = [planned("1 part", "none"), planned("chunks of 2", "mixed")]
    check_experts_contract(family, [SFT], 2, engines=engines, recorded=True)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_many_forests_in_every_plan_equal_their_rows(family):
    check_experts_contract(family, [SFT, PPO], 8, engines=[planned("1 part", "none"), *MANY])


@pytest.mark.slow
@pytest.mark.parametrize("family", WITH_AUXILIARY)
def test_many_forests_in_every_plan_equal_their_rows_with_the_auxiliary_loss(family):
    engines = [planned("1 part", "none"), *MANY]
    check_experts_contract(family, [SFT, PPO], 6, engines=engines, auxiliary=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "auxiliary"), [*((name, False) for name in FAMILIES), *((name, True) for name in WITH_AUXILIARY)]
)
def test_many_forests_with_recorded_experts_equal_their_rows(family, auxiliary):
    engines = [planned("1 part", "none"), *MANY[:4]]
    check_experts_contract(family, [SFT], 6, engines=engines, auxiliary=auxiliary, recorded=True)


def test_a_router_that_draws_noise_is_refused_in_training_mode_and_welcome_without():
    model = make_family("mixtral", router_jitter_noise=0.1)
    assert check_model(model).experts is not None
    with pytest.raises(UnsupportedModel, match=r"jitter_noise=0.1 in training mode"):
        check_model(model.train())
    assert check_model(make_family("mixtral").train()).experts is not None
