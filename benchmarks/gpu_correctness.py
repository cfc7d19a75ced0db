"""Stage 1 of the GPU benchmark: correctness. Attention against the dense reference, a whole step against its rows."""

import itertools
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch

import treetrain as tt
from gpu_rows import Out, device
from tree_shapes import rows_of, synthetic
from treetrain.engine.engine import TreeEngine
from treetrain.planning.partition import uniform
from treetrain.softmax_attention.backends import make_attention, runnable, using
from treetrain.softmax_attention.kv_cache import KVCache
from treetrain.softmax_attention.reference import reference_attention
from treetrain.softmax_attention.schedule import PLAIN_ATTENTION, AttentionSpec, Forest
from treetrain.tree.attention_range import AttentionRange
from treetrain.tree.build import build_tree
from treetrain.tree.layout import PackedLayout, cut, pack

SPECS = {
    "full": (PLAIN_ATTENTION, False),
    "window and sinks": (AttentionSpec(AttentionRange(window=100)), True),
    "cap": (AttentionSpec(softcap=30.0), False),
}
BOUNDS = {torch.float32: 2e-5, torch.bfloat16: 1.5e-2}
"""Of ||got - expected|| / ||expected||; of the truth in float64."""


def trees(smoke: bool) -> dict[str, PackedLayout]:
    """Branching forests: forks at the first token, single tokens, deep chains, tiles' borders."""
    rng, size = np.random.default_rng(0), 24 if smoke else 400
    trunk = rng.integers(0, 99, size).tolist()
    deep = [[*trunk[: i * 5 + 1], 100 + i] for i in range(size // 6)]
    bushy = rows_of(synthetic(0.7, size, leaves=4 if smoke else 12, segment=8), 1000)
    return {
        "deep and single": pack(build_tree([trunk, *deep, [1], [2, 3]]), trim=False),
        "bushy": pack(build_tree(bushy), trim=False),
    }


def forest_of(layout: PackedLayout) -> Forest:
    """The attention layer's view of a layout."""
    return Forest(
        ends=layout.ends,
        depth=layout.positions,
        segment_start=layout.segment_start,
        segment_parent=layout.segment_parent,
    )


def inputs(tokens: int, heads: int, groups: int, size: int, dtype: torch.dtype, seed: int = 0) -> list[torch.Tensor]:
    """Query, key, value, the output's gradient, sinks."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(tokens, heads, size), (tokens, groups, size), (tokens, groups, size), (tokens, heads, size), (heads,)]
    return [torch.randn(s, generator=generator).bfloat16().to(device(), dtype) for s in shapes]


def both_ways(attend: Any, tensors: list[torch.Tensor], sinks: bool) -> list[torch.Tensor]:
    """Output and gradients of query, key, value (and sinks)."""
    leaves = [t.detach().clone().requires_grad_() for t in (*tensors[:3], *(tensors[4:] if sinks else ()))]
    out = attend(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, tensors[3])]


def expected(layout: PackedLayout, tensors: list[torch.Tensor], spec: AttentionSpec, sinks: bool) -> list[torch.Tensor]:
    """Output and gradients of the reference, in float64."""
    ends, depth = (torch.from_numpy(x).to(device()) for x in (layout.ends, layout.positions))
    where = {
        "depth": depth,
        "window": spec.visible_range.window,
        "chunk": spec.visible_range.chunk,
        "softcap": spec.softcap,
    }

    def attend(q, k, v, s=None):
        return reference_attention(q, k, v, ends, q.shape[2] ** -0.5, sinks=s, **where)

    return both_ways(attend, [t.double() for t in tensors], sinks)


def in_parts(layout: PackedLayout, tensors: list[torch.Tensor], spec: AttentionSpec, sinks: bool) -> list[torch.Tensor]:
    """Output and gradients in parts that share a KV cache, as the executor runs them."""
    plan = uniform(layout, max(2, layout.num_tokens // 4))
    rows = np.full(layout.num_tokens, -1)
    rows[plan.exported] = np.arange(int(plan.exported.sum()))
    cache = KVCache(int(plan.exported.sum()), device(), gradients=True)
    results = [torch.zeros_like(tensors[3]), *(torch.zeros_like(t) for t in (*tensors[:3], *tensors[4:]))]

    def forward(part: int, tokens: np.ndarray):
        attach = int(plan.attach[part])
        path = rows[plan.path(attach)] if attach >= 0 else np.zeros(0, np.int64)
        view = cache.view(path, rows[tokens])
        attention = make_attention(forest_of(cut(layout, tokens).layout), device(), 64, view)
        leaves = [t[torch.from_numpy(tokens).to(device())].requires_grad_(torch.is_grad_enabled()) for t in tensors[:3]]
        leaves += [tensors[4].clone().requires_grad_(torch.is_grad_enabled())] if sinks else []
        return attention(*leaves[:3], tensors[0].shape[2] ** -0.5, 0, spec, leaves[3] if sinks else None), leaves

    for kind, part in plan.traverse():
        tokens = plan.tokens(part)
        if kind == "enter" and plan.is_inner[part]:
            with torch.no_grad():
                forward(part, tokens[plan.exported[tokens]])
        elif kind == "leave":
            out, leaves = forward(part, tokens)
            where = torch.from_numpy(tokens).to(device())
            grads = torch.autograd.grad(out, leaves, tensors[3][where])
            for result, value in zip(results, (out.detach(), *grads[:3])):
                result[where] = value
            if sinks:
                results[4] += grads[3]
    return results[: 5 if sinks else 4]


def attention_cases(backend: str, smoke: bool) -> list[tuple]:
    """Cases (tree, spec, dtype, head size): more where compiling is cheap."""
    dtypes = [torch.float32] if device().type == "cpu" else [torch.bfloat16, torch.float32]
    sizes = {"triton": (64, 80, 96, 128, 256), "varlen": (64, 128), "flex": (128, 256)}.get(backend, (128,))
    specs = ["full"] if backend in ("varlen", "flex-flash") else list(SPECS)
    found = [
        ("bushy", spec, dtype, size)
        for size, spec, dtype in itertools.product(sizes, specs, dtypes)
        if (size == 128 or spec == "full")
        and not (dtype == torch.float32 and (backend == "varlen" or spec == "cap" or size not in (64, 128)))
    ]
    found.append(("deep and single", "full", dtypes[0], 128))
    return [(tree, spec, dtype, 16) for tree, spec, dtype, _ in found[:3]] if smoke else found


def check_attention(out: Out, backend: str, smoke: bool, part: str | None = None) -> bool:
    """Write one row per case, of one spec and head size or of all; returns whether all are correct."""
    right, layouts = True, trees(smoke)
    for tree, ask_name, dtype, head_size in attention_cases(backend, smoke):
        if part not in (None, f"{ask_name} {head_size}"):
            continue
        if out.left < 5:
            out.write(
                "gpu_correctness", _row(backend, f"{tree}, {ask_name}", dtype, head_size, "skipped: no time left")
            )
            continue
        spec, sinks = SPECS[ask_name]
        layout = layouts[tree]
        tensors = inputs(layout.num_tokens, 4, 2, head_size, dtype)
        truth = expected(layout, tensors, spec, sinks)
        for name, attend in (("whole", _whole), ("in parts", in_parts)):
            start, shown = time.perf_counter(), (backend, f"{tree}, {ask_name}, {name}", dtype, head_size)
            try:
                with using(backend):
                    got, again = (attend(layout, tensors, spec, sinks) for _ in range(2))
                errors = [float((a.double() - b).norm() / b.norm()) for a, b in zip(got, truth)]
                fine = all(error <= BOUNDS[dtype] for error in errors)
                row = _row(*shown, "right" if fine else "WRONG", errors)
                row |= {"same_bits_twice": all(torch.equal(a, b) for a, b in zip(got, again))}
            except Exception as error:
                fine, row = False, _row(*shown, f"FAILED: {_said(error)}")
            right &= fine
            out.write("gpu_correctness", row | {"seconds": time.perf_counter() - start})
    return right


def _whole(layout: PackedLayout, tensors: list[torch.Tensor], spec: AttentionSpec, sinks: bool) -> list[torch.Tensor]:
    attention = make_attention(forest_of(layout), device(), 64)
    scale = tensors[0].shape[2] ** -0.5
    return both_ways(lambda q, k, v, s=None: attention(q, k, v, scale, 0, spec, s), tensors, sinks)


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0][:160] if str(error) else ''}".replace(",", ";")


def _row(backend: str, case: str, dtype: torch.dtype, size: int, verdict: str, errors: list[float] | None = None):
    names = ("error_out", "error_dq", "error_dk", "error_dv", "error_dsinks")
    found = dict.fromkeys(names, "") | dict(zip(names, errors or []))
    shown = {"backend": backend, "case": case, "dtype": str(dtype).removeprefix("torch."), "head_size": size}
    return shown | found | {"bound": BOUNDS.get(dtype, ""), "verdict": verdict, "same_bits_twice": "", "seconds": ""}


def check_steps(out: Out, backend: str, smoke: bool) -> bool:
    """Compare gradients of a whole step, tree against single rows through transformers' own attention.

    Returns whether none failed or is far off: one step in bfloat16 may exceed a tight bound by chance.
    """
    rows = rows_of(synthetic(0.7, 40 if smoke else 700, leaves=4 if smoke else 10, segment=8 if smoke else 32), 1000)
    model, right = _tiny_model(), True
    truth = _linear_gradients(model.double(), rows)
    for dtype in (torch.float32, torch.bfloat16):
        if dtype == torch.float32 and backend in ("varlen", "flex-flash"):
            continue
        model.to(dtype)
        bound = 1e-5 + 1.5 * _error(_linear_gradients(model, rows), truth)
        for budget in (None, 60 if smoke else 800):
            start = time.perf_counter()
            row = _row(backend, f"step, budget {budget or 'none'}", dtype, 64, "")
            try:
                if out.left < 5:
                    raise TimeoutError("no time left")
                with using(backend):
                    model.zero_grad()
                    TreeEngine(model, budget=budget).forward_backward(rows, tt.losses.sft())
                error = _error(_gradients(model), truth)
                row |= {"error_out": error, "bound": bound, "verdict": "right" if error <= bound else "WRONG"}
                right &= error <= 4 * bound
            except Exception as error:
                row |= {"verdict": f"FAILED: {_said(error)}"}
                right &= isinstance(error, TimeoutError)
            out.write("gpu_correctness", row | {"seconds": time.perf_counter() - start})
    return right


def _tiny_model():
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=1024, hidden_size=256, intermediate_size=512, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, tie_word_embeddings=True, max_position_embeddings=4096,
    )  # fmt: skip
    return Qwen3ForCausalLM(config).bfloat16().to(device()).eval()


def _linear_gradients(model, rows: list[tt.Trajectory]) -> torch.Tensor:
    """Gradients of the mean loss of all trained tokens, row by row, without this library."""
    model.zero_grad()
    total = sum(float(row.loss_weights[1:].sum()) for row in rows)
    for row in rows:
        ids = torch.from_numpy(np.asarray(row.ids, np.int64)).to(device())[None]
        logits = model(input_ids=ids).logits[0, :-1]
        log_p = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
        weights = torch.from_numpy(np.asarray(row.loss_weights[1:])).to(device(), log_p.dtype)
        (-(log_p.gather(1, ids[0, 1:, None])[:, 0] * weights).sum() / total).backward()
    return _gradients(model)


def _gradients(model) -> torch.Tensor:
    return torch.cat([p.grad.double().flatten() for p in model.parameters()])


def _error(got: torch.Tensor, truth: torch.Tensor) -> float:
    return float((got - truth).norm() / truth.norm())


STEPS, WARM = "steps", "warm"


def groups(smoke: bool) -> list[str]:
    """Names <backend>/<part> of groups that run in parallel processes, since compiling is most of the work.

    The last ones compile what the next stage measures, so that its time is not spent on that.
    """
    backends, found = runnable(device()), []
    for backend in backends:
        found.append(f"{backend}/{STEPS}")
        found += dict.fromkeys(f"{backend}/{spec} {size}" for _, spec, _, size in attention_cases(backend, smoke))
    from gpu_attention import HEADS

    return found + [f"{backend}/{WARM} {heads}" for heads in HEADS for backend in backends if not smoke]


def run_group(out: Out, group: str, smoke: bool) -> bool:
    """Run one group; returns whether it is correct."""
    torch.set_float32_matmul_precision("highest")
    backend, _, part = group.partition("/")
    if part == STEPS:
        return check_steps(out, backend, smoke)
    if part.startswith(WARM):
        from gpu_attention import warm

        warm(backend, part.removeprefix(WARM).strip())
        return True
    return check_attention(out, backend, smoke, part)


def run(out: Out, smoke: bool) -> None:
    """Run the stage and record which backends are correct; skipped cases do not count as wrong."""
    command = [sys.executable, str(Path(__file__).parent / "gpu.py"), "--stage", "correctness"]
    command += ["--out", str(out.folder), "--until", str(out.until), *(["--smoke"] if smoke else [])]

    def one(group: str) -> bool:
        if out.left < 5:
            print(f"{group}: skipped, no time left", flush=True)
            return True
        try:
            return subprocess.run([*command, "--group", group], check=False, timeout=out.left).returncode == 0
        except subprocess.TimeoutExpired:
            print(f"{group}: ended, it took too long", flush=True)
            return True

    names = groups(smoke)
    with ThreadPoolExecutor(max(1, min(14, len(os.sched_getaffinity(0)) - 2))) as pool:
        right = dict(zip(names, pool.map(one, names)))
    wrong = {name.partition("/")[0] for name, fine in right.items() if not fine}
    out.tune(right=[name for name in runnable(device()) if name not in wrong])
