"""A batch from a tree of nodes: predictions that trajectories share, in place of trajectories; nothing is flattened."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from treetrain.engine.batch import Reads
from treetrain.engine.loss import PackedLoss
from treetrain.tree.layout import PackedLayout, pack
from treetrain.tree.merged import MergedPredictions
from treetrain.tree.token_tree import TokenTree


@dataclass(frozen=True, kw_only=True, eq=False)
class MergedBatch:
    """As `Batch`, with T merged predictions as its items: each ends where it is scored."""

    tree: TokenTree
    layout: PackedLayout
    merged: MergedPredictions
    edges: np.ndarray
    """int64 [T]: the edge that each prediction reads."""

    @classmethod
    def of(cls, tree: TokenTree, merged: MergedPredictions, *, every_token: bool = False) -> "MergedBatch":
        """What training computes of a tree of nodes; see `Batch.of`."""
        layout = pack(tree, tree.trained_edges()[0] > 0, trim=not every_token)
        edges, index = merged.reads(layout.edge_tokens)
        of_prediction = np.empty(len(merged), np.int64)
        of_prediction[index] = edges
        return cls(tree=tree, layout=layout, merged=merged, edges=of_prediction)

    @cached_property
    def deepest_row(self) -> np.ndarray:
        """int64 [T]: the row that makes each prediction."""
        return self.layout.edge_row_index[self.edges]

    def select(self, numbers: np.ndarray) -> "MergedSelection":
        """Some of the predictions."""
        edges = self.edges[numbers]
        rows = self.layout.edge_row_index[edges]
        return MergedSelection(merged=self.merged, index=numbers, edges=edges, rows=rows)

    def everything(self) -> "MergedSelection":
        """All predictions."""
        return self.select(np.arange(len(self.merged)))


@dataclass(frozen=True, kw_only=True, eq=False)
class MergedSelection(Reads):
    """Some of the merged predictions of a batch."""

    merged: MergedPredictions
    index: np.ndarray
    """int64 [T]: which of them."""

    def facts(self, loss: PackedLoss, device: torch.device, dtype: torch.dtype) -> Any:
        """See `Reads`."""
        return loss.pack(self.merged, device=device, dtype=dtype, used=self.index)
