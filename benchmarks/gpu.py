"""The GPU benchmark in three runs: A correctness, B the tree, C the linear baseline and memory.

    python3 benchmarks/gpu.py --run A                  # at most 4 minutes
    python3 benchmarks/gpu.py --run B                  # at most 9 minutes
    python3 benchmarks/gpu.py --run C                  # at most 9 minutes; ends with the speed-ups

Needs a checkout, torch, transformers and jaxtyping; nothing is installed or downloaded. Weights are random, trees have
the shapes in benchmarks/shapes. All that a run leaves is rows.jsonl and log.txt in --out; both are written
continuously. A case that fails leaves a row that says so, and the next one runs. --flash FA4 activates another
FlashAttention for every engine and plain kernel. --smoke takes tiny sizes, on a CPU too.
"""

# ruff: noqa: E402
import argparse
import collections
import contextlib
import datetime
import functools
import gc
import importlib
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "benchmarks")]
os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "4")  # a few small graphs: more workers take longer to start

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

import treetrain as tt
from tree_shapes import load, rows_of, synthetic
from treetrain.engine import lm_head
from treetrain.engine.linear import LinearEngine
from treetrain.engine.lm_head import ENVIRONMENT as HEAD
from treetrain.engine.lm_head import Edges, ScoreRequest, score_edges
from treetrain.planning.devices import Device
from treetrain.planning.partition import whole_trees
from treetrain.planning.plan import Plan
from treetrain.softmax_attention.attention import ENVIRONMENT as ATTENTION
from treetrain.softmax_attention.attention import AttentionTree, runnable
from treetrain.softmax_attention.reference import reference_attention
from treetrain.softmax_attention.schedule import AttentionSpec, Forest
from treetrain.tree.layout import AttentionRange, pack
from treetrain.tree.stats import ideal_speedup, linear_work, tree_work
from treetrain.tree.token_tree import build_tree

MINUTES = {"A": 4.0, "B": 9.0, "C": 9.0}
CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
PEAK_FLOPS = Device.of_kind("cuda" if CUDA else "cpu", 2 if CUDA else 4).flops


class Out:
    """Rows, log and deadline of a run."""

    def __init__(self, folder: Path, minutes: float, *, smoke: bool, **every_row: Any):
        folder.mkdir(parents=True, exist_ok=True)
        self.path, self._log = folder / "rows.jsonl", (folder / "log.txt").open("a", encoding="utf-8")
        self.end, self.smoke, self.every_row = time.time() + 60 * minutes, smoke, every_row

    @property
    def left(self) -> float:
        """Seconds left."""
        return self.end - time.time()

    def say(self, text: str) -> None:
        """Print a line, and append it to the log."""
        print(text, flush=True)
        self._log.write(f"{datetime.datetime.now():%H:%M:%S} {text}\n")
        self._log.flush()

    def write(self, kind: str, **row: Any) -> None:
        """Append a row."""
        short = {name: float(f"{x:.5g}") if isinstance(x, float) else x for name, x in row.items()}
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"kind": kind} | short | self.every_row) + "\n")
        self.say(f"{kind}: " + " ".join(f"{name}={value}" for name, value in short.items()))

    def rows(self, kind: str) -> list[dict[str, Any]]:
        """The rows of a kind that this and earlier runs have left here."""
        lines = self.path.read_text(encoding="utf-8").splitlines() if self.path.exists() else []
        return [row for row in map(json.loads, lines) if row["kind"] == kind]

    def need(self, seconds: float) -> None:
        """Raise TimeoutError if less time is left than this."""
        if not self.smoke and seconds > self.left:
            raise TimeoutError(f"skipped: it takes about {seconds:.0f} s, and {self.left:.0f} s are left")

    @contextlib.contextmanager
    def share(self, part: float) -> Iterator[None]:
        """Leave the block only this part of the time that is left."""
        end = self.end
        self.end = time.time() + part * self.left
        try:
            yield
        finally:
            self.end = end

    @contextlib.contextmanager
    def case(self, kind: str, **row: Any) -> Iterator[dict[str, Any]]:
        """A case, which fills in the rest of its row; an error, too little time among them, becomes its note."""
        start = time.time()
        try:
            yield row
        except Exception as error:
            row["note"] = f"{type(error).__name__}: {error}"[:300]
            if not isinstance(error, TimeoutError):
                self._log.write(traceback.format_exc())
        if not self.smoke:
            row["took"] = time.time() - start
        self.write(kind, **row)
        forget()


def provenance(run: str) -> dict[str, Any]:
    """Provenance that every row records."""
    import rows

    found: dict[str, Any] = {"run": run} | rows.provenance()
    if not found["commit"].strip("+"):  # a copy of the tree without its history
        found["commit"] = os.environ.get("TREETRAIN_COMMIT", "unknown")
    with contextlib.suppress(ImportError):
        import triton  # pyright: ignore[reportMissingImports]

        found["triton"] = triton.__version__
    if torch.cuda.is_available():
        found["machine"] = torch.cuda.get_device_name()
    return found


