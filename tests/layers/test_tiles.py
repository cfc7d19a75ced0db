"""The tiled rules and the path convolution against their specifications, token by token."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rules import RULES, SHAPES, inputs, layout_of

from treetrain.check.forests import forests, runs
from treetrain.check.linear import relative_error
from treetrain.core.tree.layout import PackedLayout
from treetrain.layers.recurrence.paths import convolve, make_taps
from treetrain.layers.recurrence.reference import reference_convolution
from treetrain.layers.recurrence.tiles import TILE, Tiles


def check(name: str, layout: PackedLayout, *, tile: int, with_state: bool, seed: int = 0, exports: int = 3) -> None:
    """Outputs, exported states and all gradients."""
    rule, rng = RULES[name], np.random.default_rng(seed)
    exported = np.sort(rng.choice(layout.num_tokens, min(exports, layout.num_tokens), replace=False))
    *given, before = leaves = inputs(name, layout.num_tokens, seed)
    state = before if with_state else torch.zeros_like(before)
    expected, states = rule.reference(*given, layout.parent, state)
    forest = Tiles(layout, exported, torch.device("cpu"), tile=tile)
    got, handed_on = rule.tiled(*given, forest, before if with_state else None)
    pairs = [(got, expected)]
    if exports:
        pairs.append((handed_on, states[exported]))
    else:
        assert handed_on is None
    factors = [torch.randn(want.shape, dtype=want.dtype) for _, want in pairs]
    for found, want in pairs:
        torch.testing.assert_close(found, want, rtol=1e-11, atol=1e-12)
    wanted = leaves if with_state else given
    both = [
        torch.autograd.grad(sum((pair[side] * f).sum() for pair, f in zip(pairs, factors)), wanted, retain_graph=True)
        for side in (0, 1)
    ]
    for found, want in zip(*both):
        assert float((found - want).norm()) <= 1e-12 * float(want.norm()) + 1e-14


@pytest.mark.few(1)
@pytest.mark.parametrize("rule", RULES)
@runs(60)
@given(forests(), st.sampled_from([1, 2, 3, 5, 64]), st.booleans(), st.integers(0, 9), st.sampled_from([0, 1, 4]))
def test_outputs_states_and_gradients_are_those_of_the_token_by_token_rule(rule, rows, tile, with_state, seed, exports):
    if any(rows):
        check(rule, layout_of(rows), tile=tile, with_state=with_state, seed=seed, exports=exports)


@pytest.mark.few(3)
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("with_state", [True, False])
def test_shapes_that_cross_tiles_are_exact(name, rule, with_state):
    check(rule, layout_of(SHAPES[name]), tile=TILE, with_state=with_state)


@pytest.mark.parametrize(("every", "strengths"), [(4, [1.0, 20.0, 60.0, 120.0]), (1, [10.0] * 4)])
@pytest.mark.parametrize("name", RULES)
def test_strong_decays_keep_float32_exact(name, every, strengths):
    """Heads of Mamba-2 may forget within a token, and then keep something for a few."""
    layout = layout_of(SHAPES["nested forks"])
    rule, leaves = RULES[name], inputs(name, layout.num_tokens, dtype=torch.float32)
    forgets = (torch.arange(layout.num_tokens) % every == 0)[:, None]
    leaves[3] = (leaves[3].detach() * torch.where(forgets, torch.tensor(strengths), 0.05)).requires_grad_()
    results = []
    for dtype in (torch.float64, torch.float32):
        *given, before = own = [x.detach().to(dtype).requires_grad_() for x in leaves]
        if dtype == torch.float64:
            out, _ = rule.reference(*given, layout.parent, before)
        else:
            out, _ = rule.tiled(*given, Tiles(layout, np.zeros(0, np.int64), torch.device("cpu")), before)
        factor = torch.linspace(0, 9, out.numel(), dtype=dtype).sin().view(out.shape)
        results.append([out.detach(), *torch.autograd.grad((out * factor).sum(), own)])
    for want, found in zip(*results):
        assert relative_error(found, want) <= 1e-6
    assert relative_error(results[1][4], results[0][4]) <= 5e-7  # the gradient of the decays


@runs(60)
@given(forests(), st.integers(1, 5), st.booleans())
def test_the_convolution_reads_the_last_inputs_of_every_path(rows, width, continues):
    if not any(rows):
        return
    layout = layout_of(rows)
    torch.manual_seed(width)
    x = torch.randn(layout.num_tokens, 3, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(3, width, dtype=torch.float64, requires_grad=True)
    before = torch.randn(width - 1, 3, dtype=torch.float64) * continues
    # The path above is one chain on which every root hangs.
    parent = np.concatenate(
        [np.arange(-1, width - 2), np.where(layout.parent < 0, width - 2, layout.parent + width - 1)]
    )
    expected = reference_convolution(torch.cat([before, x]), weight, parent)[width - 1 :]
    exported = np.arange(layout.num_tokens)[:: 2 + width % 2]
    taps = make_taps(layout.parent, exported, width, torch.device("cpu"))
    extended = torch.cat([before, x])
    got = convolve(extended, weight, taps)
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
    factor = torch.randn_like(got)
    for found, want in zip(
        *(torch.autograd.grad((y * factor).sum(), [x, weight], retain_graph=True) for y in (got, expected))
    ):
        torch.testing.assert_close(found, want, rtol=1e-11, atol=1e-12)
    # A tail is what a child would look back at.
    for token, tail in zip(exported, extended[taps.tails]):
        path = [token + width - 1]
        while len(path) < width - 1:
            path.append(parent[path[-1]] if path[-1] > 0 else 0)
        torch.testing.assert_close(tail, extended[path[: width - 1][::-1]])


@pytest.mark.parametrize("name", SHAPES)
def test_tiles_are_few_and_nearly_full(name):
    layout = layout_of(SHAPES[name])
    forest = Tiles(layout, np.zeros(0, np.int64), torch.device("cpu"))
    tiles = sum(tiles.shape[0] for tiles in forest.classes)
    assert all(tiles.shape[1] <= TILE for tiles in forest.classes)
    assert tiles <= 1.5 * layout.num_tokens / TILE + 1
