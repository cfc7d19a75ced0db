"""The cases of `quarter_hour.py`: correctness, steps, attention, profile, memory. Each leaves rows.

Weights are random, and trees have the shapes in benchmarks/shapes. A case that fails leaves a row that says so. In a
rehearsal ("smoke") all sizes are tiny, and layers are compiled by the backend aot_eager, so that a CPU takes the path
that a GPU takes.
"""

# ruff: noqa: E402
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
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "benchmarks")]
import numpy as np
import torch
from torch import Tensor, nn
from torch._dynamo.utils import calculate_time_spent, counters
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

import treetrain as tt
from tree_shapes import load, rows_of, synthetic
from treetrain.check.linear_engine import LinearEngine
from treetrain.core.attention.attention import AttentionTree
from treetrain.core.attention.reference import reference_attention
from treetrain.core.attention.schedule import PLAIN_ATTENTION, AttentionSpec, Forest
from treetrain.core.head import lm_head
from treetrain.core.head.lm_head import Edges, ScoreRequest, score_edges
from treetrain.core.planning.devices import Device
from treetrain.core.tree.layout import AttentionRange, pack
from treetrain.core.tree.token_tree import build_tree
from treetrain.kernels.attention_check import failure_of_backend
from treetrain.kernels.backends import BACKENDS, DeviceBackends, runnable
from treetrain.kernels.backends import ENVIRONMENT as ATTENTION
from treetrain.kernels.lm_head import ENVIRONMENT as HEAD
from treetrain.models.work import cheapest_rows, linear_work, tree_work

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
PEAK_FLOPS = Device.of_kind("cuda" if CUDA else "cpu", 2 if CUDA else 4).flops


class Out:
    """Rows, log and deadline of a process."""

    def __init__(self, folder: Path, minutes: float, *, smoke: bool, **every_row: Any):
        folder.mkdir(parents=True, exist_ok=True)
        self.path, self._log = folder / "rows.jsonl", (folder / "log.txt").open("a", encoding="utf-8")
        self.end, self.smoke, self.every_row = time.time() + 60 * minutes, smoke, every_row
        self.device_failed = False
        """Whether a case has ended with a CUDA error: all later calls of this process would fail too."""

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

    def need(self, seconds: float) -> None:
        """Raise TimeoutError if less time is left than this."""
        if not self.smoke and seconds > self.left:
            raise TimeoutError(f"skipped: it takes about {seconds:.0f} s, and {self.left:.0f} s are left")

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
            self.device_failed |= type(error).__name__ == "AcceleratorError" or "CUDA error" in str(error)
        if not self.smoke:
            row["took"] = time.time() - start
        self.write(kind, **row)
        if not self.device_failed:
            forget()


def provenance() -> dict[str, Any]:
    """What every row records: date, commit, machine, versions, and the FlashAttention that is active."""
    import rows

    found: dict[str, Any] = rows.provenance()
    with contextlib.suppress(ImportError):
        import triton  # pyright: ignore[reportMissingImports]

        found["triton"] = triton.__version__
    if CUDA:
        found["machine"] = torch.cuda.get_device_name()
    return found | {"flash": torch.nn.attention.current_flash_attention_impl() or "FA2"}


def memory_bytes() -> int:
    """Bytes of the card; 0 without one."""
    return torch.cuda.get_device_properties(0).total_memory if CUDA else 0


def forget() -> None:
    """Free the memory of what is no longer used."""
    gc.collect()
    if CUDA:
        torch.cuda.empty_cache()


def wait() -> None:
    """Wait until the device has finished all queued work."""
    if CUDA:
        torch.cuda.synchronize()


def rehearse() -> None:
    """Compile layers on a CPU as a GPU does, without generating code: graphs and recompilations are those of a GPU."""
    torch.compile = functools.partial(torch.compile, backend="aot_eager")


# ---- correctness


CANDIDATES = ("cudnn.flex_attention", "flash_attn.cute")
"""Attention of others that could serve irregular forests (docs/gpu.md)."""
LIMITS = {torch.bfloat16: 1.5e-2, torch.float32: 2e-5}
"""Largest relative error of attention and its gradients against float64."""


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
        row["backends"] = runnable(DEVICE)
        row |= {"importable": {name: importable(name) for name in CANDIDATES}}
        if CUDA:
            properties = torch.cuda.get_device_properties(0)
            row |= {"capability": f"{properties.major}.{properties.minor}", "gb": properties.total_memory / 1e9}


