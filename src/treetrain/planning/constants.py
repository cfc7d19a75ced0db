"""What a device and the layers of a model cost: the numbers that the cost model multiplies counts with.

Two ways to get them: `Constants.from_shape`, whose formulas are written out below and whose speeds are those of one
machine, and a short measurement on the user's own model and device (``engine/calibrate.py``).

Shape letters: D hidden size, F width of the MLP, H query heads, G key/value heads, d head size, V vocabulary,
b bytes of an entry in the model's dtype.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, Self

from treetrain.planning.blocks import DELTA_CHUNK, Attention, Experts, GatedDelta, Layers, Mixer, Mlp, ShortConvolution
from treetrain.planning.cost import ModelShape

HEAD_CHUNK_LOGITS = {"cpu": 1 << 23, "cuda": 1 << 28}
"""Logits that the head makes at once, within the bounds of `HEAD_CHUNK_ROWS`: what a CPU's cache can do something with;
on a GPU so many that reading the head's matrix and adding to its gradient, once for each chunk, are small beside the
products (1,766 rows of a vocabulary of 151,936)."""
HEAD_CHUNK_ROWS = {"cpu": (64, 2048), "cuda": (64, 8192)}
"""Fewest and most rows of a chunk."""
WIDE = 4
"""Bytes of float32, in which log-probabilities, entropies and accumulators are kept."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Constants:
    """Speeds in FLOP/s, bytes/s and seconds; memory in bytes, above model, gradients and optimiser state.

    A *pass* is one call of the model: with graph (a forward and its backward) or without. Memory is linear in the
    tokens and head rows of a pass within each phase of it; the phases are named below.
    """

    matrix_flops: float
    """Speed of a layer's forward, all of it: its matrices' FLOPs over its time."""
    backward_ratio: float
    """Time of a layer's backward over that of its forward: 2, with checkpointing 3, less where weights are frozen."""
    pair_flops: float
    """Speed of attention over (query, key) pairs, forward and backward."""
    head_flops: float
    """Speed of the LM head with its softmax, forward and backward."""
    bandwidth: float
    """Bytes read or written per second."""
    graph_pass_bytes: float
    """Bytes moved by a pass with graph whatever its length: weights read twice, gradients written and added up."""
    forward_pass_bytes: float
    """Bytes moved by a pass without graph: the layers' weights, read once."""
    graph_pass_seconds: float
    """What a pass with graph costs besides: launches, Python, autograd."""
    forward_pass_seconds: float
    """The same for a pass without graph."""

    saved_token: float
    """A graph: bytes saved for backward per token."""
    saved_row: float
    """Per head row: the hidden state and what its edges keep."""
    saved_pass: float
    """Per pass."""
    layer_token: float
    """The backward of a layer: bytes beside the graph per token."""
    layer_pass: float
    """Per pass: the largest gradient of a weight before it is added up."""
    head_row: float
    """The LM head: bytes beside the graph per row, those of its hidden state's gradient."""
    head_chunk_row: float
    """Per row of a chunk: logits and their gradient."""
    head_pass: float
    """Per pass: what a 16-bit head needs before its gradient is added up."""
    chunk_rows: int
    """Rows of a chunk."""
    end_token: float
    """The end of a backward, when the graph is gone: bytes per token."""
    end_pass: float
    """Per pass."""
    forward_token: float
    """A pass without graph: bytes per token, at its widest layer."""
    carry_token: float
    """The carry: bytes per row, keys, values and the accumulators of their gradients, all layers."""
    carry_state: float
    """The carry of recurrent layers: bytes of the states after one token, with the accumulators of their gradients."""
    path_token: float
    """Attention over the carry: bytes per token of the path, in one layer."""
    step_token: float
    """Per computed token, the whole step long: the layout, positions, log-probabilities."""
    step_bytes: float
    """Per step: the sums of the embedding's and the head's gradients over all passes."""
    slack: float
    """What the process takes over what tensors ask for, as a factor: blocks that the allocator cannot use again."""
    slack_bytes: float
    """The same, whatever the size: libraries' own buffers, and large blocks that find no gap of their size."""

    source: str
    """Where the numbers are from."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name == "source":
                continue
            low = 1 if field.name in _POSITIVE else 0
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < low:
                raise ValueError(f"constants: {field.name} is {value!r}, expected a number from {low}")

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON data."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """The reverse of `as_dict`. Raises ValueError for other keys and for values out of range."""
        names = {field.name for field in dataclasses.fields(cls)}
        if set(data) != names:
            raise ValueError(f"constants: unlike keys {', '.join(sorted(set(data) ^ names))}")
        return cls(**data)

    @classmethod
    def from_shape(
        cls,
        shape: ModelShape,
        device: Literal["cpu", "cuda"] = "cpu",
        *,
        dtype_bytes: int = 4,
        checkpointing: bool = False,
    ) -> Self:
        """Constants by formula, every weight trained.

        Args:
            shape: the model.
            device: whose speeds to take; see `SPEEDS`.
            dtype_bytes: b, of the arithmetic (2 under autocast).
            checkpointing: every layer keeps its input alone and is run forward again in backward.

        Raises:
            ValueError: another device or dtype.
        """
        if device not in SPEEDS or dtype_bytes not in (2, 4, 8):
            raise ValueError(
                f"device={device!r}, dtype_bytes={dtype_bytes!r}: known are {', '.join(SPEEDS)} with 2, 4 or 8 bytes"
            )
        speed = SPEEDS[device]
        rate = speed.flops * min(1.0, 4 / dtype_bytes) * (speed.narrow if dtype_bytes == 2 else 1.0)
        memory = _memory(shape, dtype_bytes, checkpointing)
        head, layers = shape.vocab * shape.hidden * dtype_bytes, shape.layer_weights * dtype_bytes
        return cls(
            matrix_flops=rate,
            backward_ratio=3.0 if checkpointing else 2.0,
            pair_flops=rate * speed.pairs,
            head_flops=rate,
            bandwidth=speed.bandwidth,
            graph_pass_bytes=layers * (7.0 if checkpointing else 6.0) + head * 4.0,
            forward_pass_bytes=layers,
            graph_pass_seconds=shape.layers * speed.layer_pass,
            forward_pass_seconds=shape.layers * speed.layer_pass * 0.7,
            chunk_rows=head_chunk_rows(shape.vocab, device),
            **memory,
            **_SLACK[device],
            source=f"formula, {speed.name}",
        )


_POSITIVE = ("matrix_flops", "pair_flops", "head_flops", "bandwidth", "chunk_rows", "slack")


class Speed(NamedTuple):
    """The speeds of a device, float32."""

    name: str
    flops: float
    """Of matrices with all that stands between them."""
    narrow: float
    """16-bit over float32."""
    pairs: float
    """Attention over matrices."""
    bandwidth: float
    layer_pass: float
    """Fixed seconds of one layer's forward and backward."""


