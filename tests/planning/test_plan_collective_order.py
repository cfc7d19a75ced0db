import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.plans import uniform
from treetrain.check.forests import trajectories
from treetrain.core.planning.cost import CostModel, Passes
from treetrain.core.planning.plan import Plan
from treetrain.core.tree.layout import PackedLayout, pack
from treetrain.core.tree.token_tree import TokenTree, build_tree
from treetrain.parallel.collective_order import (
    Candidate,
    Offer,
    Turn,
    candidates,
    choose,
    largest_first,
    offers_of,
    order_seconds,
    timed_order,
)
from treetrain.shapes import ModelShape, make_plan
from treetrain.simulation.rank_plans import plan_ranks

SHAPE = ModelShape(layers=2, hidden=64, intermediate=96, heads=4, kv_heads=2, head_dim=16, vocab=128, tied=True)
PRICES = CostModel.from_shape(SHAPE)


def trained(tree: TokenTree) -> PackedLayout:
    return pack(tree, tree.trained_edges()[0] > 0)


def groups(count: int, seed: int = 0) -> list[list[int]]:
    """Prompts of many lengths with a few answers each, or with many."""
    rng = np.random.default_rng(seed)
    rows = []
    for number in range(count):
        prompt = rng.integers(0, 99, rng.integers(5, 200)).tolist()
        for _ in range(rng.integers(1, 25)):
            rows.append([number, *prompt, *rng.integers(0, 99, rng.integers(5, 40)).tolist()])
    return rows


def chosen_ways(rows, ranks: int, budget: int | None) -> tuple[list[list[Candidate]], list[int]]:
    found = plan_ranks(build_tree(rows), PRICES, ranks, budget=budget)
    trees = [build_tree([rows[number] for number in own]) for own in found.dispatch.trajectories]
    ways = [candidates(tree, plan, trained) for tree, plan in zip(trees, found.plans)]
    return ways, choose([offers_of(own) for own in ways])


def waiting(plans: list[Plan]) -> tuple[float, float]:
    """Seconds of the common order, and what it adds to the slowest rank's own work as a share of that."""
    work = [PRICES.passes(plan) for plan in plans]
    total = order_seconds(work)
    return total, total / max(sum(own.seconds) for own in work) - 1


@given(trajectories(max_rows=9), st.integers(2, 30))
@settings(max_examples=50, deadline=None)
def test_every_way_computes_all_that_is_trained_within_the_budget(rows, budget):
    tree = build_tree(rows)
    plan = make_plan(tree, PRICES, budget=budget)
    ways = candidates(tree, plan, trained)
    assert len({way.name for way in ways}) == len(ways)
    for way in ways:
        assert way.plan.peak_tokens <= budget
        assert way.tree.num_trajectories == len(rows)
        assert all((way.tree.tokens[way.tree.path(k)] == tree.tokens[tree.path(k)]).all() for k in range(len(rows)))
        assert way.plan.layout.edge_tokens.tolist() == trained(way.tree).edge_tokens.tolist()
        assert way.tree.trained_edges()[0].sum() == tree.trained_edges()[0].sum()
        if way.name.endswith("ranges"):
            assert not way.plan.is_inner.any(), "a range is a part of its own"
            assert way.plan.num_parts <= int(way.name.split()[0])


@given(trajectories(max_rows=9), st.integers(1, 12), st.sampled_from(["none", "all", "mixed"]), st.booleans())
@settings(max_examples=50, deadline=None)
def test_siblings_in_another_order_are_the_same_parts_and_cost_the_same(rows, chunk, keep, joint):
    layout = trained(build_tree(rows))
    plan = uniform(layout, chunk, keep)
    if joint:
        plan = Plan.of_parts(layout, plan.part_of, plan.kept, prefill_limit=3 * chunk)
    found = largest_first(plan, PRICES)
    assert {frozenset(found.tokens(part)) for part in range(found.num_parts)} == {
        frozenset(plan.tokens(part)) for part in range(plan.num_parts)
    }
    assert (found.parent < np.arange(found.num_parts)).all()
    for fact in ("peak_tokens", "recomputed_tokens", "cached_tokens", "cached_states"):
        assert getattr(found, fact) == getattr(plan, fact)
    assert PRICES.seconds(found) == pytest.approx(PRICES.seconds(plan))
    assert PRICES.peak_bytes(found) == pytest.approx(PRICES.peak_bytes(plan))
    first = [event.number for event in found.events() if event.kind == "prefill"]
    assert first == sorted(first), "prefilles are numbered in the order they run"
    seconds = np.bincount(found.part_of, PRICES.token_seconds(layout.positions), found.num_parts)
    for parent in {*found.parent.tolist()}:
        of_parent = seconds[found.parent == parent]
        assert (np.diff(of_parent) <= 0).all()


@pytest.mark.slow
@given(trajectories(max_rows=12), st.integers(2, 4), st.integers(3, 30))
@settings(max_examples=40, deadline=None)
def test_aligned_ranks_are_never_slower_than_with_plans_of_their_own(rows, ranks, budget):
    ways, chosen = chosen_ways(rows, ranks, budget)
    offers = [offers_of(own) for own in ways]
    aligned = order_seconds([own[number].passes for own, number in zip(offers, chosen)])
    assert aligned <= order_seconds([own[0].passes for own in offers]) * (1 + 1e-9)
    assert chosen == choose(offers), "every rank finds the same"


