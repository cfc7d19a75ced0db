"""A training run as one self-contained HTML page, alone or beside the same training without shared prefixes.

Reads what any `transformers.Trainer` leaves in its output folder: the `log_history` of `trainer_state.json`. Figures
are matplotlib's SVG, whose colours become CSS variables, so that the page is light or dark as the reader's system is.
"""

import dataclasses
import datetime
import io
import json
import re
from collections.abc import Callable, Iterator
from functools import partial
from importlib.metadata import distributions
from importlib.resources import files
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from jinja2 import Environment, StrictUndefined
from markupsafe import Markup
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, FuncFormatter, LogLocator, MaxNLocator
from transformers import TrainerCallback

from treetrain.errors import DataError

PAGE, STATE = "report.html", "trainer_state.json"
PACKAGES = ("treetrain", "torch", "transformers", "trl", "peft")
COLOURS = {"c0": "#0b6fb8", "c1": "#d9730d", "c2": "#0b8a63", "c3": "#b0509a", "soft": "#5b6672", "grid": "#e9ecf0"}
"""Names of the page's CSS variables, and the colours that stand for them in figures."""
NARROW, WIDE = (4.7, 2.5), (9.6, 2.7)
"""Inches of a figure, at 72 pixels each, in one column of the page and in two."""
PREFIX = "tree/"
"""Of what the execution of a step is logged as: tree/flat_tokens, tree/computed_tokens, tree/seconds and so on."""
SHOWN = ("loss", "eval_loss", "seconds", "computed_tokens", "unique_tokens", "flat_tokens", "peak_memory_bytes")
NOT_SHOWN = re.compile(r".*(_flops|_runtime|_per_second|num_tokens|ideal_speedup)$")
SMOOTHED_FROM, SMALLEST_DIFFERENCE = 60, 1e-9
Series = dict[int, float]
"""Values by optimiser step, ascending."""


@dataclasses.dataclass(frozen=True)
class Run:
    """What a Trainer logged."""

    logs: dict[str, Series]
    """By name, `tree/` taken off."""
    final: dict[str, float]
    """Logged once, at the end: `train_runtime` and so on."""
    step: int
    steps: int

    def __getitem__(self, name: str) -> Series:
        return self.logs.get(name, {})

    def values(self, name: str) -> np.ndarray:
        """The finite values."""
        found = np.array(list(self[name].values()), float)
        return found[np.isfinite(found)]

    @property
    def flops(self) -> Series:
        """FLOPs of the passes of each step; a run that computes every token of every row shares nothing."""
        shares = self.values("computed_tokens").sum() < self.values("flat_tokens").sum()
        return self["tree_flops" if shares else "linear_flops"]


@dataclasses.dataclass(frozen=True)
class Line:
    """A line of a figure; its style is line, dashed, dots, or under: broad, for another to lie on."""

    name: str
    series: Series
    colour: str = "c0"
    style: str = "line"
    said: str | None = None
    """In the legend; None: the last value."""


@dataclasses.dataclass(frozen=True)
class Chart:
    """A figure with its title and legend."""

    title: str
    lines: list[Line]
    form: Callable[[float], str] = lambda value: plain(value)
    log: bool = False
    zero: bool = False
    wide: bool = False


