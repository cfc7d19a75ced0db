"""Peak memory of a step under a sweep of budgets: measured in a fresh process, against what the plan predicts.

Run: python benchmarks/memory.py [case ...] [--repeats 5] [--dry-run]. Cases: a full binary tree of 64 rows of 4,096
tokens on the preset model "tiny"; tool-agent calls whose template drops think blocks (benchmarks/workloads.py) on 30M
parameters, beside the least that training without a tree needs, the longest row by itself. CPU, one thread, float32,
SFT; bytes above model and gradients; medians over fresh processes, which run with the C library's allocator as it is.
Another load of the machine changes nothing. A third case is distillation over the whole vocabulary from a teacher of
the same size, beside SFT. Rows are appended to results/memory.csv and results/distill_memory.csv; a case that has its
rows at this commit is left out.
"""

import contextlib
import copy
import ctypes
import gc
import multiprocessing
import re
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
from torch import nn

import rows as result_rows
import treetrain as tt
from treetrain.core.planning.make import Bytes
from treetrain.distill import Divergence
from workloads import load_workload, model_30m

LEAVES, PATH = 64, 4096
TREE, CALLS = "binary tree, 64 rows of 4,096 tokens", "tool agent, think blocks dropped"
DISTILLATION = "distillation"
BUDGETS: dict[str, tuple[int | str, ...]] = {
    TREE: (16_384, 4_096, 1_024, 512, "1GB", "200MB"),
    CALLS: (3_518, 2_323, 1_161, 512, 256, 64, "1GB", "500MB", "250MB"),
    DISTILLATION: (3_518, 2_323, 512, 64),
}
"""Of the calls: the whole tree, its longest path, half of that, and less."""


def binary_tree(leaves: int = LEAVES, path: int = PATH, vocabulary: int = 2048) -> list[tt.Trajectory]:
    """Rows of `path` tokens that fork in two after every seventh of it."""
    levels = leaves.bit_length()
    rng = np.random.default_rng(0)
    segments: dict[tuple[int, int], np.ndarray] = {}
    made = []
    for leaf in range(leaves):
        pieces = []
        for level in range(levels):
            node = (level, leaf >> (levels - 1 - level))
            length = path // levels if level < levels - 1 else path - (levels - 1) * (path // levels)
            if node not in segments:
                segments[node] = rng.integers(5, vocabulary, length)
            pieces.append(segments[node])
        made.append(tt.Trajectory(np.concatenate(pieces)))
    return made


def load(case: str):
    """(model, rows) of a case."""
    if case == TREE:
        from treetrain.models.loading import load_model

        return load_model("tiny"), binary_tree()
    return model_30m().eval(), load_workload(case)


def peak_step_bytes(
    engine_type: Any,
    options: dict[str, Any],
    model: nn.Module,
    trajectories: Sequence[tt.Trajectory],
    loss: Any,
    teacher: nn.Module | None = None,
) -> int:
    """Peak bytes of one forward and backward above the model and its gradients, and above a teacher.

    With a teacher, `loss` is the divergence from it. The model is sent to a new process, so that nothing that ran
    before is counted.

    Raises:
        OSError: the system's kernel does not report a process's peak.
    """
    Path("/proc/self/clear_refs").stat()
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    arguments = (sender, engine_type, options, model, list(trajectories), loss, teacher, torch.get_num_threads())
    process = context.Process(target=_measure_peak, args=arguments)
    process.start()
    sender.close()
    try:
        return receiver.recv()
    except EOFError:
        raise RuntimeError(
            f"the process measuring memory ended with code {process.exitcode} (out of memory?)"
        ) from None
    finally:
        process.join()


def _measure_peak(sender, engine_type, options, model, trajectories, loss, teacher, threads) -> None:
    torch.set_num_threads(threads)
    _touch_weights_and_gradients(model)
    # Libraries map their code when it first runs; that is not memory of a step.
    few = [tt.Trajectory([0, 0, 0, 0]), tt.Trajectory([0, 0, 1, 1])]
    engine_type(model).forward_backward(few, tt.losses.sft())
    if teacher is not None:
        _touch_weights_and_gradients(teacher)
        engine_type(model).distill(few, engine_type(teacher), loss)
    model.zero_grad(set_to_none=False)
    engine = engine_type(model, **options)
    taught = None if teacher is None else engine_type(teacher, **options)
    if not isinstance(engine.budget, int):
        engine.plan(trajectories)  # may time passes, which is no part of a step
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):  # another C library than glibc
        ctypes.CDLL(None).malloc_trim(0)  # else the step would reuse free blocks that are already counted
    before = _status_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # restarts the peak
    if taught is None:
        engine.forward_backward(trajectories, loss)
    else:
        engine.distill(trajectories, taught, loss)
    sender.send(max(_status_bytes("VmHWM") - before, 0))
    sender.close()


