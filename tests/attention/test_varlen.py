"""The varlen schedule and its merging, on the CPU, with a stand-in for the GPU's varlen call."""

from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from parts_by_hand import Tensors

from support.plans import attention_forest, star
from treetrain.check.forests import bushy_rows, forests, runs
from treetrain.check.linear import relative_error
from treetrain.core.attention.kv_cache import KVCache
from treetrain.core.attention.rectangles import StockKernel
from treetrain.core.attention.reference import reference_attention, visible
from treetrain.core.attention.schedule import PLAIN_ATTENTION, AttentionSpec, Forest
from treetrain.core.tree.layout import AttentionRange
from treetrain.kernels import varlen
from treetrain.kernels.varlen import DeviceCall, StockVarlen, VarlenAttention, pieces_of, suits, varlen_calls

SCALE = 0.4
CPU = torch.device("cpu")
WIDE = (torch.float64, torch.float32)


class SequenceBySequence:
    """Computes what the GPU's varlen kernel does, with one stock CPU call for each sequence."""

    calls = 0

    def forward(self, query, key, value, call: DeviceCall, scale):
        self._check(query, key, call)
        wide = torch.promote_types(query.dtype, torch.float32)
        out, lse = torch.empty_like(query), query.new_empty(query.shape[1], len(query), dtype=wide)
        for q, k in self._spans(call):
            given = (self._heads_first(x) for x in (query[q], key[k], value[k]))
            piece, piece_lse = StockKernel().forward(*given, call.causal, None, scale)
            out[q], lse[:, q] = piece[0].transpose(0, 1), piece_lse[0]
        return out, lse

    def backward(self, grad_out, query, key, value, out, lse, call: DeviceCall, scale):
        self._check(query, key, call)
        assert lse.shape == (query.shape[1], len(query)) and lse.is_contiguous()
        grads = tuple(torch.zeros_like(x) for x in (query, key, value))
        for q, k in self._spans(call):
            given = [self._heads_first(x) for x in (grad_out[q], query[q], key[k], value[k], out[q])]
            found = StockKernel().backward(*given, lse[None, :, q], call.causal, None, scale)
            for grad, span, piece in zip(grads, (q, k, k), found):
                grad[span] = piece[0].transpose(0, 1)
        return grads

    def _check(self, query, key, call: DeviceCall):
        SequenceBySequence.calls += 1
        assert call.query_offsets.dtype == call.key_offsets.dtype == torch.int32
        assert query.is_contiguous() and key.is_contiguous()
        for count, offsets, longest in zip(
            (len(query), len(key)), (call.query_offsets, call.key_offsets), call.longest
        ):
            assert offsets[0] == 0 and offsets[-1] == count and offsets.diff().max() == longest
            assert (offsets.diff() > 0).all(), "the kernel says nothing of sequences without keys"

    @staticmethod
    def _spans(call: DeviceCall):
        bounds = zip(*(x.unfold(0, 2, 1).tolist() for x in (call.query_offsets, call.key_offsets)))
        return [(slice(*q), slice(*k)) for q, k in bounds]

    @staticmethod
    def _heads_first(x):
        return x.transpose(0, 1).unsqueeze(0)


def attention_of(forest, view=None) -> VarlenAttention:
    return VarlenAttention(pieces_of(forest), CPU, cache=view, kernel=SequenceBySequence(), dtypes=WIDE)


def inputs(tokens: int, *, size=8, value_size=8, sinks=False, dtype=torch.float64, seed=0) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    shapes: list[tuple[int, ...]] = [(tokens, 4, size), (tokens, 2, size), (tokens, 2, value_size)]
    shapes += [(tokens, 4, value_size), *([(4,)] if sinks else [])]
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def both_ways(attend, tensors: Tensors) -> Tensors:
    leaves = [t.detach().clone().requires_grad_() for i, t in enumerate(tensors) if i != 3]
    out = attend(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, tensors[3])]


def expected(forest, tensors: Tensors, spec: AttentionSpec = PLAIN_ATTENTION) -> Tensors:
    ends, depth = torch.from_numpy(forest.ends), torch.from_numpy(forest.depth)
    where = {"depth": depth, "window": spec.visible_range.window, "softcap": spec.softcap}
    return both_ways(
        lambda q, k, v, sinks=None: reference_attention(q, k, v, ends, SCALE, sinks=sinks, **where), tensors
    )


def check(forest, tensors: Tensors, spec: AttentionSpec = PLAIN_ATTENTION, tolerance: float = 1e-12) -> None:
    attention = attention_of(forest)
    got = both_ways(lambda q, k, v, sinks=None: attention(q, k, v, SCALE, 0, spec, sinks), tensors)
    errors = [relative_error(a, b) for a, b in zip(got, expected(forest, tensors, spec))]
    assert max(errors) <= tolerance, errors


