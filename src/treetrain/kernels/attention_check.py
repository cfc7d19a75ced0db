"""Compares a backend of tree attention with the specification on small forests, forward and backward.

Gaussian inputs alone hide faults that real activations show, so there are others: keys of large norm, rows that are
nearly one-hot, equal keys; a long tree beside short ones; queries alone. The forest of most cases has two roots, a long
chain, forks whose branches span several tiles, short branches, and a fork three branches deep. Below a path, the path's
keys come from the cache, and its gradients are those that arrive there. Heads, dtype and device are those of the layer
that asks; a window or chunk is cut to the size of the forest.

A right kernel in 16 bits is far off where large terms cancel. So an error is measured in the error of `flash_attention`
below, plain and dense, which rounds where every flash kernel does: beyond the limit of its dtype, a backend may have
`ALLOWED` times that error.

Shape letters: M tokens of path and forest, H query heads, G key/value heads, D size of query and key heads, V size of
value heads.
"""

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from treetrain.core.attention.attention import Constructor
from treetrain.core.attention.kv_cache import KVCache
from treetrain.core.attention.reference import reference_attention, visible
from treetrain.core.attention.schedule import AttentionSpec, Forest
from treetrain.core.tree.layout import AttentionRange, PackedLayout, cut, pack
from treetrain.core.tree.token_tree import build_tree
from treetrain.kernels.checks import Run, failure_of, limit_of
from treetrain.kernels.launch import tf32_is_allowed

PATH = 70
"""Tokens of the path."""
WINDOW, CHUNK = 37, 40
"""The window or chunk of a layer that has one, whatever its length: the forest is short."""
ALLOWED = 3.0
"""A backend's largest error, in errors of `flash_attention`."""
LEAST = 0.03
"""Gradients that cancel, to less than this share of the output's gradient, are compared with that share."""
NAMES = ("the output", "the gradient of queries", "of keys", "of values", "of sinks")


