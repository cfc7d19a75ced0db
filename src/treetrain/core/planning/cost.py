"""Costs of a model: its counts (FLOPs, parameters, bytes), and the seconds and peak bytes of a plan. Numpy only.

The numbers come from the model itself, counted layer by layer (``models/costs.py``), or from the sizes of a plain
decoder (`ModelShape`), for planning without a model.

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

Under FSDP every pass gathers the weights, and a backward also reduces their gradients. A GPU does both beside the
arithmetic, except for the first layer's share. So a pass takes the longer of the two, plus that share, and parts are
made large enough to hide the links. On a CPU the same cores send and compute, so the times add up.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from treetrain.core.errors import UnsupportedModel, expect, nearest
from treetrain.core.planning.devices import HEAD_CHUNK_LOGITS, HEAD_CHUNK_ROWS, SLACK, Collective, Device, Group
from treetrain.core.planning.plan import Bytes, Passes, Plan, heights
from treetrain.core.tree.layout import FULL, AttentionRange, Pairs, pairs_at
from treetrain.core.tree.token_tree import Int64s, Row, TokenTree, as_tree

if TYPE_CHECKING:
    from treetrain.models.work import TreeStats

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


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """The sizes of a plain decoder: full attention and gated MLPs in every layer, as in Llama, Qwen3 and Qwen3-MoE."""

    layers: int
    hidden: int
    """Width of the residual stream."""
    intermediate: int
    """Inner width of the MLP, or of each expert."""
    heads: int
    """Query heads."""
    kv_heads: int
    """Key/value heads; a divisor of `heads`."""
    head_dim: int
    vocab: int
    tied: bool
    """Whether LM head and embedding share one matrix. This changes the memory, not the FLOPs."""
    experts: int = 0
    """Experts in every layer; 0 for an MLP that all tokens go through."""
    experts_per_token: int = 0

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "intermediate", "heads", "kv_heads", "head_dim", "vocab"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise UnsupportedModel(f"model shape: {name} is {value!r}, expected a positive whole number")
        uneven = self.heads % self.kv_heads or bool(self.experts) != bool(self.experts_per_token)
        if uneven or self.experts_per_token > self.experts:
            raise UnsupportedModel(
                f"model shape: {self.heads} heads on {self.kv_heads} key/value heads, {self.experts_per_token} experts "
                f"per token of {self.experts}; expected a divisor of the heads, and no more than the experts"
            )

    @classmethod
    def named(cls, name: str) -> Self:
        """Look up a well-known shape, for planning without a model.

        Args:
            name: qwen3-0.6b, qwen3-1.7b, qwen3-4b, qwen3-8b, qwen3-14b, qwen3-32b, qwen3-30b-a3b, qwen3-235b-a22b or
                llama-3.1-8b.

        Raises:
            ValueError: any other name.
        """
        if name.lower() not in _NAMED:
            raise ValueError(f"no model shape is named {name!r}; {nearest(name, _NAMED)}")
        sizes = ("layers", "hidden", "intermediate", "heads", "kv_heads", "head_dim", "vocab")
        *numbers, tied, experts, chosen = _NAMED[name.lower()]
        return cls(**dict(zip(sizes, numbers)), tied=bool(tied), experts=experts, experts_per_token=chosen)

    @staticmethod
    def names() -> tuple[str, ...]:
        """The names that `named` knows."""
        return tuple(_NAMED)

    @classmethod
    def of(cls, shape: "ModelShape | str") -> "ModelShape":
        """Return a shape, or look one up by its name."""
        return cls.named(shape) if isinstance(shape, str) else shape

    @property
    def layer_parameters(self) -> int:
        """Parameters of one layer's matrices: query, key, value, output, the router, and the three of each MLP."""
        attention = 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)
        return attention + self.experts * self.hidden + max(1, self.experts) * self._mlp_parameters

    @property
    def _mlp_parameters(self) -> int:
        return 3 * self.hidden * self.intermediate

    @property
    def parameters(self) -> int:
        """Parameters of all matrices, the embedding included; norms and biases (under 0.1%) are left out."""
        return self.layers * self.layer_parameters + (1 if self.tied else 2) * self.vocab * self.hidden

    def counts(self, *, dtype_bytes: int = 4, checkpointing: bool = False) -> ModelCounts:
        """Count a model of this shape with every weight trained.

        A layer saves per token: for each of its two norms, the float32 input, the normed input and the output; for
        attention, queries and keys (in float32 before their norms, after them, and rotated), values, output and
        log-sum-exp; for the MLP, gate, activation, up projection and the product of the last two.

        Raises:
            ValueError: `dtype_bytes` is not 2, 4 or 8.
        """
        if dtype_bytes not in (2, 4, 8):
            raise ValueError(f"dtype_bytes={dtype_bytes!r}: numbers of 2, 4 or 8 bytes are known")
        b, wide, hidden = dtype_bytes, max(WIDE, dtype_bytes), self.hidden
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        norms = 2 * (2 * hidden * b + (hidden + 1) * wide)
        attention = 3 * (queries + keys) * b + (queries + keys + 2 * self.heads + self.kv_heads) * wide
        used = max(1, self.experts_per_token)
        idle = max(0, self.experts - used) * self._mlp_parameters
        copies = 2 * hidden * b * self.experts_per_token  # a token's states, sorted by expert, and each expert's output
        layer, matrix = norms + attention + 4 * used * self.intermediate * b + copies, self.vocab * hidden
        cached = 2 * keys * (b + wide)
        return ModelCounts(
            layers=self.layers,
            hidden=hidden,
            vocab=self.vocab,
            parameters=self.parameters,
            parameters_in_layers=self.layers * self.layer_parameters,
            dtype_bytes=b,
            checkpointing=checkpointing,
            heads=self.heads,
            kv_heads=self.kv_heads,
            experts=self.experts,
            experts_per_token=self.experts_per_token,
            expert_parameters=self.layers * self.experts * self._mlp_parameters,
            token_flops=2 * self.layers * (self.layer_parameters - idle),
            flops_by_range={FULL: 4 * self.layers * queries},
            saved_layers=self.layers * layer,
            saved_layer=layer,
            saved_outside=hidden * (wide + 2 * b) + 2 * self.head_dim * b,  # the last norm; cosines and sines
            # Backward frees the graph as it goes, so it adds little: gradients of the residual stream.
            backward_token=3 * b * hidden,
            weight_gradient=hidden * max((2 * self.experts or 1) * self.intermediate, queries) * b,
            forward_token=4 * hidden * b + 3 * used * self.intermediate * b + copies,
            cache_token=self.layers * cached,
            cache_layer=cached,
            logit=2 * wide + (b if b < wide else 0),
            head_pass=matrix * b if b < wide else 0,
            step=matrix * wide * (1 if self.tied else 2),
        )


