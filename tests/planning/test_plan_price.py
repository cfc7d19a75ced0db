"""Predicted seconds and bytes of plans, against sums by hand and a walk over the plan's events."""

import dataclasses
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from treetrain.check.forests import forests
from treetrain.core.planning.cost import CostModel, Speeds, head_chunk_rows
from treetrain.core.planning.devices import HEAD_CHUNK_LOGITS, HEAD_CHUNK_ROWS
from treetrain.core.planning.plan import Plan
from treetrain.core.tree.layout import PackedLayout, pack, pairs_at
from treetrain.core.tree.token_tree import build_tree
from treetrain.shapes import ModelShape

SHAPE = ModelShape(layers=3, hidden=8, intermediate=12, heads=4, kv_heads=2, head_dim=5, vocab=50, tied=True)
PRIMES = [n for n in range(2, 200) if all(n % d for d in range(2, n))]


def distinct(**changes) -> CostModel:
    """Every number of bytes and every speed another prime, so that a mix-up cannot cancel out."""
    counts = SHAPE.counts()
    fixed = ("layers", "hidden", "vocab", "dtype_bytes", "checkpointing", "token_flops", "flops_by_range")
    names = [field.name for field in dataclasses.fields(counts) if field.name not in fixed]
    speeds = [field.name for field in dataclasses.fields(Speeds) if field.name != "source"]
    values = dict(zip([*names, *speeds], map(float, PRIMES))) | changes
    return CostModel(
        counts=dataclasses.replace(counts, **{name: values[name] for name in names}),
        speeds=Speeds(**{name: values[name] for name in speeds}, source=""),
    )


