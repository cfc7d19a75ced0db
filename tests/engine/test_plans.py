"""The numerics contract for every shape of plan: parts of all sizes, kept, recomputed and mixed."""

import pytest

from support.cases import OTHERS
from support.models import make_model
from support.plans import KEEPS, SHAPES, planned
from treetrain.check.contract import PPO, SFT, check_contract

FAST = ("chunks of 2", "shared prefill")


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("shape", "cases", "forests"),
    [
        *((shape, [PPO], 2) for shape in FAST),
        *(pytest.param(shape, [SFT, PPO], 7, marks=pytest.mark.slow) for shape in SHAPES),
    ],
)
def test_gradients_of_every_plan_are_those_of_the_rows(shape, cases, forests, record_property):
    engines = [planned(shape, keep) for keep in KEEPS]
    record_property("errors", check_contract(make_model("qwen3"), cases, forests, engines=engines))
    for keep, engine in zip(KEEPS, engines):
        if shape == "1 part":
            continue
        assert max(plan.num_parts for plan in engine.plans) > 1
        for plan in engine.plans:
            nested = bool((plan.parent >= 0).any())
            assert keep == "mixed" or (plan.recomputed_tokens > 0) == (nested and keep == "none")


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_every_other_loss_holds_in_small_parts(name, record_property):
    engines = [planned("chunks of 2", keep) for keep in KEEPS]
    # Enough forests for the pooled bfloat16 error to settle: one at a clipping bound decides that of a few.
    record_property("errors", check_contract(make_model("qwen3"), [OTHERS[name]], 30, engines=engines))
