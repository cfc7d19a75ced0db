"""Counts what operators do: FLOPs, and the storages that are alive, with stand-ins for what need not be computed."""

import weakref
from collections import Counter
from collections.abc import Hashable, Sequence
from typing import Any

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from treetrain.core.attention.kv_cache import AttentionCall
from treetrain.core.attention.schedule import PLAIN_ATTENTION
from treetrain.core.planning.cost import WIDE
from treetrain.core.tree.layout import AttentionRange, PackedLayout
from treetrain.layers.recurrence.paths import Paths, Rule

Tallied = str | tuple[str, AttentionRange]
"""The key of a sum: a name, or FLOPs of attention with the range that its layer sees."""


class CountStorages(TorchDispatchMode):
    """Counts every storage that an operator makes in the block, while it lives."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        """Bytes alive at this moment."""
        self.peak = 0
        """Most bytes that were alive at once; set it to `now` to start again."""
        self._alive: dict[int, int] = {}

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        given = {_key(t) for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and _key(tensor) not in given and self.counts(tensor):
                self.add(tensor)
        return out

    def counts(self, tensor: Shaped[Tensor, " ..."]) -> bool:
        """Whether a new tensor is counted; a subclass may leave some out."""
        return True

    def add(self, tensor: Shaped[Tensor, " ..."]) -> None:
        """Count a tensor's storage until it is freed."""
        storage, key = tensor.untyped_storage(), _key(tensor)
        if key not in self._alive:
            self._alive[key] = storage.nbytes()
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._freed, key)

    def _freed(self, key: int) -> None:
        self.now -= self._alive.pop(key, 0)


def _key(tensor: Shaped[Tensor, " ..."]) -> int:
    return tensor.untyped_storage()._cdata


class Meter(CountStorages):
    """Counts FLOPs and live bytes of everything that runs in the block.

    Args:
        shapes: the weights' shapes; tensors of these shapes are counted separately.
        flash: whether attention is a GPU's flash attention.
    """

    def __init__(self, shapes: set[tuple[int, ...]], *, flash: bool):
        super().__init__()
        self.shapes, self.flash = shapes | {shape[::-1] for shape in shapes}, flash
        self.tally: Counter[Tallied] = Counter()
        """Sums over layers and attention: FLOPs, bytes, FLOPs by range."""
        self.flops = 0
        self.weights_now = 0
        self.most_saved = self.most_cached = self.run_saved = self.run_copies = 0

    def __torch_dispatch__(
        self, func: OpOverload, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._grouped_mm.default:  # its fake kernel supports bfloat16 only
            return self._grouped(*args, **kwargs)
        out = super().__torch_dispatch__(func, types, args, kwargs)
        formula = flop_registry.get(func._overloadpacket)
        if formula is not None:
            self.flops += formula(*args, **kwargs, out_val=out)
        return out

    def _grouped(
        self,
        left: Float[Tensor, "n m"],
        right: Float[Tensor, "... m o"],
        offsets: Int[Tensor, " groups"],
        *_: object,
        **__: object,
    ) -> Float[Tensor, "... n o"]:
        """The product of each group of rows with its own matrix, or of groups of columns with groups of rows."""
        self.flops += 2 * left.shape[0] * left.shape[1] * right.shape[-1]
        groups = () if right.dim() == 3 else (offsets.shape[0],)
        out = left.new_empty(*groups, left.shape[0], right.shape[-1])
        if right.dim() == 3:
            self.add(out)
        return out

    def counts(self, tensor: Shaped[Tensor, " ..."]) -> bool:
        """Whether a tensor holds tokens; one of a weight's shape is added to `weights_now` instead."""
        if tensor.dim() < 2 or tuple(tensor.shape) not in self.shapes:
            return True
        self.weights_now += tensor.untyped_storage().nbytes()
        return False


class CountedAttention(AttentionCall):
    """Stands in for tree attention: records its calls, computes nothing, and holds as much memory."""

    name = "counted"

    def __init__(self, meter: Meter):
        self._meter = meter

    def __call__(self, query, key, value, scale, layer=0, spec=PLAIN_ATTENTION, sinks=None) -> Tensor:
        if torch.is_autocast_enabled("cpu"):  # as tree attention casts
            query, key, value = (x.to(torch.get_autocast_dtype("cpu")) for x in (query, key, value))
        tokens, heads, size = query.shape
        meter, b = self._meter, key.element_size()
        meter.tally["pairs", spec.visible_range] += 2 * heads * (size + value.shape[2])
        cached = tokens * key.shape[1] * (size + value.shape[2]) * (b + max(WIDE, b))
        meter.tally["cache"] += cached
        meter.most_cached = max(meter.most_cached, cached)
        return HeldAttention.apply(query, key, value, meter.flash)  # type: ignore[no-any-return]


class HeldAttention(torch.autograd.Function):
    """Allocates an attention call's tensors: float32 sums, the piece added to them, and what is saved for backward."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, flash: bool) -> Tensor:  # type: ignore[override]
        wide = torch.promote_types(query.dtype, torch.float32)
        total, piece = (query.new_empty(*query.shape[:2], value.shape[2], dtype=wide) for _ in range(2))
        del piece
        out = total.to(query.dtype)
        ctx.save_for_backward(query, key, value, out, query.new_empty(query.shape[:2], dtype=wide))
        ctx.flash = flash
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        wide = torch.promote_types(grad.dtype, torch.float32)
        query, key, value, out, _ = ctx.saved_tensors
        totals = [torch.empty_like(x, dtype=wide) for x in (query, key, value)]
        pieces = [torch.empty_like(x) for x in totals]
        if ctx.flash:  # a varlen call: see kernels/varlen.py, which bounds the first
            tokens, heads, size = query.shape
            pieces = [query.new_empty(2 * tokens, heads, -(-size // 32) * 32, dtype=wide)]
            pieces += [torch.empty_like(x) for x in (query, key, value, grad, out)]  # gathered
            if heads != key.shape[1]:  # the gradients of keys and values before heads of a group are added
                pieces += [torch.empty_like(query), torch.empty_like(query)]
        del pieces
        return *(x.to(grad.dtype) for x in totals), None


class CountedPaths(Paths):
    """The paths of a chain; records the size of the states that recurrent layers pass on."""

    def __init__(self, layout: PackedLayout, device: torch.device, tally: Counter[Tallied]):
        super().__init__(layout, device)
        self.tally = tally

    def convolve(
        self, layer: Hashable, inputs: Float[Tensor, "N C"], weight: Float[Tensor, "C taps"]
    ) -> Float[Tensor, "N C"]:
        b = inputs.element_size()
        self.tally["state"] += (weight.shape[1] - 1) * inputs.shape[1] * (b + max(WIDE, b))
        return super().convolve(layer, inputs, weight)

    def recur(self, layer: Hashable, rule: Rule, *given: Float[Tensor, "N ..."]) -> Float[Tensor, "N H V"]:
        _, key, value, *_ = given
        state = value.shape[1] * key.shape[2] * value.shape[2]
        self.tally["state"] += state * 2 * max(WIDE, value.element_size())
        return super().recur(layer, rule, *given)
