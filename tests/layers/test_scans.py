"""Rules by kernels that scan sequences, level by level, against the specification token by token.

The kernels of flash-linear-attention run on CUDA. What surrounds them is proved with a stand-in of the same signatures;
the kernels themselves where they and a device are there.
"""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rules import RULES, SHAPES, inputs, layout_of

from support.stand_in import StandIn
from treetrain.check.forests import forests, runs
from treetrain.check.linear import relative_error, rms
from treetrain.layers.recurrence import scans as scans_module
from treetrain.layers.recurrence import self_check
from treetrain.layers.recurrence.scans import GATED_DELTA_KERNEL, Scans, scan_for, scanned

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def check(layout, *, name: str = "gated delta", with_state: bool, seed: int = 0, exports: int = 3) -> StandIn:
    """Outputs, exported states and all gradients."""
    rule, kernel = RULES[name], StandIn()
    rng = np.random.default_rng(seed)
    exported = np.sort(rng.choice(layout.num_tokens, min(exports, layout.num_tokens), replace=False))
    *given, before = leaves = inputs(name, layout.num_tokens, seed, torch.float64)
    expected, states = rule.reference(*given, layout.parent, before if with_state else torch.zeros_like(before))
    scans = Scans(layout, exported, CPU)
    got, handed_on = scanned(given, scans, before if with_state else None, rule.kernel.bound(kernel))
    pairs = [(got, expected)]
    if exports:
        pairs.append((handed_on, states[exported]))
    else:
        assert handed_on is None
    for found, want in pairs:
        torch.testing.assert_close(found, want, rtol=1e-11, atol=1e-12)
    factors = [torch.randn_like(want) for _, want in pairs]
    both = [
        torch.autograd.grad(
            sum((pair[side] * f).sum() for pair, f in zip(pairs, factors)),
            leaves if with_state else given,
            retain_graph=True,
        )
        for side in (0, 1)
    ]
    for found, want in zip(*both):
        assert float((found - want).norm()) <= 1e-12 * float(want.norm()) + 1e-14
    return kernel


@pytest.mark.few(1)
@pytest.mark.parametrize("name", RULES)
@runs(40)
@given(forests(), st.booleans(), st.integers(0, 9), st.sampled_from([0, 1, 4]))
def test_level_by_level_is_the_token_by_token_rule_with_all_gradients(name, rows, with_state, seed, exports):
    if any(rows):
        check(layout_of(rows), name=name, with_state=with_state, seed=seed, exports=exports)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["forks at the first token", "nested forks", "levels of segments"])
def test_shapes_that_fork_often_are_exact(name):
    check(layout_of(SHAPES[name]), with_state=True)


@runs(100)
@given(forests(), st.integers(0, 9), st.sampled_from([0, 1, 4]))
def test_every_token_is_scanned_once_behind_the_one_before_it(rows, seed, exports):
    if not any(rows):
        return
    layout = layout_of(rows)
    exported = np.sort(np.random.default_rng(seed).choice(layout.num_tokens, min(exports, layout.num_tokens), False))
    scans = Scans(layout, exported, CPU)
    order = scans.order.tolist()
    assert sorted(order) == list(range(layout.num_tokens))
    ends, place = [-1], 0  # the last token of every run that goes on, behind the state before the roots
    above = ends
    for call in (*scans.levels, *([scans.last] if scans.last else [])):
        above = ends if call is scans.last else above
        here = []
        for entry, first, stop in zip(call.entry.tolist(), call.offsets[:-1].tolist(), call.offsets[1:].tolist()):
            run = np.array(order[place + first : place + stop])
            assert layout.parent[run[0]] == above[entry] and (layout.parent[run[1:]] == run[:-1]).all()
            here.append(int(run[-1]))
        place += int(call.offsets[-1])
        if call is not scans.last:
            ends, above = [*ends, *here], here
    assert [ends[1 + end] for end in scans.exported.tolist()] == exported.tolist()
    # As few levels as there can be: one for every place on a path where a run must end.
    cut = np.bincount(layout.parent[layout.parent >= 0], minlength=layout.num_tokens) > 1
    cut[exported] = True
    assert len(scans.levels) == max(int(cut[path].sum()) for path in paths_of(layout))


def paths_of(layout) -> list[list[int]]:
    paths = [[token] for token in range(layout.num_tokens)]
    for token, parent in enumerate(layout.parent.tolist()):
        if parent >= 0:
            paths[token] = paths[parent] + paths[token]
    return paths


def test_a_bushy_tree_is_a_few_calls_and_only_runs_that_go_on_are_asked_for_their_state():
    kernel = check(
        layout_of([[1, 2, 3, i, 100 + j] for i in range(10) for j in range(10)]), with_state=False, exports=0
    )
    assert [(call["runs"], call["tokens"], call["final"]) for call in kernel.calls] == [
        (1, 3, True),
        (10, 10, True),
        (100, 100, False),
    ]


def test_rows_that_share_nothing_are_one_call():
    kernel = check(layout_of([[i, 1, 2] for i in range(20)]), with_state=True, exports=0)
    assert [call["runs"] for call in kernel.calls] == [20]


# Which rule runs where.


def scans_of(rows):
    return Scans(layout_of(rows), np.zeros(0, np.int64), CPU)


@pytest.mark.parametrize(
    ("device", "dtype", "sizes", "runs_there"),
    [
        (CUDA, torch.bfloat16, (128, 256), True),
        (CPU, torch.bfloat16, (128, 128), False),
        (CUDA, torch.float32, (128, 128), False),
        (CUDA, torch.bfloat16, (512, 128), False),
        (CUDA, torch.bfloat16, (64, 63), False),
    ],
)
def test_tiles_run_where_the_kernels_cannot_or_are_not_exact(monkeypatch, device, dtype, sizes, runs_there):
    monkeypatch.setattr(scans_module, "_installed", lambda *_: StandIn())
    assert (scan_for(GATED_DELTA_KERNEL, device, dtype, *sizes) is not None) == runs_there


