"""Predicted seconds and bytes of plans, against sums by hand and a walk over the plan's events."""

import dataclasses
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.forests import forests
from treetrain.planning.constants import HEAD_CHUNK_LOGITS, HEAD_CHUNK_ROWS, Constants, head_chunk_rows
from treetrain.planning.cost import ModelShape, step_flops
from treetrain.planning.plan import Plan
from treetrain.planning.price import CostModel
from treetrain.tree.build import build_tree
from treetrain.tree.layout import PackedLayout, pack

SHAPE = ModelShape(layers=3, hidden=8, intermediate=12, heads=4, kv_heads=2, head_dim=5, vocab=50, tied=True)
NUMBERS = [field.name for field in dataclasses.fields(Constants) if field.name != "source"]


def distinct_constants(**changes) -> Constants:
    """Every constant another prime, so that a mix-up cannot cancel out."""
    primes = [n for n in range(2, 200) if all(n % d for d in range(2, n))][: len(NUMBERS)]
    return Constants(**(dict(zip(NUMBERS, map(float, primes))) | {"chunk_rows": 3, "slack": 1.25} | changes), source="")


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
    c = distinct_constants(backward_ratio=2.0, matrix_flops=1.0, pair_flops=1.0, head_flops=1.0)
    layout = pack(build_tree(ROWS))
    plan = Plan.of_parts(layout, np.zeros(layout.num_tokens, np.int64))
    flops = step_flops(SHAPE, layout.num_tokens, layout.pairs, len(layout.rows))
    fixed = c.graph_pass_bytes / c.bandwidth + c.graph_pass_seconds
    assert CostModel(shape=SHAPE, constants=c).seconds(plan) == pytest.approx(flops + fixed, rel=1e-12)


@given(plan=plans())
def test_seconds_are_the_sum_over_the_events_of_the_plan(plan):
    c, shape = distinct_constants(), SHAPE

    def forward(tokens: np.ndarray) -> float:
        pairs = (plan.layout.positions[tokens] + 1).sum()
        matrices = 2 * len(tokens) * shape.layers * shape.layer_parameters / c.matrix_flops
        return matrices + 4 * pairs * shape.layers * shape.heads * shape.head_dim / c.pair_flops

    total = 0.0
    for event in plan.events():
        if event.kind == "prefill":
            fixed = c.forward_pass_bytes / c.bandwidth + c.forward_pass_seconds
            total += forward(plan.prefill_tokens(event.number)) + fixed
        elif event.kind == "forward":
            tokens = plan.tokens(event.number)
            rows = np.isin(plan.layout.rows, tokens).sum()
            fixed = c.graph_pass_bytes / c.bandwidth + c.graph_pass_seconds
            total += forward(tokens) * (1 + c.backward_ratio) + fixed
            total += 6 * rows * shape.hidden * shape.vocab / c.head_flops
    cost = CostModel(shape=shape, constants=c)
    assert cost.seconds(plan) == pytest.approx(total, rel=1e-9)
    assert cost.seconds_by(plan)["recomputation"] == pytest.approx(
        sum(forward(plan.prefill_tokens(event.number)) for event in plan.events() if event.kind == "prefill")
    )


@given(
    plan=plans(), largest=st.sampled_from(["none", "end_pass", "end_token", "forward_token", "head_pass", "layer_pass"])
)
def test_peak_bytes_are_the_most_alive_at_any_event(plan, largest):
    c = distinct_constants(**({} if largest == "none" else {largest: 5000.0}))
    alive, most, carry, most_carry, states, most_states = {}, 0.0, {}, 0, {}, 0
    attached = np.unique(plan.attach[plan.attach >= 0])
    for event in plan.events():
        number, held = event.number, sum(alive.values())
        if event.kind == "prefill":
            first, tokens = plan.prefill_parts(number)[0], plan.prefill_tokens(number)
            carry[first], states[first] = len(tokens), int(np.isin(attached, tokens).sum())
            rows = int(np.isin(plan.layout.rows, tokens).sum())
            working = c.forward_token * len(tokens) + c.path_token * above(plan, first)
            working += c.head_chunk_row * min(rows, c.chunk_rows)
            most = max(most, held + working)
        elif event.kind == "forward":
            tokens = plan.tokens(number)
            rows = int(np.isin(plan.layout.rows, tokens).sum())
            if plan.kept[number]:
                carry[number] = len(plan.exported_tokens(number))
                states[number] = int(np.isin(attached, plan.tokens(number)).sum())
            graph = c.saved_pass + c.saved_token * len(tokens) + c.saved_row * rows
            head = c.head_pass + c.head_row * rows + c.head_chunk_row * min(rows, c.chunk_rows) if rows else 0.0
            layers = c.layer_pass + c.layer_token * len(tokens) + c.path_token * above(plan, number)
            most = max(most, held + graph + max(head, layers), held + c.end_pass + c.end_token * len(tokens))
            alive[number] = graph
        else:
            del alive[number]
            carry.pop(number, None)
            states.pop(number, None)
        most_carry, most_states = max(most_carry, sum(carry.values())), max(most_states, sum(states.values()))
    assert not alive and not carry
    step = c.step_bytes + c.step_token * plan.layout.num_tokens if plan.num_parts else 0.0
    held = c.carry_token * most_carry + c.carry_state * most_states
    expected = (most + held + step) * c.slack + c.slack_bytes * (plan.num_parts > 0)
    assert CostModel(shape=SHAPE, constants=c).peak_bytes(plan) == pytest.approx(expected, rel=1e-9)


