"""Stage 2 of the GPU benchmark: FLOP rate of tree attention against the fastest plain causal attention.

Plain causal attention runs on one row with about as many visible pairs, with the fastest of PyTorch's
flash, cuDNN and efficient kernels. FLOPs count visible pairs alone, on both sides.
"""

import dataclasses
import functools
import itertools
import math
import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from gpu_correctness import forest_of
from gpu_rows import Out, device, forget, load_tuned, seconds
from tree_shapes import load, rows_of, synthetic
from treetrain.softmax_attention.backends import make_attention, runnable, using
from treetrain.tree.build import build_tree
from treetrain.tree.layout import PackedLayout, pack

HEADS = {"0.6b": (16, 8, 128), "8b": (32, 8, 128), "size 64": (16, 8, 64)}
"""Query heads, key/value heads, head size."""
PLAIN_KERNELS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}


def trees(smoke: bool) -> dict[str, list]:
    """Shapes by name, the most informative first."""
    if smoke:
        return {"synthetic 0.5, paths of 64": synthetic(0.5, 64, leaves=3, segment=8)}
    found = {"tau_airline 2": load("tau_airline_calls_2")}
    for overlap, path in ((0.75, 16384), (0.9, 4096), (0.5, 4096), (0.5, 16384), (0.75, 32768), (0.9, 32768)):
        found[f"synthetic {overlap}, paths of {path}"] = synthetic(overlap, path)
    found["bushy, segments of 16"] = synthetic(0.75, 512, leaves=64, segment=16)
    return found


def flops(pairs: float, heads: tuple[int, int, int]) -> tuple[float, float]:
    """FLOPs of forward and backward: two and five products per visible pair."""
    each = 2.0 * heads[0] * heads[2] * pairs
    return 2 * each, 5 * each


def measure(attend: Callable[..., Tensor], shapes: list[tuple[int, ...]], repeats: int) -> tuple[float, float]:
    """Median seconds of a forward and of a backward of bfloat16 tensors: query, key, value, the output's gradient."""
    generator = torch.Generator(device=device()).manual_seed(0)
    made = [torch.randn(s, device=device(), dtype=torch.bfloat16, generator=generator) for s in shapes]
    leaves = [t.requires_grad_() for t in made[:3]]
    forward = statistics.median(seconds(lambda: attend(*leaves), repeats, 1.0))

    def both() -> None:
        torch.autograd.grad(attend(*leaves), leaves, made[3])

    return forward, max(statistics.median(seconds(both, repeats, 2.0)) - forward, 1e-9)


@functools.cache
def plain_rate(length: int, heads: tuple[int, int, int], repeats: int) -> tuple[tuple[float, float, float], str]:
    """FLOP/s (forward, backward, both) of the fastest plain causal kernel, and its name."""
    found: dict[str, tuple[float, float, float]] = {}
    for name, kernel in PLAIN_KERNELS.items():
        query_heads, groups, size = heads
        shapes = [(1, h, length, size) for h in (query_heads, groups, groups, query_heads)]

        def attend(q, k, v):
            return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

        try:
            with sdpa_kernel([kernel] if device().type == "cuda" else [*PLAIN_KERNELS.values(), SDPBackend.MATH]):
                times = measure(attend, shapes, repeats)
        except (RuntimeError, NotImplementedError):  # this kernel does not run on this device
            continue
        found[name] = _rates(flops(length * (length + 1) / 2, heads), times)
    best = max(found, key=lambda name: found[name][2])
    # The fastest forward and backward may come from different kernels.
    return tuple(max(rates[i] for rates in found.values()) for i in range(3)), best  # type: ignore[return-value]


def _rates(work: tuple[float, float], times: tuple[float, float]) -> tuple[float, float, float]:
    return work[0] / times[0], work[1] / times[1], sum(work) / sum(times)


