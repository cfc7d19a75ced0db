"""Models with recurrent layers: the numerics contract in every plan shape, and the shapes that recurrence is about."""

import gc
import inspect
import warnings
import weakref

import numpy as np
import pytest
import torch

import treetrain as tt
from support.cases import OTHERS
from support.models import MAMBA, make_model, needs_transformers
from support.passes import cache_bytes
from support.plans import KEEPS, SHAPES, calls_answer, planned
from support.stand_in import StandIn
from treetrain.check import linear
from treetrain.check.contract import PPO, SFT, PureFloat64, RoundsToFloat32, check_contract
from treetrain.check.forests import bushy_rows, with_random_facts
from treetrain.kernels import checks as kernel_checks
from treetrain.layers.recurrence import paths, recurrent_layers
from treetrain.layers.recurrence.tiles import TILE

DELTA = ("qwen3_5_text", "qwen3_next_dense")


@pytest.mark.few(1)
@pytest.mark.parametrize(("family", "shape"), zip(DELTA, ("chunks of 7", "one segment per part")))
def test_gradients_of_gated_delta_models_are_those_of_the_rows(family, shape, record_property):
    # A smooth loss, as below.
    cases, engines = [OTHERS["reinforce k3 entropy"]], [planned("1 part", "none"), planned(shape, "mixed")]
    record_property("errors", check_contract(make_model(family), cases, 2, engines=engines))


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("family", [*DELTA, "olmo_hybrid", "lfm2", *MAMBA, "falcon_h1_plain"])
def test_gradients_of_every_plan_of_hybrids_are_those_of_the_rows(family, shape, record_property):
    # Smooth losses: one ratio of PPO that bfloat16 moves over its bound outweighs all other errors of a few forests.
    cases, engines = [SFT, OTHERS["reinforce k3 entropy"]], [planned(shape, keep) for keep in KEEPS]
    record_property("errors", check_contract(make_model(family), cases, 20, engines=engines))


@pytest.mark.parametrize(
    "family",
    [
        "lfm2",
        *(pytest.param(x, marks=pytest.mark.slow) for x in ("nemotron_h", "olmo_hybrid", "falcon_h1", "zamba2")),
    ],
)
def test_other_builds_of_recurrent_layers_meet_the_contract(family, record_property):
    engines = [planned("1 part", "none"), planned("chunks of 7", "mixed")]
    record_property("errors", check_contract(make_model(family), [SFT], 2, engines=engines))