def chunked(layout: PackedLayout, size: int, keep: str, seed: int = 0, prefill_limit: int = 0) -> Plan:
    """Segments in pieces of at most `size` tokens, kept or not."""
    start = layout.segment_start
    segment = np.repeat(np.arange(len(start) - 1), np.diff(start))
    offset = np.arange(layout.num_tokens) - start[segment]
    _, part_of = np.unique(segment * 10**6 + offset // size, return_inverse=True)
    count = int(part_of.max(initial=-1)) + 1
    flags = {"all": np.ones(count, bool), "none": np.zeros(count, bool)}
    kept = flags.get(keep, np.random.default_rng(seed).random(count) < 0.5)
    return Plan.of_parts(layout, part_of, kept, prefill_limit=prefill_limit)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    tree = build_tree(draw(forests()))
    wanted = np.random.default_rng(draw(st.integers(0, 99))).random(tree.num_tokens) < draw(st.sampled_from([0.2, 1.0]))
    layout = pack(tree, wanted)
    keep = draw(st.sampled_from(["all", "none", "mixed"]))
    return chunked(layout, draw(st.integers(1, 6)), keep, draw(st.integers(0, 99)), draw(st.sampled_from([0, 3, 100])))


ROWS = [[1, 2, 3, 4, 5, 6], [1, 2, 3, 7, 8], [1, 2, 3, 7, 9]]


def test_one_part_costs_its_flops_one_pass_and_the_bytes_of_it():
    cost = distinct(backward_ratio=2.0, layers=1.0, attention=1.0, head=1.0)
    layout = pack(build_tree(ROWS))
    plan = Plan.of_parts(layout, np.zeros(layout.num_tokens, np.int64))
    flops = SHAPE.counts().flops(layout.num_tokens, pairs_at(layout.positions), len(layout.rows))
    assert cost.seconds(plan) == pytest.approx(flops + cost.speeds.graph_pass, rel=1e-12)


@settings(deadline=None)
@given(plan=plans())
def test_seconds_are_the_sum_over_the_events_of_the_plan(plan):
    cost, shape = distinct(), SHAPE
    c = cost.speeds

    def forward(tokens: np.ndarray) -> float:
        pairs = (plan.layout.positions[tokens] + 1).sum()
        matrices = 2 * len(tokens) * shape.layers * shape.layer_parameters / c.layers
        return matrices + 4 * pairs * shape.layers * shape.heads * shape.head_dim / c.attention

    total = 0.0
    for event in plan.events():
        if event.kind == "prefill":
            total += forward(plan.prefill_tokens(event.number)) + c.forward_pass
        elif event.kind == "forward":
            tokens = plan.tokens(event.number)
            rows = np.isin(plan.layout.rows, tokens).sum()
            total += forward(tokens) * (1 + c.backward_ratio) + c.graph_pass
            total += 6 * rows * shape.hidden * shape.vocab / c.head
    assert cost.seconds(plan) == pytest.approx(total, rel=1e-9)
    assert cost.seconds_by(plan)["recomputation"] == pytest.approx(
        sum(forward(plan.prefill_tokens(event.number)) for event in plan.events() if event.kind == "prefill")
    )


@given(plan=plans(), largest=st.sampled_from(["none", "forward_token", "head_pass", "weight_gradient", "hidden"]))
def test_peak_bytes_are_the_most_alive_at_any_event(plan, largest):
    cost = distinct(**({} if largest == "none" else {largest: 5000.0}))
    c = dataclasses.replace(cost.counts, hidden=5000) if largest == "hidden" else cost.counts
    cost = dataclasses.replace(cost, counts=c)
    alive, most, cached, most_cached, states, most_states = {}, 0.0, {}, 0, {}, 0
    attached = np.unique(plan.attach[plan.attach >= 0])
    for event in plan.events():
        number, held = event.number, sum(alive.values())
        if event.kind == "prefill":
            first, tokens = plan.prefill_parts(number)[0], plan.prefill_tokens(number)
            cached[first], states[first] = len(tokens), int(np.isin(attached, tokens).sum())
            rows = int(np.isin(plan.layout.rows, tokens).sum())
            working = c.forward_token * len(tokens) + c.cache_layer * above(plan, first)
            working += c.logit * c.vocab * min(rows, 3)
            most = max(most, held + working)
        elif event.kind == "forward":
            tokens = plan.tokens(number)
            rows = int(np.isin(plan.layout.rows, tokens).sum())
            if plan.kept[number]:
                cached[number] = len(plan.exported_tokens(number))
                states[number] = int(np.isin(attached, plan.tokens(number)).sum())
            graph = c.saved_pass + (c.saved_layers + c.saved_outside) * len(tokens) + (4 * c.hidden + 16) * rows
            head = c.head_pass + 4 * c.hidden * rows + c.logit * c.vocab * min(rows, 3) if rows else 0.0
            layers = c.weight_gradient + c.backward_token * len(tokens) + c.cache_layer * above(plan, number)
            most = max(most, held + graph + max(head, layers), held + 8 * c.hidden * len(tokens))
            alive[number] = graph
        else:
            del alive[number]
            cached.pop(number, None)
            states.pop(number, None)
        most_cached, most_states = max(most_cached, sum(cached.values())), max(most_states, sum(states.values()))
    assert not alive and not cached
    step = c.step + 200 * plan.layout.num_tokens if plan.num_parts else 0.0
    held = c.cache_token * most_cached + c.cache_state * most_states
    with mock.patch("treetrain.core.planning.cost.head_chunk_rows", lambda vocab, device: 3):
        found = cost.bytes_by(plan)
    assert sum(found.values()) - found["allocator"] == pytest.approx(most + held + step, rel=1e-9)
    if plan.num_parts:
        assert found["allocator"] == pytest.approx(0.17 * (most + held + step) + 8e6)


def above(plan: Plan, part: int) -> int:
    return 0 if plan.attach[part] < 0 else int(plan.layout.positions[plan.attach[part]]) + 1


def test_a_part_without_predictions_has_no_head():
    layout = pack(build_tree([range(12)]), np.arange(12) == 11)
    plan = chunked(layout, 10, "none")
    cost = distinct(head_pass=1e6)
    assert plan.sizes.tolist() == [10, 1]
    found, c = cost.bytes_by(plan), cost.counts
    row = 4 * c.hidden + 16
    assert found["running graph"] == c.saved_pass + c.saved_token + row and found["working"] >= 1e6


def test_keeping_takes_memory_and_recomputing_takes_time():
    layout = pack(build_tree([[*range(400), k, *range(500, 700)] for k in range(2)]))
    cost = CostModel.from_shape(ModelShape.named("qwen3-0.6b"))
    kept, late = chunked(layout, 200, "all"), chunked(layout, 200, "none")
    assert cost.seconds(late) > cost.seconds(kept)
    assert cost.peak_bytes(late) < cost.peak_bytes(kept)
    assert cost.seconds_by(kept)["recomputation"] == 0 < cost.seconds_by(late)["recomputation"]
    assert cost.bytes_by(late)["kept graphs"] == 0 < cost.bytes_by(kept)["kept graphs"]
    whole = Plan.of_parts(layout, np.zeros(layout.num_tokens, np.int64))
    assert cost.seconds(whole) < cost.seconds(kept)
    assert cost.bytes_by(whole)["KV cache"] == 0 < cost.bytes_by(kept)["KV cache"]


def test_a_batch_of_nothing_costs_nothing():
    layout = pack(build_tree([[1]]), np.zeros(1, bool))
    plan = Plan.of_parts(layout, np.zeros(0, np.int64))
    cost = CostModel.from_shape(SHAPE)
    assert cost.seconds(plan) == 0 and cost.peak_bytes(plan) == 0


@pytest.mark.parametrize(("device", "dtype_bytes"), [("tpu", 4), ("cpu", 3)])
def test_a_device_or_dtype_without_figures_is_refused(device, dtype_bytes):
    with pytest.raises(ValueError, match="known are cpu, cuda with 2, 4 or 8 bytes"):
        CostModel.from_shape(SHAPE, device, dtype_bytes=dtype_bytes)


def test_checkpointing_trades_saved_bytes_for_a_second_forward():
    layout = pack(build_tree(ROWS))
    plan = Plan.of_parts(layout, np.zeros(layout.num_tokens, np.int64))
    plain, checkpointed = (CostModel.from_shape(SHAPE, checkpointing=flag) for flag in (False, True))
    assert checkpointed.counts.saved_token < plain.counts.saved_token / 3
    assert checkpointed.peak_bytes(plan) < plain.peak_bytes(plan)
    assert checkpointed.speeds.backward_ratio == plain.speeds.backward_ratio + 1
    assert checkpointed.counts.checkpointed(False) == plain.counts


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_chunks_of_the_head_stay_within_their_bounds(device):
    least, most = HEAD_CHUNK_ROWS[device]
    for vocab in (1, 100, 2048, 16_384, 151_936, 10**6, 10**9):
        rows = head_chunk_rows(vocab, device)
        assert least <= rows <= most
        assert rows in (least, most) or rows == HEAD_CHUNK_LOGITS[device] // vocab
    # On a GPU the head's matrix is read once for each chunk: not for every few rows.
    assert head_chunk_rows(151_936, "cuda") > 1500 and head_chunk_rows(151_936, "cpu") == 64
