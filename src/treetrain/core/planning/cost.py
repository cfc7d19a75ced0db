"""Costs of a model: its counts (FLOPs, parameters, bytes), and the seconds and peak bytes of a plan. Numpy only.

The numbers come from the model itself, counted layer by layer (``models/costs.py``), or from the sizes of a plain
decoder (``shapes.py``), for planning without a model.

Only matrix products are counted; a multiplication and an addition are two FLOPs. Norms, activations, rotary embeddings,
softmax and the optimiser are left out. A backward needs two products for each product of the forward, so a step is
three forwards.

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
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from treetrain.core.planning.devices import HEAD_CHUNK_LOGITS, HEAD_CHUNK_ROWS, SLACK, Device
from treetrain.core.planning.plan import Bytes, Passes, Plan
from treetrain.core.tree.layout import FULL, AttentionRange, Pairs, pairs_at
from treetrain.core.tree.token_tree import Int64s

WIDE = 4
"""Bytes of float32, the dtype of log-probabilities, entropies and summed gradients."""


def head_chunk_rows(vocab: int, device: str = "cpu") -> int:
    """Rows whose logits the head computes at once on a kind of device; unlisted kinds count as a CPU."""
    device = device if device in HEAD_CHUNK_LOGITS else "cpu"
    least, most = HEAD_CHUNK_ROWS[device]
    return max(least, min(most, HEAD_CHUNK_LOGITS[device] // vocab))


@dataclass(frozen=True, kw_only=True)
class ModelCounts:
    """FLOPs and bytes of one model, all layers together.

    Bytes are in the model's dtype. A *pass* is one call of the model, with graph (forward and backward) or without. In
    each phase of a pass, memory is linear in its tokens and head rows.
    """

    layers: int
    hidden: int
    """Width of the residual stream."""
    vocab: int
    parameters: int
    parameters_in_layers: int
    """Parameters in the layers, all experts included."""
    dtype_bytes: int
    """Bytes per number in the compute dtype: 2, 4 or 8."""
    checkpointing: bool = False
    """Whether every layer keeps only its input and runs forward again in backward."""
    heads: int = 1
    """Query heads."""
    kv_heads: int = 1
    experts: int = 0
    """Experts of a layer; 0 for a model without any."""
    experts_per_token: int = 0
    expert_parameters: int = 0
    """Parameters of all experts of all layers."""

    token_flops: float
    """Forward FLOPs of a token in all layers, attention over pairs excluded."""
    flops_by_range: Mapping[AttentionRange, float]
    """Forward FLOPs of a visible (query, key) pair in all layers with this range."""

    saved_layers: float
    """Bytes per token that the layers save for backward, without checkpointing."""
    saved_layer: float
    """Bytes per token that the layer that saves most saves."""
    saved_outside: float
    """Bytes per token saved outside the layers, such as by the last norm."""
    saved_pass: float = 0.0
    """Bytes saved per pass: autocast's copies of weights."""
    backward_token: float
    """Bytes per token, besides the graph, in the backward of a layer."""
    weight_gradient: float
    """Bytes of the largest weight's gradient, before accumulation."""
    forward_token: float
    """Bytes per token of a pass without graph, in its widest layer."""
    cache_token: float
    """Bytes of keys, values and their gradients per cached token, all layers."""
    cache_layer: float
    """Bytes of keys, values and their gradients per cached token in the largest layer."""
    cache_state: float = 0.0
    """Bytes of the recurrent states after one token and their gradients, all layers."""
    logit: float
    """Bytes of one logit with its gradient, while a chunk of rows is scored."""
    head_pass: float
    """Bytes of the LM head per pass: its 16-bit gradient before accumulation, and autocast's 16-bit copy of it."""
    step: float
    """Bytes held for the whole step: summed gradients of embedding and head."""

    @property
    def wide_bytes(self) -> int:
        """Bytes per number of weights, their gradients and whatever is added up: float32 or wider."""
        return max(WIDE, self.dtype_bytes)

    @property
    def saved_token(self) -> float:
        """Bytes of a pass's graph per token."""
        layers = self.layers * self.hidden * self.dtype_bytes if self.checkpointing else self.saved_layers
        return layers + self.saved_outside

    @property
    def attention_ranges(self) -> tuple[AttentionRange, ...]:
        """The distinct attention ranges of the layers."""
        return tuple(self.flops_by_range) or (FULL,)

    def pairs_at(self, depth: Int64s) -> Pairs:
        """Visible pairs of tokens at these depths of their paths (0: the first token), as `flops` takes them."""
        return pairs_at(depth, self.attention_ranges)

    def pair_flops(self, pairs: Pairs) -> float:
        """Forward FLOPs of visible pairs, all layers."""
        return sum(flops * pairs[each] for each, flops in self.flops_by_range.items())

    def flops(self, tokens: int, pairs: Pairs, head_rows: int) -> float:
        """FLOPs of one forward and backward, nothing recomputed.

        Args:
            tokens: tokens through the layers.
            pairs: visible (query, key) pairs by range, the token itself included; see `pairs_at`.
            head_rows: hidden states through the LM head.
        """
        return 3.0 * (tokens * self.token_flops + self.pair_flops(pairs) + 2 * head_rows * self.hidden * self.vocab)

    def saving(self, token: float) -> Self:
        """Return the counts of layers that, together with what is outside of them, save other bytes per token."""
        layers = max(token - self.saved_outside, 0.0)
        return replace(self, saved_layers=layers, saved_layer=self.saved_layer * layers / self.saved_layers)

    def checkpointed(self, checkpointing: bool) -> Self:
        """Return the counts with or without gradient checkpointing of every layer."""
        return replace(self, checkpointing=checkpointing)


