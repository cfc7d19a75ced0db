"""An executor runs every token once, exported tokens of recomputed parts twice, and caches one path."""

import itertools
from collections import Counter

import numpy as np
import pytest
import torch

import treetrain as tt
from support.models import make_model
from support.passes import WatchedCache, unique_ids, unnoticed, watched
from support.plans import KEEPS, check_plan, planned
from treetrain.check import linear
from treetrain.check.contract import PureFloat64
from treetrain.check.forests import bushy_rows, with_random_facts
from treetrain.core.engine import executor

TRUNK = list(range(14))
IDS = {
    "deep": unique_ids(
        [
            [*TRUNK, 20, 21, 22, 23],
            [*TRUNK, 20, 24, 25],
            [*TRUNK, 26, 27],
            [*TRUNK[:5], 28, 29, 30],
            [*TRUNK[:5], 28, 31],
            TRUNK[:8],
            TRUNK[:8],
            [32, 33, 34],
            [32, 35],
            [32, 33],
        ]
    ),
    "bushy": unique_ids(bushy_rows(np.random.default_rng(2), rows=8, segment=3, levels=4)),
}
LOSSES = {"sft": tt.losses.sft(), "ppo": tt.losses.ppo(entropy=0.05), "clip": tt.losses.ppo()}
PLANS = [
    ("1 part", "none"),
    ("N/4", "mixed"),
    ("one segment per part", "all"),
    ("one segment per part", "none"),
    ("chunks of 7", "none"),
    ("chunks of 2", "none"),
    ("chunks of 2", "all"),
    ("chunks of 2", "mixed"),
    ("shared prefill", "none"),
    ("shared prefill", "mixed"),
]
every_plan = pytest.mark.parametrize(("shape", "keep"), PLANS)
CASES = [("deep", "ppo"), ("deep", "sft"), ("bushy", "clip")]
every_plan_and_case = pytest.mark.parametrize(
    ("shape", "keep", "tree", "loss"),
    [
        pytest.param(*plan, *case, marks=() if number % 3 == at else pytest.mark.slow)
        for number, plan in enumerate(PLANS)
        for at, case in enumerate(CASES)
    ],
)


@pytest.fixture(scope="module")
def model():
    return make_model("qwen3", dtype=torch.float64, vocab_size=80)


@pytest.fixture(autouse=True)
def no_gradients(model):
    model.zero_grad()


@pytest.fixture
def caches(monkeypatch):
    """The caches of all executors of a test."""
    monkeypatch.setattr(WatchedCache, "made", [])
    monkeypatch.setattr(executor, "KVCache", WatchedCache)
    return WatchedCache.made


def counted(passes: list[list[int]]) -> Counter:
    return Counter(itertools.chain.from_iterable(passes))


@pytest.mark.few(3)
@every_plan_and_case
def test_every_token_runs_once_and_the_exported_ones_of_recomputed_parts_twice(model, shape, keep, tree, loss):
    engine = planned(shape, keep)(model)
    with watched(model) as seen:
        result = engine.forward_backward(with_random_facts(IDS[tree], 1), LOSSES[loss])
    plan = engine.plans[-1]
    check_plan(plan)
    ids = plan.layout.input_ids
    late = (plan.is_inner & ~plan.kept)[plan.part_of]
    assert counted(seen.graph) == counted(seen.backward) == Counter(ids.tolist()), "forward and backward, once each"
    assert counted(seen.plain) == Counter(ids[plan.exported & late].tolist())
    assert sorted(map(len, seen.graph)) == sorted(plan.sizes.tolist())
    assert len(seen.plain) == plan.num_prefills
    assert result.computed_tokens == len(ids) and result.parts == plan.num_parts
    assert result.recomputed_tokens == sum(map(len, seen.plain))


@pytest.mark.few(5)
@every_plan
def test_parts_run_in_the_order_of_the_plans_events(model, shape, keep):
    engine = planned(shape, keep)(model)
    with watched(model) as seen:
        engine.forward_backward(with_random_facts(IDS["deep"], 1), LOSSES["ppo"])
    plan, ids = engine.plans[-1], engine.plans[-1].layout.input_ids
    events = list(plan.events())
    forward = [ids[plan.tokens(e.number)].tolist() for e in events if e.kind == "forward"]
    backward = [ids[plan.tokens(e.number)].tolist() for e in events if e.kind == "backward"]
    published = [ids[plan.prefill_tokens(e.number)].tolist() for e in events if e.kind == "prefill"]
    assert (seen.graph, seen.backward, seen.plain) == (forward, backward, published)


