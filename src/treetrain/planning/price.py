"""Predicts seconds and peak bytes of a plan on a device. Numpy only.

Why it is right. Time is a sum over passes, since passes run one after the other: FLOPs over their speed, plus a fixed
cost per pass (launches, Python, autograd, weights read and gradients written). Memory is a maximum over time, since
freed memory is reused. At any moment these are alive:

    kept graphs | graph of the running part | working memory | KV cache | what lives for the whole step
    ------------+---------------------------+----------------+----------+------------------------------
    ancestors   | grows in forward, shrinks | one of: head,  | cached   | layout, summed gradients of
    kept        | in backward               | layers, end    | tokens   | embedding and head

Only the first three change within a step. Their worst moment is in one of three phases of some part, or in a prefill,
so the peak is a maximum over parts, phases and prefills. Each is linear in tokens and rows, with the factors in
`ModelCounts`.

Under FSDP every pass gathers the weights, and a backward also reduces their gradients. A GPU does both beside the
arithmetic, except for the first layer's share. So a pass takes the longer of the two, plus that share, and parts are
made large enough to hide the links. On a CPU the same cores send and compute, so the times add up.
"""

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from treetrain.planning.cost import WIDE, ModelCounts, ModelShape
from treetrain.planning.devices import SLACK, Device, head_chunk_rows
from treetrain.planning.plan import Plan, heights
from treetrain.tree.assemble import Int64s

Floats = NDArray[np.float64]
STEP_TOKEN = 200.0
"""Bytes per computed token for the whole step: layout, positions, log-probabilities."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Speeds:
    """Speeds of a device on one model: FLOP/s, and the fixed seconds of a pass."""

    layers: float
    """FLOP/s of a layer's forward, everything between the matrix products included."""
    attention: float
    """FLOP/s of attention over (query, key) pairs."""
    head: float
    """FLOP/s of the LM head with its softmax, forward and backward."""
    backward_ratio: float
    """Time of a layer's backward over that of its forward: 2, or 3 with checkpointing."""
    graph_pass: float
    """Fixed seconds of a forward and backward: launches, Python, autograd; weights read, gradients written."""
    forward_pass: float
    """Fixed seconds of a pass without graph."""
    source: str
    """Where the numbers come from."""

    @classmethod
    def on(cls, device: Device, counts: ModelCounts) -> Self:
        """Derive a model's speeds from a device's description."""
        reads = 3 if counts.checkpointing else 2  # reads of the weights: in forward, and once or twice in backward
        weights = counts.parameters_in_layers * counts.dtype_bytes
        head = (counts.parameters - counts.parameters_in_layers) * counts.dtype_bytes  # and the embedding
        fixed = counts.layers * device.layer_pass_seconds
        reached = device.flops * device.efficiency
        return cls(
            layers=reached,
            attention=device.flops * device.attention_efficiency,
            head=reached,
            backward_ratio=float(reads),
            graph_pass=fixed + (weights * (reads + 4) + 4 * head) / device.memory_bandwidth,
            forward_pass=0.7 * fixed + weights / device.memory_bandwidth,
            source=f"the description of {device.name}",
        )


class Passes(NamedTuple):
    """A rank's sequence of passes."""

    kinds: str
    """One letter per pass: P(refill), F(orward), B(ackward)."""
    seconds: list[float]


class WeightLinks(NamedTuple):
    """Seconds that FSDP's collectives take in each pass."""

    forward: float
    """All weights gathered."""
    backward: float
    """The weights of the layers gathered again, and all gradients reduced."""
    first: float
    """The share of these that cannot run beside arithmetic: 1 / layers; 1 on a CPU."""

    def exposed(self, kind: str, seconds: float) -> float:
        """Seconds that the links add to a pass, by its kind (P, F or B) and its own seconds."""
        sent = self.backward if kind == "B" else self.forward
        return sent - (1 - self.first) * min(seconds, sent)


