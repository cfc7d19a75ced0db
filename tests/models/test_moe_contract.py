"""Mixtures of experts are exact on a tree: every family, with and without its auxiliary loss and recorded experts."""

import contextlib
import functools

import pytest
import torch
from hypothesis import given

from support import moe
from support.models import make_model
from support.plans import planned
from treetrain.check.contract import PPO, SFT, PureFloat64, check_contract, measured
from treetrain.check.forests import runs, trajectories
from treetrain.check.linear import relative_error
from treetrain.core.errors import UnsupportedModel
from treetrain.engine import TreeEngine
from treetrain.layers.experts.routers import experts_of
from treetrain.layers.finders import check_model

FAMILIES = ("qwen3_moe", "mixtral", "glm4_moe", "deepseek_v3", "gpt_oss", "llama4_text", "llama4_tuned")
FAMILIES += ("granitemoehybrid", "nemotron_h")
WITH_AUXILIARY = ("qwen3_moe", "mixtral", "gpt_oss", "granitemoehybrid")
PLANS = [("chunks of 7", "none"), ("chunks of 2", "mixed"), ("one segment per part", "all")]
MANY = [planned(shape, keep) for shape in ("N/2", "chunks of 7", "chunks of 2") for keep in ("none", "all", "mixed")]
MANY += [planned("one segment per part", "mixed"), planned("shared prefill", "none")]
FAST = ("deepseek_v3", "gpt_oss", "llama4_text")  # the tests below have others


def check(family: str, cases, examples: int, *, engines=(TreeEngine,), recorded: bool = False) -> dict[str, float]:
    """The numerics contract, and its errors; `recorded`: some experts are given at random, some left to the router."""
    model = make_model(family)
    prepare = functools.partial(moe.at_random, places=len(moe.routers_of(model))) if recorded else list
    return check_contract(model, cases, examples, engines=engines, prepare=prepare)


def check_with_auxiliary_loss(family: str, cases, examples: int, *, engines, recorded: bool = False) -> None:
    """In float64 and float32: in bfloat16 rounding changes choices, whose frequencies enter the loss of all tokens."""
    models = {dtype: make_model(family, dtype, **moe.AUXILIARY) for dtype in (torch.float64, torch.float32)}

    @runs(examples)
    @given(trajectories())
    def every_forest(rows):
        for dtype, bound in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
            model = models[dtype]
            own = moe.at_random(rows, len(moe.routers_of(model))) if recorded else rows
            with PureFloat64() if dtype == torch.float64 else contextlib.nullcontext():
                truths = moe.expected(model, own, cases, moe.COEFFICIENT)
                for engine in engines:
                    for case, (loss, gradient) in zip(cases, truths):
                        found = measured(model, own, case, engine)
                        assert found[0] == pytest.approx(loss, rel=bound, abs=bound)
                        assert relative_error(found[1], gradient) <= bound

    every_forest()


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "family", [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES]
)
def test_a_tree_equals_its_rows(family):
    check(family, [PPO], 2, engines=[planned("1 part", "none")])


@pytest.mark.slow
@pytest.mark.parametrize("family", ("qwen3_moe", "gpt_oss"))
def test_a_tree_in_parts_equals_its_rows_with_the_auxiliary_loss_of_all_of_them(family):
    check_with_auxiliary_loss(family, [SFT], 2, engines=[planned(*plan) for plan in PLANS])


@pytest.mark.slow
@pytest.mark.parametrize(
    "family",
    ["mixtral", "glm4_moe", "llama4_text", "nemotron_h"],
)
def test_recorded_experts_are_used_again_in_a_tree_as_in_its_rows(family, record_property):
    engines = [planned("1 part", "none"), planned("chunks of 2", "mixed")]
    record_property("errors", check(family, [SFT], 2, engines=engines, recorded=True))


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_many_forests_in_every_plan_equal_their_rows(family):
    check(family, [SFT, PPO], 8, engines=[planned("1 part", "none"), *MANY])
    check(family, [SFT], 6, engines=[planned("1 part", "none"), *MANY[:4]], recorded=True)


@pytest.mark.slow
@pytest.mark.parametrize("family", WITH_AUXILIARY)
def test_many_forests_in_every_plan_equal_their_rows_with_the_auxiliary_loss(family):
    for recorded in (False, True):
        engines = [planned("1 part", "none"), *(MANY[:4] if recorded else MANY)]
        check_with_auxiliary_loss(family, [SFT, PPO], 6, engines=engines, recorded=recorded)


def test_a_router_that_draws_noise_is_refused_in_training_mode_and_welcome_without():
    model = make_model("mixtral", router_jitter_noise=0.1)
    assert experts_of(check_model(model)) is not None
    with pytest.raises(UnsupportedModel, match=r"jitter_noise=0.1 in training mode"):
        check_model(model.train())
    assert experts_of(check_model(make_model("mixtral").train())) is not None