def forget() -> None:
    """Free the memory of what is no longer used."""
    gc.collect()
    if CUDA:
        torch.cuda.empty_cache()


def wait() -> None:
    """Wait until the device has finished all queued work."""
    if CUDA:
        torch.cuda.synchronize()


# ---- run A: correctness


CANDIDATES = ("cudnn.flex_attention", "flash_attn.cute")
"""Attention of others that could serve irregular forests (docs/gpu_kernels.md)."""


def importable(name: str) -> str:
    """ "yes", or why a module cannot be imported."""
    try:
        importlib.import_module(name)
    except Exception as error:  # it may look for drivers and compilers
        return f"{type(error).__name__}: {error}"[:200]
    return "yes"


def environment(out: Out) -> None:
    """Record the backends that can run, what others can be imported, and the GPU."""
    with out.case("environment") as row:
        row |= {"backends": runnable(DEVICE), "flash": torch.nn.attention.current_flash_attention_impl() or "FA2"}
        row |= {"importable": {name: importable(name) for name in CANDIDATES}}
        if CUDA:
            properties = torch.cuda.get_device_properties(0)
            row |= {"capability": f"{properties.major}.{properties.minor}", "gb": properties.total_memory / 1e9}


def gpu_tests(out: Out) -> None:
    """The tests of the kernels, which take the GPU where there is one."""
    files = ["softmax_attention/test_triton.py", "softmax_attention/test_varlen.py", "engine/test_head_kernels.py"]
    for file in files[1:2] if out.smoke else files:
        with out.case("tests", file=file) as row:
            out.need(20.0)
            command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(ROOT / "tests" / file)]
            environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests")])}
            limit = 300 if out.smoke else min(60.0, out.left)
            done = subprocess.run(command, capture_output=True, text=True, timeout=limit, env=environment, check=False)
            lines = done.stdout.strip().splitlines()
            row |= {"passed": done.returncode == 0, "said": lines[-1] if lines else done.stderr[-200:]}
            if done.returncode:
                out.say(done.stdout[-3000:])


SPECS = {"full": (None, None, False), "window and sinks": (100, None, True), "cap": (None, 30.0, False)}
"""Window, cap, sinks."""