def stats(rows: Sequence[Row] | TokenTree, shape: ModelCounts | ModelShape | str | None = None) -> "TreeStats":
    """Compute how many tokens a batch shares, where, and the ideal speed-up.

    Args:
        rows: the batch, K rows (trajectories, or lists or arrays of token ids) or their tree.
        shape: a model's counts or shape, or a shape's name ("qwen3-8b"), for the speed-ups in FLOPs; None leaves
            them out.

    Raises:
        DataError: invalid rows.
        ValueError: an unknown shape name.
    """
    from treetrain.models.work import tree_stats

    shape = ModelShape.of(shape) if isinstance(shape, str) else shape
    return tree_stats(as_tree(rows), shape.counts() if isinstance(shape, ModelShape) else shape)


# layers, hidden, intermediate, heads, kv_heads, head_dim, vocab, tied, experts, experts per token: the published
# config.json files.
_NAMED = {
    "qwen3-0.6b": (28, 1024, 3072, 16, 8, 128, 151936, True, 0, 0),
    "qwen3-1.7b": (28, 2048, 6144, 16, 8, 128, 151936, True, 0, 0),
    "qwen3-4b": (36, 2560, 9728, 32, 8, 128, 151936, True, 0, 0),
    "qwen3-8b": (36, 4096, 12288, 32, 8, 128, 151936, False, 0, 0),
    "qwen3-14b": (40, 5120, 17408, 40, 8, 128, 151936, False, 0, 0),
    "qwen3-32b": (64, 5120, 25600, 64, 8, 128, 151936, False, 0, 0),
    "qwen3-30b-a3b": (48, 2048, 768, 32, 4, 128, 151936, False, 128, 8),
    "qwen3-235b-a22b": (94, 4096, 1536, 64, 4, 128, 151936, False, 128, 8),
    "llama-3.1-8b": (32, 4096, 14336, 32, 8, 128, 128256, False, 0, 0),
}


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