def tune(out: Out, smoke: bool) -> None:
    """Measure the Triton kernels' block sizes on one tree, and take the fastest kernel by kernel."""
    from treetrain.softmax_attention.triton_shapes import Shapes, candidates, use

    layout = _layout(synthetic(0.6, 48 if smoke else 8192, leaves=3 if smoke else 6))
    chosen = dict(out.tuned().get("shapes", {}))
    for size, heads in ((128, HEADS["0.6b"]), (64, HEADS["size 64"])):
        if out.left < 100 and not smoke:
            break
        times: dict[Any, tuple[float, float]] = {}
        for shapes in candidates(size, torch.bfloat16)[: 1 if smoke else None]:
            if out.left < 60 and times and not smoke:
                break
            use(size, torch.bfloat16, shapes)
            try:
                times[shapes] = _tree_times("triton", layout, heads, 1 if smoke else 5)
            except Exception as error:
                print(f"triton {size} {shapes}: {type(error).__name__}: {error}", flush=True)
        if not times:
            continue
        forward = min(times, key=lambda s: times[s][0]).forward
        both = min(times, key=lambda s: times[s][1])
        best = Shapes(forward, both.query_gradient, both.key_gradient)
        use(size, torch.bfloat16, best)
        chosen[f"{size} bfloat16"] = [dataclasses.astuple(shape) for shape in best]
        for shapes, (first, second) in times.items():
            row = {"head_size": size, "shapes": str([dataclasses.astuple(s) for s in shapes]).replace(",", "")}
            out.write("gpu_tuning", row | {"forward_ms": 1e3 * first, "backward_ms": 1e3 * second})
    out.tune(shapes=chosen)


def warm(backend: str, model: str) -> None:
    """Compile what this stage measures of a backend, for these heads; the kernels are cached on disk."""
    from treetrain.softmax_attention.triton_shapes import candidates, use

    heads = HEADS[model]
    layout = _layout(synthetic(0.6, 512, leaves=3))
    for shapes in candidates(heads[2], torch.bfloat16) if backend == "triton" else [None]:
        try:
            if shapes is not None:
                use(heads[2], torch.bfloat16, shapes)
            _tree_times(backend, layout, heads, 1)
        except Exception as error:
            print(f"{backend}, heads of {model}, {shapes}: {type(error).__name__}: {error}", flush=True)


def _layout(shape: list) -> PackedLayout:
    return pack(build_tree(rows_of(shape, 30_000)), trim=False)


def _tree_times(backend: str, layout: PackedLayout, heads: tuple[int, int, int], repeats: int) -> tuple[float, float]:
    query_heads, groups, size = heads
    with using(backend):
        attention = make_attention(forest_of(layout), device(), query_heads * size)
    shapes = [(layout.num_tokens, h, size) for h in (query_heads, groups, groups, query_heads)]
    return measure(lambda q, k, v: attention(q, k, v, size**-0.5), shapes, repeats)


def run(out: Out, smoke: bool) -> None:
    """Run the stage and record which backend is fastest over the trees."""
    load_tuned(out)
    right = out.tuned().get("right")
    # If none was correct, measuring all is still more useful than nothing.
    backends = [name for name in runnable(device()) if right is None or name in right] or runnable(device())
    if "triton" in backends:
        tune(out, smoke)
    repeats, sums = (1 if smoke else 7), {name: [] for name in backends}
    for (model, heads), (tree, shape) in itertools.product(HEADS.items(), trees(smoke).items()):
        if model != "0.6b" and tree != next(iter(trees(smoke))):
            continue  # one tree shows what the number of heads does
        layout = _layout(shape)
        length = math.isqrt(2 * layout.pairs)
        (forward, backward, both), plain = plain_rate(128 if smoke else min(length, 65536), heads, repeats)
        for backend in backends:
            row: dict[str, Any] = {"tree": tree, "heads": model, "tokens": layout.num_tokens, "pairs": layout.pairs}
            row |= {"backend": backend, "plain": plain, "plain_tflops": both / 1e12}
            names = ("forward_ms", "backward_ms", "tflops", "of_plain_forward", "of_plain_backward", "of_plain", "note")
            row |= dict.fromkeys(names, "")
            try:
                if out.left < 5:
                    raise TimeoutError("skipped: no time left")
                times = _tree_times(backend, layout, heads, repeats)
                rates = _rates(flops(layout.pairs, heads), times)
                row |= {"forward_ms": 1e3 * times[0], "backward_ms": 1e3 * times[1], "tflops": rates[2] / 1e12}
                row |= {"of_plain_forward": rates[0] / forward, "of_plain_backward": rates[1] / backward}
                row |= {"of_plain": rates[2] / both}
                sums[backend].append(rates[2] / both)
            except Exception as error:
                row["note"] = f"{type(error).__name__}: {str(error)[:120]}".replace(",", ";").replace("\n", " ")
            out.write("gpu_attention", row)
        best = {name: statistics.geometric_mean(found) for name, found in sums.items() if found}
        most = max(map(len, sums.values()))
        ranked = [name for name in sorted(best, key=lambda n: -best[n]) if len(sums[name]) == most]
        if ranked:
            out.tune(fastest=ranked[0], of_plain={name: round(rate, 3) for name, rate in best.items()})
        forget()
