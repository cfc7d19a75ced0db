"""The numerics contract for every shape of plan: parts of all sizes, kept, recomputed and mixed."""

import pytest

from support.contract import OTHERS, PPO, SFT, check_contract
from support.plans import KEEPS, SHAPES, planned


@pytest.mark.parametrize("keep", KEEPS)
@pytest.mark.parametrize("shape", SHAPES)
def test_gradients_of_every_plan_are_those_of_the_rows(shape, keep, record_property):
    engine = planned(shape, keep)
    worst = check_contract("qwen3", [SFT, PPO], 8, engine=engine)
    record_property("errors", worst)
    if shape != "1 part":
        parts = [plan.num_parts for plan in engine.plans]
        assert max(parts) > 2
        recomputed = sum(plan.recomputed_tokens for plan in engine.plans)
        assert keep == "mixed" or (recomputed == 0) == (keep == "all")


@pytest.mark.parametrize("keep", KEEPS)
@pytest.mark.parametrize("name", OTHERS)
def test_every_other_loss_holds_in_small_parts(name, keep, record_property):
    # Enough forests for the pooled bfloat16 error to settle.
    worst = check_contract("qwen3", [OTHERS[name]], 20, engine=planned("chunks of 2", keep))
    record_property("errors", worst)