def failure_of_backend(
    name: str,
    make: Constructor,
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
    tf32 = query.dtype == torch.float32 and query.device.type == "cuda" and tf32_is_allowed()

    def runs() -> Iterator[Run]:
        options = {"sinks": sinks, "below_path": below_path, "tf32": tf32}
        with torch.autocast(query.device.type, enabled=False):
            yield from _runs(make, heads, sizes, query.dtype, query.device, small, **options)

    case = str(query.device), f"heads {heads}", f"sizes {sizes}", small, f"sinks {sinks}", f"below a path {below_path}"
    return failure_of(f"tree attention {name!r}", case, query.dtype, runs, tf32=tf32)


class _Case(NamedTuple):
    """One input of the check."""

    name: str
    layout: PackedLayout
    query: Float[Tensor, "M H D"]
    key: Float[Tensor, "M G D"]
    value: Float[Tensor, "M G V"]
    grad_out: Float[Tensor, "M H V"]
    tokens: np.ndarray | None = None
    """The tokens whose output is compared and has a gradient; None: all."""


def _cases(path: int, heads: tuple[int, int], sizes: tuple[int, int]) -> Iterator[_Case]:
    """The inputs of a check, in float32 on the CPU, below a path of some tokens (0: trees are roots)."""
    generator = torch.Generator().manual_seed(0)
    (query_heads, groups), (size, value_size) = heads, sizes

    def drawn(name: str, layout: PackedLayout, tokens: np.ndarray | None = None) -> _Case:
        shapes = ((query_heads, size), (groups, size), (groups, value_size), (query_heads, value_size))
        # Drawn on the CPU: the device's own random state belongs to the user's run.
        q, k, v, grad_out = (torch.randn(layout.num_tokens, *x, generator=generator) for x in shapes)
        return _Case(name, layout, q, k, v, grad_out, tokens)

    forks = _layout(path, _forks)
    yield drawn("", forks)
    yield drawn("branches of one token", forks, _alone(forks, path))
    few = drawn("", _layout(path, _few_forks))
    common = torch.randn(1, groups, size, generator=generator)
    yield few._replace(name="keys of large norm", key=4 * few.key + 30 * common)
    parent = torch.from_numpy(np.maximum(few.layout.parent, 0))
    nearby = few.key[parent[parent]].repeat_interleave(query_heads // groups, 1)
    yield few._replace(name="nearly one-hot rows", query=4 * nearby)
    yield few._replace(name="equal keys", key=few.key[:1].expand_as(few.key).clone())
    yield drawn("a long tree beside short ones", _layout(path, _long_beside_short))
    yield drawn("a single token", _layout(path, lambda new: [new(1)]))


def _forks(new: Callable[[int], list[int]]) -> list[list[int]]:
    """A chain and branches that span tiles, and a branch of one token below a branch: alone at its depth of forks."""
    trunk = new(100)
    rest = new(175)
    branch = new(170)
    # Both ends of the trunk have two leaves, so the one with more tokens comes first.
    return [trunk + rest, trunk + rest[:60] + new(30), trunk + branch, trunk + branch[:80] + new(1), new(20)]


def _few_forks(new: Callable[[int], list[int]]) -> list[list[int]]:
    trunk = new(160)
    return [trunk, trunk[:90] + new(70), trunk[:40] + new(64)]


def _long_beside_short(new: Callable[[int], list[int]]) -> list[list[int]]:
    long = new(300)
    return [long, long[:200] + new(70), new(1), new(3), new(17)]


def _layout(path: int, rows_of: Callable[[Callable[[int], list[int]]], list[list[int]]]) -> PackedLayout:
    ids = iter(range(1, 10_000))

    def new(count: int) -> list[int]:
        return [next(ids) for _ in range(count)]

    above = new(path)
    return pack(build_tree([above + row for row in rows_of(new)]), trim=False)


def _alone(layout: PackedLayout, path: int) -> np.ndarray:
    """The tokens that are a branch by themselves."""
    index = np.arange(layout.num_tokens)
    alone = (layout.parent != index - 1) & (layout.ends == index + 1)
    return np.flatnonzero(alone & (index >= path))


def _runs(
    make: Constructor,
    heads: tuple[int, int],
    sizes: tuple[int, int],
    dtype: torch.dtype,
    device: torch.device,
    spec: AttentionSpec,
    *,
    sinks: bool,
    below_path: bool,
    tf32: bool = False,
) -> Iterator[Run]:
    """Run the backend on each case, for the errors of the output and of all gradients.

    An error is relative; one that is allowed by that of `flash_attention` is scaled down to the limit of the dtype.
    """
    path, limit = PATH if below_path else 0, limit_of(dtype, tf32=tf32)
    generator = torch.Generator().manual_seed(1)
    extra = [torch.randn(heads[0], generator=generator).to(device, dtype)] if sinks else []
    for case in _cases(path, heads, sizes):
        truth, plain = _expected(case, path, (dtype, tf32), device, spec, extra)
        least = LEAST * float(case.grad_out.norm())
        scales = [max(least, float(right.norm())) for right in truth]
        allowed = [
            max(scale, ALLOWED * float((rounded - right).norm()) / limit)
            for scale, rounded, right in zip(scales, plain, truth)
        ]

        def run(case=case, truth=truth, allowed=allowed) -> dict[str, float]:
            results = _results(make, case, path, dtype, device, spec, extra)
            if results is None and not case.name:
                raise ValueError("the backend does not take the forest of its check")
            return {  # nothing, if it leaves such a forest to others
                f"{name} ({case.name})" if case.name else name: float((result.double() - right).norm()) / size
                for name, result, right, size in zip(NAMES, results or (), truth, allowed)
            }

        yield run


def _results(
    make: Constructor,
    case: _Case,
    path: int,
    dtype: torch.dtype,
    device: torch.device,
    spec: AttentionSpec,
    extra: list,
) -> list[Tensor] | None:
    """The backend's output and gradients; None if it leaves the forest to others."""
    q, k, v, grad_out = (x.to(device, dtype) for x in case[2:6])
    count = len(q)
    size = q.shape[2]
    below = np.arange(path, len(q))
    view = cache = None
    if path:
        cache = KVCache(path, device, gradients=True, tokens=count)
        cache.allocate(np.arange(path))
        above = cache.view(np.arange(0), np.arange(path))
        assert above is not None
        above.write(0, k[:path], v[:path])
        view = cache.view(np.arange(path), below)
    backend = make(Forest.of(cut(case.layout, below).layout), view, device, q.shape[1] * size)
    if backend is None:
        return None
    leaves = [x.clone().requires_grad_() for x in (q[path:], k[path:], v[path:], *extra)]
    out = backend(leaves[0], leaves[1], leaves[2], size**-0.5, 0, spec, leaves[3] if extra else None)
    compared = _compared(case, path, device)
    grads = list(torch.autograd.grad(out, leaves, grad_out[path:] * compared[path:, None, None]))
    if cache is not None:
        for number, name in ((1, "key"), (2, "value")):
            grads[number] = torch.cat([cache.grad((0, name)).to(dtype), grads[number]])
    return [out.detach()[compared[path:]], *grads]


def _compared(case: _Case, path: int, device: torch.device) -> Bool[Tensor, " M"]:
    compared = torch.zeros(len(case.query), dtype=torch.bool)
    compared[path if case.tokens is None else torch.from_numpy(case.tokens)] = True
    if case.tokens is None:
        compared[path:] = True  # the path's own outputs belong to the part above
    return compared.to(device)


def _expected(
    case: _Case, path: int, kind: tuple[torch.dtype, bool], device: torch.device, spec: AttentionSpec, extra: list
) -> tuple[list[Tensor], list[Tensor]]:
    """The right output and gradients in float64, and those of `flash_attention`."""
    dtype, tf32 = kind
    inputs = [x.to(device, dtype) for x in case[2:5]]
    compared = _compared(case, path, device)
    grad_out = case.grad_out.to(device, dtype) * compared[:, None, None]
    ends, depth = (torch.from_numpy(x).to(device) for x in (case.layout.ends, case.layout.positions))
    groups = inputs[1].shape[1]
    scale = inputs[0].shape[2] ** -0.5
    ranged = spec.visible_range
    seen, where = visible(ends, depth, ranged.window, ranged.chunk), {"window": ranged.window, "chunk": ranged.chunk}
    wide = [x.double().requires_grad_() for x in (*inputs, *extra)]
    rights, plains = [], []
    for group in range(groups):  # one group of heads at a time, since the mask is dense
        own = slice(group, group + 1)
        q, sink = wide[0].chunk(groups, 1)[group], wide[3].chunk(groups)[group] if extra else None
        rights.append(
            reference_attention(
                q, wide[1][:, own], wide[2][:, own], ends, scale, depth=depth, softcap=spec.softcap, sinks=sink, **where
            )
        )
        k = wide[1][:, own].detach()
        v = wide[2][:, own].detach()
        g = grad_out.chunk(groups, 1)[group].double()
        rounding = _rounding(dtype, tf32=tf32)
        plains.append(flash_attention(q.detach(), k, v, g, seen, scale, spec.softcap, sink, rounding))
    out = torch.cat(rights, 1)
    truth = [out.detach(), *torch.autograd.grad(out, wide, grad_out.double())]
    plain = [torch.cat(parts, 0 if number == 4 else 1) for number, parts in enumerate(zip(*plains))]
    for found in (truth, plain):
        found[0], found[1] = found[0][compared], found[1][path:]
    return truth, plain


Rounding = Callable[[Tensor], Tensor]


def _rounding(dtype: torch.dtype, *, tf32: bool) -> Rounding:
    """Round float64 numbers as a kernel of this dtype rounds the factors of its products."""
    if tf32:  # ten bits of mantissa
        return lambda x: (x.float().view(torch.int32) + 4096).bitwise_and(-8192).view(torch.float32).double()
    return lambda x: x.to(dtype).double()


def flash_attention(
    query: Float[Tensor, "M h D"],
    key: Float[Tensor, "M 1 D"],
    value: Float[Tensor, "M 1 V"],
    grad_out: Float[Tensor, "M h V"],
    seen: Bool[Tensor, "M M"],
    scale: float,
    softcap: float | None,
    sinks: Float[Tensor, " h"] | None,
    rounded: Rounding,
) -> list[Tensor]:
    """Output and gradients by the formulas of flash attention, dense, with factors of products rounded as in a kernel.

    Returns:
        The output, and the gradients of query, key, value and sinks (left out without sinks).
    """
    q, g = (rounded(x.transpose(0, 1)) for x in (query, grad_out))
    k, v = (rounded(x.transpose(0, 1)) for x in (key, value))
    scores = q @ k.transpose(1, 2) * scale
    slope: Tensor | float = 1.0
    if softcap is not None:
        bent = torch.tanh(scores / softcap)
        scores, slope = softcap * bent, 1 - bent**2
    scores = scores.masked_fill(~seen, -math.inf)
    lse = scores.logsumexp(2, keepdim=True)
    if sinks is not None:
        lse = torch.logaddexp(lse, sinks.detach()[:, None, None])
    weights = (scores - lse).exp()
    out = rounded(rounded(weights) @ v)
    delta = (out * g).sum(2, keepdim=True)
    change = rounded(weights * (g @ v.transpose(1, 2) - delta) * slope)
    grads = [change @ k * scale, (change.transpose(1, 2) @ q * scale).sum(0, keepdim=True)]
    grads.append((rounded(weights).transpose(1, 2) @ g).sum(0, keepdim=True))
    found = [rounded(x.transpose(0, 1)) for x in (out, *grads)]
    if sinks is not None:
        found.append(-((sinks.detach()[:, None, None] - lse).exp() * delta).sum((1, 2)))
    return found
