"""Stages 4 to 7 of the GPU benchmark: whole steps, batches without sharing, memory, and an ablation.

The linear side packs rows without padding and runs the same fused head and loss; its attention is one stock varlen
flash call for each layer of a run. The rival is the whole tree packed, FlexAttention, every layer checkpointed.
"""

import os
from typing import Any

import numpy as np

import treetrain as tt
from gpu_models import (
    MOE,
    OneHead,
    SegmentBySegment,
    blocks_compiled,
    checkpointing,
    linear_engine,
    make_model,
    measure,
    optimiser_of,
    with_facts,
)
from gpu_rows import Out, device, forget, load_tuned
from tree_shapes import load, rows_of, synthetic
from treetrain.engine.costs import count
from treetrain.engine.engine import LinearEngine, TreeEngine
from treetrain.engine.lm_head import ENVIRONMENT as HEAD
from treetrain.softmax_attention.backends import DEFAULTS, using
from treetrain.tree.build import build_tree
from treetrain.tree.stats import ideal_speedup

ACHIEVED = 3.5e14
"""FLOP/s at which a linear step is expected to run, to know whether it fits the time."""
COST = {"qwen3-0.6b": 0.45e9, "qwen3-1.7b": 1.4e9, "qwen3-4b": 3.6e9, "qwen3-8b": 7.0e9, MOE: 0.45e9}
"""Weights that a token meets, the head left out."""

CASES = [
    ("qwen3-0.6b", "tau_airline 2", "sft", (False, True)),
    ("qwen3-0.6b", "synthetic 0.847 4096", "sft", (False,)),
    ("qwen3-0.6b", "synthetic 0.847 4096", "grpo", (False,)),
    ("qwen3-4b", "tau_airline 21", "sft", (False, True)),
    (MOE, "synthetic 0.847 4096", "sft", (False,)),
    (MOE, "synthetic 0.847 4096", "grpo", (False,)),
    ("qwen3-8b", "tau_airline 21", "sft", (False, True)),
    ("qwen3-1.7b", "tau_airline 21", "sft", (False, True)),
    ("qwen3-1.7b", "synthetic 0.75 16384", "sft", (False,)),
    ("qwen3-0.6b", "synthetic 0.5 4096", "sft", (False,)),
    ("qwen3-0.6b", "synthetic 0.9 4096", "sft", (False,)),
    ("qwen3-0.6b", "synthetic 0.75 32768", "sft", (False,)),
    ("qwen3-4b", "synthetic 0.75 16384", "sft", (True,)),
    (MOE, "tau_airline 21", "sft", (False,)),
]
"""Model, rows, loss, with and without activation checkpointing; the most telling first."""
COLUMNS = (
    "model", "rows", "loss", "checkpointing", "engine", "attention", "flat_tokens", "unique_tokens", "ideal", "seconds",
    "least", "most", "parts", "recomputed_tokens", "host_waits", "above_gb", "peak_gb", "predicted_gb", "speedup",
    "efficiency", "note",
)  # fmt: skip


def batch(name: str, smoke: bool, vocabulary: int = 30_000) -> list[tt.Trajectory]:
    """Rows of a workload."""
    kind, *sizes = name.split()
    if smoke:
        return rows_of(synthetic(0.6, 48, leaves=3, segment=8), 500)
    if kind == "tau_airline":
        return rows_of(load(f"tau_airline_calls_{sizes[0]}"), vocabulary)
    return rows_of(synthetic(float(sizes[0]), int(sizes[1])), vocabulary)