@pytest.mark.few(5)
@every_plan_and_case
def test_the_cache_is_made_once_and_holds_what_the_plan_says(model, caches, shape, keep, tree, loss):
    engine = planned(shape, keep)(model)
    engine.forward_backward(with_random_facts(IDS[tree], 1), LOSSES[loss])
    plan = engine.plans[-1]
    assert len(caches) == (plan.cached_tokens > 0), "a plan without descendants needs none"
    if not caches:
        return
    (cache,) = caches
    assert max(cache.reserved) == cache.first_rows == plan.cached_tokens, "rows held at once"
    assert len(cache.made_at) == (4 if (plan.parent >= 0).any() else 0), "keys and values of two layers"
    for key, buffer in cache._buffers.items():
        assert buffer.value.data_ptr() == cache.made_at[key] and len(buffer.value) == plan.cached_tokens
    writing = sum(int((own >= 0).any()) for _, own in cache.views)
    passes = int(plan.is_inner.sum()) + plan.num_prefills
    assert writing == passes, "closed parts hand nothing on"


@pytest.mark.few(5)
@every_plan
def test_rows_of_the_cache_are_returned(model, shape, keep, monkeypatch):
    executors, make = [], executor.Executor.__init__
    monkeypatch.setattr(
        executor.Executor, "__init__", lambda self, *args, **kw: executors.append(self) or make(self, *args, **kw)
    )
    engine = planned(shape, keep)(model)
    engine.forward_backward(with_random_facts(IDS["deep"], 1), LOSSES["ppo"])
    engine.logprobs(IDS["deep"])
    used = [each._cache for each in executors if each._cache is not None]
    assert len(executors) == 2 and len(used) == (0 if shape == "1 part" else 2)
    assert all(cache._in_use == 0 and (cache.row_of == -1).all() for cache in used)


@pytest.mark.few(2)
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize(("shape", "keep"), PLANS[::3])
def test_the_same_plan_gives_the_same_bits_and_gradients_add_up(model, shape, keep, loss):
    rows, engine = with_random_facts(IDS["deep"], 1), planned(shape, keep)(model)
    first = engine.forward_backward(rows, LOSSES[loss])
    gradient = linear.gradients(model)
    model.zero_grad()
    second = engine.forward_backward(rows, LOSSES[loss])
    assert torch.equal(gradient, linear.gradients(model)) and first.loss == second.loss
    engine.forward_backward(rows, LOSSES[loss])
    assert linear.relative_error(linear.gradients(model), 2 * gradient) <= 1e-15


@pytest.mark.few(5)
@pytest.mark.parametrize("tree", IDS)
@every_plan
def test_scores_of_parts_are_those_of_the_rows_in_one_pass_without_graph(model, caches, shape, keep, tree):
    engine = planned(shape, keep)(model)
    with watched(model) as seen, PureFloat64():
        logps, entropies = engine.logprobs(IDS[tree], return_entropy=True)
        plan = engine.plans[-1]
    assert not seen.graph and counted(seen.plain) == Counter(plan.layout.input_ids.tolist())
    assert [len(p) for p in seen.plain] == plan.sizes.tolist()
    assert len(caches) == (plan.cached_tokens > 0)
    for cache in caches:
        assert max(cache.reserved) <= cache.first_rows == plan.cached_tokens
        assert all(buffer.grad is None for buffer in cache._buffers.values())
    with PureFloat64():
        reference = linear.score_rows(model, IDS[tree])
    for got, row in zip(logps + entropies, reference[0] + reference[1]):
        torch.testing.assert_close(got, row.detach(), rtol=1e-12, atol=1e-12)
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("keep", KEEPS)
def test_scores_of_a_long_path_in_small_parts_hold_one_path(model, caches, keep):
    rows = unique_ids([[*range(60), 61], [*range(60), 62], [*range(30), 63, 64]])
    planned("chunks of 7", keep)(model).logprobs(rows)
    (cache,) = caches
    longest = max(map(len, rows))
    assert longest - 10 < max(cache.reserved) <= longest + 7