def above(plan: Plan, part: int) -> int:
    return 0 if plan.attach[part] < 0 else int(plan.layout.positions[plan.attach[part]]) + 1


def test_a_part_without_predictions_has_no_head():
    layout = pack(build_tree([range(12)]), np.arange(12) == 11)
    plan = chunked(layout, 10, "none")
    c = distinct_constants(head_pass=1e6, slack=1.0, slack_bytes=0.0)
    assert plan.sizes.tolist() == [10, 1]
    found = CostModel(shape=SHAPE, constants=c).bytes_by(plan)
    assert found["running graph"] == c.saved_pass + c.saved_token + c.saved_row and found["working"] >= 1e6


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
    assert cost.bytes_by(whole)["carry"] == 0 < cost.bytes_by(kept)["carry"]


def test_a_batch_of_nothing_costs_nothing():
    layout = pack(build_tree([[1]]), np.zeros(1, bool))
    plan = Plan.of_parts(layout, np.zeros(0, np.int64))
    cost = CostModel.from_shape(SHAPE)
    assert cost.seconds(plan) == 0 and cost.peak_bytes(plan) == 0


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("dtype_bytes", [2, 4, 8])
def test_constants_survive_json(checkpointing, dtype_bytes):
    found = Constants.from_shape(SHAPE, "cuda", dtype_bytes=dtype_bytes, checkpointing=checkpointing)
    assert Constants.from_dict(json.loads(json.dumps(found.as_dict()))) == found


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"bandwidth": 0.0}, "bandwidth is 0.0"),
        ({"saved_token": -1.0}, "saved_token is -1.0"),
        ({"slack": float("nan")}, "slack is nan"),
        ({"chunk_rows": "64"}, "chunk_rows is '64'"),
        ({"matrix_flops": True}, "matrix_flops is True"),
        ({"unknown": 1.0}, "unlike keys unknown"),
    ],
)
def test_constants_that_cannot_be_are_refused_by_name(changes, says):
    with pytest.raises(ValueError, match=says):
        Constants.from_dict(distinct_constants().as_dict() | changes)


@pytest.mark.parametrize(("device", "dtype_bytes"), [("tpu", 4), ("cpu", 3)])
def test_a_device_or_dtype_without_figures_is_refused(device, dtype_bytes):
    with pytest.raises(ValueError, match="known are cpu, cuda with 2, 4 or 8 bytes"):
        Constants.from_shape(SHAPE, device, dtype_bytes=dtype_bytes)


def test_checkpointing_trades_saved_bytes_for_a_second_forward():
    plain, checkpointed = (Constants.from_shape(SHAPE, checkpointing=flag) for flag in (False, True))
    assert checkpointed.saved_token < plain.saved_token / 5
    assert checkpointed.layer_token > plain.layer_token
    assert checkpointed.backward_ratio == plain.backward_ratio + 1


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_chunks_of_the_head_stay_within_their_bounds(device):
    least, most = HEAD_CHUNK_ROWS[device]
    for vocab in (1, 100, 2048, 16_384, 151_936, 10**6, 10**9):
        rows = head_chunk_rows(vocab, device)
        assert least <= rows <= most
        assert rows in (least, most) or rows == HEAD_CHUNK_LOGITS[device] // vocab
        assert Constants.from_shape(dataclasses.replace(SHAPE, vocab=vocab), device).chunk_rows == rows
    # On a GPU the head's matrix is read once for each chunk: not for every few rows.
    assert head_chunk_rows(151_936, "cuda") > 1500 and head_chunk_rows(151_936, "cpu") == 64
