"""Merging pieces of attention and adding up their gradients: in PyTorch, and by Triton's kernels in its interpreter."""

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from support.triton_here import triton_or_skip
from treetrain import kernels as room
from treetrain.check.forests import runs
from treetrain.kernels import checks as kernel_checks
from treetrain.kernels import merging
from treetrain.kernels.merge_tables import Sums
from treetrain.kernels.merging import PLAIN, Merging

CPU = torch.device("cpu")
HEADS, SIZE, COUNT = 2, 8, 40


@st.composite
def places(draw, repeated: bool) -> list[np.ndarray]:
    """Tokens of the rows of some pieces."""
    tokens = st.lists(st.integers(0, COUNT - 1), min_size=1, max_size=30, unique=not repeated)
    found = draw(st.lists(tokens, max_size=4))
    return [np.array(x if repeated else sorted(x)) for x in found]


def drawn(seed: int, *shapes: tuple[int, ...], dtype=torch.float64) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def merged(pieces: list[np.ndarray], dtype: torch.dtype, operations: Merging = PLAIN, seed: int = 0):
    """The result of merging drawn pieces into a drawn start, and its log-sum-exps."""
    shapes = [(COUNT, HEADS, SIZE), (HEADS, COUNT)]
    shapes += [shape for at in pieces for shape in ((len(at), HEADS, SIZE), (HEADS, len(at)))]
    tensors = [x.bfloat16() if x.dim() == 3 else 9 * x for x in drawn(seed, *shapes)]
    wide = torch.promote_types(dtype, torch.float32)
    (out, lse), rest = (tensors[0].to(dtype), tensors[1].to(wide)), tensors[2:]
    table = Sums.of(pieces, COUNT, CPU)
    sums = table.beside(out)
    for piece, piece_lse, to in zip(rest[::2], rest[1::2], table.targets):
        operations.merge_(out, lse, sums, piece.to(dtype), piece_lse.to(wide), to)
    return out, lse


@runs(60)
@given(places(repeated=False), st.integers(0, 9))
def test_pieces_that_are_merged_in_turn_are_one_softmax_over_all_keys(pieces, seed):
    out, lse = merged(pieces, torch.float64, seed=seed)
    shapes = [(COUNT, HEADS, SIZE), (HEADS, COUNT)]
    shapes += [shape for at in pieces for shape in ((len(at), HEADS, SIZE), (HEADS, len(at)))]
    tensors = [x.bfloat16().double() if x.dim() == 3 else 9 * x for x in drawn(seed, *shapes)]
    every = np.arange(COUNT)
    for token in range(COUNT):
        holding = [(number, int(np.flatnonzero(at == token)[0])) for number, at in enumerate([every, *pieces])
                   if token in at]  # fmt: skip
        scores = torch.stack([tensors[2 * number + 1][:, row] for number, row in holding])
        values = torch.stack([tensors[2 * number][row] for number, row in holding])
        assert torch.allclose(lse[:, token], scores.logsumexp(0), rtol=1e-12)
        assert torch.allclose(out[token], (scores.softmax(0)[..., None] * values).sum(0), rtol=1e-12, atol=1e-12)


@runs(60)
@given(places(repeated=True), st.integers(0, 9))
def test_the_rows_of_pieces_are_added_to_their_tokens_also_if_a_piece_has_several_of_one(pieces, seed):
    start, *rows = drawn(seed, (COUNT, HEADS, SIZE), *[(len(at), HEADS, SIZE) for at in pieces])
    total, table = start.clone(), Sums.of(pieces, COUNT, CPU)
    for piece, to in zip(rows, table.targets):
        merging.add_(total, table.beside(total), piece, to)
        assert (to.tokens.diff() > 0).all()
    expected = start.clone()
    for piece, at in zip(rows, pieces):
        expected.index_add_(0, torch.from_numpy(at), piece)
    assert torch.allclose(total, expected, rtol=1e-12, atol=1e-12)


@runs(40)
@given(places(repeated=False), st.integers(0, 9))
def test_a_16_bit_row_is_rounded_once_however_many_pieces_it_has(pieces, seed):
    """bfloat16 results are the float32 ones, rounded: sums between two pieces stay in float32."""
    narrow, lse = merged(pieces, torch.bfloat16, seed=seed)
    wide, wide_lse = merged(pieces, torch.float32, seed=seed)
    assert torch.equal(narrow, wide.bfloat16()) and torch.equal(lse, wide_lse)
    start, *rows = drawn(seed, (COUNT, HEADS, SIZE), *[(len(at), HEADS, SIZE) for at in pieces], dtype=torch.bfloat16)
    table, totals = Sums.of(pieces, COUNT, CPU), [start.clone(), start.float()]
    for total in totals:
        sums = table.beside(total)
        for piece, to in zip(rows, table.targets):
            merging.add_(total, sums, piece.to(total.dtype), to)
    assert torch.equal(totals[0], totals[1].bfloat16())


