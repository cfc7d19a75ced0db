"""One packed forward of a model over a forest: hidden states at tree tokens, scores at edges."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from treetrain.attention.dispatch import make_attention
from treetrain.attention.schedule import Forest
from treetrain.engine.head import Edges, Scores
from treetrain.engine.scoring import scoring_head
from treetrain.errors import UnsupportedModel
from treetrain.models.capability import Capabilities
from treetrain.models.switch import RUN_KEYWORD, TreeRun, tree_attention
from treetrain.tree.layout import PackedLayout


class PackedRun:
    """A packed layout on a model's device, ready to be run forward (and, inside `active`, backward)."""

    def __init__(self, model: nn.Module, capabilities: Capabilities, layout: PackedLayout):
        device = model_device(model)
        self.model, self.capabilities = model, capabilities
        self.input_ids = torch.from_numpy(layout.input_ids).to(device).unsqueeze(0)
        self.positions = torch.from_numpy(layout.positions).to(device).unsqueeze(0)
        self.edges = Edges(
            rows=torch.from_numpy(layout.rows).to(device),
            edge_row=torch.from_numpy(layout.edge_row_index).to(device),
            targets=torch.from_numpy(layout.edge_targets).to(device),
        )
        forest = Forest(
            ends=layout.ends,
            depth=layout.positions,
            segment_start=layout.segment_start,
            segment_parent=layout.segment_parent,
        )
        self.attention = make_attention(forest, device, capabilities.heads_times_size)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Tree mode: keep it open over the backward too, since activation checkpointing runs layers again there."""
        with tree_attention(self.model):
            yield

    def scores(self, *, temperature: float, need_entropy: bool = False, coefficients: Tensor | None = None) -> Scores:
        """Run the model's own top-level forward with its head scoring edges. Call inside `active`.

        Raises:
            UnsupportedModel: a layer that did not go through tree attention, or logits changed after the head.
        """
        if len(self.edges.targets) == 0:
            return self._nothing(need_entropy)
        run = TreeRun(self.attention, self.input_ids.shape[1])
        with scoring_head(
            self.capabilities,
            self.edges,
            temperature=temperature,
            need_entropy=need_entropy,
            coefficients=coefficients,
        ) as calls:
            outputs = self.model(
                input_ids=self.input_ids,
                position_ids=self.positions,
                attention_mask=None,
                use_cache=False,
                **{RUN_KEYWORD: run},
            )
        self._check_layers(run)
        if len(calls) != 1 or not calls[0].is_untouched(outputs.logits):
            raise UnsupportedModel(
                f"{type(self.model).__name__} does not return what its head gives (it was called {len(calls)} times, "
                "or its logits are scaled, capped or cast afterwards); such a head is not supported yet."
            )
        return calls[0].scores

    def _nothing(self, need_entropy: bool) -> Scores:
        """Scores of a batch without a single prediction: models cannot be called on no tokens."""
        wide = torch.promote_types(self.model.dtype, torch.float32)  # type: ignore[arg-type]
        empty = torch.zeros(0, dtype=wide, device=self.input_ids.device)
        return Scores(empty, empty.clone() if need_entropy else None, None)

    def _check_layers(self, run: TreeRun) -> None:
        if len(run.layers_seen) != self.capabilities.layers:
            raise UnsupportedModel(
                f"{len(run.layers_seen)} of {self.capabilities.layers} layers went through tree attention; the "
                "others mix tokens in a way that is unknown here and would be silently wrong on a tree."
            )


def model_device(model: nn.Module) -> torch.device:
    """Where the model takes its input."""
    embeddings = model.get_input_embeddings()  # type: ignore[operator]
    return next(embeddings.parameters()).device
