"""Bytes that `varlen` attention moves around its flash calls, for each token of a layer. Needs no GPU.

Run: python benchmarks/merge_bytes.py. Needs Triton (any machine). Tensors are on the meta device; 16 query and 8
key/value heads of 128 in bfloat16. Flash calls return tensors of the right sizes and count nothing. PyTorch's
operations count what they read and write, and so do the merge kernels. Rows are appended to results/merge_bytes.csv.
"""

import functools
import inspect
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import rows
from tree_shapes import load, rows_of, synthetic
from treetrain.core.attention.kv_cache import Inputs
from treetrain.core.attention.schedule import PLAIN_ATTENTION, Forest
from treetrain.core.tree.layout import pack
from treetrain.core.tree.token_tree import build_tree
from treetrain.kernels import merge_kernels, merging, varlen
from treetrain.kernels.varlen import VarlenAttention, pieces_of

HEADS, GROUPS, SIZE = 16, 8, 128
META = torch.device("meta")
VIEWS = {
    "view", "slice", "transpose", "t", "unsqueeze", "squeeze", "expand", "alias", "detach", "_unsafe_view", "select",
    "as_strided", "permute", "empty", "new_empty", "empty_like", "_reshape_alias", "split", "empty_strided",
    "lift_fresh", "narrow",
}  # fmt: skip
"""Operations that move nothing."""


def size_of(x: Tensor) -> int:
    return x.numel() * x.element_size()


class Traffic(TorchDispatchMode):
    """Adds up the bytes that operations and merge kernels read and write."""

    def __init__(self):
        super().__init__()
        self.bytes = self.kernels = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name, tensors = func._overloadpacket.__name__, [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if name in VIEWS:
            return out
        if name in ("index_put_", "index_copy_"):
            moved = 2 * size_of(tensors[-1])
        elif name == "index_add_":
            moved = 3 * size_of(tensors[-1])
        elif name in ("index_select", "index"):
            moved = 2 * size_of(out)
        elif name in ("copy_", "fill_", "zero_", "zeros", "zeros_like"):
            moved = sum(map(size_of, tensors)) or size_of(out)
        else:
            moved = sum(map(size_of, [*tensors, *(x for x in tree_leaves(out) if isinstance(x, Tensor))]))
        self._add(moved)
        return out

    def launch(self, kernel: Any, grid: Any, like: Tensor, *arguments: Any, **options: Any) -> None:
        """Count a merge kernel: the piece is read; t rows of the result are read and written; tables by every head."""
        given = inspect.signature(kernel.fn).bind(*arguments, **{k: v for k, v in options.items() if k != "num_warps"})
        found, row = given.arguments, HEADS * SIZE * 2 if like.shape[1] == HEADS else GROUPS * SIZE * 2
        changed, tables = found["rows"], [x for n, x in found.items() if n in ("token_ptr", "offset_ptr", "copy_ptr")]
        moved = size_of(found["piece_ptr"]) + 2 * changed * row + like.shape[1] * sum(map(size_of, tables))
        if "lse_ptr" in found:
            moved += 3 * size_of(found["piece_lse_ptr"])
        if found["SUMS"]:  # rows kept in float32 instead; at most those that have one
            moved += 2 * row * (len(found["sums_ptr"]) - 1) + 2 * like.shape[1] * size_of(found["source_ptr"])
        self._add(moved)

    def _add(self, moved: int) -> None:
        self.bytes += moved
        self.kernels += 1


class NoKernel:
    """Flash calls that allocate their results."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, call: Any, scale: float) -> tuple[Tensor, Tensor]:
        return torch.empty_like(query), query.new_empty((query.shape[1], len(query)), dtype=torch.float32)

    def backward(self, grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def moved(forest: Forest, *, fused: bool = True) -> dict[str, int]:
    """Bytes for each token of a layer, and kernels, forward and backward.

    Args:
        fused: the merge kernels, else PyTorch's operations.
    """
    tokens = len(forest.ends)
    attend = VarlenAttention(pieces_of(forest), META, kernel=NoKernel())  # type: ignore[arg-type]
    chosen = merging.Merging(merge_kernels.merge_, merge_kernels.add_) if fused else merging.PLAIN
    query, key, value, grad_out = (
        torch.empty(tokens, heads, SIZE, dtype=torch.bfloat16, device=META) for heads in (HEADS, GROUPS, GROUPS, HEADS)
    )
    given, found = Inputs(query, key, value, None, None), {}
    with mock.patch.object(varlen, "merging", lambda like: chosen):
        with Traffic() as forward, mock.patch.object(merge_kernels, "launch", forward.launch):
            out, lse = attend.forward(given, 1.0, PLAIN_ATTENTION)
        with Traffic() as backward, mock.patch.object(merge_kernels, "launch", backward.launch):
            grads = attend.backward(grad_out, given, out, lse, 1.0, PLAIN_ATTENTION)
            _ = [grad.to(torch.bfloat16) for grad in grads[:3] if grad is not None]  # as the cache hands them on
    for name, traffic in (("forward", forward), ("backward", backward)):
        found |= {f"{name}_bytes": traffic.bytes // tokens, f"{name}_kernels": traffic.kernels}
    return found


def shapes() -> dict[str, Any]:
    named = {f"tau_airline {k}": load(f"tau_airline_calls_{k}") for k in (48, 2, 21, 33)}
    return named | {
        "synthetic 0.847 4096": synthetic(0.847, 4096),
        "synthetic 0.75 16384": synthetic(0.75, 16384),
        "bushy": synthetic(0.75, 512, leaves=64, segment=16),
    }


@functools.cache
def forest_of(name: str) -> Forest:
    tree = build_tree(rows_of(shapes()[name], 30_000))
    return Forest.of(pack(tree, tree.trained_edges()[0] > 0))


def main() -> None:
    for name in shapes():
        forest = forest_of(name)
        row = {"tree": name, "tokens": len(forest.ends), "calls": len(varlen.varlen_calls(pieces_of(forest)))}
        for kind, fused in (("kernels", True), ("pytorch", False)):
            row |= {f"{kind}_{what}": count for what, count in moved(forest, fused=fused).items()}
        print(row, flush=True)
        rows.append("merge_bytes", row)


if __name__ == "__main__":
    main()