class Counting:
    """A user's own loss that notes what it is called with."""

    scope, needs = "trajectory", ("logprobs", "entropies")

    def __init__(self):
        self.calls: list[tuple] = []

    def normaliser(self, rows):
        return 1.0

    def __call__(self, logprobs, entropies, trajectory):
        self.calls.append((trajectory.id, logprobs.detach().clone(), entropies.detach().clone()))
        return (logprobs.square() + 0.1 * entropies).sum(), {}


@pytest.mark.few(2)
@every_plan
def test_a_loss_is_called_once_for_every_row_with_all_of_its_scores(model, shape, keep):
    rows = [tt.Trajectory(ids, id=str(k)) for k, ids in enumerate([*IDS["deep"], [], [3]])]
    loss = Counting()
    with PureFloat64():
        planned(shape, keep)(model).forward_backward(rows, loss)
        reference = linear.score_rows(model, [row.ids.tolist() for row in rows])
    assert sorted(name for name, _, _ in loss.calls) == sorted(str(k) for k in range(len(rows)))
    for name, logps, entropies in loss.calls:
        torch.testing.assert_close(logps, reference[0][int(name)].detach(), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(entropies, reference[1][int(name)].detach(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("loss", LOSSES)
def test_a_prefill_pass_scores_only_where_trajectories_below_need_it(model, loss):
    scored = []
    handle = model.lm_head.register_forward_hook(
        unnoticed(lambda m, a, out: scored.append((torch.is_grad_enabled(), out.numel())))
    )
    planned("chunks of 2", "none")(model).forward_backward(with_random_facts(IDS["deep"], 1), LOSSES[loss])
    handle.remove()
    published = [size for graph, size in scored if not graph]
    assert published and (max(published) == 0) == (loss == "sft")


WAYS = {
    "engine": lambda m: planned("chunks of 2", "mixed")(m).forward_backward(
        with_random_facts(IDS["deep"], 1), LOSSES["ppo"]
    ),
    "engine, known": lambda m: planned("chunks of 2", "none")(m).forward_backward(
        with_random_facts(IDS["deep"], 1), LOSSES["sft"]
    ),
    "scores": lambda m: planned("chunks of 2", "none")(m).logprobs(IDS["deep"]),
    "primitive at once": lambda m: tt.logprobs(m, IDS["deep"])[0].sum().backward(),
    "primitive in parts": lambda m: tt.logprobs(m, IDS["deep"], budget=5)[0].sum().backward(),
}


@pytest.mark.few(1)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("when", ["first forward", "later forward", "last forward", "backward"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, tt.UnsupportedModel])
def test_an_exception_in_the_middle_passes_unchanged_and_leaves_the_model_as_it_was(model, way, when, error):
    if when == "backward" and way == "scores":
        return
    raised, calls = error("in the middle"), []

    def fail(*_):
        raise raised

    def hook(module, args, out):
        calls.append(1)
        if when == "backward":
            if out.requires_grad and len(calls) > 2 * (way != "primitive at once"):
                out.register_hook(fail)
        elif len(calls) == at:
            fail()

    count = model.model.layers[1].mlp.register_forward_hook(lambda *_: calls.append(1))
    WAYS[way](model)
    count.remove()
    at = {"first forward": 1, "later forward": (len(calls) + 1) // 2, "last forward": len(calls)}.get(when, 0)
    calls.clear()
    model.zero_grad()
    handle = model.model.layers[1].mlp.register_forward_hook(hook)
    before = model.config._attn_implementation
    with pytest.raises(error) as caught:
        WAYS[way](model)
    handle.remove()
    assert caught.value is raised
    assert model.config._attn_implementation == before
    assert not [name for name, module in model.named_modules() if "forward" in vars(module)]
    if way.startswith("primitive"):
        assert all(p.grad is None for p in model.parameters())
    plain = linear.score_row(model, IDS["deep"][0])[0]
    torch.testing.assert_close(tt.logprobs(model, IDS["deep"])[0], plain, rtol=1e-5, atol=1e-5)
