"""Experts, windows, soft-caps, scaled heads and recurrent layers: the numerics contract on real trajectories."""

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch

import treetrain as tt
from support import moe
from support.families import ATTENTION, GATED_DELTA, HEADS, MOE, WINDOW, make_family
from support.plans import planned
from support.real_rows import SOURCES, VOCABULARY, loader, with_facts
from treetrain.testing import linear
from treetrain.testing.contract import PPO, SFT, PureFloat64, Rows, as_dtype, expected, measured

FAMILIES = [*MOE, *ATTENTION, *HEADS, *GATED_DELTA]
CASES = {"sft": SFT, "ppo": PPO}


PARTS = [("N/4", "mixed"), ("chunks of 7", "none")]
ENGINES = [tt.TreeEngine, *(planned(shape, keep) for shape, keep in PARTS)]


@pytest.fixture(scope="module")
def load(shared_data) -> Callable[[str], Rows]:
    """A source's rows, made when they are first asked for."""
    return loader(shared_data)


def model_of(family: str, dtype: torch.dtype, **changes) -> torch.nn.Module:
    return make_family(family, dtype, vocab_size=VOCABULARY, **changes)


@pytest.mark.parametrize("source", SOURCES)
def test_the_samples_fork_within_and_beyond_the_windows_and_are_trained(source, load):
    rows = load(source)
    tree = tt.build_tree(rows)
    stats = tt.stats(tree)
    assert tree.num_tokens < 0.75 * tree.num_flat_tokens and stats.forks >= 2
    assert stats.longest_path > 8 * WINDOW and max(len(row) for row in rows) <= 150
    assert sum(row.weights.sum() for row in rows) > 50


def float64_error(model, rows: Rows, case, engines) -> float:
    """The worst error of some engines, each within the contract."""
    with PureFloat64():
        [(loss, gradient)] = expected(model, rows, [case])
        found = [measured(model, rows, case, engine) for engine in engines]
    assert float(gradient.norm()) > 0
    for got, _ in found:
        assert got == pytest.approx(loss, rel=1e-12, abs=1e-12)
    worst = max(linear.relative_error(got, gradient) for _, got in found)
    assert worst <= 1e-12
    return worst


def float32_error(model, rows: Rows, case, truth: torch.Tensor, engines) -> float:
    """The same in float32, where the rows' own rounding may be the larger bound."""
    [(loss, gradient)] = expected(model, rows, [case])
    bound, worst = max(1e-5, 3 * linear.relative_error(gradient, truth)), 0.0
    for engine in engines:
        got = measured(model, rows, case, engine)
        assert got[0] == pytest.approx(loss, rel=1e-5, abs=1e-5)
        worst = max(worst, linear.relative_error(got[1], gradient))
    assert worst <= bound
    return worst


FAST = ("qwen3_moe", "deepseek_v3", "gpt_oss", "gemma3_text", "gemma2", "qwen3_next_dense")
"""One of each way of computing; the slow test below has every family on every source."""


@pytest.mark.parametrize(("number", "family"), list(enumerate(FAST)), ids=FAST)
def test_a_family_on_real_trajectories_is_exact_in_float64_whole_and_in_parts(number, family, load, record_property):
    source = list(SOURCES)[number % len(SOURCES)]
    rows = with_facts(model_of(family, torch.float32), load(source))
    engines = [tt.TreeEngine, ENGINES[1 + number % len(PARTS)]]
    record_property("error", float64_error(model_of(family, torch.float64), rows, PPO, engines))


@pytest.mark.slow
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_on_every_source_is_exact_in_float64_and_float32(family, source, load, record_property):
    single, double = model_of(family, torch.float32), model_of(family, torch.float64)
    rows = with_facts(single, load(source))
    for name, case in CASES.items():
        record_property(f"float64 {name}", float64_error(double, rows, case, ENGINES))
        with PureFloat64():
            truth = expected(double, rows, [case])[0][1]
        record_property(f"float32 {name}", float32_error(single, rows, case, truth, ENGINES))


REPLAYED = [*MOE, "qwen3_next", "qwen3_5_moe_text"]
"""Both sides are told the experts of the float32 rows; a choice that rounding turns over is neither side's error."""
WITHOUT_EXPERTS = [*ATTENTION, *HEADS, "qwen3_next_dense", "qwen3_5_text"]


@pytest.mark.slow
@pytest.mark.parametrize("family", [*REPLAYED, *WITHOUT_EXPERTS])
def test_bfloat16_on_all_sources_is_about_as_exact_as_the_rows(family, load, record_property):
    low = model_of(family, torch.bfloat16)
    single, double = as_dtype(low, torch.float32), as_dtype(low, torch.float64)
    ours: list[float] = []
    theirs: list[float] = []
    for source in SOURCES:
        rows = with_facts(single, load(source))
        told = moe.with_routes(single, rows) if family in REPLAYED else rows
        for case in CASES.values():
            truth = gradient_of_rows(double, told, case, pure=True)
            theirs.append(linear.relative_error(gradient_of_rows(low, told, case), truth))
            ours.extend(linear.relative_error(measured(low, told, case, engine)[1], truth) for engine in ENGINES)
    tree, plain = linear.rms(ours), linear.rms(theirs)
    record_property("bfloat16", (tree, plain))
    assert tree <= 1.5 * plain


def gradient_of_rows(model, rows: Rows, case, *, pure: bool = False) -> torch.Tensor:
    """By the linear reference, every row through the experts it names."""
    with PureFloat64() if pure else nullcontext():
        scores = []
        for row in rows:
            with moe.replayed(model, row.experts):
                scores.append(linear.score_row(model, row.ids.tolist(), case.temperature))
        logps, entropies = map(list, zip(*scores))
        return linear.gradients(model, linear.batch_loss((logps, entropies), rows, case.per_token))


@pytest.mark.parametrize("source", SOURCES)
def test_a_window_that_is_left_out_would_be_seen_on_these_rows(source, load):
    # The same weights without the window have quite another gradient: the errors above are not small for want of use.
    model = model_of("gemma3_text", torch.float64)
    wide = model_of("gemma3_text", torch.float64, sliding_window=1000)
    wide.load_state_dict(model.state_dict())
    rows = load(source)
    assert linear.relative_error(gradient_of_rows(wide, rows, SFT), gradient_of_rows(model, rows, SFT)) > 0.05
