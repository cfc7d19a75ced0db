"""The words and key figures of a page: what state a run is in, what it reached, and on what."""

import dataclasses
import statistics
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from treetrain.report.catalogue import flop_rate, ideal_speedup
from treetrain.report.compare import SETTLING, Comparison
from treetrain.report.records import Column, Run
from treetrain.report.words import byte_count, duration, number, percent, short, times
from treetrain.report.words import flop_rate as flops_a_second

STATES = {
    "running": "Running",
    "silent": "Silent",
    "interrupted": "Interrupted",
    "failed": "Failed",
    "finished": "Finished",
}


@dataclasses.dataclass(frozen=True, slots=True)
class Tile:
    """A key figure."""

    label: str
    value: str
    detail: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Bar:
    """One length in a group of bars."""

    name: str
    colour: int
    share: float
    """Of the longest bar."""
    value: str
    mark: float | None = None
    """Where the ideal is, as a share of the longest bar."""


@dataclasses.dataclass(frozen=True, slots=True)
class Bars:
    """Two bars to be compared."""

    title: str
    bars: list[Bar]
    note: str = ""


def state_words(run: Run, now: float) -> str:
    """Where the run stands, in half a sentence."""
    total = run.total_steps
    steps = f"step {run.step:,} of {total:,}" if total else f"step {run.step:,}"
    state = run.state(now)
    if state == "running":
        left = run.seconds_left()
        return steps + (f", about {duration(left)} left" if left is not None else "")
    if state == "silent":
        return f"{steps}; no record for {duration(now - run.updated)}, it may have been killed"
    if state == "finished":
        return f"{run.step:,} steps"
    return f"after {steps}"


def subtitle(run: Run, *, execution: bool = True) -> str:
    """Model, loss and execution in a line."""
    config = run.config
    words = [str(config[name]) for name in ("model", "loss") if config.get(name)]
    if execution and config.get("execution"):
        words.append(f"{config['execution']} execution")
    words += [str(run.start[name]) for name in ("machine",) if run.start.get(name)]
    return " · ".join(words)


def run_tiles(run: Run) -> Iterator[Tile]:
    """Loss, evaluation, reward, speed, sharing, memory."""
    loss = run.column("loss").finite.values
    if len(loss):
        yield Tile("loss", number(loss[-1]), f"from {number(loss[0])} at the first step")
    held_out = run.evaluated("nll").finite.values
    if len(held_out):
        since = f"from {number(held_out[0])}; " if len(held_out) > 1 else ""
        yield Tile("held-out loss", number(held_out[-1]), f"{since}nats per trained token")
    reward = run.column("reward_mean").finite.values
    if len(reward) and run.config.get("loss", "sft") != "sft":
        yield Tile("reward", number(_late_mean(reward)), f"last tenth; the first: {number(_early_mean(reward))}")
    flat, seconds = run.column("flat_tokens").values, run.column("seconds").values
    if len(flat) and len(flat) == len(seconds) and seconds.sum() > 0:
        rate = flat[SETTLING:].sum() / seconds[SETTLING:].sum() if len(flat) > SETTLING else flat.sum() / seconds.sum()
        yield Tile(
            "tokens a second", short(rate), f"of all rows; {short(flat.sum())} tokens in {duration(seconds.sum())}"
        )
    unique = run.column("unique_tokens").values
    if len(unique) and len(unique) == len(flat) and flat.sum():
        yield from _sharing_tiles(run, 1 - unique.sum() / flat.sum())
    peak = run.column("peak_memory_bytes").finite.values
    if len(peak):
        yield Tile("peak memory", byte_count(peak.max()), _budget_words(run))


def _sharing_tiles(run: Run, overlap: float) -> Iterator[Tile]:
    if run.config.get("execution") == "linear":
        return
    yield Tile("overlap", percent(overlap), "of all tokens lie on a prefix that another row has computed")
    ideal, rate = ideal_speedup(run).finite.values, flop_rate(run).finite.values
    if len(ideal):
        speed = f"; {flops_a_second(statistics.median(rate))} reached" if len(rate) else ""
        yield Tile("ideal speed-up", times(statistics.median(ideal)), f"by FLOPs, median over steps{speed}")


def _budget_words(run: Run) -> str:
    budget = run.config.get("budget")
    unit = " tokens alive at once" if isinstance(budget, int) or str(budget).isdigit() else ""
    return "no budget given" if budget is None else f"budget {budget}{unit}"


