"""Tree attention as a few varlen calls of stock flash attention, merged by log-sum-exp.

Every path of first children (a chain) is contiguous in pre-order and needs causal attention. Subtrees that attach to a
chain at a fork see the chain down to that fork in full: a rectangle. Every visible pair is in one chain or in one
rectangle. The light depth of a token counts the forks above it where its path does not take the first child. Rectangles
of one light depth have no query in common, so they can share a call. The backward calls the stock backward of each call
with the output and log-sum-exp over *all* keys, which is exact.

Calls are cut by length for the sake of the backward. Its grid is (longest sequence / 128) x sequences x heads, so a
long sequence beside many short ones would launch mostly blocks that find nothing to do. It also allocates (queries +
128 x sequences) x heads x 128 float32 numbers, so the sequences of a call are bounded by the forest's tokens / 128.

`suits` says for which forests this is fast: a rectangle's keys are copied for each fork, so a chain with many forks
would be copied many times, and small pieces leave the kernel idle. Parts below a path are left to other backends:
flash attention returns gradients in 16 bits, and those of the path must reach its float32 sums unrounded.

Shape letters: N tokens, S segments, C sequences of a call, q and k their queries and keys, H query heads, G key/value
heads, D size of query and key heads, V size of value heads.
"""

from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int32, Int64
from torch import Tensor
from torch.nn.attention import current_flash_attention_impl
from torch.nn.functional import pad

from treetrain.device_arrays import to_device
from treetrain.softmax_attention.kv_cache import CachedAttention, Inputs, KVCacheView, sink_gradient
from treetrain.softmax_attention.schedule import PLAIN_ATTENTION, AttentionSpec, Forest, path_tops
from treetrain.tree.layout import ranges

BLOCK = 128
"""Rows of a block of flash attention's backward, and the rows that its scratch has for each sequence."""
MOST_COPIES = 2
"""Most keys copied for rectangles, as a multiple of the forest's tokens."""
LEAST_QUERIES = 64
"""Least mean number of queries in a chain, and in a rectangle. So a light depth takes two calls, or one more for each
length that stands out."""
IDLE_BLOCKS = 512
"""Blocks without work, per head, that a call may launch before another call costs less. An estimate: 15 ns per block,
0.1 ms per call."""
MOST_SEQUENCES = 65_535
"""Most sequences of a call: flash attention puts them on a grid dimension with this limit."""


class Pieces(NamedTuple):
    """The chains and rectangles of a forest, in token numbers."""

    chains: Int64[np.ndarray, " _"]
    """Where each chain starts; then N."""
    queries: Int64[np.ndarray, "rectangles 2"]
    """Start and stop of the queries."""
    keys: Int64[np.ndarray, "rectangles 2"]
    """Start and stop of the keys."""
    level: Int64[np.ndarray, " rectangles"]
    """Light depth of the chain that the rectangle hangs off."""


def pieces_of(forest: Forest) -> Pieces:
    """Cut every visible pair of a forest into chains and rectangles."""
    start, parent = forest.segment_start, forest.segment_parent
    top = path_tops(parent)
    tops = np.unique(top)
    # A segment with several children has one rectangle: all children but the first against the chain above.
    forks = np.unique(parent[(parent >= 0) & (parent != np.arange(len(parent)) - 1)])
    return Pieces(
        chains=np.append(start[tops], len(forest.ends)),
        queries=np.stack([forest.ends[start[forks + 1]], forest.ends[start[forks]]], axis=1),
        keys=np.stack([start[top[forks]], start[forks + 1]], axis=1),
        level=_light_depth(parent, top, tops)[np.searchsorted(tops, top[forks])],
    )


