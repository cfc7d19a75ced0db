"""Tree attention as a few varlen calls of stock flash attention, merged by log-sum-exp.

Every path of first children (a chain) is contiguous in pre-order and needs causal attention. Subtrees that attach to a
chain at a fork see the chain down to that fork in full: a rectangle. Every visible pair is in one chain or in one
rectangle. The light depth of a token counts the forks above it where its path does not take the first child. Rectangles
of one light depth have no query in common, so they can share a call. The backward calls the stock backward of each call
with the output and log-sum-exp over *all* keys, which is exact.

Calls are cut by length for the sake of the backward. Its grid is (longest sequence / 128) x sequences x heads, so a
long sequence beside many short ones would launch mostly blocks that find nothing to do. It also allocates (queries +
128 x sequences) x heads x 128 float32 numbers, so the sequences of a call are bounded by the forest's tokens / 128.
A call of all chains returns the result that the rectangles are merged into, without a copy, so chains are cut less.

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

from treetrain.core.attention.kv_cache import CachedAttention, Inputs, KVCacheView, sink_gradient
from treetrain.core.attention.schedule import PLAIN_ATTENTION, AttentionSpec, Forest, path_tops
from treetrain.core.device_arrays import rows_on, to_device
from treetrain.core.tree.layout import ranges
from treetrain.kernels.merge_tables import Sums
from treetrain.kernels.merging import merging

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
COPIED, PLACED = 13, 4
"""Cost of a block of a chain whose call does not hold all chains, in idle blocks: its inputs and results are copied, or
if its tokens are consecutive only the results. An estimate: 74 and 25 KB a token at 16 and 8 heads of 128, 3 TB/s."""
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
    calls = [_call(chains[group], chains[group], causal=True) for group in _chain_groups(chains, tokens)]
    for number in np.unique(pieces.level):
        queries, keys = (bounds[pieces.level == number] for bounds in (pieces.queries, pieces.keys))
        calls += [_call(queries[group], keys[group], causal=False) for group in _alike(queries, keys, tokens)]
    return calls


def _chain_groups(chains: Int64[np.ndarray, "C 2"], tokens: int) -> list[Int64[np.ndarray, " _"]]:
    """Group chains: of similar length, or as they come, which copies less; whichever costs less."""
    blocks, most = -(-np.diff(chains)[:, 0] // BLOCK), _most_sequences(tokens)
    consecutive = [np.arange(start, min(start + most, len(chains))) for start in range(0, len(chains), most)]

    def cost(groups: list[Int64[np.ndarray, " _"]]) -> int:
        idle = sum(2 * int((blocks[group].max() - blocks[group]).sum()) for group in groups)
        if len(groups) == 1:
            return idle
        copied = [(PLACED if (np.diff(group) == 1).all() else COPIED) * int(blocks[group].sum()) for group in groups]
        return idle + sum(copied) + (len(groups) - 1) * IDLE_BLOCKS

    return min(consecutive, _alike(chains, chains, tokens), key=cost)


def _call(queries: Int64[np.ndarray, "C 2"], keys: Int64[np.ndarray, "C 2"], *, causal: bool) -> Call:
    order = np.argsort(queries[:, 0])  # ascending queries: their rows of the result are then in order
    queries, keys = queries[order], keys[order]
    counts = np.diff(queries)[:, 0], np.diff(keys)[:, 0]
    query_offsets, key_offsets = (np.concatenate([[0], np.cumsum(count)]) for count in counts)
    taken = ranges(queries[:, 0], counts[0]), ranges(keys[:, 0], counts[1])
    return Call(*taken, query_offsets, key_offsets, causal)


def _alike(
    queries: Int64[np.ndarray, "C 2"], keys: Int64[np.ndarray, "C 2"], tokens: int
) -> list[Int64[np.ndarray, " _"]]:
    """Group sequences of similar length; each group holds ascending indices of sequences."""
    blocks = -(-np.diff(queries)[:, 0] // BLOCK) - (-np.diff(keys)[:, 0] // BLOCK)
    groups = []
    rest = np.argsort(-blocks, kind="stable")
    most = _most_sequences(tokens)
    while len(rest):
        idle = np.cumsum(blocks[rest[0]] - blocks[rest])
        size = min(int(np.searchsorted(idle, IDLE_BLOCKS, side="right")), most)
        groups.append(np.sort(rest[:size]))
        rest = rest[size:]
    return groups


def _most_sequences(tokens: int) -> int:
    return min(max(tokens // BLOCK, 1), MOST_SEQUENCES)


class DeviceCall(NamedTuple):
    """A call on the device."""

    queries: slice | Int64[Tensor, " q"]
    """A slice where they are consecutive, which are not copied."""
    keys: slice | Int64[Tensor, " k"]
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
        self.calls = [_on_device(call, device) for call in calls]
        # Chains hold every token once and come first: what follows is merged into their result.
        merged, count = [call for call in calls if not call.causal], int(pieces.chains[-1])
        self._chains = len(calls) - len(merged)
        self._queries = Sums.of([call.queries for call in merged], count, device)
        self._keys = Sums.of([call.keys for call in merged], count, device)

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
        heads = _Filled(query, key, value)
        out, lse = self._of_chains(heads, scale)
        if sinks is not None:
            total = torch.logaddexp(lse, sinks.to(lse.dtype)[:, None])
            out *= (lse - total).exp_().t().unsqueeze(-1)
            lse = total
        if self.calls[self._chains :]:
            operations, sums = merging(out), self._queries.beside(out)
            for call, to in zip(self.calls[self._chains :], self._queries.targets):
                piece, piece_lse = self.kernel.forward(*heads.taken(call), call, scale)
                operations.merge_(out, lse, sums, piece, piece_lse, to)
        return out[..., : value.shape[2]].contiguous(), lse

    def _of_chains(self, heads: "_Filled", scale: float) -> tuple[Tensor, Tensor]:
        query = heads.inputs[0]
        if self._chains == 1:  # all tokens in order: the result's own memory takes what follows
            out, lse = self.kernel.forward(*heads.inputs, self.calls[0], scale)
            return out, lse.contiguous()
        out = torch.empty_like(query)
        lse = query.new_empty((query.shape[1], len(query)), dtype=torch.promote_types(query.dtype, torch.float32))
        for call in self.calls[: self._chains]:
            piece, piece_lse = self.kernel.forward(*heads.taken(call), call, scale)
            if isinstance(call.queries, slice):
                out[call.queries], lse[:, call.queries] = piece, piece_lse
            else:
                out.index_copy_(0, call.queries, piece)
                lse.index_copy_(1, call.queries, piece_lse)
        return out, lse

    def backward(
        self, grad_out: Tensor, given: Inputs, out: Tensor, lse: Tensor, scale: float, spec: AttentionSpec
    ) -> Inputs:
        query, key, value, sinks, _ = given
        heads = _Filled(query, key, value)
        sides = heads.filled(grad_out), heads.filled(out), lse.contiguous()
        grads = self._gradients_of_chains(heads, sides, scale)
        if self.calls[self._chains :]:
            tables = self._queries, self._keys, self._keys
            running = [(merging(total), total, sums.beside(total)) for total, sums in zip(grads, tables)]
            for number, call in enumerate(self.calls[self._chains :]):
                pieces = self._gradients(heads, sides, call, scale)
                for (operations, total, beside), sums, piece in zip(running, tables, pieces):
                    operations.add_(total, beside, piece, sums.targets[number])
        dq, dk, dv = (x[..., : like.shape[2]].contiguous() for x, like in zip(grads, (query, key, value)))
        return Inputs(dq, dk, dv, None if sinks is None else sink_gradient(sinks, grad_out, out, lse.t()), None)

    def _gradients_of_chains(self, heads: "_Filled", sides: tuple[Tensor, ...], scale: float) -> list[Tensor]:
        """Those of queries, keys and values; of keys and values in float32 if the cache adds to them."""
        wide = torch.promote_types(heads.inputs[0].dtype, torch.float32)
        kinds = [x.dtype if number == 0 or self.cache is None else wide for number, x in enumerate(heads.inputs)]
        if self._chains == 1:
            found = self._gradients(heads, sides, self.calls[0], scale)
            return [x.to(kind) for x, kind in zip(found, kinds)]
        grads = [torch.empty_like(x, dtype=kind) for x, kind in zip(heads.inputs, kinds)]
        for call in self.calls[: self._chains]:
            for total, piece in zip(grads, self._gradients(heads, sides, call, scale)):
                if isinstance(call.queries, slice):
                    total[call.queries] = piece
                else:
                    total.index_copy_(0, call.queries, piece.to(total.dtype))
        return grads

    def _gradients(
        self, heads: "_Filled", sides: tuple[Tensor, ...], call: DeviceCall, scale: float
    ) -> tuple[Tensor, ...]:
        """The gradients of a call's queries, keys and values, from the output and log-sum-exp over all keys."""
        grad_out, out, lse = sides
        return self.kernel.backward(
            _taken(grad_out, call.queries), *heads.taken(call), _taken(out, call.queries),
            _taken(lse, call.queries, 1).contiguous(), call, scale,
        )  # fmt: skip