def ceilings(out: Out) -> None:
    """Rates that the card reaches: copies, products of our shapes, and the head's `addmm` with `out_dtype`."""
    with out.case("ceilings") as row:
        narrow = torch.bfloat16 if CUDA else torch.float32
        size = 1 << (31 if CUDA else 20)
        target, source = torch.empty(2, size, dtype=torch.uint8, device=DEVICE)
        row["copy_tb_s"] = 2 * size / milliseconds(functools.partial(target.copy_, source)) / 1e9
        del target, source
        large = ((8192, 8192, 8192), (24_704, 1024, 3072), (24_704, 4096, 12_288), (1766, 1024, VOCABULARY))
        for m, k, n in large if CUDA else ((64, 64, 64),):
            a, b = (torch.randn(shape, device=DEVICE, dtype=narrow) for shape in ((m, k), (k, n)))
            row[f"tflops_{m}x{k}x{n}"] = 2 * m * k * n / milliseconds(lambda a=a, b=b: a @ b) / 1e9
        if CUDA:
            total = torch.zeros(VOCABULARY, 1024, device=DEVICE)
            a, b = (torch.randn(1766, width, device=DEVICE, dtype=narrow) for width in (VOCABULARY, 1024))
            add = functools.partial(torch.addmm, total, a.t(), b, out_dtype=torch.float32, out=total)
            row["addmm_out_dtype_tflops"] = 2 * 1766 * VOCABULARY * 1024 / milliseconds(add) / 1e9


def self_checks(out: Out, names: tuple[str, ...] = ("varlen", "triton")) -> None:
    """The comparison that precedes the first use of each backend, timed; heads of Qwen3-0.6B."""
    candidates = [name for name in names if name in runnable(DEVICE)] if CUDA else ["rectangles"]
    narrow = torch.bfloat16 if CUDA else torch.float32
    cases = dict.fromkeys([(narrow, False), (narrow, True), (torch.float32, False)])
    for name, (dtype, below) in itertools.product(candidates, cases):
        if name == "varlen" and (below or dtype == torch.float32):
            continue
        with out.case("self_check", backend=name, dtype=str(dtype), below_path=below) as row, warnings.catch_warnings():
            out.need(5.0)
            warnings.simplefilter("ignore")  # the row says it
            q, k = (torch.empty(1, heads, 16 if out.smoke else 128, dtype=dtype, device=DEVICE) for heads in (16, 8))
            failure = failure_of_backend(name, BACKENDS[name], q, k, k, PLAIN_ATTENTION, sinks=False, below_path=below)
            row |= {"right": failure is None, "said": failure}


def kernel_tests(out: Out) -> None:
    """The tests of the kernels, which take the GPU where there is one; each file compiles many variants."""
    for file in ("attention/test_triton.py", "attention/test_varlen.py", "engine/test_head_kernels.py"):
        with out.case("tests", file=file) as row:
            out.need(20.0)
            command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(ROOT / "tests" / file)]
            environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests")])}
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=out.left, env=environment, check=False
            )
            lines = done.stdout.strip().splitlines()
            row |= {"right": done.returncode == 0, "said": lines[-1] if lines else done.stderr[-200:]}
            if done.returncode:
                out.say(done.stdout[-3000:])


SPECS = {"full": (None, None, False), "window and sinks": (100, None, True), "cap": (None, 30.0, False)}
"""Window, cap, sinks."""