def attention_correctness(out: Out) -> None:
    """Every backend against the dense reference in float64, and twice for the same bits.

    A backend passes the gate for run B if it is right with full attention, heads of 128 and bfloat16.
    """
    rng, size = np.random.default_rng(0), 24 if out.smoke else 400
    trunk = rng.integers(0, 99, size).tolist()
    deep = [trunk, *[[*trunk[: i * 5 + 1], 100 + i] for i in range(size // 6)], [1], [2, 3]]
    large = [trunk, *[[*trunk[: k * size // 4], 100 + k, *trunk] for k in range(1, 4)]]
    bushy = [row.ids for row in rows_of(synthetic(0.7, size, leaves=4 if out.smoke else 12, segment=8), 1000)]
    trees = {"bushy": bushy, "large pieces": large, "deep": deep}
    narrow = torch.bfloat16 if CUDA else torch.float32
    cases = [("full", 128, narrow, tree) for tree in trees]
    cases += [(spec, 128, narrow, "bushy") for spec in ("window and sinks", "cap")]
    cases += [("full", head, narrow, "large pieces") for head in (64, 80, 256)] + [
        ("full", 128, torch.float32, "bushy")
    ]
    wrong: set[str] = set()
    for backend, (spec, head, dtype, tree) in itertools.product(runnable(DEVICE), cases[: 3 if out.smoke else None]):
        head = 16 if out.smoke else head
        layout = pack(build_tree(trees[tree]), trim=False)
        with out.case("attention", backend=backend, spec=spec, head=head, dtype=str(dtype), tree=tree) as row:
            out.need(5.0)
            window, cap, sinks = SPECS[spec]
            tensors = [torch.randn(s, device=DEVICE).to(dtype) for s in shapes_of(layout.num_tokens, (4, 2, head))]
            tensors += [torch.randn(4, device=DEVICE).to(dtype)] if sinks else []
            ask = AttentionSpec(AttentionRange(window=window), cap)
            ends, depth = (torch.from_numpy(x).to(DEVICE) for x in (layout.ends, layout.positions))

            def reference(q, k, v, s=None, ends=ends, depth=depth, window=window, cap=cap, head=head):
                where = {"depth": depth, "window": window, "softcap": cap, "sinks": s}
                return reference_attention(q, k, v, ends, head**-0.5, **where)

            attention = AttentionTree(Forest.of(layout))

            def attend(q, k, v, s=None, attention=attention, ask=ask, head=head, backend=backend):
                return attention(q, k, v, head**-0.5, 0, ask, s, backend)

            truth = both_ways(reference, [t.double() for t in tensors])
            got, again = (both_ways(attend, tensors) for _ in range(2))
            errors = [float((a.double() - b).norm() / b.norm()) for a, b in zip(got, truth)]
            fine = max(errors) <= (1.5e-2 if dtype == torch.bfloat16 else 2e-5)
            same = all(torch.equal(a, b) for a, b in zip(got, again))
            row |= {"ran": sorted(attention.calls), "errors": errors, "right": fine, "same_bits": same}
        if spec == "full" and dtype == narrow and head in (16, 128) and not row.get("right"):
            wrong.add(backend)
    out.write("gate", right=sorted(set(runnable(DEVICE)) - wrong))


def both_ways(attend: Callable[..., Tensor], tensors: list[Tensor]) -> list[Tensor]:
    """Output and gradients of query, key, value (and sinks); the fourth tensor is the output's gradient."""
    leaves = [t.detach().clone().requires_grad_() for t in (*tensors[:3], *tensors[4:])]
    result = attend(*leaves)
    return [result.detach(), *torch.autograd.grad(result, leaves, tensors[3])]


def shapes_of(tokens: int, heads: tuple[int, int, int]) -> list[tuple[int, int, int]]:
    """Shapes of query, key, value and the output's gradient."""
    return [(tokens, count, heads[2]) for count in (heads[0], heads[1], heads[1], heads[0])]


def head_correctness(out: Out) -> None:
    """The LM head by Triton against float64, beside PyTorch's operations."""
    hidden, vocabulary = (16, 300) if out.smoke else (1024, 151_936)
    count = min(192, vocabulary)
    generator = torch.Generator(device=DEVICE).manual_seed(0)
    x = torch.randn(count, hidden, device=DEVICE, generator=generator)
    weight = torch.randn(vocabulary, hidden, device=DEVICE, generator=generator) * 2 / hidden**0.5
    targets = torch.randint(vocabulary, (count,), device=DEVICE, generator=generator)
    factors = torch.randn(count, device=DEVICE, generator=generator)
    numbers = torch.arange(count, device=DEVICE)
    edges = Edges(rows=numbers, edge_row=numbers, targets=targets, host_edge_row=np.arange(count))

    def gradients(dtype: torch.dtype, entropy: bool) -> list[Tensor]:
        head = nn.Linear(hidden, vocabulary, bias=False, device=DEVICE, dtype=dtype)
        head.weight.data.copy_(weight.bfloat16())
        rows = x.bfloat16().to(dtype).requires_grad_()
        request = ScoreRequest(need_entropy=entropy, coefficients=None if entropy else factors.to(dtype))
        scores = score_edges(rows, head, head, edges, request, fused=True, vocab_size=vocabulary)
        total = scores.linear_loss if scores.linear_loss is not None else (scores.logprobs * factors).sum()
        total = total + 0.1 * scores.entropies.sum() if scores.entropies is not None else total
        return [scores.logprobs.detach(), *torch.autograd.grad(total, [rows, head.weight])]

    for kernels, entropy in itertools.product(("torch", "triton"), (False, True)):
        if kernels == "torch" or "triton" in runnable(DEVICE):
            with out.case("head", kernels=kernels, entropy=entropy) as row, variable(HEAD, "torch"):
                out.need(5.0)
                truth = gradients(torch.float64, entropy)
                with variable(HEAD, kernels):
                    got = gradients(torch.bfloat16 if CUDA else torch.float32, entropy)
                row["errors"] = [float((a.double() - b).norm() / b.norm()) for a, b in zip(got, truth)]


@contextlib.contextmanager
def variable(name: str, value: str | None) -> Iterator[None]:
    """Set an environment variable within the block."""
    before = os.environ.get(name)
    os.environ[name] = value or ""
    try:
        yield
    finally:
        os.environ[name] = before or ""


def step_correctness(out: Out) -> None:
    """Gradients of whole steps against the rows by themselves through transformers' own attention, in float64."""
    rows = rows_of(synthetic(0.7, 40 if out.smoke else 700, leaves=10, segment=8 if out.smoke else 64), 1000)
    config = Qwen3Config(
        vocab_size=1024, hidden_size=256, intermediate_size=512, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, tie_word_embeddings=True, max_position_embeddings=4096,
    )  # fmt: skip
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(config).bfloat16().to(DEVICE).eval()
    truth = row_gradients(model.double(), rows)
    for dtype, budget, compiled in itertools.product((torch.bfloat16, torch.float32), (None, 800), (False, True)):
        with out.case("step", dtype=str(dtype), budget=budget, compiled=compiled) as row:
            out.need(5.0)
            model.to(dtype)
            bound = 1e-5 + 1.5 * relative(row_gradients(model, rows), truth)
            model.zero_grad()
            options = {"budget": 60 if budget and out.smoke else budget, "compile_layers": compiled and not out.smoke}
            done = tt.TreeEngine(model, **options).forward_backward(rows, tt.losses.sft())
            error = relative(flat_gradients(model), truth)
            row |= {"ran": dict(done.attention), "error": error, "bound": bound, "right": error <= bound}


def row_gradients(model: Any, rows: list[tt.Trajectory]) -> Tensor:
    """Gradients of the mean loss of all trained tokens, row by row, without this library."""
    model.zero_grad()
    total = sum(float(row.loss_weights[1:].sum()) for row in rows)
    for row in rows:
        ids = torch.from_numpy(np.asarray(row.ids, np.int64)).to(DEVICE)[None]
        logits = model(input_ids=ids).logits[0, :-1]
        log_p = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
        weights = torch.from_numpy(np.asarray(row.loss_weights[1:])).to(DEVICE, log_p.dtype)
        (-(log_p.gather(1, ids[0, 1:, None])[:, 0] * weights).sum() / total).backward()
    return flat_gradients(model)


def flat_gradients(model: nn.Module) -> Tensor:
    return torch.cat([p.grad.double().flatten() for p in model.parameters() if p.grad is not None])


def relative(got: Tensor, truth: Tensor) -> float:
    return float((got - truth).norm() / truth.norm())


# ---- models, batches and steps

VOCABULARY = 151_936
QWEN3 = {
    # layers, hidden, intermediate, heads, kv heads, tied
    "0.6b": (28, 1024, 3072, 16, 8, True),
    "1.7b": (28, 2048, 6144, 16, 8, True),
    "4b": (36, 2560, 9728, 32, 8, True),
    "8b": (36, 4096, 12288, 32, 8, False),
}
MOE = "30b-a3b, 6 of 48 layers"
CASES = [
    ("0.6b", "tau_airline 2", "sft", (False, True)),
    ("8b", "tau_airline 21", "sft", (False, True)),
    ("0.6b", "synthetic 0.847 4096", "grpo", (False,)),
    (MOE, "synthetic 0.847 4096", "sft", (False,)),
    ("4b", "tau_airline 21", "sft", (False, True)),
    ("1.7b", "synthetic 0.75 16384", "sft", (False,)),
    ("0.6b", "synthetic 0.9 4096", "sft", (False,)),
    ("0.6b", "synthetic 0.75 32768", "sft", (False,)),
    (MOE, "tau_airline 21", "grpo", (False,)),
]
"""Model, rows, loss, with and without activation checkpointing; the most telling first."""


_made: dict[str, Any] = {}
"""The last model."""


def model_of(name: str, smoke: bool) -> Any:
    """A Qwen3 with random weights in bfloat16 and its optimiser, in training mode; the last one is kept."""
    if name not in _made:
        _made.clear()
        forget()
        _made[name] = make_model(name, smoke)
    return _made[name]


def make_model(name: str, smoke: bool) -> Any:
    """See `model_of`."""
    torch.manual_seed(0)
    common = {"head_dim": 128, "vocab_size": VOCABULARY, "max_position_embeddings": 65_536}
    if name == MOE:
        made, kind = Qwen3MoeForCausalLM, Qwen3MoeConfig
        sizes = {"num_hidden_layers": 6, "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768}
        sizes |= {"num_attention_heads": 32, "num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8}
        sizes |= {"norm_topk_prob": True, "tie_word_embeddings": False}
        small = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}
    else:
        made, kind, small = Qwen3ForCausalLM, Qwen3Config, {}
        layers, hidden, intermediate, heads, groups, tied = QWEN3[name]
        sizes = {"num_hidden_layers": layers, "hidden_size": hidden, "intermediate_size": intermediate}
        sizes |= {"num_attention_heads": heads, "num_key_value_heads": groups, "tie_word_embeddings": tied}
    if smoke:
        sizes |= {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48} | small
        sizes |= {"num_attention_heads": 2, "num_key_value_heads": 1}
        common |= {"head_dim": 16, "vocab_size": 512}
    with DEVICE:
        model = made(kind(**common, **sizes)).to(torch.bfloat16 if CUDA else torch.float32).train()
    model.optimiser = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=CUDA)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    model.optimiser.step()  # makes its state, so that plans see the memory that is free besides it
    return model


def checkpointing(model: Any, on: bool) -> None:
    """Run every layer's forward again in backward, or not."""
    if on:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    else:
        model.gradient_checkpointing_disable()


def batch(name: str, loss: str, smoke: bool) -> list[tt.Trajectory]:
    """The rows of a workload, with what the loss needs."""
    kind, *sizes = name.split()
    if smoke:
        rows = rows_of(synthetic(0.6, 48, leaves=3, segment=8), 500)
    elif kind == "tau_airline":
        rows = rows_of(load(f"tau_airline_calls_{sizes[0]}"), 30_000)
    elif kind == "unshared":
        rng = np.random.default_rng(0)
        rows = [tt.Trajectory([k, *rng.integers(16, 30_000, 4095).tolist()]) for k in range(16)]
    else:
        rows = rows_of(synthetic(float(sizes[0]), int(sizes[1])), 30_000)
    if loss == "grpo":
        rng = np.random.default_rng(0)
        rows = [row.replace(advantages=float(rng.normal()), old_logprobs=np.full(len(row), -12.0)) for row in rows]
    return rows


class Checkpointed(tt.TreeEngine):
    """The rival: the whole tree as one part (with FlexAttention and every layer checkpointed)."""

    def plan_of(self, layout: Any) -> Any:
        """See `TreeEngine.plan_of`."""
        return whole_trees(layout, max(layout.num_tokens, 1))


class SegmentBySegment(tt.TreeEngine):
    """Plans one part per segment, depth first."""

    def plan_of(self, layout: Any) -> Any:
        """See `TreeEngine.plan_of`."""
        length = np.diff(layout.segment_start)
        return Plan.of_parts(layout, np.repeat(np.arange(len(length)), length))


def linear_engine(model: Any, rows: list[tt.Trajectory], **options: Any) -> LinearEngine:
    """Rows packed without padding, in runs of 32,768 tokens, or of the most that are predicted to fit."""
    size = 32_768
    while CUDA and size > 2048:
        engine = LinearEngine(model, pack_tokens=size, **options)
        if engine.cost.peak_bytes(engine.plan(rows)) <= (engine.prepared.free_bytes() or math.inf):
            break
        size //= 2
    return LinearEngine(model, pack_tokens=size, **options)


def step_case(
    out: Out, model_name: str, rows_name: str, loss_name: str, engine_name: str, make: Callable[..., Any], *,
    checkpointed: bool = False, kind: str = "steps", backend: str | None = None, repeats: int = 3, waits: bool = False,
    **options: Any,
) -> None:  # fmt: skip
    """Time an engine's forward, backward and optimiser as a training loop runs them: one row.

    A step builds the next step's tree while the GPU works. Warm-up is a step on three rows. No repeat starts that is
    predicted to end after the deadline.
    """
    options.setdefault("compile_layers", not out.smoke)
    shown = {"model": model_name, "rows": rows_name, "loss": loss_name, "engine": engine_name}
    shown |= {"checkpointed": checkpointed, "compiled": options["compile_layers"]}
    with out.case(kind, **shown) as row, variable(ATTENTION, backend):
        out.need(8.0)
        model, rows = model_of(model_name, out.smoke), batch(rows_name, loss_name, out.smoke)
        loss = tt.losses.grpo() if loss_name == "grpo" else tt.losses.sft()
        checkpointing(model, checkpointed)
        engine = make(model, rows, **options) if make is linear_engine else make(model, **options)
        tree, counts = build_tree(rows, merge=engine.merge), engine.cost.counts
        plan = engine.plan(rows)
        expected = engine.cost.seconds(plan)
        work = (tree_work if engine.merge else linear_work)(build_tree(rows), counts.attention_ranges)
        flops, whole = counts.flops(*work), build_tree(rows)
        row |= {"flat_tokens": whole.num_flat_tokens, "unique_tokens": whole.num_tokens}
        row |= {"ideal": ideal_speedup(whole, counts), "predicted_gb": engine.cost.peak_bytes(plan) / 1e9}

        def step(given: Any) -> Any:
            model.zero_grad(set_to_none=False)  # kept, so that plans see the memory that is free besides them
            done = engine.forward_backward(given, loss)
            model.optimiser.step()
            build_tree(rows, merge=engine.merge)
            return done

        step(rows[:3])
        wait()
        before, times = torch.cuda.memory_allocated() if CUDA else 0, []
        if CUDA:
            torch.cuda.reset_peak_memory_stats()
        while len(times) < repeats and (out.smoke or out.left > 2 + max(min(times, default=expected), 0.1)):
            start = time.perf_counter()
            done = step(tree)
            wait()
            times.append(time.perf_counter() - start)
        if not times:
            out.need(2 + expected)
        seconds = statistics.median(times)
        row |= {"seconds": seconds, "least": min(times), "most": max(times), "expected": expected}
        row |= {"flat_tokens_per_second": whole.num_flat_tokens / seconds, "mfu": flops / seconds / PEAK_FLOPS}
        row |= {"tokens_per_second": work.tokens / seconds, "attention": dict(done.attention), "parts": done.parts}
        row |= {"recomputed_tokens": done.recomputed_tokens}
        if CUDA:
            peak = torch.cuda.max_memory_allocated()
            row |= {"above_gb": (peak - before) / 1e9, "peak_gb": peak / 1e9}
            if waits:
                row["host_waits"] = count_waits(lambda: step(tree))


def count_waits(step: Callable[[], Any]) -> int:
    """How often the host waits for the GPU in a step, as PyTorch's debug mode counts it."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum("synchronizing CUDA operation" in str(warning.message) for warning in told)


# ---- run B: where the time goes, the tree, attention


def profile(out: Out) -> None:
    """Seconds of one tree and one linear step by purpose."""
    for name, make in (("tree", tt.TreeEngine), ("linear", linear_engine)):
        with out.case("profile", model="0.6b", rows="tau_airline 21", engine=name) as row:
            out.need(20.0)
            model, rows = model_of("0.6b", out.smoke), batch("tau_airline 21", "sft", out.smoke)
            checkpointing(model, False)
            options = {"compile_layers": not out.smoke}
            engine = make(model, rows, **options) if make is linear_engine else make(model, **options)

            def step(engine=engine, model=model, rows=rows) -> None:
                model.zero_grad(set_to_none=False)
                engine.forward_backward(rows, tt.losses.sft())
                model.optimiser.step()
                wait()

            step()
            activities = [torch.profiler.ProfilerActivity.CPU]
            activities += [torch.profiler.ProfilerActivity.CUDA] if CUDA else []
            with in_a_range("head", lm_head), torch.profiler.profile(activities=activities) as found:
                start = time.perf_counter()
                step()
                seconds = time.perf_counter() - start
            table = by_purpose(found.events() or [])
            row |= {"seconds": seconds} | {purpose: table[purpose] for purpose in sorted(table)}
            row["idle"] = seconds - sum(table.values())


@contextlib.contextmanager
def in_a_range(name: str, module: Any) -> Iterator[None]:
    """Name the range of the profile in which edges are scored."""
    original = module.score_edges

    def score_edges(*args: Any, **options: Any) -> Any:
        with torch.profiler.record_function(name):
            return original(*args, **options)

    module.score_edges = score_edges
    try:
        yield
    finally:
        module.score_edges = original


PURPOSES = {
    "attention": (
        "flash",
        "fmha",
        "forward_kernel",
        "query_gradient",
        "key_gradient",
        "delta_kernel",
        "flex_attention",
    ),
    "head": ("statistics_kernel", "gradient_kernel"),
    "gemm": ("gemm", "nvjet", "cutlass", "cublas", "::mm", "::addmm", "::bmm", "linear"),
}
"""Parts of the names of kernels; all others are elementwise."""


def by_purpose(events: Any) -> collections.Counter[str]:
    """Seconds of kernels (on a CPU, of operators) by purpose: attention, elementwise, gemm, head, optimiser."""
    table: collections.Counter[str] = collections.Counter()

    def purpose(name: str) -> str:
        lower = name.lower()
        return next((each for each, parts in PURPOSES.items() if any(part in lower for part in parts)), "elementwise")

    for event in events:
        if event.is_user_annotation:
            continue
        above, within = event, None
        while above is not None and within is None:
            within = "head" if above.name == "head" else "optimiser" if above.name.startswith("Optimizer.") else None
            above = above.cpu_parent
        if not CUDA:
            table[within or purpose(event.name)] += event.self_cpu_time_total / 1e6
        elif event.device_type == torch.autograd.DeviceType.CUDA:
            table[purpose(event.name)] += event.time_range.elapsed_us() / 1e6
        elif within:  # what operators of the head and the optimiser launched
            for kernel in event.kernels:
                table[purpose(kernel.name)] -= kernel.duration / 1e6
                table[within] += kernel.duration / 1e6
    return table


def tree_steps(out: Out) -> None:
    """The tree on all models: compiled layers, the default attention, the Triton head; the first case without each."""
    for model, rows, loss, modes in CASES[:2] if out.smoke else CASES:
        given = out, model, rows, loss
        for checkpointed in modes:
            step_case(*given, "tree", tt.TreeEngine, checkpointed=checkpointed, waits=not checkpointed)
        if True in modes:
            backend = "flex" if "flex" in runnable(DEVICE) else None
            step_case(*given, "rival", Checkpointed, checkpointed=True, backend=backend, compile_layers=False)


def ablations(out: Out) -> None:
    """The tree of the first case with one feature changed at a time."""
    given = CASES[0][:3]
    step_case(out, *given, "tree, eager", tt.TreeEngine, compile_layers=False)
    for backend in gate(out):
        if backend not in ("varlen", "rectangles"):
            step_case(out, *given, f"tree, {backend}", tt.TreeEngine, backend=backend)
    with variable(HEAD, "torch"):
        step_case(out, *given, "tree, head by PyTorch", tt.TreeEngine)
    size = len(batch(given[1], given[2], out.smoke)[0])
    step_case(out, *given, "tree, parts of a row", functools.partial(tt.TreeEngine, budget=size))
    step_case(out, *given, "tree, a part for each segment", SegmentBySegment)


def gate(out: Out) -> list[str]:
    """The backends that run A found right; all that can run if there was no run A."""
    found = out.rows("gate")
    return [name for name in runnable(DEVICE) if not found or name in found[-1]["right"]]


HEADS = {"0.6b": (16, 8, 128), "8b": (32, 8, 128), "size 64": (16, 8, 64)}
"""Query heads, key/value heads, head size."""
PLAIN = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}


def attention_sweep(out: Out) -> None:
    """FLOP rate of every backend on trees, beside that of plain causal kernels at as many visible pairs."""
    trees = {"tau_airline 2": load("tau_airline_calls_2"), "synthetic 0.75 16384": synthetic(0.75, 16384)}
    trees |= {"synthetic 0.9 32768": synthetic(0.9, 32768), "bushy": synthetic(0.75, 512, leaves=64, segment=16)}
    trees = {"smoke": synthetic(0.5, 64, leaves=3, segment=8)} if out.smoke else trees
    for (heads_name, heads), (tree, shape) in itertools.product(HEADS.items(), trees.items()):
        if heads_name != "0.6b" and tree != next(iter(trees)):
            continue  # one tree shows what the heads do
        layout = pack(build_tree(rows_of(shape, 30_000)), trim=False)
        length = min(math.isqrt(2 * layout.pairs), 65_536)
        shown = {"tree": tree, "heads": heads_name, "tokens": layout.num_tokens}
        for name, kernel in PLAIN.items() if CUDA else [("math", SDPBackend.MATH)]:
            with out.case("sweep", kernel=f"plain {name}", **shown) as row, sdpa_kernel([kernel]):
                out.need(5.0)
                attend = functools.partial(scaled_dot_product_attention, is_causal=True, enable_gqa=True)
                tensors = [x.transpose(0, 1)[None] for x in inputs(length, heads)]
                row |= rates(attend, tensors, length * (length + 1) / 2, heads)
        for backend in gate(out):
            with out.case("sweep", kernel=backend, **shown) as row:
                out.need(5.0)
                attention = AttentionTree(Forest.of(layout))
                attend = functools.partial(attention, scale=heads[2] ** -0.5, backend=backend)
                row |= rates(attend, inputs(layout.num_tokens, heads), layout.pairs, heads)
                row["ran"] = sorted(attention.calls)


def inputs(tokens: int, heads: tuple[int, int, int]) -> list[Tensor]:
    """Random query, key, value and output gradient, in bfloat16 on a GPU."""
    dtype = torch.bfloat16 if CUDA else torch.float32
    made = [torch.randn(shape, device=DEVICE, dtype=dtype) for shape in shapes_of(tokens, heads)]
    return [*(x.requires_grad_() for x in made[:3]), made[3]]


def rates(attend: Callable[..., Tensor], tensors: list[Tensor], pairs: float, heads: tuple[int, int, int]) -> Any:
    """Milliseconds and TFLOP/s of forward, and of forward and backward: visible pairs alone, 2 and 5 products each."""
    *leaves, grad = tensors
    forward = milliseconds(lambda: attend(*leaves))
    both = milliseconds(lambda: torch.autograd.grad(attend(*leaves), leaves, grad))
    flops = 2.0 * heads[0] * heads[2] * pairs
    tflops = {"forward_tflops": 2 * flops / forward / 1e9, "tflops": 7 * flops / both / 1e9}
    return {"forward_ms": forward, "backward_ms": both - forward} | tflops


def milliseconds(call: Callable[[], Any], calls: int = 10) -> float:
    """Milliseconds of a call: back-to-back calls between two CUDA events, so the host's time does not count."""
    call()
    if not CUDA:
        start = time.perf_counter()
        call()
        return 1e3 * (time.perf_counter() - start)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(calls):
        call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / calls


def kernel_sweep(out: Out) -> None:
    """Every block size of each Triton kernel, alone: the other two keep their defaults."""
    layout = pack(build_tree(rows_of(synthetic(0.6, 48 if out.smoke else 8192, leaves=6), 30_000)), trim=False)
    from treetrain.softmax_attention.triton_attention import SHAPES
    from triton_shapes import candidates  # needs Triton

    for heads_name in ("0.6b", "size 64"):
        heads = HEADS[heads_name]
        place = next(largest for largest in (64, 128, 256) if heads[2] <= largest), 2
        default = SHAPES[place]
        for kernel, listed in candidates(heads[2], torch.bfloat16).items():
            for shape in listed[: 1 if out.smoke else None]:
                with out.case("kernel", kernel=kernel, heads=heads_name, shape=tuple(shape)) as row:
                    out.need(5.0)
                    SHAPES[place] = default._replace(**{kernel: shape})
                    tree = AttentionTree(Forest.of(layout))
                    attend = functools.partial(tree, scale=heads[2] ** -0.5, backend="triton")
                    row |= rates(attend, inputs(layout.num_tokens, heads), layout.pairs, heads)
        SHAPES[place] = default


# ---- run C: the linear baseline, memory, and what both say together


def linear_steps(out: Out) -> None:
    """The linear baseline on all models, compiled as the tree is; nothing shared on both sides."""
    for number, (model, rows, loss, modes) in enumerate(CASES[:2] if out.smoke else CASES):
        for checkpointed in modes:
            step_case(out, model, rows, loss, "linear", linear_engine, checkpointed=checkpointed)
        if number == 0:
            step_case(out, model, rows, loss, "linear, eager", linear_engine, compile_layers=False)
            for name, make in (("tree", tt.TreeEngine), ("linear", linear_engine)):
                step_case(out, model, "unshared 16", "sft", name, make)


def memory(out: Out) -> None:
    """Peaks, predicted and measured: from all free memory down to a quarter of the longest path."""
    longest = max(map(len, batch("tau_airline 21", "sft", out.smoke)))
    for budget in (None, longest, longest // 2, longest // 4):
        make = functools.partial(tt.TreeEngine, budget=budget)
        step_case(out, "0.6b", "tau_airline 21", "sft", f"tree, budget {budget}", make, kind="memory", repeats=1)


def speedups(out: Out) -> None:
    """Tree and rival over the linear baseline, from the newest rows of all runs here."""
    found = {(r["model"], r["rows"], r["loss"], r["engine"], r["checkpointed"]): r for r in out.rows("steps")}
    for (model, rows, loss, engine, checkpointed), row in found.items():
        for against in (False, True):
            linear = found.get((model, rows, loss, "linear", against))
            if engine.startswith("linear") or linear is None or not {"seconds"} <= set(row) & set(linear):
                continue
            speedup = linear["seconds"] / row["seconds"]
            shown = {"model": model, "rows": rows, "loss": loss, "engine": engine, "checkpointed": checkpointed}
            shown |= {"linear_checkpointed": against, "speedup": speedup, "ideal": row["ideal"]}
            out.write("speedup", **shown, efficiency=speedup / row["ideal"], mfu=row["mfu"])


RUNS: dict[str, dict[Callable[[Out], None], float]] = {
    "A": {environment: 1, attention_correctness: 0.5, head_correctness: 0.5, step_correctness: 0.6, gpu_tests: 1},
    "B": {environment: 1, profile: 0.2, tree_steps: 0.6, attention_sweep: 0.5, kernel_sweep: 0.6, ablations: 1},
    "C": {environment: 1, linear_steps: 0.8, memory: 1, speedups: 1},
}
"""The parts of every run, and the share that each may take of the time that those before it leave."""


def main() -> int:
    """Run what the command line says; returns 1 if a case failed or was wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", required=True, choices=RUNS)
    parser.add_argument("--minutes", type=float, help="instead of 4, 9 and 9")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "gpu", help="folder of the rows")
    parser.add_argument("--flash", help="FA3 or FA4: activate this FlashAttention")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes: does it run?")
    options = parser.parse_args()
    if not CUDA and not options.smoke:
        print("no CUDA device: nothing to measure here (--smoke runs it with tiny sizes on a CPU)", file=sys.stderr)
        return 2
    if options.flash:
        torch.nn.attention.activate_flash_attention_impl(options.flash)
    minutes = options.minutes or MINUTES[options.run]
    out = Out(options.out, minutes, smoke=options.smoke, **provenance(options.run))
    before = len(out.path.read_text().splitlines()) if out.path.exists() else 0
    for part, share in RUNS[options.run].items():
        if part is not kernel_sweep or "triton" in runnable(DEVICE):
            out.say(f"== {part.__name__}: {share:.0%} of {out.left:.0f} s")
            try:
                with out.share(share):
                    part(out)
            except Exception:
                out.say(f"{part.__name__} failed:\n{traceback.format_exc()}")
    rows = [json.loads(line) for line in out.path.read_text().splitlines()[before:]]
    bad = [row for row in rows if "note" in row or row.get("right") is False or row.get("passed") is False]
    out.say(f"== {len(rows)} rows, {len(bad)} of them failed, wrong or skipped")
    return min(len(bad), 1)


if __name__ == "__main__":
    sys.exit(main())
