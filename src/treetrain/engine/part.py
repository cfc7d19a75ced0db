"""A part of a plan, and the tensors that a model reads in the pass over it."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import numpy as np
from jaxtyping import Int64

from treetrain.engine.lm_head import ScoreRequest
from treetrain.models.tree_mode import AttentionBackend
from treetrain.softmax_attention.kv_cache import KVCacheView
from treetrain.tree.layout import Piece

T = TypeVar("T")


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
    """Objects that extensions pass to the layers of the model and to one another, such as a `RouterPass`."""

    def extra(self, kind: type[T]) -> T | None:
        """The extra of a class; None if no extension has added one."""
        return next((x for x in self.extras if isinstance(x, kind)), None)