def attention_correctness(out: Out) -> None:
    """The library's backends of a GPU against the dense reference in float64, and twice for the same bits."""
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
    backends = [name for name in runnable(DEVICE) if not CUDA or name in ("varlen", "triton")]
    for backend, (spec, head, dtype, tree) in itertools.product(backends, cases[: 3 if out.smoke else None]):
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

            attention = AttentionTree(Forest.of(layout), backends=DeviceBackends())

            def attend(q, k, v, s=None, attention=attention, ask=ask, head=head, backend=backend):
                return attention(q, k, v, head**-0.5, 0, ask, s, backend)

            truth = both_ways(reference, [t.double() for t in tensors])
            got, again = (both_ways(attend, tensors) for _ in range(2))
            errors = [float((a.double() - b).norm() / b.norm()) for a, b in zip(got, truth)]
            fine = all(error <= LIMITS[dtype] for error in errors)  # false for NaN
            same = all(torch.equal(a, b) for a, b in zip(got, again))
            row |= {"ran": sorted(attention.calls), "errors": errors, "right": fine, "same_bits": same}


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
                row["right"] = all(error <= LIMITS[torch.bfloat16] for error in row["errors"])


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
    """Gradients of whole steps against the rows by themselves through transformers' own attention, in float64.

    Layers are not compiled: the steps of the other phases compare compiled layers with these.
    """
    rows = rows_of(synthetic(0.7, 40 if out.smoke else 700, leaves=10, segment=8 if out.smoke else 64), 1000)
    config = Qwen3Config(
        vocab_size=1024, hidden_size=256, intermediate_size=512, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, tie_word_embeddings=True, max_position_embeddings=4096,
    )  # fmt: skip
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(config).bfloat16().to(DEVICE).eval()
    truth = row_gradients(model.double(), rows)
    for dtype, budget in itertools.product((torch.bfloat16, torch.float32), (None, 800)):
        with out.case("step", dtype=str(dtype), budget=budget) as row:
            out.need(5.0)
            model.to(dtype)
            bound = 1e-5 + 1.5 * relative(row_gradients(model, rows), truth)
            model.zero_grad()
            options = {"budget": 60 if budget and out.smoke else budget, "compile_layers": False}
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
_made: dict[str, Any] = {}
"""The last model."""


def model_of(name: str, smoke: bool) -> Any:
    """`weights_of` with an optimiser; the last model is kept."""
    if name not in _made:
        _made.clear()
        forget()
        model = weights_of(name, smoke)
        # A rate of 0 costs as much as any other, and all engines compute the gradient at the same weights.
        model.optimiser = torch.optim.AdamW(model.parameters(), lr=0.0, fused=CUDA)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        model.optimiser.step()  # makes its state, so that plans see the memory that is free besides it
        _made[name] = model
    return _made[name]


def weights_of(name: str, smoke: bool) -> Any:
    """A Qwen3 with random weights, always the same, in bfloat16 (on a CPU in float32), in training mode."""
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
        # The grouped product has no kernel on a CPU, and what replaces it cannot be traced.
        common |= {"experts_implementation": "batched_mm"} if name == MOE else {}
    with DEVICE:
        return made(kind(**common, **sizes)).to(torch.bfloat16 if CUDA else torch.float32).train()


def checkpointing(model: Any, on: bool) -> None:
    """Run every layer's forward again in backward, or not."""
    if on:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    else:
        model.gradient_checkpointing_disable()


def batch(name: str, smoke: bool) -> list[tt.Trajectory]:
    """The rows of a workload."""
    kind, *sizes = name.split()
    if smoke:
        rows = rows_of(synthetic(0.6, 48, leaves=3, segment=8), 500)
        # Each row with a prefix of it, as one row per LLM call has.
        return [*rows, *(row.replace(ids=row.ids[:-2], loss_weights=row.weights[:-2]) for row in rows)]
    if kind == "tau_airline":
        return rows_of(load(f"tau_airline_calls_{sizes[0]}"), 30_000)
    if kind == "unshared":
        rng = np.random.default_rng(0)
        return [tt.Trajectory([k, *rng.integers(16, 30_000, 4095).tolist()]) for k in range(16)]
    return rows_of(synthetic(float(sizes[0]), int(sizes[1])), 30_000)


def linear_engine(model: Any, rows: list[tt.Trajectory], **options: Any) -> LinearEngine:
    """Rows packed without padding, in runs of 32,768 tokens, or of the most that are predicted to fit."""
    size = 32_768
    while CUDA and size > 2048:
        engine = LinearEngine(model, pack_tokens=size, **options)
        if engine.cost.peak_bytes(engine.plan(rows)) <= (engine.prepared.free_bytes() or math.inf):
            break
        size //= 2
    return LinearEngine(model, pack_tokens=size, **options)


LINEAR = ("linear", "linear, every row")
"""The baselines: rows that extend one another merged into the longest, with the weights of all; and every row."""
GRADIENT_NUMBERS = 1 << 20
"""Numbers of a gradient that are compared with those of the other engines."""


