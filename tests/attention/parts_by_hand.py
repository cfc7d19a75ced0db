"""A plan at the level of attention alone: layers of a part forward and backward, without a model around them."""

from collections.abc import Callable

import numpy as np
import torch

from treetrain.core.attention.kv_cache import KVCache
from treetrain.core.attention.schedule import AttentionSpec
from treetrain.core.planning.plan import Plan
from treetrain.core.tree.layout import cut

Tensors = list[torch.Tensor]


class PartsByHand:
    """Runs a plan at the level of attention: every layer of a part forward, and backward in the order of a walk.

    Args:
        tensors: query, key, value, the output's gradient, and perhaps sinks, of every layer.
        backend: makes an attention from a layout and a view of the cache.
        order: of rows 0 to C - 1; each exported token takes the next one.
        asks: what each layer asks of attention besides; None for nothing.
    """

    def __init__(
        self,
        plan: Plan,
        tensors: list[Tensors],
        backend: Callable,
        order: np.ndarray,
        scale: float,
        specs: list[AttentionSpec] | None = None,
    ):
        self.plan, self.layout, self.tensors, self.backend = plan, plan.layout, tensors, backend
        self.scale, self.specs = scale, specs
        self.cache = KVCache(len(order), tensors[0][0].device, gradients=True)
        self.row_of = np.full(self.layout.num_tokens, -1)
        self.row_of[plan.exported] = order[: int(plan.exported.sum())]
        self.results = []
        for t in tensors:
            out = t[3].new_zeros(t[3].shape)
            self.results.append([out, *(torch.zeros_like(x) for i, x in enumerate(t) if i != 3)])

    def run(self) -> list[Tensors]:
        graphs = {}
        for kind, part in self.plan.traverse():
            tokens = self.plan.tokens(part)
            if kind == "enter" and self.plan.kept[part]:
                graphs[part] = self.forward(part, tokens)
            elif kind == "enter" and self.plan.is_inner[part]:
                with torch.no_grad():
                    self.forward(part, tokens[self.plan.exported[tokens]])
            elif kind == "leave":
                self.backward(tokens, graphs.pop(part) if part in graphs else self.forward(part, tokens))
        return self.results

    def forward(self, part: int, tokens: np.ndarray) -> list[tuple[torch.Tensor, Tensors]]:
        attach = int(self.plan.attach[part])
        path = self.row_of[self.plan.path(attach)] if attach >= 0 else np.zeros(0, np.int64)
        assert (path >= 0).all(), "a token on the path has no row"
        attention = self.backend(cut(self.layout, tokens).layout, self.cache.view_of_rows(path, self.row_of[tokens]))
        done = []
        for layer, tensors in enumerate(self.tensors):
            given = [x[tokens] for x in tensors[:3]] + tensors[4:]
            leaves = [x.clone().requires_grad_(torch.is_grad_enabled()) for x in given]
            if self.specs is None:
                out = attention(*leaves, self.scale, layer)
            else:
                out = attention(*leaves[:3], self.scale, layer, self.specs[layer], *leaves[3:])
            done.append((out, leaves))
        return done

    def backward(self, tokens: np.ndarray, done: list[tuple[torch.Tensor, Tensors]]) -> None:
        for layer in reversed(range(len(done))):
            out, leaves = done[layer]
            grads = torch.autograd.grad(out, leaves, self.tensors[layer][3][tokens])
            for result, value in zip(self.results[layer], (out.detach(), *grads[:3])):
                result[tokens] = value
            for result, value in zip(self.results[layer][4:], grads[3:]):
                result += value
