"""The varlen schedule and its merging, on the CPU, with a stand-in for the GPU's varlen call."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from support.attention_forests import attention_forest, forest_of
from support.layouts import nested_forks, one_segment_per_part, star, uniform
from support.parts import PartsByHand, Tensors
from support.plans import KEEPS
from treetrain.softmax_attention import varlen
from treetrain.softmax_attention.kernels import StockKernel
from treetrain.softmax_attention.rectangles import RectangleAttention
from treetrain.softmax_attention.reference import reference_attention, visible
from treetrain.softmax_attention.schedule import PLAIN_ATTENTION, AttentionSpec
from treetrain.softmax_attention.varlen import DeviceCall, StockVarlen, VarlenAttention, varlen_calls
from treetrain.testing.forests import bushy_rows, forests, runs
from treetrain.testing.linear import relative_error
from treetrain.tree.attention_range import AttentionRange
from treetrain.tree.build import build_tree
from treetrain.tree.layout import PackedLayout, pack

SCALE = 0.4
CPU = torch.device("cpu")
WIDE = (torch.float64, torch.float32)


class SequenceBySequence:
    """What the GPU's varlen kernel computes, one stock CPU call for each sequence."""

    calls = 0

    def forward(self, query, key, value, call: DeviceCall, scale):
        self._check(query, key, call)
        out, lse = torch.empty_like(query), query.new_empty(query.shape[1], len(query))
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
    return VarlenAttention(
        forest,
        CPU,
        cache=view,
        kernel=SequenceBySequence(),
        dtypes=WIDE,
        otherwise=lambda: RectangleAttention(forest, cache=view),
    )


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


@runs(150)
@given(forests(max_rows=12, max_length=30))
def test_calls_cover_every_visible_pair_once(rows):
    forest = attention_forest(rows)
    count = len(forest.ends)
    seen = np.zeros((count, count), int)
    for call in varlen_calls(forest):
        for c in range(len(call.query_offsets) - 1):
            queries = call.queries[call.query_offsets[c] : call.query_offsets[c + 1]]
            keys = call.keys[call.key_offsets[c] : call.key_offsets[c + 1]]
            block = np.ones((len(queries), len(keys)), int)
            seen[np.ix_(queries, keys)] += np.tril(block) if call.causal else block
        assert len(np.unique(call.queries)) == len(call.queries), "a call asks for a token once"
    assert (seen == visible(torch.from_numpy(forest.ends)).numpy()).all()


def test_calls_are_as_many_as_the_light_depth_says():
    assert len(varlen_calls(attention_forest([[*range(50)]]))) == 1
    assert len(varlen_calls(forest_of(star(500, 3)))) == 2
    assert len(varlen_calls(forest_of(nested_forks(500)))) == 2
    binary = attention_forest([[k >> 3, 10 + (k >> 2), 20 + (k >> 1), 40 + k] for k in range(16)])
    assert len(varlen_calls(binary)) == 4, "one for the paths of first children, one for each level of forks"


@runs(40)
@given(forests(max_rows=12, max_length=40), st.integers(0, 99), st.booleans())
def test_random_forests_equal_the_reference(rows, seed, sinks):
    forest = attention_forest(rows)
    if len(forest.ends):
        check(forest, inputs(len(forest.ends), sinks=sinks, seed=seed))
        check(forest, inputs(len(forest.ends), sinks=sinks, seed=seed, dtype=torch.float32), tolerance=3e-6)


@pytest.mark.parametrize(("size", "value_size"), [(12, 12), (24, 16), (8, 20)])
def test_head_sizes_that_the_kernel_lacks_are_filled_up(size, value_size):
    forest = attention_forest(bushy_rows(np.random.default_rng(0), rows=8, segment=6, levels=3))
    check(forest, inputs(len(forest.ends), size=size, value_size=value_size, sinks=True))


def test_parts_with_a_carry_equal_the_whole_tree():
    rng = np.random.default_rng(0)
    for number, keep in enumerate(KEEPS):
        layout = pack(build_tree(bushy_rows(rng, rows=8, segment=6, levels=4)), trim=False)
        for plan in (uniform(layout, 11, keep), one_segment_per_part(layout, keep)):
            tensors = [inputs(layout.num_tokens, sinks=True, seed=number + layer) for layer in range(2)]
            order = rng.permutation(int(plan.exported.sum()) + 3)
            got = PartsByHand(plan, tensors, _backend, order, SCALE, [PLAIN_ATTENTION, PLAIN_ATTENTION]).run()
            for layer, result in zip(tensors, got):
                errors = [relative_error(a, b) for a, b in zip(result, expected(forest_of(layout), layer))]
                assert max(errors) <= 1e-12, errors


def _backend(layout: PackedLayout, view):
    return attention_of(forest_of(layout), view)


@pytest.mark.parametrize("spec", [AttentionSpec(AttentionRange(window=5)), AttentionSpec(softcap=1.5)], ids=str)
def test_what_varlen_calls_cannot_do_goes_to_another_backend(spec):
    forest, before = attention_forest([[1, 2, 3, 4], [1, 2, 5]]), SequenceBySequence.calls
    check(forest, inputs(len(forest.ends)), spec)
    assert SequenceBySequence.calls == before


def test_a_chain_that_forks_everywhere_is_not_copied_for_every_fork():
    nested = forest_of(nested_forks(300))
    assert not attention_of(nested).suits
    before = SequenceBySequence.calls
    check(nested, inputs(len(nested.ends)))
    assert SequenceBySequence.calls == before
    assert attention_of(forest_of(star(300, 40))).suits


def test_more_sequences_than_a_call_takes_go_to_another_backend(monkeypatch):
    forest = forest_of(star(12, 3))
    most = max(len(call.query_offsets) - 1 for call in varlen_calls(forest))
    monkeypatch.setattr(varlen, "MOST_SEQUENCES", most)
    assert attention_of(forest).suits
    monkeypatch.setattr(varlen, "MOST_SEQUENCES", most - 1)
    assert not attention_of(forest).suits
    check(forest, inputs(len(forest.ends)))


def test_the_stock_calls_are_what_pytorch_offers():
    """On the meta device: names and arguments, without a GPU."""
    query, key = torch.empty(7, 4, 16, device="meta"), torch.empty(9, 2, 16, device="meta")
    offsets = [torch.empty(3, dtype=torch.int32, device="meta") for _ in range(2)]
    call = DeviceCall(None, None, offsets[0], offsets[1], (4, 5), False)
    out, lse = StockVarlen().forward(query, key, key, call, SCALE)
    assert out.shape == query.shape and lse.shape == (4, 7)
    grads = StockVarlen().backward(out, query, key, key, out, lse, call, SCALE)
    assert [g.shape for g in grads] == [query.shape, key.shape, key.shape]