def gradient_sample(model: nn.Module) -> np.ndarray:
    """About so many numbers of the gradient, evenly over all parameters, in float32."""
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    stride = max(1, sum(grad.numel() for grad in grads) // GRADIENT_NUMBERS)
    return torch.cat([grad.flatten()[::stride].float() for grad in grads]).cpu().numpy()


def gradient_error(model: nn.Module, kept: Path) -> float | None:
    """Relative difference from the gradient kept in a file, None for the first, which is kept there."""
    sample = gradient_sample(model)
    if not kept.exists():
        np.save(kept, sample)
        return None
    first = np.load(kept)
    return float(np.linalg.norm(sample - first) / np.linalg.norm(first))


def step_case(
    out: Out, scratch: Path, model_name: str, rows_name: str, engine_name: str, *,
    checkpointed: bool = False, kind: str = "steps", backend: str | None = None, repeats: int = 3, waits: bool = False,
    **options: Any,
) -> None:  # fmt: skip
    """Time an engine's forward, backward and optimiser as a training loop runs them: one row.

    A step builds the next step's tree while the GPU works, and the host never waits between the timed steps. The first
    step, of the same plan, compiles what the others run; its gradient is compared with that of the engine which ran
    first on these rows, the baseline as a rule.

    Args:
        scratch: the folder of the gradients that are compared.
        engine_name: one of `LINEAR`, or the tree with what is special about it.
        repeats: timed steps; fewer if there is no time for them, but one.
        waits: count the waits of the host in one more step.
        options: of the engine.
    """
    options.setdefault("compile_layers", True)
    linear = engine_name in LINEAR
    shown = {"model": model_name, "rows": rows_name, "engine": engine_name, "checkpointed": checkpointed}
    with out.case(kind, **shown, compiled=options["compile_layers"]) as row, variable(ATTENTION, backend):
        out.need(8.0)
        model, every_row = model_of(model_name, out.smoke), batch(rows_name, out.smoke)
        tree, loss = build_tree(every_row), tt.losses.sft()
        rows = cheapest_rows(tree) if engine_name == "linear" else every_row
        checkpointing(model, checkpointed)
        engine = linear_engine(model, rows, **options) if linear else tt.TreeEngine(model, **options)
        counts, given = engine.cost.counts, build_tree(rows, merge=not linear)
        plan = engine.plan(given)
        ours = tree_work(tree, counts.attention_ranges)
        work = linear_work(build_tree(rows), counts.attention_ranges) if linear else ours
        row |= {"row_count": len(rows), "flat_tokens": tree.num_flat_tokens, "unique_tokens": tree.num_tokens}
        row |= {"tokens": work.tokens, "predicted_gb": engine.cost.peak_bytes(plan) / 1e9}
        if linear:
            row["ideal"] = counts.flops(*work) / counts.flops(*ours)
        # FLOPs of one product over the visible pairs in all layers: a forward has 2 of them, a backward 5.
        config = model.config
        heads = config.num_attention_heads * config.head_dim * config.num_hidden_layers
        row["product_flops"] = 2.0 * heads * sum(work.pairs.values())

        def optimise() -> None:
            model.optimiser.step()
            model.zero_grad(set_to_none=False)  # kept, so that plans see the memory that is free besides them

        def step() -> Any:
            done = engine.forward_backward(given, loss)
            build_tree(rows, merge=not linear)
            return done

        model.zero_grad(set_to_none=False)
        graphs, compiling, start = *compilations(), time.perf_counter()
        done = step()
        wait()
        first = time.perf_counter() - start
        row |= {"loss": done.loss, "attention": dict(done.attention), "parts": done.parts}
        row |= {"recomputed_tokens": done.recomputed_tokens}
        # Experts are chosen by comparing numbers that rounding changes.
        if model_name != MOE:
            error = gradient_error(model, scratch / f"{model_name} {rows_name}.npy")
            row |= {} if error is None else {"gradient_error": error, "right": error <= GRADIENT_LIMIT}
        optimise()
        wait()
        row |= {"graphs": compilations()[0] - graphs, "compile_seconds": compilations()[1] - compiling}
        row["first_seconds"] = first

        graphs, before = compilations()[0], torch.cuda.memory_allocated() if CUDA else 0
        if CUDA:
            torch.cuda.reset_peak_memory_stats()
        steady = max(first - row["compile_seconds"], 1e-3)
        fitting = repeats if out.smoke else max(1, min(repeats, int((out.left - 3) / steady)))
        seconds, optimiser = timed(step, optimise, fitting)
        middle = statistics.median(seconds)
        row |= {"seconds": middle, "least": min(seconds), "most": max(seconds), "repeats": fitting}
        row |= {
            "seconds_without_optimiser": middle - statistics.median(optimiser),
            "expected": engine.cost.seconds(plan),
        }
        row |= {"graphs_while_timed": compilations()[0] - graphs, "mfu": counts.flops(*work) / middle / PEAK_FLOPS}
        row |= {"flat_tokens_per_second": tree.num_flat_tokens / middle, "tokens_per_second": work.tokens / middle}
        if CUDA:
            peak = torch.cuda.max_memory_allocated()
            row |= {"above_gb": (peak - before) / 1e9, "peak_gb": peak / 1e9}
            if waits:
                row["host_waits"] = count_waits(lambda: (step(), optimise()))


GRADIENT_LIMIT = 0.05 if CUDA else 1e-4
"""Largest relative difference of two engines' gradients: both are rounded, in bfloat16 on a GPU."""


def compilations() -> tuple[int, float]:
    """Graphs that this process has compiled, and the seconds that it took."""
    return counters["stats"]["unique_graphs"], calculate_time_spent()["total_wall_time"]


def timed(step: Callable[[], Any], optimise: Callable[[], Any], repeats: int) -> tuple[list[float], list[float]]:
    """Seconds of steps that run back to back, with the optimiser, and of the optimiser alone.

    On a GPU between events in the stream, so that the host can work ahead as it does in training.
    """

    def now() -> Any:
        if not CUDA:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    marks = [now()]
    for _ in range(repeats):
        step()
        marks.append(now())
        optimise()
        marks.append(now())
    wait()
    between = [a.elapsed_time(b) / 1e3 if CUDA else b - a for a, b in itertools.pairwise(marks)]
    return [a + b for a, b in zip(between[::2], between[1::2])], between[1::2]


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


# ---- where the time goes, attention, memory


def profile(out: Out) -> None:
    """Seconds of one tree and one linear step by purpose."""
    for name, make in (("tree", tt.TreeEngine), ("linear", linear_engine)):
        with out.case("profile", model="0.6b", rows="tau_airline 21", engine=name) as row:
            out.need(20.0)
            model, rows = model_of("0.6b", out.smoke), batch("tau_airline 21", out.smoke)
            checkpointing(model, False)
            if make is linear_engine:
                rows = cheapest_rows(build_tree(rows))
                engine = linear_engine(model, rows, compile_layers=True)
            else:
                engine = tt.TreeEngine(model, compile_layers=True)

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


HEADS = {"0.6b": (16, 8, 128), "8b": (32, 8, 128), "size 64": (16, 8, 64)}
"""Query heads, key/value heads, head size."""
PLAIN = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}