class Case:
    """One model on one batch, and its result rows."""

    def __init__(self, out: Out, file: str, model: Any, name: str, rows_name: str, loss_name: str, smoke: bool):
        self.out, self.file, self.model, self.smoke = out, file, model, smoke
        self.rows = batch(rows_name, smoke)
        self.loss = tt.losses.grpo() if loss_name == "grpo" else tt.losses.sft()
        if loss_name == "grpo":
            self.rows = with_facts(self.rows)
        tree = build_tree(self.rows)
        self.ideal = ideal_speedup(tree, count(model))
        self.shown = {"model": name, "rows": rows_name, "loss": loss_name, "flat_tokens": tree.num_flat_tokens}
        self.shown |= {"unique_tokens": tree.num_tokens, "ideal": self.ideal}
        self.flops = 6.0 * COST[name] * tree.num_flat_tokens
        self.reference: float | None = None
        """Seconds of the linear side."""

    def run(self, engine_name: str, engine: TreeEngine, backend: str | None, checkpointed: bool, **options: Any) -> Any:
        """Measure one engine and write its row, whatever happens; the measurement, or None."""
        row = dict.fromkeys(COLUMNS, "") | self.shown
        row |= {"engine": engine_name, "attention": backend or DEFAULTS[device().type], "checkpointing": checkpointed}
        found = None
        try:
            linear = isinstance(engine, LinearEngine)
            expected = self.flops * (4 / 3 if checkpointed else 1) / ACHIEVED / (1 if linear else self.ideal)
            if not self.smoke and 2 * expected + 3 > self.out.left:
                raise TimeoutError(f"skipped: about {2 * expected:.0f} s of {self.out.left:.0f} s left")
            checkpointing(self.model, checkpointed)
            if linear and expected > 3:
                options["warm_up"] = self.rows[:3]
            given = options.pop("given", self.rows)
            optimiser = options.pop("optimiser", None)
            found = measure(self.model, optimiser, engine, given, self.loss, backend=backend, **options)
            row |= {"seconds": found.seconds, "least": found.spread[0], "most": found.spread[1], "parts": found.parts}
            row |= {"recomputed_tokens": found.recomputed, "above_gb": found.peak_bytes / 1e9}
            row |= {"peak_gb": found.total_bytes / 1e9, "host_waits": found.host_waits}
            if linear and given is self.rows:
                self.reference = found.seconds
            elif self.reference is not None:
                speedup = self.reference / found.seconds
                row |= {"speedup": speedup, "efficiency": speedup / self.ideal}
        except Exception as error:
            row["note"] = f"{type(error).__name__}: {str(error)[:160]}".replace(",", ";").replace("\n", " ")
        if found is None:
            forget()  # here, where the error no longer references the tensors
        self.finish(row, engine)
        return found

    def finish(self, row: dict[str, Any], engine: TreeEngine) -> None:
        """Write a row."""
        self.out.write(self.file, row)


class MemoryCase(Case):
    """Also predicts the peak of memory."""

    def run(self, engine_name: str, engine: TreeEngine, backend: str | None, checkpointed: bool, **options: Any) -> Any:
        """See `Case.run`."""
        checkpointing(self.model, checkpointed)
        self._given, self._backend = options.get("given", self.rows), backend
        return super().run(engine_name, engine, backend, checkpointed, **options)

    def finish(self, row: dict[str, Any], engine: TreeEngine) -> None:
        """See `Case.finish`."""
        try:
            with using(self._backend):  # the cost of passes was measured with it
                row["predicted_gb"] = engine.cost.peak_bytes(engine.plan(self._given)) / 1e9
        except Exception as error:
            row["note"] = f"{row['note']} {type(error).__name__}: {str(error)[:100]}".replace(",", ";").replace(
                "\n", " "
            )
        super().finish(row, engine)


def _backends(out: Out) -> tuple[str | None, str | None, str | None]:
    """(the tree's, the linear side's, the rival's)."""
    if device().type != "cuda":
        return None, None, None
    found = out.tuned()
    right = found.get("right", [])
    best = found.get("fastest", "flex")
    return best, "varlen" if not right or "varlen" in right else best, "flex"


def steps(out: Out, smoke: bool) -> None:
    """Whole steps: tree, linear and rival."""
    load_tuned(out)
    best, varlen, flex = _backends(out)
    model, made, optimiser, case = None, "", None, None
    for name, rows, loss, modes in CASES[:1] + CASES[4:6] if smoke else CASES:
        if out.left < 12 and not smoke:
            out.write("gpu_steps", _skipped(name, rows, loss))
            continue
        if made != name:
            model = optimiser = case = None  # before the next one is made
            forget()
            model, made = make_model(name, smoke), name
            optimiser = optimiser_of(model)
        for checkpointed in modes:
            case = Case(out, "gpu_steps", model, name, rows, loss, smoke)
            checkpointing(model, checkpointed)
            repeats = {"optimiser": optimiser, "repeats": 1 if smoke else 3, "most": 4.0, "waits": True}
            case.run("linear", linear_engine(model, case.rows), varlen, checkpointed, **repeats)
            case.run("tree", TreeEngine(model), best, checkpointed, **repeats)
            if checkpointed:
                case.run("rival", TreeEngine(model), flex, True, **repeats)


