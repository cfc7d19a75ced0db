"""Where not all graphs fit until the loss is known, those are kept that would take longest to make again."""

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import treetrain as tt
from support.plans import layout_of
from treetrain.core.planning.cost import CostModel
from treetrain.core.planning.kept_graphs import keeping_most, most_worth_keeping
from treetrain.core.planning.plan import Plan
from treetrain.shapes import make_plan

COST = CostModel.from_shape(tt.ModelShape.named("qwen3-0.6b"))
STEM = list(range(400))
ROWS = [[*STEM[: 100 * k], *range(1000 * k, 1000 * k + 150)] for k in range(1, 5) for _ in range(2)]
ROWS = [[*row, 9000 + number, *range(500 + number, 560 + number)] for number, row in enumerate(ROWS)]


def plan_of(tokens: int) -> Plan:
    return make_plan(layout_of(ROWS), COST, budget=tokens)


@pytest.mark.parametrize("share", [0.3, 0.5, 0.7, 0.9])
def test_a_budget_holds_in_both_phases(share):
    tokens = int(layout_of(ROWS).num_tokens * share)
    plan = keeping_most(plan_of(tokens), COST, tokens=tokens, room=0.0)
    assert plan is not None and plan.kept.any() and plan.peak_tokens <= tokens
    alive, scored = dict[int, int](), set()
    for event in plan.events():
        size = int(plan.sizes[event.number])
        if event.kind == "backward":
            assert event.number not in set(plan.parent[list(alive)])  # all parts below have run
            del alive[event.number]
            continue
        assert event.kind == ("forward" if plan.kept[event.number] or event.number in scored else "score")
        assert sum(alive.values()) + size <= tokens
        if event.kind == "forward":
            alive[event.number] = size
        scored.add(event.number)
    assert not alive and scored == set(range(plan.num_parts))
    assert plan.recomputed_tokens == plan.sizes[~plan.kept].sum()
    assert len(plan.phases[0]) == plan.num_parts and "B" not in plan.phases[0]


def test_a_budget_in_bytes_holds_as_predicted_and_time_falls_as_it_grows():
    plan = plan_of(200)
    whole, seconds = COST.peak_bytes(plan.keeping_graphs()), []
    for share in (0.4, 0.55, 0.7, 0.85, 1.0):
        found = keeping_most(plan, COST, tokens=None, room=share * whole)
        assert found is not None and COST.peak_bytes(found) <= share * whole * (1 + 1e-9)
        seconds.append(COST.seconds(found))
    assert seconds == sorted(seconds, reverse=True) and found.kept.all()
    assert keeping_most(plan, COST, tokens=None, room=0.05 * whole) is None


def test_caches_that_are_too_large_for_the_budget_are_not_held():
    chain = make_plan(
        layout_of([list(range(3000))] + [[*range(k), 5000 + k] for k in range(0, 3000, 3)]), COST, budget=4
    )
    assert keeping_most(chain, COST, tokens=4, room=0.0) is None


def every_choice(worth, graph, beside):
    best = 0.0
    for bits in range(2 ** len(worth)):
        kept = np.array([bits >> k & 1 for k in range(len(worth))], bool)
        before = np.cumsum(kept * graph) - kept * graph
        if (before <= beside).all():
            best = max(best, worth[kept].sum())
    return best


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=9), st.integers(9, 40))
@example([(3, 6), (1, 1), (1, 3)], 9)  # small parts first leave no room for the one that is worth most
def test_the_choice_fits_and_is_near_the_best(parts, room):
    worth, graph = (np.array(column, float) for column in zip(*parts))
    beside = room - graph
    kept = most_worth_keeping(worth, graph, beside)
    assert kept is not None and kept[-1]  # the last part runs backward at once
    assert (np.cumsum(kept * graph) - kept * graph <= beside).all()
    assert worth[kept].sum() >= 0.6 * every_choice(worth, graph, beside)


def test_a_part_that_does_not_fit_alone_is_said():
    assert most_worth_keeping(np.ones(2), np.array([3.0, 9.0]), np.array([2.0, -1.0])) is None
