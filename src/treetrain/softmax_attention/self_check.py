"""Compares a backend of tree attention with the specification on a small forest, forward and backward.

The forest has two roots, a long chain, a fork whose branch spans several tiles, and a short branch. Below a path, the
path's keys come from the cache, and its gradients are those that arrive there. Heads, dtype and device are those of the
layer that asks; a window or chunk is cut to the size of the forest.

Shape letters: M tokens of path and forest, H query heads, G key/value heads, D size of query and key heads, V size of
value heads.
"""

from collections.abc import Callable

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from treetrain.device_arrays import tf32_is_allowed
from treetrain.kernel_checks import failure_of, relative_error
from treetrain.softmax_attention.kv_cache import CachedAttention, KVCache, KVCacheView
from treetrain.softmax_attention.reference import reference_attention
from treetrain.softmax_attention.schedule import AttentionSpec, Forest
from treetrain.tree.layout import AttentionRange, PackedLayout, cut, pack
from treetrain.tree.token_tree import build_tree

PATH = 70
"""Tokens of the path."""
WINDOW, CHUNK = 37, 40
"""The window or chunk of a layer that has one, whatever its length: the forest is short."""
Make = Callable[[Forest, KVCacheView | None, torch.device, int], CachedAttention | None]


def failure_of_backend(
    name: str,
    make: Make,
    query: Float[Tensor, "n H D"],
    key: Float[Tensor, "n G D"],
    value: Float[Tensor, "n G V"],
    spec: AttentionSpec,
    *,
    sinks: bool,
    below_path: bool,
) -> str | None:
    """Say why a backend must not serve a layer; None if it is right. Each kind of layer is checked once per process.

    Args:
        name: what ran, for messages.
        make: constructs the backend for a forest.
        query, key, value: the layer's tensors, of which only shapes, dtype and device are read.
        below_path: whether the part reads keys of a path from the cache.
    """
    ranged = spec.visible_range
    small = AttentionSpec(AttentionRange(ranged.window and WINDOW, ranged.chunk and CHUNK), spec.softcap)
    heads, sizes = (query.shape[1], key.shape[1]), (query.shape[2], value.shape[2])

    def errors() -> dict[str, float]:
        with torch.autocast(query.device.type, enabled=False):
            return _errors(make, heads, sizes, query.dtype, query.device, small, sinks=sinks, below_path=below_path)

    case = str(query.device), f"heads {heads}", f"sizes {sizes}", small, f"sinks {sinks}", f"below a path {below_path}"
    tf32 = query.dtype == torch.float32 and query.device.type == "cuda" and tf32_is_allowed()
    return failure_of(f"tree attention {name!r}", case, query.dtype, errors, tf32=tf32)


def _layout(path: int) -> PackedLayout:
    """Lay out the forest below a path of some tokens (0: its two trees are roots)."""
    ids = iter(range(1, 10_000))

    def tokens(count: int) -> list[int]:
        return [next(ids) for _ in range(count)]

    above, trunk = tokens(path), tokens(130)
    rows = [trunk + tokens(100), trunk[:100] + tokens(160), trunk[:50] + tokens(10), tokens(80)]
    return pack(build_tree([above + row for row in rows]), trim=False)


def _errors(
    make: Make,
    heads: tuple[int, int],
    sizes: tuple[int, int],
    dtype: torch.dtype,
    device: torch.device,
    spec: AttentionSpec,
    *,
    sinks: bool,
    below_path: bool,
) -> dict[str, float]:
    """Compute the relative errors of the output and of all gradients."""
    path = PATH if below_path else 0
    layout = _layout(path)
    count, (query_heads, groups), (size, value_size) = layout.num_tokens, heads, sizes
    shapes = [(count, query_heads, size), (count, groups, size), (count, groups, value_size)]
    shapes.append((count, query_heads, value_size))
    generator = torch.Generator().manual_seed(0)
    # Drawn on the CPU: the device's own random state belongs to the user's run.
    q, k, v, grad_out = (torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes)
    extra = [torch.randn(query_heads, generator=generator).to(device, dtype)] if sinks else []
    grad_out[:path] = 0  # the path's own outputs belong to the part above

    below, view, cache = np.arange(path, count), None, None
    if below_path:
        cache = KVCache(path, device, gradients=True, tokens=count)
        cache.allocate(np.arange(path))
        above = cache.view(np.arange(0), np.arange(path))
        assert above is not None
        above.write(0, k[:path], v[:path])
        view = cache.view(np.arange(path), below)
    backend = make(Forest.of(cut(layout, below).layout), view, device, query_heads * size)
    if backend is None:
        raise ValueError("the backend does not take the forest of its check")
    leaves = [x.clone().requires_grad_() for x in (q[path:], k[path:], v[path:], *extra)]
    scale = size**-0.5
    out = backend(leaves[0], leaves[1], leaves[2], scale, 0, spec, leaves[3] if sinks else None)
    grads = list(torch.autograd.grad(out, leaves, grad_out[path:]))
    if cache is not None:
        for number, name in ((1, "key"), (2, "value")):
            grads[number] = torch.cat([cache.grad((0, name)).to(dtype), grads[number]])

    ends, depth = (torch.from_numpy(x).to(device) for x in (layout.ends, layout.positions))
    wide = [x.double().requires_grad_() for x in (q, k, v, *extra)]
    expected = torch.cat(
        [
            reference_attention(
                wide[0].chunk(groups, 1)[group], wide[1][:, group : group + 1], wide[2][:, group : group + 1], ends,
                scale, depth=depth, window=spec.visible_range.window, chunk=spec.visible_range.chunk,
                softcap=spec.softcap, sinks=wide[3].chunk(groups)[group] if sinks else None,
            )
            for group in range(groups)  # one group of heads at a time, since the mask is dense
        ],
        dim=1,
    )  # fmt: skip
    expected_grads = list(torch.autograd.grad(expected, wide, grad_out.double()))
    expected_grads[0] = expected_grads[0][path:]
    names = ("the output", "the gradient of queries", "of keys", "of values", "of sinks")
    pairs = zip(names, (out.detach(), *grads), (expected.detach()[path:], *expected_grads))
    return {name: relative_error(found, right) for name, found, right in pairs}