def _light_depth(
    parent: Int64[np.ndarray, " S"], top: Int64[np.ndarray, " S"], tops: Int64[np.ndarray, " chains"]
) -> Int64[np.ndarray, " chains"]:
    above = parent[tops]
    above = np.where(above >= 0, np.searchsorted(tops, top[above]), -1)
    depth, at = np.zeros(len(tops), np.int64), above
    while (at >= 0).any():
        depth += at >= 0
        at = np.where(at >= 0, above[at], -1)
    return depth


def suits(pieces: Pieces) -> bool:
    """Whether varlen calls are fast for a forest: few copied keys, and chains and rectangles of some size."""
    tokens = int(pieces.chains[-1])
    queries, copies = (int(np.diff(bounds).sum()) for bounds in (pieces.queries, pieces.keys))
    large = tokens >= LEAST_QUERIES * (len(pieces.chains) - 1) and queries >= LEAST_QUERIES * len(pieces.level)
    return large and copies <= MOST_COPIES * tokens


class Call(NamedTuple):
    """One varlen call as host arrays: sequence c of queries sees sequence c of keys."""

    queries: Int64[np.ndarray, " q"]
    keys: Int64[np.ndarray, " k"]
    """Key tokens, once for each sequence that they are in."""
    query_offsets: Int64[np.ndarray, " C+1"]
    key_offsets: Int64[np.ndarray, " C+1"]
    causal: bool


def varlen_calls(pieces: Pieces) -> list[Call]:
    """The calls that cover every visible pair exactly once: chains, which hold every query once, then rectangles."""
    tokens = int(pieces.chains[-1])
    chains = np.stack([pieces.chains[:-1], pieces.chains[1:]], axis=1)
    calls = [_call(chains[group], chains[group], causal=True) for group in _alike(chains, chains, tokens)]
    for number in np.unique(pieces.level):
        queries, keys = (bounds[pieces.level == number] for bounds in (pieces.queries, pieces.keys))
        calls += [_call(queries[group], keys[group], causal=False) for group in _alike(queries, keys, tokens)]
    return calls


def _call(queries: Int64[np.ndarray, "C 2"], keys: Int64[np.ndarray, "C 2"], *, causal: bool) -> Call:
    counts = np.diff(queries)[:, 0], np.diff(keys)[:, 0]
    query_offsets, key_offsets = (np.concatenate([[0], np.cumsum(count)]) for count in counts)
    taken = ranges(queries[:, 0], counts[0]), ranges(keys[:, 0], counts[1])
    return Call(*taken, query_offsets, key_offsets, causal)