class CountedShape(Protocol):
    """The sizes of a model, from which its costs follow."""

    def counts(self, *, dtype_bytes: int = 4, checkpointing: bool = False) -> ModelCounts:
        """The counts with every weight trained."""
        ...


Floats = NDArray[np.floating]
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
    """Time of a layer's backward divided by the time of its forward: 2, or 3 with checkpointing."""
    graph_pass: float
    """Fixed seconds of a forward and backward: launches, Python, autograd; weights read, gradients written."""
    forward_pass: float
    """Fixed seconds of a pass without graph."""
    source: str
    """Says where the numbers come from."""

    @classmethod
    def on(cls, device: Device, counts: ModelCounts) -> Self:
        """Derive a model's speeds from a device's description."""
        reads = 3 if counts.checkpointing else 2  # reads of the weights: in forward, and once or twice in backward
        weights = counts.parameters_in_layers * counts.dtype_bytes  # a pass reads them whatever its size
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


class Links(Protocol):
    """Seconds that processes take to send weights and gradients in each pass; `parallel/links.py` has FSDP's."""

    def hidden_beside(self, backward_ratio: float) -> float:
        """Seconds of a part's forward from which on its passes hide the links; 0 where nothing hides them."""
        ...

    def added_seconds(self, kind: str, seconds: Floats, *, reduces: bool = True) -> Floats:
        """Seconds that the links add to passes of a kind that take `seconds` by themselves."""
        ...


class Beside(NamedTuple):
    """Memory that a step needs besides that of its parts, for what runs once before the first and after the last."""

    name: str
    held: float
    """Bytes that stay alive while parts run."""
    peak: float
    """Most bytes alive before the first part or after the last one."""