def _on_device(call: Call, device: torch.device) -> DeviceCall:
    query_offsets, key_offsets = to_device([x.astype(np.int32) for x in (call.query_offsets, call.key_offsets)], device)
    longest = int(np.diff(call.query_offsets).max()), int(np.diff(call.key_offsets).max())
    queries, keys = rows_on(device, call.queries), rows_on(device, call.keys)
    return DeviceCall(queries, keys, query_offsets, key_offsets, longest, call.causal)


def _taken(x: Tensor, rows: slice | Tensor, dim: int = 0) -> Tensor:
    if isinstance(rows, slice):
        return x.narrow(dim, rows.start, rows.stop - rows.start)
    return x.index_select(dim, rows)


class _Filled:
    """Pads query, key and value with zeros to one head size that the kernel supports; scores do not change."""

    def __init__(self, query: Tensor, key: Tensor, value: Tensor):
        self._size = -(-max(query.shape[2], value.shape[2]) // 8) * 8
        self.inputs = self.filled(query), self.filled(key), self.filled(value)

    def filled(self, x: Tensor) -> Tensor:
        return x.contiguous() if x.shape[2] == self._size else pad(x, (0, self._size - x.shape[2]))

    def taken(self, call: DeviceCall) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value = self.inputs
        return _taken(query, call.queries), _taken(key, call.keys), _taken(value, call.keys)