def _alike(
    queries: Int64[np.ndarray, "C 2"], keys: Int64[np.ndarray, "C 2"], tokens: int
) -> list[Int64[np.ndarray, " _"]]:
    """Group sequences of similar length; each group holds ascending indices of sequences."""
    blocks = -(-np.diff(queries)[:, 0] // BLOCK) - (-np.diff(keys)[:, 0] // BLOCK)
    order, most = np.argsort(-blocks, kind="stable"), min(max(tokens // BLOCK, 1), MOST_SEQUENCES)
    groups, rest = [], order
    while len(rest):
        idle = np.cumsum(blocks[rest[0]] - blocks[rest])
        size = min(int(np.searchsorted(idle, IDLE_BLOCKS, side="right")), most)
        groups.append(np.sort(rest[:size]))
        rest = rest[size:]
    return groups


class DeviceCall(NamedTuple):
    """A call on the device."""

    queries: Int64[Tensor, " q"] | None
    """None for all tokens in order, as queries and as keys."""
    keys: Int64[Tensor, " k"] | None
    query_offsets: Int32[Tensor, " C+1"]
    key_offsets: Int32[Tensor, " C+1"]
    longest: tuple[int, int]
    """Length of the longest sequence of queries, and of keys."""
    causal: bool


class StockVarlen:
    """PyTorch's own flash attention: 16-bit dtypes, head sizes that are multiples of 8 up to 256.

    `torch.nn.attention.activate_flash_attention_impl` replaces these operators by FlashAttention 3 or 4.
    """

    def forward(
        self,
        query: Float[Tensor, "q H D"],
        key: Float[Tensor, "k G D"],
        value: Float[Tensor, "k G D"],
        call: DeviceCall,
        scale: float,
    ) -> tuple[Float[Tensor, "q H D"], Float[Tensor, "H q"]]:
        """The output of all sequences and its log-sum-exp.

        Raises:
            RuntimeError: FlashAttention 4 is active in a version that this torch cannot call.
        """
        try:
            out, lse, *_ = torch.ops.aten._flash_attention_forward(
                query, key, value, call.query_offsets, call.key_offsets, *call.longest, 0.0, call.causal, False,
                scale=scale,
            )  # fmt: skip
        except ValueError as error:
            # torch unpacks what flash-attn-4 returns, and the number of values has changed between its releases.
            if current_flash_attention_impl() != "FA4" or "unpack" not in str(error):
                raise
            raise RuntimeError(
                f"the installed flash-attn-4 returns other values than torch {torch.__version__} unpacks: "
                "install 4.0.0b16 for torch 2.11 to 2.13 (docs/gpu.md)"
            ) from error
        return out, lse

    def backward(
        self, grad_out, query, key, value, out, lse, call: DeviceCall, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients of query, key and value; `out` and `lse` are those over all keys."""
        # Without dropout the random state is not used.
        state = torch.zeros(2, dtype=torch.uint64, device=query.device), torch.empty(0, device=query.device)
        return torch.ops.aten._flash_attention_backward(
            grad_out, query, key, value, out, lse, call.query_offsets, call.key_offsets, *call.longest, 0.0,
            call.causal, *state, scale=scale,
        )  # fmt: skip


class VarlenAttention(CachedAttention):
    """Tree attention for one forest without a path above it, used by every layer of a run.

    Args:
        pieces: of the forest.
        cache: stores the forest's own keys; None for whole trees.
        kernel: None uses PyTorch's.
        dtypes: the dtypes that the kernel supports.
    """

    def __init__(
        self,
        pieces: Pieces,
        device: torch.device,
        *,
        cache: KVCacheView | None = None,
        kernel: StockVarlen | None = None,
        dtypes: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float16),
    ):
        assert cache is None or not cache.path_tokens
        self.cache = cache
        self.kernel, self._dtypes = kernel or StockVarlen(), dtypes
        calls = varlen_calls(pieces)
        in_order = len(calls) > 0 and len(calls[0].query_offsets) == len(pieces.chains)  # one call holds all chains
        self.calls = [_on_device(call, in_order and number == 0, device) for number, call in enumerate(calls)]

    @property
    def name(self) -> str:
        """The backend, with the FlashAttention that runs if it is not PyTorch's own."""
        active = current_flash_attention_impl()
        return "varlen" if active is None else f"varlen, {active}"

    def path_seen(self, spec: AttentionSpec) -> int:
        return 0 if self.cache is None else self.cache.path_tokens

    def takes(self, query: Tensor, value: Tensor, spec: AttentionSpec) -> bool:
        # Stock flash attention has no caps, and no windows across calls.
        return spec == PLAIN_ATTENTION and query.dtype in self._dtypes and max(query.shape[2], value.shape[2]) <= 256

    def forward(self, given: Inputs, scale: float, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
        query, key, value, sinks, _ = given
        assert self.takes(query, value, spec)
        heads, calls = _Filled(query, key, value), self.calls
        if len(calls) == 1 and calls[0].queries is None:  # rows that share nothing: plain flash attention, no copy
            out, lse = self.kernel.forward(*heads.inputs, calls[0], scale)
        else:
            wide = torch.promote_types(query.dtype, torch.float32)
            out = torch.empty_like(heads.inputs[0], dtype=wide)
            lse = query.new_empty((query.shape[1], len(query)), dtype=wide)
            for call in calls:
                piece, piece_lse = self.kernel.forward(*heads.taken(call), call, scale)
                at = slice(None) if call.queries is None else call.queries
                if not call.causal:
                    piece, piece_lse = _merged(out[at], lse[:, at], piece, piece_lse)
                out[at], lse[:, at] = piece.to(wide), piece_lse.to(wide)
        if sinks is not None:
            total = torch.logaddexp(lse, sinks.to(lse.dtype)[:, None])
            out, lse = out * _per_row(lse - total), total
        return out[..., : value.shape[2]].to(query.dtype).contiguous(), lse

    def backward(
        self, grad_out: Tensor, given: Inputs, out: Tensor, lse: Tensor, scale: float, spec: AttentionSpec
    ) -> Inputs:
        query, key, value, sinks, _ = given
        heads, lse, rest = _Filled(query, key, value), lse.contiguous(), self.calls
        do, o = heads.filled(grad_out), heads.filled(out)
        wide = torch.promote_types(query.dtype, torch.float32)
        if rest and rest[0].queries is None:
            grads = self.kernel.backward(do, *heads.inputs, o, lse, rest[0], scale)
            rest = rest[1:]
            if rest or self.cache is not None:  # more gradients will be added
                grads = tuple(x.to(wide) for x in grads)
        else:
            grads = tuple(torch.zeros_like(x, dtype=wide) for x in heads.inputs)
        for call in rest:
            at = call.queries
            assert at is not None and call.keys is not None
            piece = self.kernel.backward(do[at], *heads.taken(call), o[at], lse[:, at].contiguous(), call, scale)
            for total, part, index in zip(grads, piece, (at, call.keys, call.keys)):
                total.index_add_(0, index, part.to(total.dtype))
        dq, dk, dv = (x[..., : like.shape[2]].contiguous() for x, like in zip(grads, (query, key, value)))
        return Inputs(dq, dk, dv, None if sinks is None else sink_gradient(sinks, grad_out, out, lse.t()), None)


def _on_device(call: Call, in_order: bool, device: torch.device) -> DeviceCall:
    query_offsets, key_offsets = to_device([x.astype(np.int32) for x in (call.query_offsets, call.key_offsets)], device)
    longest = int(np.diff(call.query_offsets).max()), int(np.diff(call.key_offsets).max())
    queries, keys = (None, None) if in_order else to_device([call.queries, call.keys], device)
    return DeviceCall(queries, keys, query_offsets, key_offsets, longest, call.causal)


class _Filled:
    """Pads query, key and value with zeros to one head size that the kernel supports; scores do not change."""

    def __init__(self, query: Tensor, key: Tensor, value: Tensor):
        self._size = -(-max(query.shape[2], value.shape[2]) // 8) * 8
        self.inputs = self.filled(query), self.filled(key), self.filled(value)

    def filled(self, x: Tensor) -> Tensor:
        return x.contiguous() if x.shape[2] == self._size else pad(x, (0, self._size - x.shape[2]))

    def taken(self, call: DeviceCall) -> tuple[Tensor, Tensor, Tensor]:
        if call.queries is None or call.keys is None:
            return self.inputs
        query, key, value = self.inputs
        keys = key.index_select(0, call.keys), value.index_select(0, call.keys)
        return query.index_select(0, call.queries), *keys


def _per_row(log_weights: Float[Tensor, "H n"]) -> Float[Tensor, "n H 1"]:
    return log_weights.exp().t().unsqueeze(-1)


def _merged(
    out: Float[Tensor, "n H V"],
    lse: Float[Tensor, "H n"],
    piece: Float[Tensor, "n H V"],
    piece_lse: Float[Tensor, "H n"],
) -> tuple[Float[Tensor, "n H V"], Float[Tensor, "H n"]]:
    """Merge attention over two sets of keys."""
    total = torch.logaddexp(lse, piece_lse)
    return out * _per_row(lse - total) + piece * _per_row(piece_lse - total), total
