"""How much faster a tree is than the best linear baseline, on the user's model and rows.

Forward and backward are timed (an optimiser's step costs both sides the same). The engines take turns in one process
so that a machine that slows down slows all of them; medians are compared. All baselines run the same fused head.
"""

import dataclasses
import statistics
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from treetrain.engine.allocator import keep_memory
from treetrain.engine.engine import TreeEngine
from treetrain.engine.linear import LinearEngine
from treetrain.engine.loss import as_loss
from treetrain.engine.packed import model_device
from treetrain.errors import UnsupportedModel
from treetrain.losses.sft import sft
from treetrain.models.capability import causal_lm
from treetrain.planning.budget import Bytes
from treetrain.planning.cost import ModelShape
from treetrain.planning.ideal import budget_share, ideal_speedup
from treetrain.tree.build import Row, as_tree, build_tree
from treetrain.tree.stats import distinct_rows
from treetrain.tree.token_tree import TokenTree
from treetrain.verification.padded_baseline import PaddedEngine
from treetrain.verification.peak_memory import peak_step_bytes

PACK_TOKENS = (4096, 8192)
"""Sizes of a linear run that are tried; the fastest is the baseline."""


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
    """Tokens whose forward it runs twice."""
    tree_seconds: float
    linear_seconds: float
    """Of the fastest baseline."""
    baseline: str
    """Its name."""
    baselines: dict[str, float]
    speedup: float
    """linear_seconds / tree_seconds, the median over the rounds."""
    speedup_spread: tuple[float, float]
    """Least and greatest speed-up of a round."""
    ideal: float | None
    """FLOP-ideal speed-up, with the forward of what the budget makes any plan run twice counted; None where the
    model's shape is unknown."""
    efficiency: float | None
    """speedup / ideal."""
    distinct_rows: int
    distinct_speedup: float | None
    """Against the same baseline without exact repeats; None where no row repeats."""
    distinct_ideal: float | None
    tree_peak_bytes: int | None
    """Above model and gradients, in a fresh process; None where not measured."""
    linear_peak_bytes: int | None
    repeats: int
    seconds: dict[str, list[float]]
    """Every measured round by engine."""

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
        memory: also measure peak memory, each side in a fresh process.
        baselines: names of those to compare with, e.g. what `fastest_baseline` has found; None is all.
        progress: called with a line about what is running.

    Raises:
        UnsupportedModel, DataError: as `TreeEngine.forward_backward`.
        ValueError: fewer than one repeat or warm-up round, a baseline that there is not.
    """
    if repeats < 1 or warmup < 1:
        raise ValueError(f"repeats={repeats}, warmup={warmup}: both must be at least 1")
    loss = sft() if loss is None else loss
    as_loss(loss)
    if model_device(model).type == "cpu":
        keep_memory()
    say = progress or (lambda _line: None)
    rows = list(as_tree(trajectories, merge=True).trajectories)
    distinct = [rows[k] for k in np.flatnonzero(distinct_rows(build_tree(rows)))]
    engines = {"tree": TreeEngine(model, budget=budget, temperature=temperature)}
    engines |= _baselines(model, temperature, baselines)
    runs = {name: (engine, rows) for name, engine in engines.items()}
    seconds = _take_turns(runs, loss, warmup, say, "warm-up")
    best = min((name for name in engines if name != "tree"), key=lambda name: min(seconds[name]))
    kept = {"tree": runs["tree"]} | {
        name: run for name, run in runs.items() if min(seconds[name]) <= 1.05 * min(seconds[best])
    }
    if len(distinct) < len(rows):
        kept["distinct"] = (engines[best], distinct)
    measured = _take_turns(kept, loss, repeats, say, "round")
    peaks = [None, None]
    if memory:
        say("peak memory")
        peaks = [
            peak_step_bytes(type(engines[name]), _options(engines[name], temperature), model, rows, loss)
            for name in ("tree", best)
        ]
    return _report(engines["tree"], rows, distinct, seconds, measured, peaks, repeats)


def fastest_baseline(
    model: nn.Module,
    trajectories: Sequence[Row] | TokenTree,
    *,
    loss: Any = None,
    temperature: float = 1.0,
    progress: Callable[[str], None] | None = None,
) -> str:
    """The name of the baseline that is fastest on these rows, for models on which every round of all takes minutes.

    Each runs once, the first one once more before, which is not counted. Arguments are those of `bench`.
    """
    loss, say = sft() if loss is None else loss, progress or (lambda _line: None)
    rows = list(as_tree(trajectories, merge=True).trajectories)
    if model_device(model).type == "cpu":
        keep_memory()
    runs = {name: (engine, rows) for name, engine in _baselines(model, temperature, None).items()}
    _take_turns(dict([next(iter(runs.items()))]), loss, 1, say, "warm-up")
    seconds = _take_turns(runs, loss, 1, say, "trial")
    return min(seconds, key=lambda name: seconds[name][0])


def _baselines(model: nn.Module, temperature: float, wanted: Collection[str] | None) -> dict[str, TreeEngine]:
    engines: dict[str, TreeEngine] = {}
    for size in PACK_TOKENS:
        engines[f"packed {size}"] = LinearEngine(model, pack_tokens=size, temperature=temperature)
        engines[f"padded {size}"] = PaddedEngine(model, pack_tokens=size, temperature=temperature)
    if wanted is None:
        return engines
    unknown = sorted(set(wanted) - set(engines))
    if unknown or not wanted:
        raise ValueError(f"baselines={list(wanted)}: give one or more of {', '.join(engines)}")
    return {name: engines[name] for name in engines if name in wanted}


def _options(engine: TreeEngine, temperature: float) -> dict[str, Any]:
    options: dict[str, Any] = {"temperature": temperature}
    if isinstance(engine, LinearEngine):
        options["pack_tokens"] = engine.pack_tokens
    else:
        options["budget"] = engine.budget
    return options


def _take_turns(runs: dict, loss: Any, rounds: int, say: Callable[[str], None], what: str) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(rounds):
        for name, (engine, rows) in runs.items():
            say(f"{what} {number + 1} of {rounds}: {name}")
            engine.model.zero_grad(set_to_none=False)
            _synchronise(engine.model)
            start = time.perf_counter()
            engine.forward_backward(rows, loss)
            _synchronise(engine.model)
            seconds[name].append(time.perf_counter() - start)
    return seconds


def _synchronise(model: nn.Module) -> None:
    if model_device(model).type == "cuda":
        torch.cuda.synchronize()


def _report(engine: TreeEngine, rows, distinct, warm, measured, peaks, repeats: int) -> BenchReport:
    medians = {name: statistics.median(times) for name, times in measured.items()}
    names = [name for name in medians if name not in ("tree", "distinct")]
    baseline = min(names, key=lambda name: medians[name])
    ratios = [a / b for a, b in zip(measured[baseline], measured["tree"])]
    tree, plan = build_tree(rows), engine.plan(rows)
    shape = _shape(engine.model)
    budget = engine.budget if isinstance(engine.budget, int) else plan.peak_tokens
    ideal = None if shape is None else ideal_speedup(tree, shape) * budget_share(plan, shape, budget)
    speedup = statistics.median(ratios)
    repeated = len(distinct) < len(rows)
    return BenchReport(
        trajectories=len(rows),
        flat_tokens=tree.num_flat_tokens,
        unique_tokens=tree.num_tokens,
        overlap=1 - tree.num_tokens / max(tree.num_flat_tokens, 1),
        attention=str(engine.attention),
        parts=plan.num_parts,
        recomputed_tokens=plan.recomputed_tokens,
        tree_seconds=medians["tree"],
        linear_seconds=medians[baseline],
        baseline=baseline,
        baselines={name: statistics.median(times) for name, times in warm.items() if name != "tree"}
        | {name: medians[name] for name in names},
        speedup=speedup,
        speedup_spread=(min(ratios), max(ratios)),
        ideal=ideal,
        efficiency=None if ideal is None else speedup / ideal,
        distinct_rows=len(distinct),
        distinct_speedup=medians["distinct"] / medians["tree"] if repeated else None,
        distinct_ideal=ideal_speedup(tree, shape, dedup=True) if repeated and shape is not None else None,
        tree_peak_bytes=peaks[0],
        linear_peak_bytes=peaks[1],
        repeats=repeats,
        seconds=measured,
    )


def _shape(model: nn.Module) -> ModelShape | None:
    try:
        return ModelShape.from_config(causal_lm(model).config.to_dict())  # type: ignore[operator, union-attr]
    except UnsupportedModel:
        return None