def test_float32_rows_are_held_for_tokens_of_several_pieces_only():
    table = Sums.of([np.arange(9), np.arange(5, 30)], COUNT, CPU)
    narrow = torch.zeros(COUNT, HEADS, SIZE, dtype=torch.bfloat16)
    sums = table.beside(narrow)
    assert sums is not None and len(sums) == 4 + 1 and table.beside(narrow.float()) is None
    assert Sums.of([np.arange(5), np.arange(5, 30)], COUNT, CPU).beside(narrow) is None


# ---- Triton's kernels


@pytest.fixture
def kernels() -> Merging:
    triton_or_skip()
    from treetrain.kernels import merge_kernels

    return Merging(merge_kernels.merge_, merge_kernels.add_)


@pytest.mark.parametrize("size", [8, 80])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_triton_kernels_do_what_pytorch_does(kernels, dtype, size):
    """The interpreter truncates where a GPU rounds to bfloat16."""
    limit = {torch.float32: 1e-6, torch.float16: 5e-4, torch.bfloat16: 5e-3}[dtype]
    found = merging.errors_of(kernels, 3, size, dtype, CPU)
    assert max(found.values()) <= limit, found


def test_the_triton_kernels_leave_the_rows_of_other_tokens_alone(kernels):
    pieces = [np.array([3, 4, 9]), np.array([4, 5])]
    out, lse = merged(pieces, torch.float32, kernels)
    (start, start_lse), others = merged([], torch.float32), np.delete(np.arange(COUNT), [3, 4, 5, 9])
    assert torch.equal(out[others], start[others]) and torch.equal(lse[:, others], start_lse[:, others])


# ---- the check before the first use


def broken(out, lse, sums, piece, piece_lse, to):
    """Merges without the highest log-sum-exp, so large ones overflow."""
    before, after = lse.index_select(1, to.tokens).exp(), piece_lse.exp()
    share = (after / (before + after)).t()[:, :, None].to(out.dtype)
    merging.merge_(out, lse, sums, piece, piece_lse, to)
    out.index_copy_(0, to.tokens, out.index_select(0, to.tokens) * share / share)


def test_merge_kernels_that_are_wrong_here_leave_their_work_to_pytorch(monkeypatch):
    monkeypatch.setattr(kernel_checks, "_FAILURES", {})
    monkeypatch.setattr(merging, "CHECKED", {"cpu"})
    monkeypatch.setattr(merging, "why_no_triton", lambda device: None)
    module = type(sys)("merge_kernels")
    module.merge_, module.add_ = broken, merging.add_
    monkeypatch.setitem(sys.modules, "treetrain.kernels.merge_kernels", module)
    monkeypatch.setattr(room, "merge_kernels", module, raising=False)
    merging._chosen.cache_clear()
    like = torch.zeros(3, 2, 8)
    with pytest.warns(RuntimeWarning, match="merging of attention pieces.*is off in the output by nan"):
        assert merging.merging(like) is PLAIN
    module.merge_ = merging.merge_
    kernel_checks._FAILURES.clear()
    merging._chosen.cache_clear()
    assert merging.merging(like) == (merging.merge_, merging.add_) and merging.merging(like) is not PLAIN
    merging._chosen.cache_clear()


# ---- bytes


@pytest.mark.parametrize(
    ("tree", "before"),
    [("tau_airline 48", 221_924), ("tau_airline 2", 181_149), ("synthetic 0.847 4096", 468_421), ("bushy", 487_097)],
)
def test_merges_move_at_most_a_third_of_what_float32_results_did(tree, before):
    """`before`: bytes for each token of a layer when results were merged and added up in float32 tensors."""
    pytest.importorskip("triton", reason="Triton is not installed: its kernels cannot be counted")
    folder = Path(__file__).parents[2] / "benchmarks"
    sys.path.insert(0, str(folder))
    try:
        spec = importlib.util.spec_from_file_location("merge_bytes", folder / "merge_bytes.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        found = module.moved(module.forest_of(tree))
    finally:
        sys.path.remove(str(folder))
    assert found["forward_bytes"] + found["backward_bytes"] <= before / 3, found
