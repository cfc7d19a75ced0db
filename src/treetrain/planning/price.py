"""What a plan costs on a device: seconds and peak bytes, by explicit formulas. Numpy only.

Time is a sum over passes; memory is the largest of what is alive at any event of the plan. The numbers that counts
are multiplied with are `Constants`.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from treetrain.planning.constants import Constants
from treetrain.planning.cost import ModelShape
from treetrain.planning.plan import Plan
from treetrain.tree.assemble import Int64s

Floats = NDArray[np.float64]


class _Counts(NamedTuple):
    """Per part."""

    tokens: Int64s
    rows: Int64s
    """Head rows."""
    exported: Int64s
    path: Int64s
    """Tokens above the part."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CostModel:
    """Predicts the seconds and the peak memory of a training step under a plan."""

    shape: ModelShape
    constants: Constants

    @classmethod
    def from_shape(
        cls,
        shape: ModelShape,
        device: Literal["cpu", "cuda"] = "cpu",
        *,
        dtype_bytes: int = 4,
        checkpointing: bool = False,
    ) -> Self:
        """Predict by formula, with nothing measured and every weight trained.

        Args:
            shape: the model's shape.
            device: whose speeds to take: "cpu" or "cuda".
            dtype_bytes: size of a number in the arithmetic: 4, 8, or 2 under autocast.
            checkpointing: whether every layer keeps its input alone and runs forward again in backward.

        Raises:
            ValueError: another device or size.
        """
        found = Constants.from_shape(shape, device, dtype_bytes=dtype_bytes, checkpointing=checkpointing)
        return cls(shape=shape, constants=found)

    def seconds(self, plan: Plan) -> float:
        """Predicted seconds of one training step under a plan, the optimiser's step excluded."""
        return float(sum(self.seconds_by(plan).values()))

    def seconds_by(self, plan: Plan) -> dict[str, float]:
        """What the seconds go to.

        layers, attention, head: FLOPs of forward and backward over their speeds (`step_flops` counts them).
        recomputation: forward FLOPs of layers and attention, over the tokens that are run twice.
        bytes: weights read and gradients written by every pass, over the bandwidth.
        passes: the fixed cost of every pass.
        """
        c, layout = self.constants, plan.layout
        forward = self._layer_seconds(layout.num_tokens)
        pairs = self._pair_seconds(layout.positions)
        late = plan.exported & (plan.prefill >= 0)[plan.part_of] if plan.num_parts else np.zeros(0, bool)
        again = self._layer_seconds(plan.recomputed_tokens)
        again += self._pair_seconds(layout.positions[late])
        publishing = plan.num_prefills
        if plan.scores_first == "recomputed":
            again += pairs + 2.0 * len(layout.rows) * self.shape.hidden * self.shape.vocab / c.head_flops
            publishing += plan.num_parts
        moved = plan.num_parts * c.graph_pass_bytes + publishing * c.forward_pass_bytes
        return {
            "layers": forward * (1 + c.backward_ratio),
            "attention": pairs * (1 + c.backward_ratio),
            "head": 6.0 * len(layout.rows) * self.shape.hidden * self.shape.vocab / c.head_flops,
            "recomputation": again,
            "bytes": moved / c.bandwidth,
            "passes": plan.num_parts * c.graph_pass_seconds + publishing * c.forward_pass_seconds,
        }

    def _layer_seconds(self, tokens: int) -> float:
        return float(tokens * self.shape.token_flops) / self.constants.matrix_flops

    def _pair_seconds(self, depth: Int64s) -> float:
        """Of tokens at these depths of their paths."""
        return self.shape.pair_flops(self.shape.pairs_at(depth)) / self.constants.pair_flops

    def peak_bytes(self, plan: Plan) -> float:
        """Predicted peak bytes of one training step, above model, gradients and optimiser state."""
        return float(sum(self.bytes_by(plan).values()))

    def bytes_by(self, plan: Plan) -> dict[str, float]:
        """What is alive at the moment of the peak.

        kept graphs: what the running part's kept ancestors saved for their backwards.
        running graph: what the running part saved; 0 for a pass without graph.
        working: beside it, at the worst of the pass's phases (head, layers, end; see `Constants`).
        carry: keys, values and gradients of exported tokens, and recurrent states where parts attach; its buffers are
            made for the most held at once.
        step: what lives as long as the step: the layout, and sums of the embedding's and head's gradients.
        allocator: what it takes over that.
        """
        c = self.constants
        if plan.num_parts == 0:
            return dict.fromkeys(("kept graphs", "running graph", "working", "carry", "step", "allocator"), 0.0)
        counts = _count(plan)
        graph = self._graph(counts.tokens, counts.rows)
        above = _held(plan, graph)
        working = self._working(counts, graph)
        publishing, publish_above = self._publishing(plan, counts, above)
        number = int(np.argmax(above + graph + working))
        found = {"kept graphs": above[number], "running graph": graph[number], "working": working[number]}
        if len(publishing):
            first = int(np.argmax(publishing + publish_above))
            if publishing[first] + publish_above[first] > sum(found.values()):
                found = {"kept graphs": publish_above[first], "running graph": 0.0, "working": publishing[first]}
        step = c.step_bytes + c.step_token * plan.layout.num_tokens
        carry = c.carry_token * plan.cached_tokens + (c.carry_state * plan.cached_states if c.carry_state else 0.0)
        found |= {"carry": carry, "step": step}
        found["allocator"] = (c.slack - 1) * sum(found.values()) + c.slack_bytes
        return {name: float(value) for name, value in found.items()}

    def _graph(self, tokens: Int64s, rows: Int64s) -> Floats:
        c = self.constants
        return c.saved_pass + c.saved_token * tokens + c.saved_row * rows

    def _working(self, counts: _Counts, graph: Floats) -> Floats:
        """Bytes beside a part's graph at the worst moment of its forward and backward."""
        c, (tokens, rows, _, path) = self.constants, counts
        chunk = np.minimum(rows, c.chunk_rows)
        head = np.where(rows > 0, c.head_pass + c.head_row * rows + c.head_chunk_row * chunk, 0.0)
        layers = c.layer_pass + c.layer_token * tokens + c.path_token * path
        end = c.end_pass + c.end_token * tokens - graph
        return np.maximum(np.maximum(head, layers), end)

    def _publishing(self, plan: Plan, counts: _Counts, above: Floats) -> tuple[Floats, Floats]:
        """Per pass without graph: its own bytes, and those of the kept graphs above it."""
        late = np.flatnonzero(plan.prefill >= 0)
        passes, first = np.unique(plan.prefill[late], return_index=True)
        tokens = np.bincount(plan.prefill[late], weights=counts.exported[late], minlength=len(passes))
        c, top = self.constants, late[first]
        scored = plan.prefill[plan.part_of[plan.layout.rows[plan.exported[plan.layout.rows]]]]
        rows = np.bincount(scored[scored >= 0], minlength=len(passes))
        # A loss that is not linear in the log-probabilities scores them here too.
        head = c.head_chunk_row * np.minimum(rows, c.chunk_rows)
        return c.forward_token * tokens + c.path_token * counts.path[top] + head, above[top]


def _count(plan: Plan) -> _Counts:
    layout, parts = plan.layout, plan.num_parts
    path = np.where(plan.attach >= 0, layout.positions[plan.attach] + 1, 0)
    return _Counts(
        tokens=plan.sizes,
        rows=np.bincount(plan.part_of[layout.rows], minlength=parts),
        exported=np.bincount(plan.part_of[plan.exported], minlength=parts),
        path=path,
    )


def _held(plan: Plan, graph: Floats) -> Floats:
    """float64 [P]: bytes of the graphs alive beside each part's: those of its kept ancestors, or of all before it."""
    if plan.scores_first == "kept":
        return np.cumsum(graph) - graph
    kept, sizes = plan.kept.tolist(), graph.tolist()
    above = np.zeros(plan.num_parts)
    through = [0.0] * (plan.num_parts + 1)  # the last entry is read at roots, whose parent is -1
    for part, before in enumerate(plan.parent.tolist()):
        above[part] = through[before]
        through[part] = through[before] + (sizes[part] if kept[part] else 0.0)
    return above
