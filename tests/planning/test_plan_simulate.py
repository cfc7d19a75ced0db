import dataclasses
import math

import numpy as np
import pytest

from treetrain.planning.cost import ModelShape
from treetrain.planning.devices import DEVICES, Device
from treetrain.planning.make import make_plan
from treetrain.planning.price import CostModel
from treetrain.planning.simulate import collective_seconds, simulate, state_of
from treetrain.tree.build import build_tree

SHAPE = ModelShape(layers=2, hidden=64, intermediate=96, heads=4, kv_heads=2, head_dim=16, vocab=128, tied=True)
PRICES = CostModel.from_shape(SHAPE)
CPU = DEVICES["cpu"]


def bushy(rows: int = 64, seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [[*range(20), k // 4, *rng.integers(0, 99, 30).tolist()] for k in range(rows)]


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
    assert state_of(SHAPE.counts(), 4, CPU, "ddp", "part") == (whole, 0.0)
    assert state_of(SHAPE.counts(), 4, CPU, "fsdp", "part").model == whole / 4
    step, part = (state_of(SHAPE.counts(), 4, CPU, "fsdp", sync).gathered for sync in ("step", "part"))
    assert step - part == 4 * SHAPE.layer_parameters  # one of two layers is not whole anyway
    tree = build_tree(bushy())
    assert simulate(tree, SHAPE, 4, CPU).peak_bytes < simulate(tree, SHAPE, 4, CPU, parallel="ddp").peak_bytes


def test_a_device_without_room_for_the_state_and_unknown_ways_are_refused():
    tree, small = build_tree(bushy()), dataclasses.replace(CPU, memory_bytes=10.0)
    with pytest.raises(ValueError, match="2 ranks of cpu: weights, gradients and moments take"):
        simulate(tree, SHAPE, 2, small)
    with pytest.raises(ValueError, match="parallel='zero'"):
        simulate(tree, SHAPE, 2, CPU, parallel="zero")  # type: ignore[arg-type]


def test_hundreds_of_ranks_are_simulated_and_idle_ones_counted():
    found = simulate(build_tree(bushy()), SHAPE, 512, CPU)
    assert found.idle_ranks >= 448 and math.isfinite(found.step_seconds)
    assert found.speedup > 1 or found.communication_seconds > found.slowest_rank_seconds


def test_the_cost_of_a_device_is_its_description():
    speeds = CostModel.on(DEVICES["h100"], SHAPE.counts(dtype_bytes=2)).speeds
    assert speeds.layers == 0.4 * 989.4e12 and speeds.forward_pass > SHAPE.layers * SHAPE.layer_parameters * 2 / 3.35e12
    assert "h100" in speeds.source
