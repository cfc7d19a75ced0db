"""Sizes of plain decoders, for planning and dispatch without a model."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from treetrain.core.errors import UnsupportedModel, expect, nearest
from treetrain.core.planning.cost import WIDE, CostModel, ModelCounts
from treetrain.core.planning.make import Bytes
from treetrain.core.planning.make import make_plan as make_plan_of
from treetrain.core.planning.plan import Plan
from treetrain.core.tree.layout import FULL, PackedLayout
from treetrain.core.tree.token_tree import Row, TokenTree
from treetrain.explain import Explained


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
        b = dtype_bytes
        wide = max(WIDE, dtype_bytes)
        hidden = self.hidden
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


def cost_of_shape(cost: CostModel | ModelShape | str) -> CostModel:
    """Return a cost model, or make one by formula on a CPU from a shape or its name."""
    if not hasattr(cost, "seconds"):  # prices of one's own have the same methods
        expect("cost", cost, (ModelShape, str), "a CostModel, a ModelShape or its name, such as qwen3-8b")
    return CostModel.from_shape(ModelShape.of(cost)) if isinstance(cost, ModelShape | str) else cost


def make_plan(
    rows: Sequence[Row] | TokenTree | PackedLayout,
    cost: CostModel | ModelShape | str,
    *,
    budget: int | str | Bytes | None = None,
    free_bytes: int | None = None,
) -> Plan:
    """Find a fast plan for a batch within a budget; `plan.explain()` describes it.

    Args:
        rows: the batch: K rows (trajectories, or lists or arrays of token ids), their tree, or a packed layout. For
            rows and trees, the plan covers the tokens that their trained predictions need.
        cost: a cost model; or, for a cost model by formula, a model's shape or its name ("qwen3-8b", see
            `ModelShape.named`).
        budget: tokens whose graph may be alive at once (int), or bytes above model, gradients and optimiser state
            ("8GiB"). None makes parts of a size that runs well if that needs no recomputation, bounded only by
            `free_bytes`.
        free_bytes: free bytes of the device, used without a budget.

    Raises:
        ValueError: an invalid or too small budget, or an unknown shape name.
        DataError: invalid rows.
    """
    return make_plan_of(rows, cost_of_shape(cost), budget=budget, free_bytes=free_bytes, purpose=Explained)
