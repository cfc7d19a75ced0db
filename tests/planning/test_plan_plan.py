from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.plans import check_plan, layout_of, layout_of_parents, nested_forks, one_segment_per_part, uniform
from treetrain.check.bench import heights
from treetrain.check.forests import forests
from treetrain.core.planning.plan import Plan

RUNS = settings(max_examples=80, deadline=None)
KEEP = st.sampled_from(["none", "all", "mixed"])


@given(forests(), st.integers(1, 20), KEEP, st.integers(0, 10))
@RUNS
def test_uniform_parts_are_a_plan_of_at_most_so_many_tokens_each(rows, chunk, keep, prefill):
    layout = layout_of(rows)
    plan = uniform(layout, chunk, keep)
    check_plan(plan)
    assert plan.sizes.max(initial=0) <= chunk
    again = Plan.of_parts(layout, plan.part_of, plan.kept, prefill_limit=prefill)
    assert (again.part_of == plan.part_of).all() and (again.kept == plan.kept).all()
    assert {"none": not plan.kept.any(), "all": (plan.kept == plan.is_inner).all(), "mixed": True}[keep]


@pytest.mark.parametrize(
    "shape", [lambda layout: uniform(layout, 10, "mixed"), lambda layout: one_segment_per_part(layout, "mixed")]
)
def test_mixed_plans_have_kept_parts_below_late_ones_and_late_ones_below_kept_ones(shape):
    plan = shape(nested_forks(60))
    inner = plan.is_inner & (plan.parent >= 0)
    above = plan.kept[plan.parent[inner]]
    assert (above & ~plan.kept[inner]).any() and (~above & plan.kept[inner]).any()


@given(forests(), KEEP)
@RUNS
def test_one_segment_per_part_is_a_plan_with_a_part_for_every_segment(rows, keep):
    layout = layout_of(rows)
    plan = one_segment_per_part(layout, keep)
    check_plan(plan)
    assert plan.num_parts == len(layout.segment_parent)


@given(forests(), st.integers(1, 8), KEEP, st.integers(0, 10))
@RUNS
def test_events_run_every_part_once_depth_first_and_publish_before_anything_reads(rows, chunk, keep, prefill):
    plan = uniform(layout_of(rows), chunk, keep)
    plan = Plan.of_parts(plan.layout, plan.part_of, plan.kept, prefill_limit=prefill)
    done: list[tuple[str, int]] = []
    known = np.zeros(plan.layout.num_tokens, bool)
    for event in plan.events():
        if event.kind == "prefill":
            tokens = plan.prefill_tokens(event.number)
            members = [plan.exported_tokens(part) for part in plan.prefill_parts(event.number)]
            assert sorted(tokens.tolist()) == sorted(np.concatenate(members).tolist())
            ahead = plan.attach[plan.prefill_parts(event.number)[0]]
            assert ahead < 0 or known[plan.path(int(ahead))].all()
            assert len(members) == 1 or len(tokens) <= prefill
            known[tokens] = True
        elif event.kind == "forward":
            attach = int(plan.attach[event.number])
            assert attach < 0 or known[plan.path(attach)].all()
            if plan.kept[event.number]:
                known[plan.exported_tokens(event.number)] = True
        else:
            assert ("forward", event.number) in done
            below = np.flatnonzero(plan.parent == event.number).tolist()
            assert all(("backward", part) in done for part in below)
        done.append((event.kind, event.number))
    assert len(set(done)) == len(done)
    passes = plan.num_prefills
    assert sorted(done) == sorted(
        [(kind, part) for kind in ("forward", "backward") for part in range(plan.num_parts)]
        + [("prefill", number) for number in range(passes)]
    )


@pytest.mark.slow
@given(forests(max_rows=4, max_length=5), st.integers(1, 9))
@RUNS
def test_no_plan_of_one_token_parts_recomputes_less_than_the_least_and_one_does_exactly(rows, budget):
    layout = layout_of(rows)
    if layout.num_tokens > 9:
        return
    count = layout.num_tokens
    found = []
    for kept in product([False, True], repeat=count):
        plan = Plan.of_parts(layout, np.arange(count), np.array(kept, bool))
        if plan.peak_tokens <= budget:
            found.append(plan.recomputed_tokens)
    assert min(found) == int((heights(layout) > budget).sum())


@given(forests())
@RUNS
def test_a_height_is_the_longest_way_down(rows):
    layout = layout_of(rows)
    expected = np.ones(layout.num_tokens, np.int64)
    for token in range(layout.num_tokens - 1, -1, -1):
        if layout.parent[token] >= 0:
            expected[layout.parent[token]] = max(expected[layout.parent[token]], expected[token] + 1)
    assert (heights(layout) == expected).all()


def test_parts_that_are_none_are_refused():
    layout = layout_of_parents(np.array([-1, 0, 1, 0]))
    with pytest.raises(ValueError, match="continue one token"):
        Plan.of_parts(layout, np.array([0, 0, 1, 1]))
    with pytest.raises(ValueError, match="has no tokens"):
        Plan.of_parts(layout, np.array([0, 0, 2, 0]))


def test_only_plans_that_were_made_for_a_budget_explain_themselves():
    plan = uniform(nested_forks(5), 3)
    with pytest.raises(ValueError, match="make_plan"):
        plan.explain()
    with pytest.raises(ValueError, match="make_plan"):
        plan.explanation()