@pytest.mark.parametrize("ranks", [4, 8])
def test_ranks_wait_for_one_another_much_less_when_their_plans_line_up(ranks):
    budget, without, lined_up = 1024, [], []
    for seed in range(6):
        tree = build_tree(groups(12 * ranks, seed))
        aligned = plan_ranks(tree, PRICES, ranks, budget=budget, aligned=True)
        assert max(plan.peak_tokens for plan in aligned.plans) <= budget
        without.append(waiting(plan_ranks(tree, PRICES, ranks, budget=budget).plans))
        lined_up.append(waiting(aligned.plans))
    (slow, much), (fast, little) = np.mean(without, 0), np.mean(lined_up, 0)
    assert much > 0.1 and little < 0.015 and fast < 0.9 * slow


def test_ranks_with_room_for_all_run_one_pass_each():
    rows = groups(60)
    found = plan_ranks(build_tree(rows), PRICES, 4, aligned=True, free_bytes=1 << 40)
    assert [plan.num_parts for plan in found.plans] == [1] * 4
    assert waiting(found.plans)[1] < 0.01


def test_without_a_budget_no_way_needs_more_than_is_free():
    tree = build_tree(groups(60))
    peak = PRICES.peak_bytes(make_plan(tree, PRICES, budget=tree.num_tokens))
    for share in (0.9, 0.5, 0.2):
        plan = make_plan(tree, PRICES, free_bytes=round(share * peak))
        ways = candidates(tree, plan, trained, free_bytes=share * peak)
        assert len(ways) > 1
        assert all(PRICES.peak_bytes(way.plan) <= share * peak for way in ways)


def test_a_plan_that_nobody_made_for_a_budget_is_the_only_way():
    tree = build_tree(groups(4))
    plan = uniform(trained(tree), 9, "mixed")
    assert [way.plan for way in candidates(tree, plan, trained)] == [plan]


def test_tokens_are_computed_once_where_that_is_asked_for():
    tree = build_tree(groups(30))
    ways = candidates(tree, make_plan(tree, PRICES, budget=300), trained, apart=False)
    assert len(ways) > 1 and all(way.tree is tree for way in ways)


def test_a_rank_takes_the_way_that_fits_the_others_even_where_its_own_is_faster():
    fast, same = Offer("fast", Passes("FFBB", [1.0] * 4)), Offer("same", Passes("FBFB", [1.1] * 4))
    other = [Offer("fast", Passes("FBFB", [1.1] * 4))]
    assert choose([[fast, same], other]) == [1, 0]
    assert choose([[fast, same], [fast]]) == [0, 0]


@given(trajectories(max_rows=9), st.integers(1, 12), st.sampled_from(["none", "all", "mixed"]))
@settings(max_examples=40, deadline=None)
def test_the_seconds_of_a_plans_passes_add_up_to_those_of_the_cost_model(rows, chunk, keep):
    tree = build_tree(rows)
    plan = uniform(pack(tree, tree.trained_edges()[0] > 0), chunk, keep)
    passes = PRICES.passes(plan)
    assert passes.kinds == plan.kinds
    assert sum(passes.seconds) == pytest.approx(PRICES.seconds(plan), rel=1e-9)


@given(st.lists(st.text("PFB", max_size=8), min_size=1, max_size=5))
@settings(max_examples=40, deadline=None)
def test_the_common_order_holds_every_ranks_own_and_a_turn_takes_as_long_as_its_slowest(kinds):
    ranks = [Passes(own, [1.0 + rank + place for place in range(len(own))]) for rank, own in enumerate(kinds)]
    order = timed_order(ranks)
    assert sum(len(turn.takers) for turn, _ in order) == sum(map(len, kinds))
    for own in kinds:
        left = iter("".join(turn.kind[0].upper() for turn, _ in order))
        assert all(kind in left for kind in own), "a rank's passes in their order"
    own_seconds = [sum(passes.seconds) for passes in ranks]
    assert max(own_seconds) - 1e-9 <= sum(seconds for _, seconds in order) <= sum(own_seconds) + 1e-9


def test_ranks_of_one_sequence_wait_for_nobody():
    everybody = tuple(range(7))
    order = timed_order([Passes("FB", [2.0, 3.0])] * 7)
    assert order == [(Turn("forward", everybody), 2.0), (Turn("backward", everybody), 3.0)]


def test_a_backward_waits_while_another_rank_has_a_forward_to_run():
    short, long = Passes("FB", [1.0, 1.0]), Passes("FFBB", [5.0, 5.0, 7.0, 7.0])
    order = timed_order([short, short, long])
    assert "".join(turn.kind[0].upper() for turn, _ in order) == "FFBB"
    assert [seconds for _, seconds in order] == [5.0, 5.0, 7.0, 7.0]
    assert [len(turn.takers) for turn, _ in order] == [3, 1, 3, 1]