def test_kernels_run_on_long_runs_and_tiles_on_trees_that_fork_often():
    assert scans_of([[*range(2000), 5000 + i, *range(1000)] for i in range(4)]).suits
    assert not scans_of([[1, 2, 3, i, 100 + j] for i in range(20) for j in range(20)]).suits
    # Every run fills its chunks, but there are only as many tokens a level as a chunk has.
    assert not scans_of([[*range(64 * n), *range(9000, 9064)] for n in range(1, 30)]).suits


@pytest.mark.parametrize(
    ("version", "says"), [("0.5.1", "0.5.1 is older than 0.6"), ("0.6.0", "cannot be .*no driver")]
)
def test_an_installed_kernel_that_cannot_be_used_is_warned_of(monkeypatch, version, says):
    def broken(name):
        raise RuntimeError("no driver")

    monkeypatch.setattr(scans_module.importlib.metadata, "version", lambda name: version)
    monkeypatch.setattr(scans_module.importlib, "import_module", broken)
    scans_module._installed.cache_clear()
    try:
        with pytest.warns(UserWarning, match=says):
            assert scan_for(GATED_DELTA_KERNEL, CUDA, torch.bfloat16, 128, 128) is None
    finally:
        scans_module._installed.cache_clear()


# The check before the first use of the kernel.


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize(("dtype", "most"), [(torch.float64, 1e-12), (torch.bfloat16, 1e-2), (torch.float16, 2e-3)])
def test_a_right_kernel_is_far_below_the_limit_of_its_check(name, dtype, most):
    rule, dtypes = RULES[name], (dtype, torch.float64, *([dtype] if name == "gated delta" else []))
    found = self_check._errors(rule.reference, rule.kernel.bound(StandIn()), (2, 4), (16, 8), dtypes, CPU)
    assert max(found.values()) <= most, found


# The kernel itself.


def errors_of(
    name: str, kernel, device: torch.device, dtype: torch.dtype, rows: list, seed: int
) -> tuple[float, float]:
    """Errors of outputs and all gradients on the tree and row by row, in a narrow dtype, against the specification."""
    layout = layout_of(rows)
    rule = RULES[name]
    leaves = [x.detach() for x in inputs(name, layout.num_tokens, seed, key=64, value=64)]
    leaves = [x.to(dtype) if number < 3 else x.float() for number, x in enumerate(leaves)]
    paths = [np.array(path) for token, path in enumerate(paths_of(layout)) if layout.ends[token] == token + 1]
    factors = [torch.randn(len(path), *leaves[2].shape[1:]) for path in paths]

    def measured(where, outs_of, *, wide: bool = False) -> torch.Tensor:
        own = [x.to(where, torch.float64 if wide else x.dtype).requires_grad_() for x in leaves]
        outs = outs_of(own)
        total = sum((out.double() * f.to(where)).sum() for out, f in zip(outs, factors))
        found = [*(out.detach() for out in outs), *torch.autograd.grad(total, own)]
        return torch.cat([x.flatten().double().cpu() / (x.double().norm().cpu() + 1e-9) for x in found])

    def by_tree(own):
        scans = Scans(layout, np.zeros(0, np.int64), device)
        out, _ = scanned(own[:-1], scans, own[-1], kernel)
        return [out[torch.from_numpy(path).to(device)] for path in paths]

    def by_rows(own):
        outs = []
        for path in paths:
            chain = Scans(layout_of([range(len(path))]), np.zeros(0, np.int64), device)
            at = torch.from_numpy(path).to(device)
            outs.append(scanned([x[at] for x in own[:-1]], chain, own[-1], kernel)[0])
        return outs

    def specified(own):
        out, _ = rule.reference(*own[:-1], layout.parent, own[-1])
        return [out[torch.from_numpy(path)] for path in paths]

    truth = measured(CPU, specified, wide=True)
    return tuple(relative_error(measured(device, way), truth) for way in (by_tree, by_rows))


FORESTS = (
    [[*range(70), 100 + i, *range(i * 20)] for i in range(4)],
    [[*range(n), 100 + n, *range(30)] for n in (1, 5, 64, 65)],
    [[i, *range(9)] for i in range(5)],
)


def compare(name: str, kernel, device: torch.device, dtype: torch.dtype) -> tuple[float, float]:
    """Pooled errors over forests, on trees and by rows."""
    torch.manual_seed(0)
    errors = [errors_of(name, kernel, device, dtype, rows, seed) for seed, rows in enumerate(FORESTS)]
    pooled = [rms(side) for side in zip(*errors)]
    assert pooled[0] <= 1.5 * pooled[1] and pooled[1] < 0.02, errors
    return pooled[0], pooled[1]


NARROW = [torch.bfloat16, torch.float16]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the kernels are for CUDA")
@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_by_the_real_kernels_a_tree_is_as_exact_as_rows(name, dtype):
    kernel = scan_for(RULES[name].kernel, CUDA, dtype, 64, 64)
    if kernel is None:
        pytest.skip("flash-linear-attention is not installed")
    compare(name, kernel, CUDA, dtype)


@pytest.mark.slow
@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_by_a_stand_in_a_tree_is_as_exact_as_rows_in_narrow_dtypes(name, dtype):
    compare(name, RULES[name].kernel.bound(StandIn()), CPU, dtype)
