"""How much faster a tree is than the best linear baseline, on the user's model and rows.

Forward and backward are timed (an optimiser's step costs both sides the same). The engines take turns in one process
so that a machine that slows down slows all of them; medians are compared. All baselines run the same fused head.
"""

import contextlib
import ctypes
import dataclasses
import gc
import multiprocessing
import re
import statistics
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from treetrain.data.trajectory import Trajectory
from treetrain.engine.costs import cost_if_countable
from treetrain.engine.engine import LinearEngine, TreeEngine
from treetrain.engine.loss import as_loss
from treetrain.engine.memory import keep_memory
from treetrain.engine.packed import model_device
from treetrain.losses.sft import sft
from treetrain.planning.budget import Bytes
from treetrain.planning.price import budget_share
from treetrain.tree.build import Row, as_tree, build_tree
from treetrain.tree.stats import distinct_rows, ideal_speedup
from treetrain.tree.token_tree import TokenTree
from treetrain.verification.padded_baseline import PaddedEngine

PACK_TOKENS = (4096, 8192)
"""Batch sizes, in tokens, of the linear runs to try; the fastest run is the baseline."""
Seconds = dict[str, list[float]]
"""The time of every round, by engine name."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class BenchReport:
    """The outcome of `bench`; times are medians in seconds of one forward and backward."""

    trajectories: int
    flat_tokens: int
    unique_tokens: int
    overlap: float
    attention: str
    """Which tree attention ran, and why."""
    parts: int
    """Forward-backward passes of the tree under its budget."""
    recomputed_tokens: int
    """Tokens whose forward runs twice."""
    tree_seconds: float
    linear_seconds: float
    """Seconds of the fastest baseline."""
    baseline: str
    """Its name."""
    baselines: dict[str, float]
    speedup: float
    """linear_seconds / tree_seconds, the median over the rounds."""
    speedup_spread: tuple[float, float]
    """Least and greatest speed-up of a round."""
    ideal: float | None
    """FLOP-ideal speed-up, counting the forwards that the budget makes every plan repeat; None if the model's shape is
    unknown."""
    efficiency: float | None
    """speedup / ideal."""
    distinct_rows: int
    distinct_speedup: float | None
    """Against the fastest baseline of the warm-up, on rows without exact repeats; None if no row repeats."""
    distinct_ideal: float | None
    tree_peak_bytes: int | None
    """Above model and gradients, on a CPU in a fresh process; None if not measured."""
    linear_peak_bytes: int | None
    repeats: int
    seconds: dict[str, list[float]]
    """The time of every measured round, by engine name."""

    def as_dict(self) -> dict[str, Any]:
        """The report as plain numbers and strings."""
        return dataclasses.asdict(self)


def bench(
    model: nn.Module,
    trajectories: Sequence[Row] | TokenTree,
    *,
    loss: Any = None,
    temperature: float = 1.0,
    budget: int | str | Bytes | None = None,
    repeats: int = 5,
    warmup: int = 1,
    memory: bool = True,
    baselines: Collection[str] | None = None,
    progress: Callable[[str], None] | None = None,
) -> BenchReport:
    """Time tree against linear.

    Args:
        model: a causal LM; its gradients are overwritten with zeros.
        trajectories: one step's rows, as `TreeEngine.forward_backward` takes them.
        loss: any loss of the protocol; None is `losses.sft()`.
        budget: of the tree's side; see `TreeEngine`.
        repeats: measured rounds; every engine runs once in each.
        warmup: rounds before, not counted; the slower baselines drop out after them.
        memory: also measure peak memory, on a CPU each side in a fresh process.
        baselines: names of those to run, such as the `BenchReport.baseline` of a smaller run; None is all.
        progress: called with a line about what is running.

    Raises:
        UnsupportedModel, DataError: as `TreeEngine.forward_backward`.
        ValueError: fewer than one repeat or warm-up round, or an unknown baseline.
    """
    if repeats < 1 or warmup < 1:
        raise ValueError(f"repeats={repeats}, warmup={warmup}: both must be at least 1")
    loss = sft() if loss is None else loss
    as_loss(loss)
    kinds: dict[str, tuple[type[TreeEngine], dict[str, Any]]] = {}
    for size in PACK_TOKENS:
        kinds |= {f"packed {size}": (LinearEngine, {"pack_tokens": size})}
        kinds |= {f"padded {size}": (PaddedEngine, {"pack_tokens": size})}
    wanted = list(kinds) if baselines is None else list(baselines)
    if not wanted or not set(wanted) <= set(kinds):
        raise ValueError(f"baselines={wanted}: give one or more of {', '.join(kinds)}")
    if model_device(model).type == "cpu":
        keep_memory()
    rows = list(as_tree(trajectories, merge=True).trajectories)
    tree = build_tree(rows)
    distinct = [rows[k] for k in np.flatnonzero(distinct_rows(tree))]
    kinds = {"tree": (TreeEngine, {"budget": budget})} | {name: kinds[name] for name in wanted}
    engines = {name: kind(model, temperature=temperature, **options) for name, (kind, options) in kinds.items()}

    def take_turns(runs: dict[str, tuple[TreeEngine, list[Trajectory]]], rounds: int, label: str) -> Seconds:
        seconds: Seconds = {name: [] for name in runs}
        for number in range(rounds):
            for name, (engine, batch) in runs.items():
                if progress is not None:
                    progress(f"{label} {number + 1} of {rounds}: {name}")
                model.zero_grad(set_to_none=False)
                _synchronise(model)
                start = time.perf_counter()
                engine.forward_backward(batch, loss)
                _synchronise(model)
                seconds[name].append(time.perf_counter() - start)
        return seconds

    runs = {name: (engine, rows) for name, engine in engines.items()}
    warm = take_turns(runs, warmup, "warm-up")
    best = min(wanted, key=lambda name: min(warm[name]))
    close = [name for name in wanted if min(warm[name]) <= 1.05 * min(warm[best])]
    runs = {name: runs[name] for name in ("tree", *close)}
    repeated = len(distinct) < len(rows)
    measured = take_turns(runs | ({"distinct": (engines[best], distinct)} if repeated else {}), repeats, "round")
    medians = {name: statistics.median(times) for name, times in measured.items()}
    baseline = min(close, key=lambda name: medians[name])
    peaks: list[int | None] = [None, None]
    if memory:
        if progress is not None:
            progress("peak memory")
        options = {"temperature": temperature}
        peaks = [peak_step_bytes(kinds[n][0], options | kinds[n][1], model, rows, loss) for n in ("tree", baseline)]
    ratios = [a / b for a, b in zip(measured[baseline], measured["tree"])]
    speedup, plan, cost = statistics.median(ratios), engines["tree"].plan(rows), cost_if_countable(model)
    ideal = distinct_ideal = None
    if cost is not None:
        tokens = engines["tree"].budget
        share = budget_share(plan, cost.counts, tokens if isinstance(tokens, int) else plan.peak_tokens)
        ideal = ideal_speedup(tree, cost.counts) * share
        distinct_ideal = ideal_speedup(tree, cost.counts, dedup=True) if repeated else None
    return BenchReport(
        trajectories=len(rows),
        flat_tokens=tree.num_flat_tokens,
        unique_tokens=tree.num_tokens,
        overlap=1 - tree.num_tokens / max(tree.num_flat_tokens, 1),
        attention=str(engines["tree"].attention),
        parts=plan.num_parts,
        recomputed_tokens=plan.recomputed_tokens,
        tree_seconds=medians["tree"],
        linear_seconds=medians[baseline],
        baseline=baseline,
        baselines={name: medians.get(name, statistics.median(warm[name])) for name in wanted},
        speedup=speedup,
        speedup_spread=(min(ratios), max(ratios)),
        ideal=ideal,
        efficiency=None if ideal is None else speedup / ideal,
        distinct_rows=len(distinct),
        distinct_speedup=medians["distinct"] / medians["tree"] if repeated else None,
        distinct_ideal=distinct_ideal,
        tree_peak_bytes=peaks[0],
        linear_peak_bytes=peaks[1],
        repeats=repeats,
        seconds=measured,
    )


def _synchronise(model: nn.Module) -> None:
    if model_device(model).type == "cuda":
        torch.cuda.synchronize()


def peak_step_bytes(
    engine_type: type[TreeEngine],
    options: dict[str, Any],
    model: nn.Module,
    trajectories: Sequence[Trajectory],
    loss: Any,
) -> int | None:
    """Peak bytes of one forward and backward above the model and its gradients.

    A CPU model is sent to a new process, so that nothing that ran before is counted; a CUDA model is measured here.

    Returns:
        Bytes, or None on a system whose kernel does not report a process's peak.
    """
    if model_device(model).type == "cuda":
        engine = engine_type(model, **options)
        _touch_weights_and_gradients(model)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        engine.forward_backward(trajectories, loss)
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    if not Path("/proc/self/clear_refs").exists():
        return None
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    arguments = (sender, engine_type, options, model, list(trajectories), loss, torch.get_num_threads())
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


def _measure_peak(sender, engine_type, options, model, trajectories, loss, threads) -> None:
    torch.set_num_threads(threads)
    _touch_weights_and_gradients(model)
    # Libraries map their code when it first runs; that is not memory of a step.
    engine_type(model).forward_backward([Trajectory([0, 0, 0, 0]), Trajectory([0, 0, 1, 1])], sft())
    model.zero_grad(set_to_none=False)
    engine = engine_type(model, **options)
    if not isinstance(engine.budget, int):
        engine.plan(trajectories)  # may time passes, which is no part of a step
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):  # another C library than glibc
        ctypes.CDLL(None).malloc_trim(0)  # else the step would reuse free blocks that are already counted
    before = _status_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # restarts the peak
    engine.forward_backward(trajectories, loss)
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
