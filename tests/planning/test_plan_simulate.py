import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.forests import trajectories
from treetrain.planning.collective_order import Passes, Turn, passes_of, spelled, timed_order
from treetrain.planning.cost import ModelShape
from treetrain.planning.devices import DEVICES, Device
from treetrain.planning.make import SHOWN, RankedPlan, make_plan
from treetrain.planning.partition import uniform
from treetrain.planning.price import CostModel
from treetrain.planning.rates import Rates
from treetrain.planning.simulate import collective_seconds, simulate, state_of
from treetrain.tree.build import build_tree
from treetrain.tree.layout import pack

SHAPE = ModelShape(layers=2, hidden=64, intermediate=96, heads=4, kv_heads=2, head_dim=16, vocab=128, tied=True)
PRICES = CostModel.from_shape(SHAPE)
CPU = DEVICES["cpu"]


def bushy(rows: int = 64, seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [[*range(20), k // 4, *rng.integers(0, 99, 30).tolist()] for k in range(rows)]


def ranked(tree, **bounds) -> RankedPlan:
    plan = make_plan(tree, PRICES, **bounds)
    assert isinstance(plan, RankedPlan)
    return plan


@given(trajectories(max_rows=9), st.integers(2, 4), st.integers(2, 30))
@settings(max_examples=40, deadline=None)
def test_every_rank_has_a_plan_of_its_own_trajectories_within_the_budget(rows, ranks, budget):
    found = ranked(build_tree(rows), ranks=ranks, budget=budget)
    assert found.ranks == len(found.plans) == ranks
    for plan, numbers, tokens in zip(found.plans, found.trajectories, found.dispatch.tokens):
        own = build_tree([rows[number] for number in numbers])
        same = make_plan(own, PRICES, budget=budget)
        assert plan.part_of.tolist() == same.part_of.tolist() and plan.layout.num_tokens == tokens
        assert plan.peak_tokens <= budget
    assert found.seconds.max() == pytest.approx(found.imbalance * found.seconds.mean())


def test_the_explanation_says_balance_duplication_and_every_rank():
    found = ranked(build_tree(bushy()), ranks=4, budget=64)
    facts, text = found.explanation(), found.explain()
    assert sum(row["trajectories"] for row in facts["per_rank"]) == 64
    assert sum(row["tokens"] for row in facts["per_rank"]) == round(facts["unique_tokens"] * (1 + facts["duplicated"]))
    assert f"slowest over mean {facts['imbalance']:.3f}" in text and f"({facts['duplicated']:.1%})" in text
    assert len(text.splitlines()) == 7 + 4
    many = ranked(build_tree(bushy()), ranks=70)
    assert f"{many.dispatch.idle} idle" in many.explain() and many.dispatch.idle >= 6
    assert len(many.explain().splitlines()) == 8 + SHOWN


def test_a_budget_too_small_for_a_rank_names_the_rank():
    with pytest.raises(ValueError, match=r"rank 0 of 2: budget=1\.0 KiB"):
        make_plan(build_tree(bushy()), PRICES, ranks=2, budget="1KiB")


def test_a_layout_cannot_be_cut_over_ranks():
    with pytest.raises(ValueError, match="give the token tree"):
        make_plan(pack(build_tree(bushy())), PRICES, ranks=2)


@given(trajectories(max_rows=9), st.integers(1, 12), st.sampled_from(["none", "all", "mixed"]))
@settings(max_examples=60, deadline=None)
def test_the_seconds_of_a_plans_passes_add_up_to_those_of_the_cost_model(rows, chunk, keep):
    tree = build_tree(rows)
    plan = uniform(pack(tree, tree.trained_edges()[0] > 0), chunk, keep)
    passes = passes_of(plan, Rates.of(PRICES))
    assert passes.kinds == spelled(event.kind for event in plan.events())
    assert sum(passes.seconds) == pytest.approx(PRICES.seconds(plan), rel=1e-9)


@given(st.lists(st.text("PFB", max_size=8), min_size=1, max_size=5))
@settings(max_examples=100, deadline=None)
def test_the_common_order_holds_every_ranks_own_and_a_turn_takes_as_long_as_its_slowest(kinds):
    ranks = [Passes(own, [1.0 + rank + place for place in range(len(own))]) for rank, own in enumerate(kinds)]
    order = timed_order(ranks)
    assert sum(len(turn.takers) for turn, _ in order) == sum(map(len, kinds))
    for own in kinds:
        left = iter(spelled(turn.kind for turn, _ in order))
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
    assert spelled(turn.kind for turn, _ in order) == "FFBB"
    assert [seconds for _, seconds in order] == [5.0, 5.0, 7.0, 7.0]
    assert [len(turn.takers) for turn, _ in order] == [3, 1, 3, 1]


def test_one_rank_has_no_links_and_its_step_is_the_cost_models():
    tree = build_tree(bushy())
    found = simulate(tree, SHAPE, 1, CPU, cost=PRICES)
    assert found.communication_seconds == found.waiting_seconds == found.collective_bytes == 0.0
    assert found.slowest_rank_seconds == pytest.approx(PRICES.seconds(make_plan(tree, PRICES)))
    assert found.speedup == pytest.approx(1.0) and found.imbalance == 1.0 and found.duplicated == 0.0
    assert found.step_seconds == pytest.approx(found.slowest_rank_seconds + found.optimiser_seconds)


def test_what_is_sent_is_counted_by_the_formulas():
    tree, weights = build_tree(bushy()), 4 * SHAPE.parameters
    ddp = simulate(tree, SHAPE, 4, CPU, parallel="ddp", budget=10**6)
    assert ddp.collective_bytes == pytest.approx(2 * 3 / 4 * weights)
    fsdp = simulate(tree, SHAPE, 4, CPU, budget=10**6)
    assert fsdp.passes == 2 and fsdp.collective_bytes == pytest.approx(3 / 4 * 3 * weights)  # two gathers, one scatter
    parts = simulate(tree, SHAPE, 4, CPU, budget=80)
    once = simulate(tree, SHAPE, 4, CPU, budget=80, sync="step")
    backward = (parts.collective_bytes - once.collective_bytes) / (3 / 4 * weights) + 1
    assert backward == pytest.approx(round(backward)) and backward > 1
    assert once.collective_bytes == pytest.approx(3 / 4 * weights * (once.passes + 1))


def test_collectives_are_bound_by_the_slower_of_links_and_network():
    quick = Device(
        name="quick",
        flops=1e12,
        memory_bytes=1e12,
        memory_bandwidth=1e12,
        link_bandwidth=1e9,
        node_ranks=4,
        network_bandwidth=1e8,
        collective_seconds=0.5,
    )
    assert collective_seconds(quick, 1, 8e9) == 0.0
    assert collective_seconds(quick, 4, 8e9) == pytest.approx(0.5 + 8 * 3 / 4)
    assert collective_seconds(quick, 8, 8e9) == pytest.approx(0.5 + 8e9 / 2 / 4e8)
    fast_network = dataclasses.replace(quick, network_bandwidth=1e10)
    assert collective_seconds(fast_network, 8, 8e9) == pytest.approx(0.5 + 8 * 7 / 8)


def test_shards_shrink_with_ranks_and_whole_states_do_not():
    whole = 16 * SHAPE.parameters
    assert state_of(SHAPE, 4, CPU, "ddp", "part") == (whole, 0.0)
    assert state_of(SHAPE, 4, CPU, "fsdp", "part").model == whole / 4
    step, part = (state_of(SHAPE, 4, CPU, "fsdp", sync).gathered for sync in ("step", "part"))
    assert step - part == 4 * SHAPE.layer_weights / 2  # one of two layers is not whole anyway
    tree = build_tree(bushy())
    assert simulate(tree, SHAPE, 4, CPU).peak_bytes < simulate(tree, SHAPE, 4, CPU, parallel="ddp").peak_bytes


def test_a_device_without_room_for_the_state_and_unknown_ways_are_refused():
    tree, small = build_tree(bushy()), dataclasses.replace(CPU, memory_bytes=10.0)
    with pytest.raises(ValueError, match="2 ranks of cpu: weights, gradients and moments take"):
        simulate(tree, SHAPE, 2, small)
    with pytest.raises(ValueError, match="parallel='zero'"):
        simulate(tree, SHAPE, 2, CPU, parallel="zero")  # type: ignore[arg-type]


def test_a_thousand_ranks_are_simulated_and_idle_ones_counted():
    found = simulate(build_tree(bushy()), SHAPE, 1024, CPU)
    assert found.idle_ranks >= 960 and math.isfinite(found.step_seconds)
    assert found.speedup > 1 or found.communication_seconds > found.slowest_rank_seconds


def test_the_cost_of_a_device_is_its_description():
    constants = DEVICES["h100"].cost(SHAPE).constants
    assert constants.matrix_flops == 0.4 * 989.4e12 and constants.bandwidth == 3.35e12
    assert "h100" in constants.source