LONG = list(np.random.default_rng(1).integers(0, 37, 2 * TILE + 30))
SHAPED = {
    "forks at the first token": [[i, 1, 2, 3] for i in range(20)] + [[1, i, 4] for i in range(5)],
    "one-token segments": [[1, 5], [1, 2, 6], [1, 2, 3, 7], [1, 2, 3, 4, 8], [7], [8, 9]],
    "segments longer than a tile": [LONG, [*LONG[: TILE + 9], 3, 1, 4], [*LONG, 1, 5], [*LONG, 9, 2, 6], LONG[:TILE]],
    "a bushy star": [[1, 2, 3, i % 37, i // 37] for i in range(40)],
    "nested forks": [[*LONG[:n], (LONG[n] + 1) % 37, 3] for n in range(1, 70, 7)],
    "levels": bushy_rows(np.random.default_rng(0), rows=9, segment=9, levels=3),
}
DEEP = ("qwen3_5_deep", "bamba_deep")
SMALL = bushy_rows(np.random.default_rng(0), rows=6, segment=4, levels=3)
PLANS = [("1 part", "none"), ("chunks of 7", "none"), ("one segment per part", "all"), ("N/4", "mixed")]


def measure(model, rows, engines) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The gradient by rows, and by each engine."""
    score = linear.score_rows(model, [row.ids.tolist() for row in rows], PPO.temperature)
    truth = linear.gradients(model, linear.batch_loss(score, rows, PPO.per_token))
    found = []
    for engine in engines:
        model.zero_grad()
        engine(model, temperature=PPO.temperature).forward_backward(rows, PPO.loss)
        found.append(linear.gradients(model))
    model.zero_grad()
    return truth, found


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("family", "name", "plans"),
    [
        *((DEEP[number // 2 % 2], name, PLANS[number % 4 :: 4]) for number, name in enumerate(SHAPED)),
        *(pytest.param(family, name, PLANS, marks=pytest.mark.slow) for family in DEEP for name in SHAPED),
    ],
)
def test_what_recurrence_is_about_is_exact(family, name, plans):
    rows = with_random_facts(SHAPED[name], 7)
    engines = [planned(*plan) for plan in plans]
    with PureFloat64():
        truth, found = measure(make_model(family, dtype=torch.float64), rows, engines)
    for gradient in found:
        assert linear.relative_error(gradient, truth) <= 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("family", [*DELTA, "bamba_deep"])
def test_five_hundred_nested_forks_are_exact(family):
    trunk = np.random.default_rng(3).integers(0, 37, 500)
    rows = with_random_facts([[*trunk[:n], (trunk[n] + 1) % 37] for n in range(1, 500)], 3)
    model = make_model(family, dtype=torch.float64)
    with PureFloat64():
        truth, found = measure(model, rows, [planned("1 part", "none"), planned("N/16", "mixed")])
    for gradient in found:
        assert linear.relative_error(gradient, truth) <= 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("family", DEEP)
def test_a_budget_in_tokens_and_the_primitive_are_exact(family):
    rows = with_random_facts(SMALL, 5)
    ids = [row.ids.tolist() for row in rows]
    model = make_model(family, dtype=torch.float64)
    with PureFloat64():
        logps, entropies = linear.score_rows(model, ids)
        truth = linear.gradients(model, sum((p * q).sum() for p, q in zip(logps, entropies)))
        for budget in (None, 5):
            found, also = tt.logprobs(model, ids, budget=budget, return_entropy=True)
            got = linear.gradients(model, sum((p * q).sum() for p, q in zip(found, also)))
            assert linear.relative_error(got, truth) <= 1e-12
            plain = tt.TreeEngine(model, budget=budget).logprobs(ids)
            for one, other, want in zip(found, plain, logps):
                torch.testing.assert_close(one, want, rtol=1e-11, atol=1e-12)
                torch.testing.assert_close(other, want, rtol=1e-11, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("family", DEEP)
def test_nothing_of_a_pure_float64_run_is_rounded(family):
    watch = RoundsToFloat32()
    model = make_model(family, dtype=torch.float64)
    with PureFloat64(), watch:
        for plan in PLANS[:2]:
            planned(*plan)(model).forward_backward(with_random_facts(SMALL, 5), PPO.loss)
    assert watch.found == []


@pytest.mark.slow
@pytest.mark.parametrize("keep", ["mixed", "none", "all"])
def test_states_are_held_only_where_parts_attach_and_room_is_made_once(keep, monkeypatch):
    made: list[paths.StateCache] = []
    grown: list[int] = []

    class Watched(paths.StateCache):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.most = 0
            made.append(self)

        def allocate(self, tokens):
            before = self._rows
            super().allocate(tokens)
            grown.append(self._rows - before)
            self.most = max(self.most, self._in_use)

    monkeypatch.setattr("treetrain.layers.recurrence.recurrence.StateCache", Watched)
    model = make_model("qwen3_5_deep")
    for shape in ("1 part", "N/4", "one segment per part", "shared prefill"):
        engine = planned(shape, keep)
        engine.plans.clear()
        engine(model).forward_backward(with_random_facts(SMALL, 5), SFT.loss)
        slots, plan = made[-1], engine.plans[-1]
        assert not any(grown)
        assert slots.most == slots._rows == plan.cached_states
        attach = np.unique(plan.attach[plan.attach >= 0])
        assert slots.most <= len(attach) and (slots.most > 0) == (len(attach) > 0)
        # Three recurrent layers, each with a state and the last three inputs, values and gradients.
        state, tail = 4 * 8 * 12, 3 * (2 * 2 * 8 + 4 * 12)
        assert cache_bytes(slots) == (3 * slots.most * (state + tail) * 4 * 2 if slots.most else 0)


def test_a_score_holds_no_states_of_a_run_that_is_over(monkeypatch):
    made: list[weakref.ref] = []

    class Watched(paths.StateCache):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            made.append(weakref.ref(self))

    monkeypatch.setattr("treetrain.layers.recurrence.recurrence.StateCache", Watched)
    engine = tt.TreeEngine(make_model("qwen3_5_deep"), budget=4, check=False)
    calls_answer(engine, plan_keeping_graphs=lambda plan: None)  # no graph is kept
    scored = engine.score([[1, 2, 3, 4, 5, 6], [1, 2, 3, 7, 8, 9]])
    assert scored.plan.scores_first == "recomputed" and scored.parts > 1
    gc.collect()
    assert [cache() for cache in made] == [None]
    torch.cat(scored.logprobs).sum().backward()
    scored.backward()
    gc.collect()
    assert [cache() for cache in made] == [None, None]


@pytest.mark.slow
@pytest.mark.parametrize("family", [*DEEP, "olmo_hybrid"])
def test_by_kernels_that_scan_sequences_every_plan_is_exact(family, monkeypatch):
    kernel = StandIn()
    monkeypatch.setattr(paths, "scan_for", lambda of, *_: of.bound(kernel))
    monkeypatch.setattr(paths.Scans, "suits", True)
    with PureFloat64():
        truth, found = measure(
            make_model(family, dtype=torch.float64), with_random_facts(SMALL, 7), [planned(*plan) for plan in PLANS]
        )
    assert any(not call["final"] for call in kernel.calls) and any(call["final"] for call in kernel.calls)
    for gradient in found:
        assert linear.relative_error(gradient, truth) <= 1e-12


class WrongForward(StandIn):
    def __call__(self, *args, **options):
        out, states = super().__call__(*args, **options)
        return out * 1.1, states


class WrongStates(StandIn):
    def __call__(self, *args, **options):
        out, states = super().__call__(*args, **options)
        return out, None if states is None else states.nan_to_num() * 0.8


class WrongGradient(StandIn):
    def __call__(self, q, k, v, *args, **options):
        return super().__call__(q, k, v.detach() + 0.8 * (v - v.detach()), *args, **options)


class DoesNotCompile(StandIn):
    def __call__(self, *args, **options):
        raise RuntimeError("ptxas: unsupported architecture\nmore lines")


KERNELS = [
    (StandIn, None),
    (WrongForward, "off in outputs and states by"),
    (DoesNotCompile, "raised RuntimeError: ptxas: unsupported architecture"),
    (WrongStates, "off in outputs and states by"),
    (WrongGradient, "off in the gradients by"),
]


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("family", "kind", "reason"),
    [
        pytest.param(family, *kernel, marks=[] if kernel[1] is None or number % 2 == other else [pytest.mark.slow])
        for other, family in enumerate(DEEP)
        for number, kernel in enumerate(KERNELS)
    ],
)
def test_tiles_take_the_place_of_a_kernel_that_is_wrong_here(family, kind, reason, monkeypatch):
    """The CPU plays a GPU, on which a kernel is checked."""
    kernel = kind()
    monkeypatch.setattr(kernel_checks, "_FAILURES", {})
    monkeypatch.setattr(paths, "CHECKED", {"cpu"})
    monkeypatch.setattr(paths, "scan_for", lambda of, *_: of.bound(kernel))
    monkeypatch.setattr(paths.Scans, "suits", True)
    with PureFloat64(), warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        truth, found = measure(
            make_model(family, dtype=torch.float64), with_random_facts(SMALL, 7), [planned(*PLANS[0])]
        )
    said = [str(w.message) for w in told if "passed over" in str(w.message)]
    assert linear.relative_error(found[0], truth) <= 1e-12
    if reason is None:
        assert not said and len(kernel.calls) > 4, "the check is two calls for each level, and steps go on with it"
    else:
        assert len(said) == 1 and "flash-linear-attention" in said[0] and reason in said[0], said
        assert "more lines" not in said[0]


def test_a_layer_is_tried_without_the_kernels_that_are_installed(monkeypatch):
    """transformers takes flash-linear-attention's on any device once it is installed, and it has none for the CPU."""
    needs_transformers("5.16", "a layer keeps the kernel that it found when it was made")
    from transformers.models.qwen3_5 import modeling_qwen3_5 as theirs

    def kernel(*_args, **_kwargs):
        raise RuntimeError("no driver")

    kernel.__wrapped__ = inspect.unwrap(theirs.torch_chunk_gated_delta_rule)
    monkeypatch.setattr(theirs, "torch_chunk_gated_delta_rule", kernel)
    monkeypatch.setattr(recurrent_layers, "_TRUSTED", {})
    model = make_model("qwen3_5_text")
    assert len(recurrent_layers.check_recurrence(model, model.config).modules) == 1
    assert theirs.torch_chunk_gated_delta_rule is kernel
    with pytest.raises(RuntimeError, match="no driver"):  # as rows run it
        model(torch.tensor([[1, 2, 3]]))
