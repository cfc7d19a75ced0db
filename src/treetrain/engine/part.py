"""A part of a plan, and the tensors that a model reads in the pass over it."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from jaxtyping import Int64
from torch import Tensor, nn

from treetrain.device_arrays import to_device
from treetrain.engine.lm_head import Edges, ScoreRequest
from treetrain.models.tree_mode import AttentionBackend
from treetrain.softmax_attention.attention import AttentionTree
from treetrain.softmax_attention.kv_cache import KVCacheView
from treetrain.softmax_attention.schedule import Forest
from treetrain.tree.layout import PackedLayout, Piece

T = TypeVar("T")
_NONE = np.zeros(0, np.int64)


@dataclass(frozen=True, slots=True)
class Part:
    """The tokens of one pass, and the path that they continue."""

    piece: Piece
    """The tokens as a layout of their own."""
    tokens: Int64[np.ndarray, " n"]
    """Indices of the tokens in the plan's layout."""
    attach: int
    """The token of the plan's layout that they continue; -1 where they start at roots."""
    cache: KVCacheView | None
    """The keys and values of the path, and where to put those of the part; None if there are neither."""
    graph: bool
    """Whether a backward follows."""


class LayoutArrays(NamedTuple):
    """The numbers of a layout that a model reads, int64, on the host."""

    ids: Int64[np.ndarray, " N"]
    positions: Int64[np.ndarray, " N"]
    rows: Int64[np.ndarray, " R"]
    edge_row: Int64[np.ndarray, " E"]
    targets: Int64[np.ndarray, " E"]

    @classmethod
    def of(cls, layout: PackedLayout, *, score: bool) -> "LayoutArrays":
        """The arrays of a layout; `score=False` leaves the edges out."""
        scored = (layout.rows, layout.edge_row_index, layout.edge_targets) if score else (_NONE, _NONE, _NONE)
        return cls(*(x.astype(np.int64, copy=False) for x in (layout.input_ids, layout.positions, *scored)))


class DeviceLayout:
    """The tensors of a layout on a device."""

    def __init__(self, arrays: LayoutArrays, device: torch.device):
        # One copy, so that the host need not wait for a GPU at each part.
        self.input_ids, self.positions, rows, edge_row, targets = to_device(arrays, device)
        self.edges = Edges(rows=rows, edge_row=edge_row, targets=targets, host_edge_row=arrays.edge_row)


@dataclass
class ModelPass:
    """Everything that one forward of a model reads. Extensions may change it before the forward."""

    part: Part
    arrays: LayoutArrays
    attention: AttentionBackend
    request: ScoreRequest
    scores: bool
    """Whether edges are scored; False runs the layers alone, for their keys and values."""
    idle: bool = False
    """Whether the pass only accompanies those of other processes, and adds nothing to the result."""
    keywords: dict[str, Any] = field(default_factory=dict)
    """Further arguments of the model's forward."""
    extras: list[object] = field(default_factory=list)
    """What extensions hand to the layers of the model and to one another."""

    def extra(self, kind: type[T]) -> T | None:
        """The extra of a class; None if no extension has added one."""
        return next((x for x in self.extras if isinstance(x, kind)), None)


def attention_of(part: Part) -> AttentionTree:
    """Tree attention over a part."""
    return AttentionTree(Forest.of(part.piece.layout), part.cache)


def model_device(model: nn.Module) -> torch.device:
    """The device that the model takes its input on."""
    embeddings = model.get_input_embeddings()  # type: ignore[operator]
    weight: Tensor = next(embeddings.parameters())
    mesh = getattr(weight, "device_mesh", None)
    if mesh is None or mesh.device_type == weight.device.type:
        return weight.device
    return torch.device(mesh.device_type, torch.get_device_module(mesh.device_type).current_device())  # offloaded