@pytest.mark.slow
@runs(150)
@given(forests(max_rows=12, max_length=30), st.integers(0, 9), st.integers(1, 9))
def test_calls_cover_every_visible_pair_once(rows, idle, block):
    forest = attention_forest(rows)
    count = len(forest.ends)
    seen = np.zeros((count, count), int)
    with mock.patch.multiple(varlen, IDLE_BLOCKS=idle, BLOCK=block):
        calls = varlen_calls(pieces_of(forest))
    for call in calls:
        for c in range(len(call.query_offsets) - 1):
            queries = call.queries[call.query_offsets[c] : call.query_offsets[c + 1]]
            keys = call.keys[call.key_offsets[c] : call.key_offsets[c + 1]]
            part = np.ones((len(queries), len(keys)), int)
            seen[np.ix_(queries, keys)] += np.tril(part) if call.causal else part
        assert (np.diff(call.queries) > 0).all(), "so that their rows of the result are in order"
        lengths = [-(-np.diff(offsets) // block) for offsets in (call.query_offsets, call.key_offsets)]
        blocks = lengths[0] + lengths[1]
        if not call.causal:
            assert (blocks.max() - blocks).sum() <= idle, "the grid of a call has few blocks without work"
        assert len(blocks) <= max(1, count // block), "the scratch of a call is bounded by the forest's tokens"
    assert (seen == visible(torch.from_numpy(forest.ends)).numpy()).all()


@pytest.mark.slow
def test_a_call_holds_everything_of_a_light_depth_that_is_of_similar_length():
    def calls(forest):
        return len(varlen_calls(pieces_of(forest)))

    assert calls(attention_forest([[*range(50)]])) == 1
    assert calls(Forest.of(star(8000, 300))) == 2
    assert calls(Forest.of(star(300, 300))) == calls(Forest.of(star(300, 300))) == 2
    binary = attention_forest(
        [[k >> 3, *[10 + (k >> 2)] * 999, *[20 + (k >> 1)] * 999, *[40 + k] * 999] for k in range(16)]
    )
    assert calls(binary) == 4, "one for the paths of first children, one for each level of forks"
    long = [*range(40_000)]
    rows = [long, *[[*long[:100], 50_000 + k, *range(200)] for k in range(9)]]
    assert calls(attention_forest(rows)) == 3, "the long chain has a call of its own"
    rows = [long[:4000], *[[*long[:100], 50_000 + k, *range(200)] for k in range(19)]]
    assert calls(attention_forest(rows)) == 2, "blocks without work cost less than copies of all chains"


@pytest.mark.slow
@runs(40)
@given(forests(max_rows=12, max_length=40), st.integers(0, 99), st.booleans())
def test_random_forests_equal_the_reference(rows, seed, sinks):
    forest = attention_forest(rows)
    if len(forest.ends):
        check(forest, inputs(len(forest.ends), sinks=sinks, seed=seed))
        check(forest, inputs(len(forest.ends), sinks=sinks, seed=seed, dtype=torch.float32), tolerance=3e-6)


def test_16_bit_results_are_rounded_no_more_than_the_pieces_are():
    """Forks three deep: the sums of a token's pieces stay in float32."""
    forest = attention_forest([[k >> 3, *[10 + (k >> 2)] * 9, *[20 + (k >> 1)] * 9, *[40 + k] * 9] for k in range(16)])
    tensors = inputs(len(forest.ends), dtype=torch.bfloat16)
    attention = VarlenAttention(pieces_of(forest), CPU, kernel=SequenceBySequence(), dtypes=(torch.bfloat16,))  # type: ignore[arg-type]
    assert attention._queries.rows
    got = both_ways(lambda q, k, v: attention(q, k, v, SCALE), tensors)
    truth = expected(forest, [x.double() for x in tensors])
    assert max(relative_error(a, b) for a, b in zip(got, truth)) <= 6e-3


@pytest.mark.parametrize(("size", "value_size"), [(12, 12), (24, 16), (8, 20)])
def test_head_sizes_that_the_kernel_lacks_are_filled_up(size, value_size):
    forest = attention_forest(bushy_rows(np.random.default_rng(0), rows=8, segment=6, levels=3))
    check(forest, inputs(len(forest.ends), size=size, value_size=value_size, sinks=True))


def test_what_a_part_hands_on_and_gets_back_goes_through_its_cache():
    """The root part of a plan, without a path above: the gradients of its exported keys are added in float32."""
    forest = attention_forest(bushy_rows(np.random.default_rng(0), rows=8, segment=6, levels=3))
    count = len(forest.ends)
    tensors, rows = inputs(count), np.full(count, -1)
    rows[::3] = np.arange(len(rows[::3]))[::-1]
    cache = KVCache(count, CPU, gradients=True)
    attention = attention_of(forest, cache.view_of_rows(np.zeros(0, np.int64), rows))
    leaves = [t.clone().requires_grad_() for t in tensors[:3]]
    out = attention(*leaves, SCALE)
    key, value = cache.view_of_rows(rows[::3], np.full(count, -1)).read(0, *leaves[1:])
    assert torch.equal(key, tensors[1][::3]) and torch.equal(value, tensors[2][::3])
    below = [torch.randn_like(x) for x in (key, value)]
    cache.view_of_rows(rows[::3], np.full(count, -1)).add_path_gradients(0, *below)
    got = torch.autograd.grad(out, leaves, tensors[3])
    for grad, truth, added in zip(got, expected(forest, tensors)[1:], (None, *below)):
        if added is not None:
            truth[::3] += added
        assert relative_error(grad, truth) <= 1e-12


def test_forests_of_chains_and_large_rectangles_suit():
    def suit(*rows):
        return suits(pieces_of(attention_forest(rows)))

    trunk = list(range(1000))
    assert suit(trunk, trunk[::-1]), "no forks at all"
    assert suit([*trunk, *trunk], [*trunk, *[1] * 64]) and not suit([*trunk, *trunk], [*trunk, *[1] * 63])
    assert suit(trunk, *[[5, k, *trunk[:63]] for k in range(50)]), "one large rectangle"
    assert not suit(*[[k, *trunk[:62]] for k in range(50)]), "short chains"
    assert not suit([*trunk, *trunk], *[[*trunk[: 800 + k], 2000 + k, *trunk[:70]] for k in range(99)]), (
        "copied for each fork"
    )


@pytest.mark.parametrize("spec", [AttentionSpec(AttentionRange(window=5)), AttentionSpec(softcap=1.5)], ids=str)
def test_layers_that_flash_attention_does_not_have_are_not_taken(spec):
    attention = VarlenAttention(pieces_of(attention_forest([[1, 2]])), CPU)
    narrow = torch.zeros(2, 4, 64, dtype=torch.bfloat16)
    assert attention.takes(narrow, narrow, PLAIN_ATTENTION)
    assert not attention.takes(narrow, narrow, spec) and not attention.takes(narrow.float(), narrow, PLAIN_ATTENTION)
    assert not attention.takes(narrow, torch.zeros(2, 4, 264, dtype=torch.bfloat16), PLAIN_ATTENTION)


def test_the_stock_calls_are_what_pytorch_offers():
    """On the meta device: names and arguments, without a GPU."""
    query, key = torch.empty(7, 4, 16, device="meta"), torch.empty(9, 2, 16, device="meta")
    offsets = [torch.empty(3, dtype=torch.int32, device="meta") for _ in range(2)]
    call = DeviceCall(slice(0, 7), slice(0, 9), offsets[0], offsets[1], (4, 5), False)
    out, lse = StockVarlen().forward(query, key, key, call, SCALE)
    assert out.shape == query.shape and lse.shape == (4, 7)
    grads = StockVarlen().backward(out, query, key, key, out, lse, call, SCALE)
    assert [g.shape for g in grads] == [query.shape, key.shape, key.shape]


@pytest.mark.parametrize("count", [2, 4])
def test_a_flash_attention_4_that_torch_cannot_unpack_is_named_with_the_version_that_it_can(monkeypatch, count):
    """torch's own adapter runs; the package is a stand-in that returns so many values."""
    from torch.nn.attention import _fa4

    query = torch.zeros(3, 2, 8)
    call = VarlenAttention(pieces_of(Forest.of(star(2, 1))), CPU).calls[0]
    package = mock.Mock(_flash_attn_fwd=lambda q, *_, **__: (q, torch.zeros(2, len(q)), None, None)[:count])
    monkeypatch.setattr(_fa4, "_FA4_MODULE_PATH", "stand-in")
    monkeypatch.setattr(_fa4, "_fa4_import_module", lambda path: package)

    def forward(q, k, v, cu_q, cu_k, max_q, max_k, dropout, causal, debug, *, scale):
        return _fa4._fa4_run_forward(q, k, v, cu_q, cu_k, max_q, max_k, scale, causal, None, None, None)

    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", forward)
    monkeypatch.setattr(varlen, "current_flash_attention_impl", lambda: "FA4")
    if count == 2:
        assert StockVarlen().forward(query, query, query, call, 1.0)[0] is query
        return
    with pytest.raises(RuntimeError, match=r"returns other values than torch .* unpacks: install 4\.0\.0b16"):
        StockVarlen().forward(query, query, query, call, 1.0)
