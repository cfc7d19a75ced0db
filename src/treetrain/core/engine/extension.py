"""The protocol by which optional features take part in the passes of a call.

A dense model in one process runs without extensions. A feature (`engine_model.Feature`) attaches one to a call when the
model or its rows have something special, and so do several processes that share the work. Extensions stand outside the
core, and what runs the passes knows this protocol alone.

The life of an extension, which belongs to one call, or to one try where memory runs out:

    begin                     once for each run of the plan; some calls score it first, without gradients
    around                    while the run's passes run; the extensions are nested in the order they are given in
        before_forward        may change what the pass reads
        after_forward         may check what the model returned and change the scores
        before_backward
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import Int64
from torch import Tensor
from transformers.utils.generic import ModelOutput

from treetrain.core.attention.kv_cache import AttentionCall
from treetrain.core.engine.executor import Part
from treetrain.core.head.lm_head import ScoreRequest, Scores
from treetrain.core.losses.facts import Metrics
from treetrain.core.planning.plan import Plan

Reduces = Literal["each", "last", "never"]
"""The backwards of a run that reduce gradients over processes."""


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
    attention: AttentionCall
    request: ScoreRequest
    scores: bool
    """Whether edges are scored; False runs the layers alone, for their keys and values."""
    idle: bool = False
    """Whether the pass only accompanies those of other processes, and adds nothing to the result."""
    keywords: dict[str, object] = field(default_factory=dict)
    """Further arguments of the model's forward."""
    extras: list[object] = field(default_factory=list)
    """Objects that extensions pass to the layers of the model and to one another, such as a `RouterPass`; see
    `tree_mode.instance_of`."""


class Extension:
    """Takes part in the passes of one call. Each method does nothing here."""

    reduces: Reduces = "each"
    """The backwards of the next run that reduce gradients over processes. The engine sets it."""
    within_hooks = False
    """Whether hooks of parameters run after its `around`, since they must see what it adds to the gradients."""

    def begin(self, plan: Plan, *, gradients: bool, idle_pass: Callable[[], Scores]) -> None:
        """A run of the plan begins; an earlier one is over.

        Args:
            gradients: whether the parts run backward too.
            idle_pass: runs a forward over one token, which adds nothing to the result.
        """

    @contextmanager
    def around(self, *, graph: bool, backward: bool) -> Iterator[None]:
        """Run passes inside the block.

        Args:
            graph: whether the passes have a graph.
            backward: whether they include the run's backwards; False if those come in a later block.
        """
        yield

    def before_forward(self, model_pass: ModelPass) -> None:
        """Change what a pass reads."""

    def after_forward(self, model_pass: ModelPass, outputs: ModelOutput, scores: Scores) -> Scores:
        """Return the scores of a pass, after a look at what the model's forward returned."""
        return scores

    def before_backward(self) -> None:
        """A part is about to run backward."""

    def postpones(self, error: Exception) -> bool:
        """Whether an error of the loss waits for the end of `around`, since other processes wait in later passes."""
        return False


class LossExtension(Extension):
    """An extension that adds a loss of the model's own, over all tokens of a step."""

    scale: float | Tensor
    """Multiplies the loss and its gradient."""
    adds: bool
    """Whether there is such a loss in this call."""

    @property
    def known(self) -> bool:
        """Whether a pass may run backward before all others have run forward."""
        raise NotImplementedError

    def settle(self) -> None:
        """All tokens have passed; the gradients of the loss are known from now on."""
        raise NotImplementedError

    @property
    def loss(self) -> Tensor:
        """The loss of the tokens that have passed, before it is scaled; a scalar without graph."""
        raise NotImplementedError

    def added_to(self, total: Tensor | float, sums: Metrics) -> tuple[Tensor | float, Metrics]:
        """A step's loss and metrics with this loss added."""
        raise NotImplementedError