SPEEDS = {
    "cpu": Speed("two cores of a small CPU", 1.05e11, 0.8, 1.2, 1.0e10, 1.0e-3),
    "cuda": Speed("published figures of an H100, not measured", 5.0e13, 8.0, 0.6, 2.5e12, 4.0e-4),
}
"""Measured (cpu) on the machine of benchmarks/results; calibration measures the user's own."""


_SLACK = {"cpu": {"slack": 1.17, "slack_bytes": 8e6}, "cuda": {"slack": 1.05, "slack_bytes": 0.0}}
"""What a process takes over its tensors. cpu: fitted to measured peaks (benchmarks/results/memory.csv) with glibc 2.36:
before 2.38 a freed aligned block is not found again for a request of its own size, and every tensor is such a block.
The tensors themselves are predicted within a tenth (a test counts them). cuda: not measured."""


def head_chunk_rows(vocab: int, device: str = "cpu") -> int:
    """Rows whose logits the head makes at once on a kind of device; on one that is not listed, as on a CPU."""
    device = device if device in HEAD_CHUNK_LOGITS else "cpu"
    least, most = HEAD_CHUNK_ROWS[device]
    return max(least, min(most, HEAD_CHUNK_LOGITS[device] // vocab))


def saved_layer_token(kind: Layers, hidden: int, b: int) -> int:
    """Bytes that one layer saves per token: RMS norms in float32, its mixer, its feed-forward block.

    Each norm keeps its input in float32, the normed input and the output (a LayerNorm keeps less). An MLP keeps its
    gate, the activation, the up projection and their product; one that is not gated, what is before and behind the
    activation.
    """
    norms = kind.norms * (2 * hidden * b + (hidden + 1) * max(WIDE, b))
    if isinstance(kind.feed, Mlp):
        feed = (4 if kind.feed.matrices == 3 else 2) * kind.feed.width * b
    else:
        feed = _saved_experts(kind.feed, b)
    return norms + _saved_mixer(kind.mixer, b) + feed


def _saved_mixer(mixer: Mixer, b: int) -> int:
    if isinstance(mixer, ShortConvolution):  # gates and values, what the convolution reads and gives, their product
        return 6 * mixer.channels * b
    return _saved_attention(mixer, b) if isinstance(mixer, Attention) else _saved_delta(mixer, b)


def _saved_attention(mixer: Attention, b: int) -> int:
    """Queries and keys raw (float32, for their norms), normed and rotated; values, output and log-sum-exp.

    A family without norms on queries and keys keeps 4 (H + G) d + (H + G) d b less.
    """
    q, k = mixer.heads * mixer.key_size, mixer.kv_heads * mixer.key_size
    values, out = mixer.kv_heads * mixer.value_size, mixer.heads * mixer.value_size
    return (2 * q + 2 * k + values + out) * b + (q + k + 2 * mixer.heads + mixer.kv_heads) * max(WIDE, b)


def _saved_delta(mixer: GatedDelta, b: int) -> int:
    """The rule keeps five products of a tile's tokens with each other per value head, in float32, and what they are
    made of; fitted to measurements over twelve shapes (within 3% of each)."""
    wide, heads, k, v = max(WIDE, b), mixer.value_heads, mixer.key_size, mixer.value_size
    rule = heads * (5 * DELTA_CHUNK + 3 * k + 7 * v + 8) * wide + heads * 6 * v * b
    return rule + mixer.key_heads * k * (16 * wide + 2 * b)


def _saved_experts(feed: Experts, b: int) -> int:
    """Per expert of a token its input, its output as it is and weighed, what is between, and their places."""
    wide = max(WIDE, b)
    each = (3 * feed.hidden + feed.kept * feed.width) * b + 8 + wide
    return feed.run * (each + 12) + feed.count * wide + 4 * feed.shared * b


def _memory(shape: ModelShape, b: int, checkpointing: bool) -> dict[str, float]:
    wide = max(WIDE, b)
    layers = [(kind, saved_layer_token(kind, shape.hidden, b)) for kind in shape.kinds]
    saved = sum(kind.count * layer for kind, layer in layers)
    final = shape.hidden * (wide + 2 * b) + 2 * shape.head_dim * b  # the last norm; cosines and sines
    # A backward frees what it has used, so that little stands beside the graph: gradients of the residual stream.
    working = 3 * b * shape.hidden
    matrix = shape.vocab * shape.hidden
    states, tails = shape.state_entries
    rows = [(kind.count, _carry_row(kind.mixer, b)) for kind in shape.kinds if isinstance(kind.mixer, Attention)]
    return {
        "saved_token": float((shape.layers * shape.hidden * b if checkpointing else saved) + final),
        "saved_row": float(b * shape.hidden + 4 * wide),
        "saved_pass": 0.0,
        "layer_token": float(working + (max(layer for _, layer in layers) if checkpointing else 0)),
        "layer_pass": float(max(_largest_matrix(kind, shape.hidden) for kind in shape.kinds) * b),
        "head_row": float(wide * shape.hidden),
        "head_chunk_row": float(shape.vocab * (2 * wide + (b if b < wide else 0))),
        "head_pass": float(matrix * b if b < wide else 0),
        "end_token": float(2 * wide * shape.hidden),
        "end_pass": 0.0,
        "forward_token": float(4 * shape.hidden * b + max(_forward_peak(kind, b) for kind in shape.kinds)),
        "carry_token": float(sum(count * row for count, row in rows)),
        "carry_state": float(states * 2 * wide + tails * (b + wide)),
        "path_token": float(max((row for _, row in rows), default=0)),
        "step_token": 200.0,
        "step_bytes": float(matrix * wide * (1 if shape.tied else 2)),
    }


def _carry_row(mixer: Attention, b: int) -> int:
    """One token's keys and values in one layer, and the accumulators of their gradients."""
    return mixer.kv_heads * (mixer.key_size + mixer.value_size) * (b + max(WIDE, b))


def _largest_matrix(kind: Layers, hidden: int) -> int:
    """Entries of the largest weight whose gradient a layer's backward makes at once."""
    feed = kind.feed
    widest = feed.width if isinstance(feed, Mlp) else max(2 * feed.count * feed.width, feed.shared)
    mixer = kind.mixer
    if isinstance(mixer, Attention):
        out = mixer.heads * mixer.key_size
    else:
        out = 3 * mixer.channels if isinstance(mixer, ShortConvolution) else mixer.channels
    return hidden * max(widest, out)


def _forward_peak(kind: Layers, b: int) -> float:
    """Bytes per token beside the residual stream, in a layer's forward without graph."""
    feed = kind.feed
    inner = 3 * feed.width * b if isinstance(feed, Mlp) else feed.run * (2 * feed.hidden + 3 * feed.width) * b
    return max(inner, 0.8 * _saved_delta(kind.mixer, b) if isinstance(kind.mixer, GatedDelta) else 0)