def _skipped(name: str, rows: str, loss: str) -> dict[str, Any]:
    row: dict[str, Any] = dict.fromkeys(COLUMNS, "")
    return row | {"model": name, "rows": rows, "loss": loss, "note": "skipped: no time left"}


def memory(out: Out, smoke: bool) -> None:
    """Peaks, predicted and measured: budgets from all free memory down to a share of the longest path."""
    load_tuned(out)
    best, varlen, _ = _backends(out)
    for name, rows in (("qwen3-0.6b", "tau_airline 21"), ("qwen3-4b", "tau_airline 21"))[: 1 if smoke else None]:
        if out.left < 15 and not smoke:
            out.write("gpu_memory", _skipped(name, rows, "sft"))
            continue
        model = make_model(name, smoke)
        case = MemoryCase(out, "gpu_memory", model, name, rows, "sft", smoke)
        longest = max(case.rows, key=len)
        once = {"repeats": 1}
        case.run("linear", linear_engine(model, case.rows), varlen, False, **once)
        case.run("longest row", LinearEngine(model), varlen, False, given=[longest], **once)
        for budget in (None, len(longest), len(longest) // 2, len(longest) // 4):
            case.run(f"tree, budget {budget or 'none'}", TreeEngine(model, budget=budget), best, False, **once)
        case.run("tree, budget none", TreeEngine(model), best, True, **once)
        del model, case
        forget()


def nothing_shared(out: Out, smoke: bool) -> None:
    """Rows without a common token: the tree's engine must not be slower than the linear one."""
    load_tuned(out)
    best, varlen, _ = _backends(out)
    model = make_model("qwen3-0.6b", smoke)
    case = Case(out, "gpu_nothing_shared", model, "qwen3-0.6b", "synthetic 0.5 4096", "sft", smoke)
    rng = np.random.default_rng(0)
    count, length = (3, 40) if smoke else (16, 4096)
    case.rows = [tt.Trajectory([k, *rng.integers(count, 500, length - 1).tolist()]) for k in range(count)]
    case.ideal = 1.0
    case.shown |= {"rows": f"{count} rows of {length}", "flat_tokens": count * length, "unique_tokens": count * length}
    case.shown["ideal"] = 1.0
    optimiser = optimiser_of(model)
    for backend in dict.fromkeys([best, varlen]):
        case.run("linear", linear_engine(model, case.rows), varlen, False, repeats=5, optimiser=optimiser)
        case.run("tree", TreeEngine(model), backend, False, repeats=5, optimiser=optimiser)


def ablation(out: Out, smoke: bool) -> None:
    """Remove one feature at a time, and try every attention backend."""
    load_tuned(out)
    best, varlen, _ = _backends(out)
    model = make_model("qwen3-0.6b", smoke)
    case = Case(out, "gpu_ablation", model, "qwen3-0.6b", "tau_airline 21", "sft", smoke)
    unique = case.shown["unique_tokens"]
    options = {"repeats": 1 if smoke else 3, "most": 2.0, "optimiser": optimiser_of(model)}
    case.run("linear", linear_engine(model, case.rows), varlen, False, **options)
    case.run("tree", TreeEngine(model), best, False, **options)
    case.run("tree, parts of a quarter", TreeEngine(model, budget=max(unique // 4, 1)), best, False, **options)
    case.run("tree, a part for each segment", SegmentBySegment(model), best, False, **options)
    case.run("tree, head not fused", OneHead(model), best, False, **options)
    if (kernels := os.environ.get(HEAD, "torch")) != "torch":
        os.environ[HEAD] = "torch"
        case.run("tree, softmax of the head by PyTorch", TreeEngine(model), best, False, **options)
        os.environ[HEAD] = kernels
    case.run("tree, layers checkpointed", TreeEngine(model), best, True, **options)
    for backend in out.tuned().get("right", []):
        if backend not in (best, None) and device().type == "cuda":
            case.run("tree", TreeEngine(model), backend, False, **options)
    # Last, since its baseline is compiled too.
    with blocks_compiled(model):
        case.run("linear, norms and MLPs compiled", linear_engine(model, case.rows), varlen, False, **options)
        case.run("tree, norms and MLPs compiled", TreeEngine(model), best, False, **options)
