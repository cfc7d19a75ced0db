"""The other linear baseline: rows of similar length in right-padded batches through transformers' own attention.

Causal attention needs no mask on the right: padding comes after every real token. So each batch is one stock causal
call per layer, with the same fused head as everywhere else.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

from treetrain.engine.engine import LinearEngine
from treetrain.engine.lm_head import Edges, ScoreRequest, Scores, scoring_head
from treetrain.engine.packed import model_device
from treetrain.errors import UnsupportedModel
from treetrain.models.capability import Capabilities
from treetrain.planning.plan import Plan
from treetrain.tree.layout import PackedLayout


class PaddedRun:
    """A forest of single rows as one right-padded batch, with the interface of `PackedRun`."""

    def __init__(
        self, model: nn.Module, capabilities: Capabilities, layout: PackedLayout, *, routers: Any = None, **_: Any
    ):
        if routers is not None:
            raise UnsupportedModel(
                "padded batches have neither an auxiliary loss of routers, which would count the padding, nor recorded "
                "experts: set config.output_router_logits=False and leave `experts` out to compare with them"
            )
        device = model_device(model)
        self.model, self.capabilities = model, capabilities
        row = np.cumsum(layout.positions == 0) - 1
        width = int(layout.positions.max(initial=0)) + 1
        slot = row * width + layout.positions
        ids = np.zeros((int(row[-1]) + 1 if len(row) else 0) * width, dtype=np.int64)
        ids[slot] = layout.input_ids
        self.input_ids = torch.from_numpy(ids.reshape(-1, width)).to(device)
        self.edges = Edges(
            rows=torch.from_numpy(slot[layout.rows]).to(device),
            edge_row=torch.from_numpy(layout.edge_row_index).to(device),
            targets=torch.from_numpy(layout.edge_targets).to(device),
        )

    @staticmethod
    @contextmanager
    def mode(model: nn.Module) -> Iterator[None]:
        """Switch nothing: attention is transformers' own."""
        yield

    def scores(self, request: ScoreRequest) -> Scores:
        """See `PackedRun.scores`."""
        with scoring_head(self.capabilities, self.edges, request) as calls:
            self.model(input_ids=self.input_ids, attention_mask=None, use_cache=False)
        return calls[0].scores


class PaddedEngine(LinearEngine):
    """A `LinearEngine` that pads: batches of at most ``pack_tokens`` slots (a longer row runs by itself)."""

    run_type = PaddedRun

    def plan_of(self, layout: PackedLayout) -> Plan:
        """Fill batches with rows in order of length."""
        lengths = np.diff(np.append(np.flatnonzero(layout.parent < 0), layout.num_tokens))
        slots = self.pack_tokens or (int(lengths.sum()) + 1) ** 2
        batch_of = np.zeros(len(lengths), np.int64)
        batch = rows = 0
        for row in np.argsort(lengths, kind="stable").tolist():
            if rows and (rows + 1) * int(lengths[row]) > slots:
                batch, rows = batch + 1, 0
            batch_of[row] = batch
            rows += 1
        return Plan.of_parts(layout, np.repeat(batch_of, lengths))