def _late_mean(values: np.ndarray) -> float:
    return float(values[-max(len(values) // 10, 1) :].mean())


def _early_mean(values: np.ndarray) -> float:
    return float(values[: max(len(values) // 10, 1)].mean())


def comparison_tiles(pair: Comparison) -> Iterator[Tile]:
    """Speed-up, how far the losses are apart, tokens, memory."""
    one, other = pair.names
    if pair.speedup is not None:
        ideal = f"; FLOP-ideal {times(pair.ideal)}" if pair.ideal else ""
        yield Tile("measured speed-up", times(pair.speedup), f"median over steps, {one} against {other}{ideal}")
    if pair.efficiency is not None:
        yield Tile("efficiency", number(pair.efficiency, 3), "measured speed-up over the FLOP-ideal one")
    if pair.same_work:
        steps = f"over {pair.common_steps:,} steps of the same rows"
        yield Tile("largest distance of the losses", number(pair.largest_difference, 2), steps)
    loss = pair.run.column("loss").finite.values
    if len(loss):
        yield Tile(f"loss of {one}", number(loss[-1]), f"from {number(loss[0])} at the first step")


def comparison_bars(pair: Comparison) -> Iterator[Bars]:
    """Time of a step, tokens computed, memory."""
    seconds = [_median_seconds(run) for run in (pair.run, pair.reference)]
    if all(seconds):
        mark = seconds[1] / pair.ideal if pair.ideal else None
        note = (
            f"dotted: {pair.names[1]} divided by the FLOP-ideal speed-up of {times(pair.ideal)}" if pair.ideal else ""
        )
        yield _bars("Forward and backward, median step", pair, seconds, duration, mark, note)
    tokens = [float(run.column("computed_tokens").values.sum()) for run in (pair.run, pair.reference)]
    if all(tokens):
        yield _bars("Tokens through the model", pair, tokens, lambda value: f"{value:,.0f}")
    peaks = [float(run.column("peak_memory_bytes").finite.values.max(initial=0)) for run in (pair.run, pair.reference)]
    if all(peaks):
        yield _bars("Peak memory", pair, peaks, byte_count)


def _bars(
    title: str, pair: Comparison, values: list[float], form: Any, mark: float | None = None, note: str = ""
) -> Bars:
    longest = max(*values, mark or 0.0)
    bars = [
        Bar(name, place, value / longest, form(value), mark / longest if mark and place == 0 else None)
        for place, (name, value) in enumerate(zip(pair.names, values))
    ]
    return Bars(title, bars, note)


def _median_seconds(run: Run) -> float:
    values = run.column("forward_backward_seconds").finite.values
    return float(np.median(values[SETTLING:] if len(values) > SETTLING else values)) if len(values) else 0.0


def measure_table(run: Run) -> list[tuple[str, ...]]:
    """(measure, first, last, least, largest) of every number of the steps, evaluations below."""
    rows = [(name, *_figures(column)) for name, column in run.train.items() if name != "time"]
    return rows + [
        (f"held out: {name}", *_figures(column)) for name, column in run.evaluations.items() if name != "time"
    ]


def _figures(column: Column) -> tuple[str, ...]:
    values = column.finite.values
    if not len(values):
        return ("–",) * 4
    return tuple(number(value, 5) for value in (values[0], values[-1], values.min(), values.max()))


def versions_line(run: Run) -> str:
    """Versions and machine."""
    versions = run.start.get("versions")
    words = [f"{name} {version}" for name, version in versions.items()] if isinstance(versions, dict) else []
    return ", ".join([*words, *(str(run.start[name]) for name in ("machine",) if run.start.get(name))])


def run_facts(run: Run) -> Iterator[tuple[str, str]]:
    """What ran, on what, on which rows."""
    start = run.start
    yield "folder", str(run.folder)
    if isinstance(start.get("versions"), dict):
        yield "versions", ", ".join(f"{name} {version}" for name, version in start["versions"].items())
    for name in ("machine", "attention"):
        if start.get(name):
            yield name, str(start[name])
    if isinstance(start.get("parameters"), int):
        trained = start.get("trained_parameters", start["parameters"])
        share = "" if trained == start["parameters"] else f", {trained:,} trained"
        yield "model", f"{run.config.get('model', '')}: {start['parameters']:,} weights{share}"
    if isinstance(start.get("rows"), int):
        held_out = f"; {start['eval_rows']:,} rows held out" if start.get("eval_rows") else ""
        yield "rows", f"{start['rows']:,} with {start.get('row_tokens', 0):,} tokens{held_out}"
    if isinstance(start.get("time"), int | float):
        yield "started", moment(start["time"])
    yield "last record", moment(run.updated)
    if run.unreadable:
        yield "unreadable lines", f"{run.unreadable:,} of the metrics file; a run that is killed may leave one"


def settings(run: Run) -> list[tuple[str, str]]:
    """Every setting, as it is stored with the run."""
    return [(name, _setting(value)) for name, value in run.config.items()]


def _setting(value: Any) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value)) or "–"
    return "–" if value is None else {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)


def moment(seconds: float) -> str:
    """Seconds since 1970 as a date, in the time zone of this machine."""
    return time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(seconds))
