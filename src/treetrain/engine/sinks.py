"""Adds up the gradients of the largest matrices, embedding and head, over the parts of a walk.

Autograd would make a new [vocabulary, hidden] gradient for each of them in every part, and add it to ``.grad``: as much
traffic per part as all layers together. Here every part adds to one buffer per matrix (one for both where they are
tied), and autograd gets the sum once, when the walk is done, so that hooks on the parameters see one gradient.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from treetrain.engine.hooks import deliver
from treetrain.models.switch import replaced_forward


class Sink:
    """One matrix's gradient."""

    def __init__(self, weight: nn.Parameter):
        self._weight = weight
        self._total: Tensor | None = None
        self.uncertain = False
        """Whether a forward that is not done has added to the sum: if it fails, the sum is worth nothing."""

    @property
    def total(self) -> Tensor:
        """[V, D] in float32 or wider, zero at first; add to it."""
        if self._total is None:
            self._total = torch.zeros_like(self._weight, dtype=torch.promote_types(self._weight.dtype, torch.float32))
        return self._total

    def deliver(self) -> None:
        """Hand the sum to autograd, as one gradient of the parameter."""
        if self._total is not None:
            deliver(self._weight, self._total.to(self._weight.dtype))
            self._total = None


class Sinks:
    """The sinks of a walk, by matrix."""

    def __init__(self) -> None:
        self._by_weight: dict[int, Sink] = {}

    def of(self, weight: Tensor) -> Sink | None:
        """The sink of a matrix; None where autograd must see every gradient."""
        if not (type(weight) is nn.Parameter and weight.requires_grad):
            return None
        return self._by_weight.setdefault(id(weight), Sink(weight))

    @property
    def uncertain(self) -> bool:
        """Whether a forward that is not done has added to a sum."""
        return any(sink.uncertain for sink in self._by_weight.values())

    def settle(self) -> None:
        """The forward is done."""
        for sink in self._by_weight.values():
            sink.uncertain = False

    def deliver(self) -> None:
        """Hand all sums to autograd."""
        for sink in self._by_weight.values():
            sink.deliver()


class _Embed(torch.autograd.Function):
    """A plain embedding whose gradient goes into a sink."""

    @staticmethod
    def forward(ctx, weight: Tensor, ids: Tensor, padding_idx: int | None, sink: Sink):
        ctx.save_for_backward(ids)
        ctx.padding_idx, ctx.sink = padding_idx, sink
        return nn.functional.embedding(ids, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        (ids,) = ctx.saved_tensors
        flat, rows = ids.flatten(), grad.flatten(0, -2).to(ctx.sink.total.dtype)
        if ctx.padding_idx is not None:
            rows = rows.masked_fill((flat == ctx.padding_idx)[:, None], 0.0)
        ctx.sink.total.index_add_(0, flat, rows)
        return None, None, None, None


@contextmanager
def gradient_sinks(model: nn.Module) -> Iterator[Sinks]:
    """Route the gradients of embedding and head into sinks for the length of the block; delivered at its end."""
    sinks = Sinks()
    embedding = model.get_input_embeddings()  # type: ignore[operator]
    sink = sinks.of(embedding.weight) if _is_plain(embedding) else None
    if sink is None:
        yield sinks
    else:

        def forward(ids: Tensor) -> Tensor:
            return _Embed.apply(embedding.weight, ids, embedding.padding_idx, sink)  # type: ignore[return-value]

        with replaced_forward(embedding, forward):
            yield sinks
    sinks.deliver()


def _is_plain(embedding: nn.Module) -> bool:
    """An embedding that does nothing but look rows up, called by nobody's own forward."""
    return (
        type(embedding) is nn.Embedding
        and "forward" not in vars(embedding)
        and embedding.max_norm is None
        and not embedding.scale_grad_by_freq
        and not embedding.sparse
    )