class RunPageCallback(TrainerCallback):
    """Writes the page of a run into its output folder when training ends.

    Args:
        linear: output folder of the same training without shared prefixes, to be shown beside it.
    """

    def __init__(self, linear: str | Path | None = None) -> None:
        self.linear = linear

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Save the logs where `Trainer.save_state` does, then the page."""
        if state.is_world_process_zero:
            Path(args.output_dir).mkdir(parents=True, exist_ok=True)
            state.save_to_json(str(Path(args.output_dir, STATE)))
            write_page(args.output_dir, self.linear)


def write_page(run_folder: str | Path, linear: str | Path | None = None, out: str | Path | None = None) -> Path:
    """Write one HTML file about a run; it loads nothing when it is opened.

    Args:
        run_folder: output folder of a `transformers.Trainer`.
        linear: output folder of the same training without shared prefixes, to compare with.
        out: the file; None: `report.html` in `run_folder`.

    Returns:
        The file.

    Raises:
        DataError: a folder has no `trainer_state.json`.
    """
    run, other = read_run(run_folder), None if linear is None else read_run(linear)
    title = Path(run_folder).resolve().name if other is None else "The same training, every shared prefix computed once"
    known = {package.name: package.version for package in distributions()}
    template = files("treetrain.trainers").joinpath("run_page.html.jinja").read_text(encoding="utf-8")
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    text = environment.from_string(template).render(
        title=title,
        versions=[
            f"{name} {known[name]}" for name in ("treetrain", "torch", "transformers", "trl", "peft") if name in known
        ],
        runs={"": run} if other is None else {"tree": run, "linear": other},
        plain=plain,
        tiles=list(_tiles(run, other)),
        bars=[] if other is None else list(_bars(run, other)),
        sections=[(name, [_drawn(chart) for chart in charts]) for name, charts in _sections(run, other) if charts],
    )
    path = Path(run_folder, PAGE) if out is None else Path(out)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def read_run(folder: str | Path) -> Run:
    """The logs of an output folder: of its `trainer_state.json`, else of its checkpoint with the most steps."""
    paths = list(Path(folder).glob(STATE)) or list(Path(folder).glob(f"*/{STATE}"))
    if not paths:
        raise DataError(f"{folder} has no {STATE}; give the output folder of a Trainer that has saved a checkpoint")
    states = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
    state = max(states, key=lambda state: state["global_step"])
    logs: dict[str, Series] = {}
    final: dict[str, float] = {}
    for entry in state["log_history"]:
        for name, value in entry.items():
            if "train_runtime" in entry:
                final[name] = value
            elif isinstance(value, int | float) and name not in ("step", "epoch"):
                logs.setdefault(name.removeprefix(PREFIX), {})[entry["step"]] = value
    return Run(logs, final, state["global_step"], state["max_steps"])


def compare_runs(run: Run, linear: Run) -> dict[str, Any]:
    """The figures of a comparison as plain JSON data.

    Returns:
        `common_steps` that both have logged; `same_work`: whether each of them had as many flat tokens in both;
        `largest_difference` of the losses, evaluations included; `speedup`: the median over the steps but the first, in
        which memory and kernels are set up; `ideal`: linear over tree FLOPs; `efficiency`: speedup over ideal. None
        stands for what cannot be known from the logs.
    """
    common = sorted(run["loss"].keys() & linear["loss"].keys())
    same = bool(common) and all(run["flat_tokens"].get(step) == linear["flat_tokens"].get(step) for step in common)
    apart = [value for name in ("loss", "eval_loss") for value in _differences(run[name], linear[name]).values()]
    speedups = list(_ratio(linear["seconds"], run["seconds"]).values())[1:] if same else []
    flops = [(linear.flops[step], run.flops[step]) for step in common[1:] if step in linear.flops and step in run.flops]
    speedup = float(np.median(speedups)) if speedups else None
    ideal = float(np.divide(*np.sum(flops, axis=0))) if same and flops else None
    return {
        "common_steps": len(common),
        "same_work": same,
        "largest_difference": max(apart) if apart else None,
        "speedup": speedup,
        "ideal": ideal,
        "efficiency": speedup / ideal if speedup and ideal else None,
    }


def plain(value: float) -> str:
    """Four digits, or all of a large number: 0.0314, 1,234, 1.9e-06."""
    return f"{value:,.4g}" if abs(value) < 1e4 else f"{value:,.0f}"


def si(value: float, unit: str = "") -> str:
    """Three digits with a prefix of the SI: 18.1k, 526 ms, 1.68 GB."""
    return EngFormatter(unit, sep=" " if unit else "")(float(f"{value:.3g}"))


_seconds, _bytes = partial(si, unit="s"), partial(si, unit="B")


def _ratio(above: Series, below: Series) -> Series:
    return {step: value / below[step] for step, value in above.items() if below.get(step)}


def _differences(one: Series, other: Series) -> Series:
    return {step: abs(value - other[step]) for step, value in one.items() if step in other}


def _tiles(run: Run, linear: Run | None) -> Iterator[tuple[str, str, str]]:
    """(label, value, detail) of the key figures."""
    if linear is not None:
        found = compare_runs(run, linear)
        if found["speedup"]:
            ideal = f"; FLOP-ideal {found['ideal']:.2f}×" if found["ideal"] else ""
            yield "measured speed-up", f"{found['speedup']:.2f}×", f"median over steps, tree against linear{ideal}"
        elif "train_runtime" in run.final and "train_runtime" in linear.final:
            times = linear.final["train_runtime"] / run.final["train_runtime"]
            yield "measured speed-up", f"{times:.2f}×", "of the whole training, tree against linear"
        if found["efficiency"]:
            yield "efficiency", f"{found['efficiency']:.3f}", "measured speed-up over the FLOP-ideal one"
        if found["largest_difference"] is not None:
            same = " of the same rows" if found["same_work"] else ""
            value = f"{found['largest_difference']:.2g}"
            yield "largest distance of the losses", value, f"over {found['common_steps']} steps{same}"
    for name, label in (("loss", "loss"), ("eval_loss", "held-out loss"), ("reward", "reward")):
        if len(values := run.values(name)):
            yield label, plain(values[-1]), f"from {plain(values[0])} at the first step"
    if linear is None:
        flat, unique, seconds = (run.values(name).sum() for name in ("flat_tokens", "unique_tokens", "seconds"))
        if flat and seconds:
            yield "tokens a second", si(flat / seconds), f"of all rows; {si(flat)} tokens"
        if flat and unique:
            yield "overlap", f"{1 - unique / flat:.1%}", "of all tokens lie on a prefix that another row has computed"
        if len(peaks := run.values("peak_memory_bytes")):
            yield "peak memory", _bytes(peaks.max()), ""
        if "train_runtime" in run.final:
            time = datetime.timedelta(seconds=round(run.final["train_runtime"]))
            yield "time", str(time), f"{run.step:,} optimiser steps"


def _bars(run: Run, linear: Run) -> Iterator[tuple[str, list[tuple[str, str, float, str]], float | None]]:
    """(title, (name, colour, share of the longest, value) of both runs, share at which the ideal is)."""
    ideal = compare_runs(run, linear)["ideal"]
    for title, name, pick, form, mark in (
        ("Forward and backward, median step", "seconds", lambda v: np.median(v[1:]), _seconds, ideal and 1 / ideal),
        ("Tokens through the model", "computed_tokens", np.sum, "{:,.0f}".format, None),
        ("Peak memory", "peak_memory_bytes", np.max, _bytes, None),
    ):
        if min(len(each.values(name)) for each in (run, linear)) > 1:
            both = [float(pick(each.values(name))) for each in (run, linear)]
            names = zip(("tree", "linear"), ("c0", "c1"), both)
            yield title, [(who, colour, value / max(both), form(value)) for who, colour, value in names], mark


def _sections(run: Run, linear: Run | None) -> Iterator[tuple[str, list[Chart]]]:
    """The figures under their headings; those without a line are left out."""

    def chart(title: str, name: str, style: str = "under", **more: Any) -> Chart:
        if linear is None:
            return Chart(title, [Line(name.replace("_", " "), run[name])], **more)
        lines = [Line("linear", linear[name], "c1", style), Line("tree", run[name])]
        return Chart(title, lines if all(line.series for line in lines) else [], **more)

    loss, tokens = chart("Loss", "loss", wide=True), chart("Tokens through the model", "computed_tokens", form=si)
    time = chart("Forward and backward", "seconds", "line", form=_seconds, zero=True)
    memory = chart("Peak memory", "peak_memory_bytes", "line", form=_bytes, zero=True)
    rest = [name for name, series in run.logs.items() if name not in SHOWN and not NOT_SHOWN.match(name)]
    twice = [run["loss"], run["eval_loss"]]  # the loss of supervised training is logged as nll too
    more = [chart(name, name) for name in rest if len(set(run[name].values())) > 1 and run[name] not in twice]
    if linear is None:
        loss.lines.append(Line("held out", run["eval_loss"], "c1", "dots"))
        tokens.lines.append(Line("of all rows", run["flat_tokens"], "c1"))
        tokens.lines.append(Line("unique", run["unique_tokens"], "c2", "dashed"))
        sections = {
            "Learning": [loss, *more[:1]],
            "Speed, sharing and memory": [time, tokens, memory],
            "More measures": more[1:],
        }
    else:
        found = compare_runs(run, linear)
        loss.lines.append(Line("linear, held out", linear["eval_loss"], "c1", "dots"))
        loss.lines.append(Line("tree, held out", run["eval_loss"], "c0", "dots"))
        apart = {
            step: max(value, SMALLEST_DIFFERENCE) for step, value in _differences(run["loss"], linear["loss"]).items()
        }
        said = f"at most {found['largest_difference'] or 0:.2g}"
        said += f"; 0 is drawn at {SMALLEST_DIFFERENCE:g}" * (0 in _differences(run["loss"], linear["loss"]).values())
        distance = Chart("Distance of the losses", [Line("|tree − linear|", apart, "c3", said=said)], log=True)
        times = Line("measured", _ratio(linear["seconds"], run["seconds"]), said=f"median {found['speedup'] or 0:.2f}×")
        ideal = Line("FLOP-ideal", _ratio(linear.flops, run.flops), "c2", "dashed", f"{found['ideal'] or 0:.2f}×")
        speed = [Chart("Speed-up", [times, ideal], "{:.3g}×".format, zero=True)] if found["same_work"] else []
        sections = {
            "Do they learn the same?": [loss, distance],
            "Speed and memory": [*speed, time, memory],
            "More measures": more,
        }
    for title, charts in sections.items():
        yield title, [chart for chart in charts if any(line.series for line in chart.lines)]


def _drawn(chart: Chart) -> dict[str, Any]:
    """A wide figure is drawn twice, since its letters could not be read on a phone."""
    lines = [line for line in chart.lines if line.series]
    said = [line.said or chart.form(list(line.series.values())[-1]) for line in lines]
    wide = _svg(chart, WIDE) if chart.wide else ""
    return {"title": chart.title, "legend": list(zip(lines, said)), "narrow": _svg(chart, NARROW), "wide": wide}


def _svg(chart: Chart, inches: tuple[float, float]) -> Markup:
    """The figure as SVG to stand in a page: letters as letters, colours as CSS variables."""
    # The salt keeps the ids of a page's figures apart, and makes them the same in every page.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": f"{chart.title}{inches}", "font.size": 11}):
        figure = Figure(figsize=inches, dpi=72, layout="constrained")
        axes = figure.add_subplot(xmargin=0.02, yscale="log" if chart.log else "linear")
        for line in chart.lines:
            _plot(axes, line)
        axes.set_ymargin(0.08)
        if chart.zero:
            axes.set_ylim(bottom=0)
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 3), numticks=6) if chart.log else MaxNLocator(5))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: chart.form(value)))
        axes.yaxis.set_minor_formatter("")
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        axes.set_xlabel("optimiser step", color=COLOURS["soft"])
        axes.grid(axis="y", color=COLOURS["grid"], linewidth=1)
        axes.tick_params(which="both", length=0, labelcolor=COLOURS["soft"])
        axes.spines[["left", "top", "right"]].set_visible(False)
        axes.spines["bottom"].set_color(COLOURS["soft"])
        file = io.StringIO()
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    text = re.sub(r"(?s)^.*?(?=<svg)|<metadata>.*?</metadata>", "", file.getvalue())
    for name, colour in COLOURS.items():
        text = text.replace(colour, f"var(--{name})")
    text = re.sub(r"font: ([\d.]+px)[^;\"]*", r"font-size: \1", text)
    return Markup(re.sub(r' id="[a-zA-Z_.0-9]*_\d+"', "", text))


def _plot(axes: Any, line: Line) -> None:
    steps, values = np.array(list(line.series)), np.array(list(line.series.values()), float)
    colour = COLOURS[line.colour]
    if line.style != "dots" and len(steps) >= SMOOTHED_FROM:
        axes.plot(steps, values, color=colour, linewidth=1, alpha=0.3)
        window = np.ones(len(steps) // 30)
        values = np.convolve(values, window, "same") / np.convolve(np.ones(len(steps)), window, "same")
    styles = {
        "line": {"linewidth": 1.9, "marker": "o" if len(steps) < SMOOTHED_FROM else None, "markersize": 2.6},
        "under": {"linewidth": 6.5, "alpha": 0.45},
        "dashed": {"linewidth": 1.6, "linestyle": (0, (4, 3))},
        "dots": {"linewidth": 0, "marker": "o", "markersize": 5},
    }
    axes.plot(steps, values, color=colour, solid_capstyle="round", **styles[line.style])
