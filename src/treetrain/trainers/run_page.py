"""A training run as one self-contained HTML page, alone or beside the same training without shared prefixes.

It reads what any `transformers.Trainer` leaves in its output folder: the `log_history` of `trainer_state.json`. Figures
are matplotlib's SVG, whose colours become CSS variables, so that the page is light or dark as the reader's system is.
"""

import io
import json
import re
from dataclasses import dataclass
from datetime import timedelta
from importlib.metadata import distributions
from importlib.resources import files
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from markupsafe import Markup
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, FuncFormatter, LogLocator, MaxNLocator
from transformers import TrainerCallback

from treetrain.errors import DataError
from treetrain.inspection.page import render

PAGE, STATE = "report.html", "trainer_state.json"
PACKAGES = ("treetrain", "torch", "transformers", "trl", "peft")
COLOURS = {"c0": "#0b6fb8", "c1": "#d9730d", "c2": "#0b8a63", "c3": "#b0509a", "soft": "#5b6672", "grid": "#e9ecf0"}
"""Names of the page's CSS variables, and the colours that stand for them in figures."""
PREFIX = "tree/"
"""Prefix of the names of execution figures: tree/flat_tokens, tree/computed_tokens, tree/seconds and so on."""
SHOWN = ("loss", "eval_loss", "seconds", "computed_tokens", "unique_tokens", "flat_tokens", "peak_memory_bytes")
NOT_SHOWN = re.compile(r".*(_flops|_runtime|_per_second|num_tokens|ideal_speedup)$")
SMOOTHED_FROM, LOG_FROM = 60, 1e-9
STYLES = {"line": {"lw": 1.9}, "under": {"lw": 6.5, "alpha": 0.45}, "dashed": {"lw": 1.6, "ls": (0, (4, 3))}}
STYLES["dots"] = {"lw": 0, "marker": "o", "markersize": 5}
Series = dict[int, float]
"""Values by optimiser step, ascending."""
Line = tuple[str, Series, str, str, str | None]
"""Name, values, name of a colour, name of a style, and what the legend says instead of the last value."""


@dataclass(frozen=True)
class Run:
    """The logs of a Trainer: series by name (without `tree/`), and the values logged once at the end."""

    logs: dict[str, Series]
    final: dict[str, float]
    step: int
    steps: int

    def __getitem__(self, name: str) -> Series:
        return self.logs.get(name, {})

    def values(self, name: str) -> np.ndarray:
        """The finite values."""
        values = np.array(list(self[name].values()), float)
        return values[np.isfinite(values)]

    @property
    def others(self) -> list[str]:
        """Names of other metrics that change, without copies of the loss (supervised training logs it as nll too)."""
        names = [name for name in self.logs if name not in SHOWN and not NOT_SHOWN.match(name)]
        twice = self["loss"], self["eval_loss"]
        return [name for name in names if len(set(self[name].values())) > 1 and self[name] not in twice]

    @property
    def flops(self) -> Series:
        """FLOPs of each step: of the tree, or of all rows if the run computed every token of every row."""
        shares = self.values("computed_tokens").sum() < self.values("flat_tokens").sum()
        return self["tree_flops" if shares else "linear_flops"]


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
    """Write a self-contained HTML page about a run and return its path.

    Args:
        run_folder: output folder of a `transformers.Trainer`.
        linear: output folder of the same training without shared prefixes, to compare with.
        out: the file; None: `report.html` in `run_folder`.

    Raises:
        DataError: a folder has no `trainer_state.json`.
    """
    run, other = read_run(run_folder), None if linear is None else read_run(linear)
    installed = {package.name: package.version for package in distributions()}
    template = files("treetrain.trainers").joinpath("run_page.html.jinja").read_text(encoding="utf-8")
    text = render(
        template,
        title=Path(run_folder).resolve().name if other is None else "The same training, every shared prefix once",
        versions=[f"{name} {installed[name]}" for name in PACKAGES if name in installed],
        run=run,
        linear=other,
        compared=None if other is None else compare_runs(run, other),
        **{each.__name__: each for each in (draw, ratio, differences, plain, si, written, timedelta)},
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
        `common_steps`: number of steps that both logged; `same_work`: whether each has equal flat tokens in both;
        `largest_difference` of the losses, evaluations included; `speedup`: the median over the steps but the first,
        which sets up memory and kernels; `ideal`: linear over tree FLOPs; `efficiency`: speedup over ideal. A value
        is None if the logs do not give it.
    """
    common = sorted(run["loss"].keys() & linear["loss"].keys())
    same = bool(common) and all(run["flat_tokens"].get(step) == linear["flat_tokens"].get(step) for step in common)
    apart = [value for name in ("loss", "eval_loss") for value in differences(run[name], linear[name]).values()]
    speedups = list(ratio(linear["seconds"], run["seconds"]).values())[1:] if same else []
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
    """Three digits with an SI prefix: 18.1k, 526 ms, 1.68 GB."""
    return EngFormatter(unit, sep=" " if unit else "")(float(f"{value:.3g}"))


def written(value: float, unit: str | None = None) -> str:
    """A value with its unit: "×", a unit with an SI prefix, or none."""
    if unit is None:
        return plain(value)
    return f"{value:.3g}×" if unit == "×" else si(value, unit)


def ratio(above: Series, below: Series) -> Series:
    return {step: value / below[step] for step, value in above.items() if below.get(step)}


def differences(one: Series, other: Series) -> Series:
    return {step: abs(value - other[step]) for step, value in one.items() if step in other}


def draw(title: str, lines: list[Line], unit: str | None, *, zero: bool, log: bool) -> Markup:
    """A figure as inline SVG: text stays text, colours become CSS variables.

    Args:
        lines: those with any value.
        unit: see `written`.
        zero: the axis begins at 0.
        log: the axis is logarithmic, from LOG_FROM.
    """
    # The salt keeps the ids of a page's figures apart, and makes them the same in every page.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": title, "font.size": 11}):
        figure = Figure(figsize=(4.7, 2.5), dpi=72, layout="constrained")
        axes = figure.add_subplot(xmargin=0.02, yscale="log" if log else "linear")
        for _, series, colour, style, _ in lines:
            values = np.array(list(series.values()), float)
            _plot(axes, np.array(list(series)), np.maximum(values, LOG_FROM) if log else values, COLOURS[colour], style)
        axes.set_ymargin(0.08)
        if zero:
            axes.set_ylim(bottom=0)
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 3), numticks=6) if log else MaxNLocator(5))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: written(value, unit)))
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


def _plot(axes: Any, steps: np.ndarray, values: np.ndarray, colour: str, style: str) -> None:
    many = len(steps) >= SMOOTHED_FROM
    if style != "dots" and many:
        axes.plot(steps, values, color=colour, linewidth=1, alpha=0.3)
        window = np.ones(len(steps) // 30)
        values = np.convolve(values, window, "same") / np.convolve(np.ones(len(steps)), window, "same")
    marks = {"marker": "o", "markersize": 2.6} if style == "line" and not many else {}
    axes.plot(steps, values, color=colour, solid_capstyle="round", **marks, **STYLES[style])
