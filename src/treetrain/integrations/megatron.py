"""Megatron: a packed forest as the arguments of its tree packing.

Megatron-LM's open pull request 7387 (issue 7386; read on 2026-11-28) takes a forest as segments in pre-order, each with
its start, length, parent and depth, beside the queries of a rank of context parallel and the states that predict::

    packed = tt.pack(rows, mask=mask)
    forest = tree_packing(packed, context_rank=0, context_size=2)
    params = TreePackedSeqParams(**forest.arguments(TreeQueryRun))  # both from megatron.core.packed_seq_params
    logits = model(forest.local_ids[None], None, None, packed_seq_params=params)  # [edges, vocabulary]

Log-probabilities of `forest.targets` go back to rows by ``packed.split(logprobs[forest.edge_of_prediction])``. Megatron
itself is not imported. Where `TreePackedSeqParams` takes other names, its constructor says so.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Int64
from torch import Tensor

from treetrain.own_model import Packed


class QueryRun(NamedTuple):
    """Consecutive tokens of a segment on this rank: they see the path above the segment, and its tokens before them."""

    segment: int
    start: int
    """The first of them in the forest."""
    stop: int
    """Behind the last."""
    local: Int64[Tensor, " n"]
    """Their places among this rank's tokens."""


@dataclass(frozen=True, kw_only=True, eq=False)
class TreePacking:
    """N tokens of a forest in pre-order, n of them on this rank of context parallel, and E edges (token, predecessor).

    Padding is a tree of its own at the end, of token 0, which predicts nothing.
    """

    input_ids: Int64[Tensor, " N"]
    position_ids: Int64[Tensor, " N"]
    """Depth of every token: its position in its rows."""
    segment_ids: Int64[Tensor, " N"]
    """The segment of every token: a run without a fork."""
    starts: tuple[int, ...]
    """The first token of every segment."""
    lengths: tuple[int, ...]
    parents: tuple[int, ...]
    """The segment that each continues; -1 at roots."""
    depths: tuple[int, ...]
    """The position of every segment's first token."""
    local: Int64[Tensor, " n"]
    """The tokens of this rank, in its order."""
    gathered: Int64[Tensor, " N"]
    """The place of every token when all ranks' tokens are concatenated."""
    runs: tuple[QueryRun, ...]
    sources: Int64[Tensor, " E"]
    """Ascending: the token whose hidden state predicts."""
    targets: Int64[Tensor, " E"]
    """The id that is predicted."""
    local_edges: Int64[Tensor, " e"]
    """The edges whose source is on this rank."""
    local_sources: Int64[Tensor, " e"]
    """The places of these sources among this rank's tokens."""
    edge_of_prediction: Int64[Tensor, " T"]
    """The edge of every prediction of `tt.pack`; rows that share a token share its edge."""

    @property
    def local_ids(self) -> Int64[Tensor, " n"]:
        """The ids of this rank's tokens."""
        return self.input_ids[self.local]

    def arguments(self, run: Callable[..., Any] = QueryRun) -> dict[str, Any]:
        """The arguments of `TreePackedSeqParams`.

        Args:
            run: Megatron's `TreeQueryRun`.
        """
        count = len(self.input_ids)
        bounds = torch.tensor([0, count], dtype=torch.int32, device=self.input_ids.device)
        names = ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded")
        return {
            "qkv_format": "thd",
            **dict.fromkeys(names, bounds),
            "max_seqlen_q": count,
            "max_seqlen_kv": count,
            "tree_segment_starts": self.starts,
            "tree_segment_lengths": self.lengths,
            "tree_segment_parents": self.parents,
            "tree_segment_depths": self.depths,
            "tree_local_position_ids": self.position_ids[self.local],
            "tree_cp_gather_inverse": self.gathered,
            "tree_query_runs": tuple(run(*each) for each in self.runs),
            "tree_cp_local_token_count": len(self.local),
            "tree_edge_local_indices": self.local_sources,
            "tree_edge_output_indices": self.local_edges,
        }


def tree_packing(packed: Packed, *, context_rank: int = 0, context_size: int = 1, multiple_of: int = 1) -> TreePacking:
    """The arrays that Megatron's tree packing takes for a packed forest.

    Context parallel divides the tokens as Megatron does: of 2 * `context_size` equal pieces each rank has one from the
    front and one from the back.

    Args:
        packed: the result of `tt.pack`. Its device is that of the tensors.
        context_rank: this process among those of context parallel.
        context_size: how many they are.
        multiple_of: the number of tokens is padded to a multiple of this and of 2 * `context_size` (of sequence
            parallel: the ranks of tensor parallel times `context_size`).

    Raises:
        ValueError: a rank that is not below the size, or a size or multiple below 1.
    """
    if not 0 <= context_rank < context_size:
        raise ValueError(f"context_rank is {context_rank} of {context_size}; give a rank from 0 to {context_size - 1}")
    if multiple_of < 1:
        raise ValueError(f"multiple_of is {multiple_of}; give a whole number from 1")
    layout, device = packed.layout, packed.input_ids.device
    pieces = 1 if context_size == 1 else 2 * context_size
    padding = -layout.num_tokens % int(np.lcm(multiple_of, pieces))
    starts, parents = layout.segment_start, layout.segment_parent
    ids, positions = (np.append(x, [0] * padding) for x in (layout.input_ids, layout.positions))
    if padding:
        positions[layout.num_tokens :] = np.arange(padding)
        starts, parents = np.append(starts, len(ids)), np.append(parents, -1)
    lengths = np.diff(starts)
    segment_ids = np.repeat(np.arange(len(lengths)), lengths)
    tokens = np.split(np.arange(len(ids)), pieces)
    per_rank = [np.concatenate([tokens[r], *(tokens[pieces - r - 1 :][: pieces > 1])]) for r in range(context_size)]
    local = per_rank[context_rank]
    place = np.full(len(ids), -1, np.int64)
    place[local] = np.arange(len(local))
    # A run ends where a segment does, and where this rank's tokens are interrupted.
    cuts = np.flatnonzero((np.diff(local) != 1) | (np.diff(segment_ids[local]) != 0)) + 1
    here = np.flatnonzero(place[layout.edge_rows] >= 0)

    def tensor(values: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values, np.int64)).to(device)

    return TreePacking(
        input_ids=tensor(ids),
        position_ids=tensor(positions),
        segment_ids=tensor(segment_ids),
        starts=tuple(starts[:-1].tolist()),
        lengths=tuple(lengths.tolist()),
        parents=tuple(parents.tolist()),
        depths=tuple(positions[starts[:-1]].tolist()),
        local=tensor(local),
        gathered=tensor(np.argsort(np.concatenate(per_rank))),
        runs=tuple(
            QueryRun(int(segment_ids[run[0]]), int(run[0]), int(run[-1]) + 1, tensor(place[run]))
            for run in np.split(local, cuts)
            if len(run)
        ),
        sources=tensor(layout.edge_rows),
        targets=tensor(layout.edge_targets),
        local_edges=tensor(here),
        local_sources=tensor(place[layout.edge_rows[here]]),
        edge_of_prediction=packed._of_edge,
    )
