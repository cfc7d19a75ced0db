"""The numerics contract of preference losses, corrections and the other policy losses; steps over calls."""

import pytest
import torch

import treetrain as tt
from support.cases import EVERY, GROUPS, OTHERS
from support.models import make_model
from support.plans import KEEPS, SHAPES, planned
from treetrain.check import linear
from treetrain.check.contract import PureFloat64, check_contract, expected
from treetrain.check.forests import whole_pairs, with_random_facts
from treetrain.check.linear_engine import LinearEngine
from treetrain.core.losses.protocol import summed

IDS = [[1, 2, 3, 4, 5, 6], [1, 2, 3, 7, 8], [1, 2, 3, 7, 8], [1, 9], [4], [], [9, 8, 7], [9, 8, 7, 7, 2]]
ROWS = whole_pairs(with_random_facts(IDS, 6))  # pairs: 0 1, 2 3, 4 5, 6 7


@pytest.fixture
def model():
    return make_model("qwen3", dtype=torch.float64)


def run(model, rows, loss, *, engine=tt.TreeEngine, normaliser=None, **options):
    """Result and gradient of one call on fresh gradients."""
    model.zero_grad()
    with PureFloat64():
        result = engine(model, **options).forward_backward(rows, loss, normaliser)
    return result, linear.gradients(model)


@pytest.mark.parametrize("group", [pytest.param("policy", marks=pytest.mark.slow), "preference"])
def test_gradients_are_those_of_the_rows_in_one_part_and_in_small_parts(group, record_property):
    engines = [planned("1 part", "none"), planned("chunks of 2", "mixed")]
    record_property("errors", check_contract(make_model("qwen3"), list(GROUPS[group].values()), 2, engines=engines))
    assert max(plan.num_parts for plan in engines[1].plans) > 2


@pytest.mark.few(4)
@pytest.mark.parametrize(
    ("name", "shape"),
    [
        pytest.param(name, shape, marks=() if name in OTHERS and shape == "chunks of 7" else pytest.mark.slow)
        for name in [*OTHERS, *EVERY]
        for shape in SHAPES
    ],
)
def test_every_loss_in_every_shape_of_plan_gives_the_gradients_of_the_rows(model, name, shape):
    case = (OTHERS | EVERY)[name]
    rows = case.prepare(ROWS)
    with PureFloat64():
        [(loss, gradient)] = expected(model, ROWS, [case])
    for keep in KEEPS:
        got, found = run(model, rows, case.loss, engine=planned(shape, keep), temperature=case.temperature)
        assert got.loss == pytest.approx(loss, rel=1e-12, abs=1e-12)
        assert linear.relative_error(found, gradient) <= 1e-12


@pytest.mark.few(3)
@pytest.mark.parametrize("name", EVERY)
def test_a_step_may_be_split_over_calls_of_whole_pairs(model, name):
    loss = EVERY[name].loss
    whole, gradient = run(model, ROWS, loss)
    assert gradient.norm() > 0
    normaliser = loss.normaliser(ROWS)
    model.zero_grad()
    results = []
    with PureFloat64():
        for rows in (ROWS[:2], ROWS[4:], ROWS[2:4]):
            results.append(tt.TreeEngine(model).forward_backward(rows, loss, normaliser))
    assert linear.relative_error(linear.gradients(model), gradient) <= 1e-12
    assert sum(r.loss for r in results) == pytest.approx(whole.loss, rel=1e-12)
    assert summed(results).metrics == pytest.approx(whole.metrics, rel=1e-10, abs=1e-12)


@pytest.mark.parametrize("name", ["dapo masked by rows", "dpo"])
def test_the_linear_engine_gives_the_same(model, name):
    whole, gradient = run(model, ROWS, EVERY[name].loss)
    packed, got = run(model, ROWS, EVERY[name].loss, engine=LinearEngine, pack_tokens=7)
    assert packed.parts > 1
    assert linear.relative_error(got, gradient) <= 1e-12
    assert packed.metrics == pytest.approx(whole.metrics, rel=1e-10)