def _touch_weights_and_gradients(model: nn.Module) -> None:
    """Read and write every page once: memory sent from another process is mapped on first use."""
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.detach().sum()
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
            parameter.grad.add_(0.0)


def _status_bytes(field: str) -> int:
    match = re.search(rf"^{field}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert match is not None
    return int(match.group(1)) * 1024


def measure_distillation(repeats: int, dry_run: bool) -> None:
    """Append one row per budget and divergence."""
    from treetrain.engine import TreeEngine

    if not dry_run and result_rows.has("distill_memory"):
        return print(f"{DISTILLATION}: has its rows at this commit")
    torch.set_num_threads(1)
    model, trajectories = load(CALLS)
    teacher = copy.deepcopy(model).requires_grad_(False)
    for budget in BUDGETS[DISTILLATION]:
        given = TreeEngine, {"budget": budget}, model, trajectories
        plain = statistics.median(peak_step_bytes(*given, tt.losses.sft()) for _ in range(repeats))
        for divergence in get_args(Divergence):
            peaks = [peak_step_bytes(*given, divergence, teacher) for _ in range(repeats)]
            row = {
                "budget": budget,
                "divergence": divergence,
                "sft_mb": f"{plain / 1e6:.1f}",
                "distillation_mb": f"{statistics.median(peaks) / 1e6:.1f}",
                "distillation_over_sft": f"{statistics.median(peaks) / plain:.3f}",
                "distillation_over_sft_min": f"{min(peaks) / plain:.3f}",
                "distillation_over_sft_max": f"{max(peaks) / plain:.3f}",
                "rounds": repeats,
            }
            result_rows.report("distill_memory", row, dry_run=dry_run)


def measure(case: str, repeats: int, dry_run: bool) -> None:
    """Append one row per budget."""
    if case == DISTILLATION:
        return measure_distillation(repeats, dry_run)
    if not dry_run and result_rows.has("memory", case=case):
        return print(f"{case}: has its rows at this commit")
    torch.set_num_threads(1)
    from treetrain.check.linear_engine import LinearEngine
    from treetrain.engine import TreeEngine

    model, trajectories = load(case)
    longest = [max(trajectories, key=len)]
    engines = [(LinearEngine, {}, longest)] if case == CALLS else []
    engines += [(TreeEngine, {"budget": budget}, trajectories) for budget in BUDGETS[case]]
    baseline = None
    for kind, options, given in engines:
        engine = kind(model, **options)
        plan = engine.plan(given)
        predicted = engine.cost.peak_bytes(plan)
        peaks = [peak_step_bytes(kind, options, model, given, tt.losses.sft()) for _ in range(repeats)]
        peak = statistics.median(peaks)
        baseline = peak if kind is LinearEngine else baseline
        budget = engine.budget
        row = {
            "case": case,
            "engine": "longest row, linear" if kind is LinearEngine else "tree",
            "budget": options.get("budget", ""),
            "tokens": plan.layout.num_tokens,
            "alive_tokens": plan.peak_tokens,
            "parts": plan.num_parts,
            "recomputed_tokens": plan.recomputed_tokens,
            "predicted_mb": f"{predicted / 1e6:.1f}",
            "rounds": repeats,
            "measured_mb": f"{peak / 1e6:.1f}",
            "measured_mb_min": f"{min(peaks) / 1e6:.1f}",
            "measured_mb_max": f"{max(peaks) / 1e6:.1f}",
            "measured_over_predicted": f"{peak / predicted:.3f}",
            "measured_over_budget": f"{peak / budget.count:.3f}" if isinstance(budget, Bytes) else "",
            "measured_over_longest_row": f"{peak / baseline:.3f}" if baseline else "",
        }
        result_rows.report("memory", row, dry_run=dry_run)


if __name__ == "__main__":
    result_rows.run_each(BUDGETS, measure, __doc__, repeats=result_rows.count(5), dry_run=result_rows.DRY_RUN)