@dataclass(frozen=True, kw_only=True, slots=True)
class CostModel:
    """Predicts the seconds and the peak memory of a training step under a plan."""

    counts: ModelCounts
    """Counts of the model."""
    speeds: Speeds
    device: Literal["cpu", "cuda"] = "cpu"
    """Sets the memory allocator that is modelled, and the rows that the head scores at once."""
    links: WeightLinks | None = None
    """FSDP: the seconds of gathering weights and reducing gradients; None if every rank holds them whole."""

    @classmethod
    def from_shape(
        cls,
        shape: ModelShape,
        device: Literal["cpu", "cuda"] = "cpu",
        *,
        dtype_bytes: int = 4,
        checkpointing: bool = False,
    ) -> Self:
        """Create a cost model from a shape, with every weight trained.

        Args:
            shape: the model's shape.
            device: the device whose speeds are used: "cpu" (two cores) or "cuda" (an H100).
            dtype_bytes: bytes per number in the compute dtype: 4, 8, or 2 under autocast.
            checkpointing: whether every layer keeps only its input and runs forward again in backward.

        Raises:
            ValueError: an unknown device or size.
        """
        described = Device.of_kind(device, dtype_bytes)
        return cls.on(described, shape.counts(dtype_bytes=dtype_bytes, checkpointing=checkpointing))

    @classmethod
    def of(cls, cost: "CostModel | ModelShape | str") -> "CostModel":
        """A cost model; from a shape or its name, by formula on a CPU."""
        return cls.from_shape(ModelShape.of(cost)) if isinstance(cost, ModelShape | str) else cost

    @classmethod
    def on(cls, device: Device, counts: ModelCounts) -> Self:
        """Create a cost model from a device's description and a model's counts."""
        return cls(counts=counts, speeds=Speeds.on(device, counts), device=device.kind)

    def seconds(self, plan: Plan) -> float:
        """Predicted seconds of one training step under a plan, the optimiser's step excluded."""
        return float(sum(self.seconds_by(plan).values()))

    def seconds_by(self, plan: Plan) -> dict[str, float]:
        """Seconds by purpose.

        layers, attention, head: FLOPs of forward and backward over their speeds.
        recomputation: the second forward of all tokens that run twice; the head's too if everything is scored first.
        passes: the fixed cost of every pass.
        links: what FSDP's collectives add to the passes.
        """
        speeds, layout, links = self.speeds, plan.layout, 0.0
        if self.links is not None:
            own = self._own_passes(plan)
            exposed = [self.links.exposed(kind, seconds) for kind, seconds in zip(*own)]
            scoring = [x for kind, x in zip(own.kinds, exposed) if kind == "F" and plan.scores_first == "recomputed"]
            links = sum(exposed) + sum(scoring)
        forward = self._layer_seconds(layout.num_tokens)
        pairs = self._pair_seconds(layout.positions)
        head = 2.0 * len(layout.rows) * self.counts.hidden * self.counts.vocab / speeds.head
        again = self._layer_seconds(plan.recomputed_tokens)
        again += self._pair_seconds(layout.positions[plan.is_recomputed_token])
        prefills = plan.num_prefills
        if plan.scores_first == "recomputed":
            again += pairs + head
            prefills += plan.num_parts
        return {
            "layers": forward * (1 + speeds.backward_ratio),
            "attention": pairs * (1 + speeds.backward_ratio),
            "head": 3 * head,
            "recomputation": again,
            "passes": plan.num_parts * speeds.graph_pass + prefills * speeds.forward_pass,
            "links": links,
        }

    def passes(self, plan: Plan) -> Passes:
        """The passes of `plan.events()` with their seconds. They sum to `seconds`, scoring passes excluded."""
        own = self._own_passes(plan)
        if self.links is None:
            return own
        return Passes(own.kinds, [s + self.links.exposed(kind, s) for kind, s in zip(*own)])

    def _own_passes(self, plan: Plan) -> Passes:
        """The passes without links."""
        layout, parts, speeds = plan.layout, plan.num_parts, self.speeds
        if not parts:
            return Passes("", [])
        both, forward_share = self.token_seconds(layout.positions), 1 / (1 + speeds.backward_ratio)
        whole = np.bincount(plan.part_of, both, parts)
        heads = self.row_seconds * np.bincount(plan.part_of[layout.rows], minlength=parts)
        again = plan.is_recomputed_token
        prefilled = np.bincount(plan.prefill[plan.part_of[again]], both[again])
        seconds = {
            "forward": whole * forward_share + heads / 3 + speeds.graph_pass / 3,
            "backward": whole * (1 - forward_share) + heads * 2 / 3 + speeds.graph_pass * 2 / 3,
            "prefill": prefilled * forward_share + speeds.forward_pass,
        }
        events = list(plan.events())
        kinds = "".join(event.kind[0].upper() for event in events)
        return Passes(kinds, [float(seconds[event.kind][event.number]) for event in events])

    @property
    def hiding_tokens(self) -> int:
        """Tokens of a part whose forward and backward take as long as their links; 0 without links, and on a CPU."""
        if self.links is None or self.links.first == 1:
            return 0
        forward = self.counts.token_flops / self.speeds.layers
        tokens = max(self.links.forward, self.links.backward / self.speeds.backward_ratio) / forward
        return math.ceil(min(tokens, 1e9))

    def token_seconds(self, depth: Int64s) -> Floats:
        """float64: seconds of the forward and backward of tokens at these depths, LM head and passes excluded."""
        both = 1 + self.speeds.backward_ratio
        seconds = np.full(len(depth), self.counts.token_flops * both / self.speeds.layers)
        for each, flops in self.counts.flops_by_range.items():
            seconds += flops * both / self.speeds.attention * each.seen(depth)
        return seconds

    @property
    def row_seconds(self) -> float:
        """Seconds of a hidden state through the LM head, forward and backward."""
        return 6.0 * self.counts.hidden * self.counts.vocab / self.speeds.head

    def _layer_seconds(self, tokens: int) -> float:
        return tokens * self.counts.token_flops / self.speeds.layers

    def _pair_seconds(self, depth: Int64s) -> float:
        """Seconds of the visible pairs of tokens at these depths."""
        return self.counts.pair_flops(self.counts.pairs_at(depth)) / self.speeds.attention

    def peak_bytes(self, plan: Plan) -> float:
        """Predicted peak bytes of one training step, above model, gradients and optimiser state."""
        return float(sum(self.bytes_by(plan).values()))

    def bytes_by(self, plan: Plan) -> dict[str, float]:
        """Bytes alive at the peak, by name.

        kept graphs: tensors saved for backward by the kept ancestors of the running part.
        running graph: tensors saved by the running part; 0 for a pass without graph.
        working: other memory of the pass, in its worst phase (head, layers, end).
        KV cache: keys, values and gradients of exported tokens, and recurrent states where parts attach.
            Its buffers are allocated for the most held at once.
        step: memory held for the whole step: the layout, and summed gradients of embedding and head.
        allocator: the allocator's overhead on all of these.
        """
        model = self.counts
        if plan.num_parts == 0:
            return dict.fromkeys(("kept graphs", "running graph", "working", "KV cache", "step", "allocator"), 0.0)
        layout = plan.layout
        rows = np.bincount(plan.part_of[layout.rows], minlength=plan.num_parts)
        path = np.where(plan.attach >= 0, layout.positions[plan.attach] + 1, 0)
        # A head row saves its hidden state and its edges' scores for backward.
        row_bytes = model.hidden * model.dtype_bytes + 4 * self._wide
        graph = np.asarray(model.saved_pass + model.saved_token * plan.sizes + row_bytes * rows, np.float64)
        above = plan.graphs_beside(graph)
        working = self._working(plan.sizes, rows, path, graph)
        prefills, prefills_above = self._prefills(plan, path, above)
        number = int(np.argmax(above + graph + working))
        peak = {"kept graphs": above[number], "running graph": graph[number], "working": working[number]}
        if len(prefills):
            first = int(np.argmax(prefills + prefills_above))
            if prefills[first] + prefills_above[first] > sum(peak.values()):
                peak = {"kept graphs": prefills_above[first], "running graph": 0.0, "working": prefills[first]}
        step = model.step + STEP_TOKEN * layout.num_tokens
        cache = model.cache_token * plan.cached_tokens
        if model.cache_state:
            cache += model.cache_state * plan.cached_states
        peak |= {"KV cache": cache, "step": step}
        factor, fixed = SLACK[self.device]
        peak["allocator"] = (factor - 1) * sum(peak.values()) + fixed
        return {name: float(value) for name, value in peak.items()}

    def _working(self, tokens: Int64s, rows: Int64s, path: Int64s, graph: Floats) -> Floats:
        """Bytes in addition to each part's graph at the worst moment of its forward and backward; arguments [P]."""
        model = self.counts
        gradient = self._wide * model.hidden  # of a hidden state
        head = np.where(rows > 0, model.head_pass + gradient * rows + self._logits(rows), 0.0)
        # With checkpointing, one layer's graph at a time is rebuilt in addition to the saved inputs.
        layer = model.backward_token + (model.saved_layer if model.checkpointing else 0)
        layers = model.weight_gradient + layer * tokens + model.cache_layer * path
        end = 2 * gradient * tokens - graph  # the graph has been freed
        return np.maximum(np.maximum(head, layers), end)

    def _logits(self, rows: Int64s) -> Floats:
        """Bytes of the logits of a chunk of rows, with their gradients."""
        chunk = np.minimum(rows, head_chunk_rows(self.counts.vocab, self.device))
        return self.counts.vocab * self.counts.logit * chunk.astype(np.float64)

    @property
    def _wide(self) -> int:
        return max(WIDE, self.counts.dtype_bytes)

    def _prefills(self, plan: Plan, path: Int64s, above: Floats) -> tuple[Floats, Floats]:
        """Per prefill: its own bytes, and those of the kept graphs above it."""
        tokens = np.bincount(plan.prefill[plan.part_of[plan.is_recomputed_token]], minlength=plan.num_prefills)
        top = np.array([plan.prefill_parts(number)[0] for number in range(plan.num_prefills)], np.int64)
        # A loss that is not linear in the log-probabilities is scored in prefills too.
        scored = plan.layout.rows[plan.is_recomputed_token[plan.layout.rows]]
        rows = np.bincount(plan.prefill[plan.part_of[scored]], minlength=plan.num_prefills)
        alone = self.counts.forward_token * tokens + self.counts.cache_layer * path[top]
        return alone + self._logits(rows), above[top]


def budget_share(plan: Plan, counts: ModelCounts, budget: int) -> float:
    """FLOPs of a step without recomputation over FLOPs with the least that a budget in tokens allows; at most 1."""
    layout = plan.layout
    again = layout.positions[heights(layout) > budget]
    once = counts.flops(layout.num_tokens, counts.pairs_at(layout.positions), len(layout.rows))
    return once / (once + counts.flops(len(again), counts.pairs_at(again), 0) / 3) if once else 1.0