class PartBytes(NamedTuple):
    """Bytes of the parts of a plan, one number for each."""

    graph: Floats
    """Saved for backward by the part."""
    beside: Floats
    """Room for graphs of other parts while the part runs; below 0 if the part does not fit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CostModel:
    """Predicts the seconds and the peak memory of a training step under a plan."""

    counts: ModelCounts
    speeds: Speeds
    device: Literal["cpu", "cuda"] = "cpu"
    """Sets the memory allocator that is modelled, and the rows that the head scores at once."""
    links: Links | None = None
    """The seconds in which FSDP2 gathers weights and reduces gradients; None if every rank holds them whole."""
    beside: Beside | None = None
    """Memory that the step at hand needs besides its parts, if any; its seconds are the same under every plan."""

    @classmethod
    def from_shape(
        cls,
        shape: CountedShape,
        device: Literal["cpu", "cuda"] = "cpu",
        *,
        dtype_bytes: int = 4,
        checkpointing: bool = False,
    ) -> Self:
        """Create a cost model from a shape, with every weight trained.

        Args:
            shape: the model's shape, such as a `ModelShape`.
            device: the device whose speeds are used: "cpu" (two cores) or "cuda" (an H100).
            dtype_bytes: bytes per number in the compute dtype: 4, 8, or 2 under autocast.
            checkpointing: whether every layer keeps only its input and runs forward again in backward.

        Raises:
            ValueError: an unknown device or size.
        """
        described = Device.of_kind(device, dtype_bytes)
        return cls.on(described, shape.counts(dtype_bytes=dtype_bytes, checkpointing=checkpointing))

    @classmethod
    def on(cls, device: Device, counts: ModelCounts, links: Links | None = None) -> Self:
        """Create a cost model from a device's description and a model's counts."""
        return cls(counts=counts, speeds=Speeds.on(device, counts), device=device.kind, links=links)

    def seconds(self, plan: Plan) -> float:
        """Predict the seconds of one training step under a plan, without the optimiser's step."""
        return float(sum(self.seconds_by(plan).values()))

    def seconds_by(self, plan: Plan) -> dict[str, float]:
        """Predict the seconds of one training step by purpose.

        Returns:
            work: the FLOPs of forward and backward divided by their speeds.
            recomputation: the second forward of all tokens that run twice, and of the head if everything is scored
                first.
            passes: the fixed cost of every pass.
            links: the seconds that FSDP's collectives add to the passes.
        """
        layout, parts, speeds, links = plan.layout, plan.num_parts, self.speeds, 0.0
        both, head = self.token_seconds(layout.positions), self.row_seconds * len(layout.rows)
        forward_share = 1 / (1 + speeds.backward_ratio)
        again, without = float(both[plan.is_recomputed_token].sum()) * forward_share, plan.num_prefills
        twice = plan.runs_twice
        if twice.any():
            again += float(both[twice[plan.part_of]].sum()) * forward_share
            again += self.row_seconds * int(twice[plan.part_of[layout.rows]].sum()) / 3  # the head's forward is a third
            without += int(twice.sum())
        if self.links is not None:
            own = self._own_seconds(plan)
            own["score"] = own["score"][twice]  # the other parts are not scored beforehand
            links = float(sum(self.links.added_seconds(*one).sum() for one in own.items()))
        return {
            "work": float(both.sum()) + head,
            "recomputation": again,
            "passes": parts * speeds.graph_pass + without * speeds.forward_pass,
            "links": links,
        }

    def passes(self, plan: Plan) -> Passes:
        """Predict the seconds of each of `plan.events()`. They sum to `seconds`, without passes that only score."""
        own = self._own_seconds(plan)
        if self.links is not None:
            own = {kind: seconds + self.links.added_seconds(kind, seconds) for kind, seconds in own.items()}
        return Passes(plan.kinds, [float(own[event.kind][event.number]) for event in plan.events()])

    def _own_seconds(self, plan: Plan) -> dict[str, Floats]:
        """Predict the seconds of passes without links, one number for each part or prefill.

        The kinds are those of `Plan.events`; "score" has a number for every part, scored beforehand or not.
        """
        layout, parts, speeds = plan.layout, plan.num_parts, self.speeds
        both, forward_share = self.token_seconds(layout.positions), 1 / (1 + speeds.backward_ratio)
        whole = np.bincount(plan.part_of, both, parts)
        heads = self.row_seconds * np.bincount(plan.part_of[layout.rows], minlength=parts)
        again = plan.is_recomputed_token
        prefilled = np.bincount(plan.prefill[plan.part_of[again]], both[again], plan.num_prefills)
        forward = whole * forward_share + heads / 3  # backward makes two products of each of the head's
        return {
            "forward": forward + speeds.graph_pass / 3,
            "backward": whole * (1 - forward_share) + heads * 2 / 3 + speeds.graph_pass * 2 / 3,
            "prefill": prefilled * forward_share + speeds.forward_pass,
            "score": forward + speeds.forward_pass,
        }

    @property
    def hiding_tokens(self) -> int:
        """Tokens of a part whose arithmetic takes as long as its links; 0 without links and on a CPU."""
        seconds = 0.0 if self.links is None else self.links.hidden_beside(self.speeds.backward_ratio)
        return math.ceil(min(seconds / (self.counts.token_flops / self.speeds.layers), 1e9))

    def token_seconds(self, depth: Int64s) -> Floats:
        """Predict the seconds of forward and backward of each token at these depths, without LM head and passes."""
        both = 1 + self.speeds.backward_ratio
        seconds = np.full(len(depth), self.counts.token_flops * both / self.speeds.layers)
        for each, flops in self.counts.flops_by_range.items():
            seconds += flops * both / self.speeds.attention * each.seen(depth)
        return seconds

    @property
    def pass_seconds(self) -> float:
        """Fixed seconds of a forward and backward."""
        return self.speeds.graph_pass

    @property
    def row_seconds(self) -> float:
        """Seconds of a hidden state in the LM head, forward and backward."""
        return 6.0 * self.counts.hidden * self.counts.vocab / self.speeds.head

    def peak_bytes(self, plan: Plan) -> float:
        """Predict the peak bytes of one training step, above model, gradients and optimiser state."""
        return float(sum(self.bytes_by(plan).values()))

    def bytes_by(self, plan: Plan) -> dict[str, float]:
        """Predict the bytes that are alive at the peak, by name.

        kept graphs: tensors saved for backward by the kept ancestors of the running part.
        running graph: tensors saved by the running part; 0 for a pass without graph.
        working: other memory of the pass, in its worst phase (head, layers, end).
        KV cache: keys, values and gradients of exported tokens, and recurrent states where parts attach.
            Its buffers are allocated for the most held at once.
        step: memory held for the whole step: the layout, and summed gradients of embedding and head.
        beside: memory held besides that of the parts (`Beside`).
        allocator: the allocator's overhead on all of these.
        """
        model = self.counts
        if plan.num_parts == 0:
            return dict.fromkeys(
                ("kept graphs", "running graph", "working", "KV cache", "step", "beside", "allocator"), 0.0
            )
        graph, working, path = self._bytes_of_parts(plan)
        above = plan.graphs_beside(graph)
        number = int(np.argmax(above + graph + working))  # the part while which most is alive
        peak = {"kept graphs": above[number], "running graph": graph[number], "working": working[number]}
        if plan.num_prefills:
            prefills, prefills_above = self._prefills(plan, path, above)
            first = int(np.argmax(prefills + prefills_above))
            if prefills[first] + prefills_above[first] > sum(peak.values()):
                peak = {"kept graphs": prefills_above[first], "running graph": 0.0, "working": prefills[first]}
        peak |= {"KV cache": self.cache_bytes(plan), "step": model.step + STEP_TOKEN * plan.layout.num_tokens}
        held, alone = (0.0, 0.0) if self.beside is None else (self.beside.held, self.beside.peak)
        if held + sum(peak.values()) < alone:  # no part is alive then
            peak = dict.fromkeys(peak, 0.0) | {"working": alone - held}
        peak["beside"] = held
        factor, fixed = SLACK[self.device]
        peak["allocator"] = (factor - 1) * sum(peak.values()) + fixed
        return {name: float(value) for name, value in peak.items()}

    def check_beside(self, limit: Bytes) -> None:
        """Raise ValueError if a limit leaves no room for what runs besides the parts."""
        if self.beside is None:
            return
        factor, fixed = SLACK[self.device]
        needed = Bytes(math.ceil(factor * self.beside.peak + fixed))
        if needed.count > limit.count:
            raise ValueError(
                f"budget={limit}: {self.beside.name} alone needs {needed} ({needed.count} bytes) above model, "
                "gradients and optimiser state; give at least that"
            )

    def cache_bytes(self, plan: Plan) -> float:
        """Predict the bytes of keys, values and recurrent states that a plan holds at once, with their gradients."""
        cache = self.counts.cache_token * plan.cached_tokens
        return cache + self.counts.cache_state * plan.cached_states if self.counts.cache_state else cache

    def graphs_within(self, plan: Plan, limit: float) -> "PartBytes":
        """Predict each part's graph, and what remains for graphs of other parts while it runs within a limit."""
        factor, fixed = SLACK[self.device]
        step = self.counts.step + STEP_TOKEN * plan.layout.num_tokens
        step += 0.0 if self.beside is None else self.beside.held
        graph, working, _ = self._bytes_of_parts(plan)
        return PartBytes(graph, (limit - fixed) / factor - step - self.cache_bytes(plan) - graph - working)

    def _bytes_of_parts(self, plan: Plan) -> tuple[Floats, Floats, Int64s]:
        """Predict each part's graph and the bytes beside it at its worst moment; and the tokens of the path above."""
        model, layout = self.counts, plan.layout
        rows = np.bincount(plan.part_of[layout.rows], minlength=plan.num_parts)
        path = np.where(plan.attach >= 0, layout.positions[plan.attach] + 1, 0)  # its keys are read, and have gradients
        # A head row saves its hidden state and its edges' scores for backward.
        row_bytes = model.hidden * model.dtype_bytes + 4 * self.counts.wide_bytes
        graph = np.asarray(model.saved_pass + model.saved_token * plan.sizes + row_bytes * rows, np.float64)
        return graph, self._working(plan.sizes, rows, path, graph), path

    def again_seconds(self, plan: Plan) -> Floats:
        """Predict the seconds that it takes to run each part once more, for its scores, without graph."""
        seconds = self._own_seconds(plan)["score"]
        return seconds if self.links is None else seconds + self.links.added_seconds("forward", seconds)

    def _working(self, tokens: Int64s, rows: Int64s, path: Int64s, graph: Floats) -> Floats:
        """Predict the bytes [P] beside each part's graph at the worst moment of its passes; all arguments are [P]."""
        model = self.counts
        gradient = self.counts.wide_bytes * model.hidden  # of a hidden state
        head = np.where(rows > 0, model.head_pass + gradient * rows + self._logits(rows), 0.0)
        # With checkpointing, one layer's graph at a time is rebuilt in addition to the saved inputs.
        layer = model.backward_token + (model.saved_layer if model.checkpointing else 0)
        layers = model.weight_gradient + layer * tokens + model.cache_layer * path
        end = 2 * gradient * tokens - graph  # the graph has been freed
        return np.maximum(np.maximum(head, layers), end)

    def _logits(self, rows: Int64s) -> Floats:
        """Predict the bytes of the logits of a chunk of rows, with their gradients."""
        chunk = np.minimum(rows, head_chunk_rows(self.counts.vocab, self.device))  # no more logits live at once
        return self.counts.vocab * self.counts.logit * chunk.astype(np.float64)

    def _prefills(self, plan: Plan, path: Int64s, above: Floats) -> tuple[Floats, Floats]:
        tokens = np.bincount(plan.prefill[plan.part_of[plan.is_recomputed_token]], minlength=plan.num_prefills)
        top = np.array([plan.prefill_parts(number)[0] for number in range(plan.num_prefills)], np.int64)
        # A loss that is not linear in the log-probabilities is scored in prefills too.
        scored = plan.layout.rows[plan.is_recomputed_token[plan.layout.rows]]
        rows = np.bincount(plan.prefill[plan.part_of[scored]], minlength=plan.num_prefills)
        alone = self.counts.forward_token * tokens + self.counts.cache_layer * path[top]
        return alone + self._logits(rows), above[top]
