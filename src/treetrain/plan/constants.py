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

from treetrain.plan.cost import ModelShape

HEAD_CHUNK_LOGITS = 1 << 23
"""Logits that the head makes at once, within the bounds of `head_chunk_rows`."""
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
            chunk_rows=head_chunk_rows(shape.vocab),
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


def head_chunk_rows(vocab: int) -> int:
    """Rows whose logits the head makes at once (the engine's head takes the same)."""
    return max(64, min(2048, HEAD_CHUNK_LOGITS // vocab))


def saved_layer_token(shape: ModelShape, b: int) -> int:
    """Bytes that one layer saves per token: RMS norms in float32, norms on queries and keys, a gated MLP.

    Each norm keeps its input in float32, the normed input and the output; queries and keys are kept raw (float32, for
    their norms), normed and rotated; values, attention's output and log-sum-exp; the MLP's gate, its activation, the
    up projection and their product. A family without norms on queries and keys keeps 4 (H + G) d + (H + G) d b less.
    """
    d_model, q, k = shape.hidden, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    narrow = 4 * d_model + 3 * q + 3 * k + 4 * shape.intermediate
    wide = 2 * d_model + q + k + 2 * shape.heads + shape.kv_heads + 2
    return narrow * b + wide * max(WIDE, b)


def _memory(shape: ModelShape, b: int, checkpointing: bool) -> dict[str, float]:
    wide = max(WIDE, b)
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    layer = saved_layer_token(shape, b)
    final = shape.hidden * (wide + 2 * b) + 2 * shape.head_dim * b  # the last norm; cosines and sines
    # A backward frees what it has used, so that little stands beside the graph: gradients of the residual stream.
    working = 3 * b * shape.hidden
    matrix = shape.vocab * shape.hidden
    largest = b * shape.hidden * max(shape.intermediate, q)
    return {
        "saved_token": float((shape.layers * shape.hidden * b if checkpointing else shape.layers * layer) + final),
        "saved_row": float(b * shape.hidden + 4 * wide),
        "saved_pass": 0.0,
        "layer_token": float(working + (layer if checkpointing else 0)),
        "layer_pass": float(largest),
        "head_row": float(wide * shape.hidden),
        "head_chunk_row": float(shape.vocab * (2 * wide + (b if b < wide else 0))),
        "head_pass": float(matrix * b if b < wide else 0),
        "end_token": float(2 * wide * shape.hidden),
        "end_pass": 0.0,
        "forward_token": float(b * (4 * shape.hidden + 3 * shape.intermediate)),
        "carry_token": float(shape.layers * 2 * kv * (b + wide)),
        "path_token": float(2 * kv * (b + wide)),
        "step_token": 200.0,
        "step_bytes": float(matrix * wide * (1 if shape.tied else 2)),
    }