class Sharding(NamedTuple):
    """How ranks hold weights: in shards, of which there may be several copies."""

    shards: Group
    """The ranks that together hold one copy."""
    copies: Group
    """The ranks that hold the same shard of different copies."""


class WeightCollectives(NamedTuple):
    """The collectives by which ranks gather sharded weights and reduce their gradients."""

    gather_layers: list[Collective]
    """The weights of the layers: in every pass."""
    gather_ends: list[Collective]
    """Embedding, head and last norm, which stay gathered from the first forward to the next backward."""
    reduce: list[Collective]
    """All gradients: in a backward."""

    @classmethod
    def of(cls, counts: ModelCounts, sharding: Sharding, experts: Sharding) -> Self:
        """The collectives of a rank with these counts.

        FSDP2 calls one collective for each layer, and one for embedding, head and last norm. It gathers weights in the
        compute dtype and reduces gradients in float32 or wider. Copies then add up their shards of the gradients.
        Experts may be divided over some of the ranks first, so they have groups of their own.
        """
        b, wide, layers = counts.dtype_bytes, counts.wide_bytes, counts.layers
        in_experts, ends = counts.expert_parameters, counts.parameters - counts.parameters_in_layers
        rest, expert_calls = counts.parameters_in_layers - in_experts, layers if in_experts else 0
        shards, expert_shards = sharding.shards.size, experts.shards.size
        # Whole weights (DDP) are reduced in one call.
        copy_calls = layers + 1 if shards > 1 else 1
        return cls(
            gather_layers=[
                Collective("all-gather", sharding.shards, b * rest, layers),
                Collective("all-gather", experts.shards, b * in_experts, expert_calls),
            ],
            gather_ends=[Collective("all-gather", sharding.shards, b * ends)],
            reduce=[
                Collective("reduce-scatter", sharding.shards, wide * (rest + ends), layers + 1),
                Collective("reduce-scatter", experts.shards, wide * in_experts, expert_calls),
                Collective("all-reduce", sharding.copies, wide * (rest + ends) / shards, copy_calls),
                Collective("all-reduce", experts.copies, wide * in_experts / expert_shards, expert_calls),
            ],
        )

    def links(self, device: Device, layers: int) -> "WeightLinks | None":
        """The seconds of these collectives; None if every rank holds the weights whole."""
        if self.gather_ends[0].group.size == 1:
            return None
        gather = sum(each.seconds(device) for each in self.gather_layers)
        return WeightLinks(
            forward=gather + sum(each.seconds(device) for each in self.gather_ends),
            backward=gather,
            reduce=sum(each.seconds(device) for each in self.reduce),
            not_hidden=1.0 if device.kind == "cpu" else 1 / layers,
        )