def attention_sweep(
    out: Out, run: Callable[[str, Callable[[], None]], None], *, only: Collection[str] | None = None
) -> None:
    """FLOP rates of plain causal kernels on rows, and of every backend on their tree; heads of Qwen3-0.6B.

    All kernels of a tree get the same numbers, and are compared with the first of them; so are the plain ones.

    Args:
        run: called with the name of each case and the case.
        only: the kernels to measure; None measures all.
    """
    heads = (2, 1, 16) if out.smoke else HEADS["0.6b"]
    for tree in ("tau_airline 2", "synthetic 0.75 16384"):
        rows = batch(tree, out.smoke)
        layout = pack(build_tree(rows), trim=False)
        # Rows of one length that have as many visible pairs per token as the linear baseline's.
        lengths = np.array([len(row) for row in cheapest_rows(build_tree(rows))])
        length = int((lengths**2).sum() / lengths.sum())
        count = max(1, min(len(lengths), 32_768 // length))
        first: dict[str, list[Tensor]] = {}
        plain = PLAIN if CUDA else {"math": SDPBackend.MATH, "flash": SDPBackend.FLASH_ATTENTION}
        for name, kernel in plain.items():
            shown = {"kernel": f"plain {name}", "tree": tree, "tokens": count * length, "length": length}

            def of_rows(shown=shown, kernel=kernel, length=length, count=count, first=first) -> None:
                with out.case("sweep", **shown) as row, sdpa_kernel([kernel]):
                    out.need(5.0)
                    attend = functools.partial(scaled_dot_product_attention, is_causal=True, enable_gqa=CUDA)
                    drawn = [x.detach().unflatten(0, (count, length)) for x in inputs(count * length, heads)]
                    tensors = [x.transpose(1, 2) for x in drawn]
                    if not CUDA:  # only kernels of CUDA take grouped heads
                        tensors[1:3] = [x.repeat_interleave(2, 1) for x in tensors[1:3]]
                    for x in tensors[:3]:
                        x.requires_grad_()
                    row |= compared(attend, tensors, first, "plain")
                    row |= rates(attend, tensors, count * length * (length + 1) / 2, heads)

            if only is None or shown["kernel"] in only:
                run(f"{tree} plain {name}", of_rows)
        for backend in [name for name in runnable(DEVICE) if not CUDA or name in ("varlen", "triton", "flex")]:
            shown = {"kernel": backend, "tree": tree, "tokens": layout.num_tokens}

            def of_tree(shown=shown, backend=backend, layout=layout, first=first) -> None:
                with out.case("sweep", **shown) as row:
                    out.need(5.0)
                    attention = AttentionTree(Forest.of(layout), backends=DeviceBackends())
                    attend = functools.partial(attention, scale=heads[2] ** -0.5, backend=backend)
                    tensors = inputs(layout.num_tokens, heads)
                    row |= compared(attend, tensors, first, "tree")
                    row |= rates(attend, tensors, layout.pairs, heads)
                    row["ran"] = sorted(attention.calls)

            if only is None or backend in only:
                run(f"{tree} {backend}", of_tree)


def compared(attend: Callable[..., Tensor], tensors: list[Tensor], first: dict[str, list[Tensor]], key: str) -> Any:
    """The errors of output and gradients against those of the kernel that ran first, which are kept."""
    *leaves, grad = tensors
    result = attend(*leaves)
    found = [x.detach() for x in (result, *torch.autograd.grad(result, leaves, grad))]
    if key not in first:
        first[key] = found
        return {}
    errors = [relative(a.float(), b.float()) for a, b in zip(found, first[key])]
    # Both are rounded.
    return {"errors": errors, "right": all(error <= 2 * LIMITS[grad.dtype] for error in errors)}


def inputs(tokens: int, heads: tuple[int, int, int]) -> list[Tensor]:
    """Random query, key, value and output gradient, the same at every call; in bfloat16 on a GPU."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    made = [
        torch.randn(shape, device=DEVICE, dtype=torch.bfloat16 if CUDA else torch.float32, generator=generator)
        for shape in shapes_of(tokens, heads)
    ]
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


def block_sizes(out: Out) -> None:
    """Every block size of each Triton kernel, alone: the other two keep their defaults."""
    if "triton" not in runnable(DEVICE):
        return out.say("Triton's kernels cannot run here")
    layout = pack(build_tree(rows_of(synthetic(0.6, 48 if out.smoke else 8192, leaves=6), 30_000)), trim=False)
    from treetrain.kernels.triton_attention import SHAPES
    from triton_shapes import candidates  # needs Triton

    for heads_name, heads in HEADS.items():
        place = next(largest for largest in (64, 128, 256) if heads[2] <= largest), 2
        default = SHAPES[place]
        for kernel, listed in candidates(heads[2], torch.bfloat16).items():
            for shape in listed[: 1 if out.smoke else None]:
                with out.case("kernel", kernel=kernel, heads=heads_name, shape=tuple(shape)) as row:
                    out.need(5.0)
                    SHAPES[place] = default._replace(**{kernel: shape})
                    tree = AttentionTree(Forest.of(layout), backends=DeviceBackends())
                    attend = functools.partial(tree, scale=heads[2] ** -0.5, backend="triton")
                    row |= rates(attend, inputs(layout.num_tokens, heads), layout.pairs, heads)
        SHAPES[place] = default