class WeightLinks(NamedTuple):
    """Seconds that FSDP's collectives take in each pass."""

    forward: float
    """Seconds of gathering all weights."""
    backward: float
    """Seconds of gathering the layers' weights again."""
    reduce: float
    """Seconds of reducing all gradients, in a backward."""
    not_hidden: float
    """The share of these seconds that cannot run beside arithmetic: the first layer's, 1 / layers; 1 on a CPU."""

    def added_seconds(self, kind: str, seconds: Floats, *, reduces: bool = True) -> Floats:
        """Seconds that the links add to passes of a kind that take `seconds` by themselves."""
        sent = self.backward + self.reduce * reduces if kind == "backward" else self.forward
        return sent - (1 - self.not_hidden) * np.minimum(seconds, sent)


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
    """What is left for graphs of other parts while the part runs; below 0 if the part does not fit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CostModel:
    """Predicts the seconds and the peak memory of a training step under a plan."""

    counts: ModelCounts
    speeds: Speeds
    device: Literal["cpu", "cuda"] = "cpu"
    """Sets the memory allocator that is modelled, and the rows that the head scores at once."""
    links: WeightLinks | None = None
    """The seconds in which FSDP2 gathers weights and reduces gradients; None if every rank holds them whole."""
    beside: Beside | None = None
    """What the step at hand needs besides its parts, if anything; its seconds are the same under every plan."""

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
        """Return a cost model, or make one by formula on a CPU from a shape or its name."""
        if not hasattr(cost, "seconds"):  # prices of one's own have the same methods
            expect("cost", cost, (ModelShape, str), "a CostModel, a ModelShape or its name, such as qwen3-8b")
        return cls.from_shape(ModelShape.of(cost)) if isinstance(cost, ModelShape | str) else cost

    @classmethod
    def on(cls, device: Device, counts: ModelCounts, *, shards: int = 1, copies: int = 1) -> Self:
        """Create a cost model from a device's description and a model's counts.

        Args:
            shards: ranks that together hold one copy of the weights (FSDP2); 1 if every rank holds them whole.
            copies: copies of the sharded weights (hybrid sharding).
        """
        sharding = Sharding(device.group(shards), device.group(copies, shards))
        links = WeightCollectives.of(counts, sharding, sharding).links(device, counts.layers)
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
            again += self.row_seconds * int(twice[plan.part_of[layout.rows]].sum()) / 3
            without += int(twice.sum())
        if self.links is not None:
            own = self._own_seconds(plan)
            own["score"] = own["score"][twice]
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
        forward = whole * forward_share + heads / 3
        return {
            "forward": forward + speeds.graph_pass / 3,
            "backward": whole * (1 - forward_share) + heads * 2 / 3 + speeds.graph_pass * 2 / 3,
            "prefill": prefilled * forward_share + speeds.forward_pass,
            "score": forward + speeds.forward_pass,
        }

    @property
    def hiding_tokens(self) -> int:
        """Tokens of a part whose arithmetic takes as long as its links; 0 without links and on a CPU."""
        if self.links is None or self.links.not_hidden == 1:
            return 0
        forward = self.counts.token_flops / self.speeds.layers
        backward = self.links.backward + self.links.reduce
        tokens = max(self.links.forward, backward / self.speeds.backward_ratio) / forward
        return math.ceil(min(tokens, 1e9))

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
        number = int(np.argmax(above + graph + working))
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
        path = np.where(plan.attach >= 0, layout.positions[plan.attach] + 1, 0)
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
        chunk = np.minimum(rows, head_chunk_rows(self.counts.vocab, self.device))
        return self.counts.vocab * self.counts.logit * chunk.astype(np.float64)

    def _prefills(self, plan: Plan, path: Int64s, above: Floats) -> tuple[Floats, Floats]:
        """Predict the bytes of each prefill, and of the kept graphs above it."""
        tokens = np.bincount(plan.prefill[plan.part_of[plan.is_recomputed_token]], minlength=plan.num_prefills)
        top = np.array([plan.prefill_parts(number)[0] for number in range(plan.num_prefills)], np.int64)
        # A loss that is not linear in the log-probabilities is scored in prefills too.
        scored = plan.layout.rows[plan.is_recomputed_token[plan.layout.rows]]
        rows = np.bincount(plan.prefill[plan.part_of[scored]], minlength=plan.num_prefills)
        alone = self.counts.forward_token * tokens + self.counts.cache_layer * path[top]
        return alone + self._logits(rows), above[top]


def budget_share(plan: Plan, counts: ModelCounts, budget: int) -> float:
    """Divide the FLOPs of a step without recomputation by the least that a budget in tokens allows; at most 1."""
    layout = plan.layout
    again = layout.positions[heights(layout) > budget]
    once = counts.flops(layout.num_tokens, counts.pairs_at(layout.positions), len(layout.rows))
    return once / (once + counts.flops(len(again), counts.pairs_at(again), 0) / 3) if once else 1.0
