"""A training run beside the same training without shared prefixes, as one self-contained HTML page.

It reads the logs that `transformers.Trainer.save_state` leaves in `trainer_state.json`. Figures are matplotlib's SVG,
whose colours become CSS variables, so that the page is light or dark as the reader's system is.
"""

import io
import json
import math
import re
from collections import defaultdict
from importlib.resources import files
from pathlib import Path

import matplotlib
import numpy as np
from markupsafe import Markup
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, FuncFormatter, LogLocator, MaxNLocator

from treetrain.core.errors import DataError, quoted, shortened
from treetrain.logs.files import write_file
from treetrain.logs.inspection.page import BEGINS, render

STATE = "trainer_state.json"
COLOURS = {"c0": "#0b6fb8", "c1": "#d9730d", "c2": "#0b8a63", "c3": "#b0509a", "soft": "#5b6672", "grid": "#e9ecf0"}
"""Names of the page's CSS variables, and the colours that stand for them in figures."""
PREFIX = "tree/"
"""Prefix of the names of execution figures: tree/flat_tokens, tree/computed_tokens, tree/seconds and so on."""
OWN_FIGURE = {"loss", "eval_loss", "seconds", "computed_tokens", "unique_tokens", "flat_tokens", "peak_memory_bytes"}
NO_FIGURE = ("_flops", "_runtime", "_per_second", "num_tokens", "ideal_speedup")
"""Endings of the names of logs that are not drawn."""
LOG_FROM = 1e-9
LARGEST = 1e100
"""A larger figure is an error; axes cannot show it."""
STYLES = {
    "line": {"lw": 1.9, "marker": "o", "markersize": 2.6},
    "under": {"lw": 6.5, "alpha": 0.45},
    "dashed": {"lw": 1.6, "ls": (0, (4, 3))},
    "dots": {"lw": 0, "marker": "o", "markersize": 5},
}
Series = dict[int, float]
"""Values by optimiser step, ascending."""
Run = defaultdict[str, Series]
"""The logs of a run by name (without `tree/`); a name that was not logged has no values."""
Line = tuple[str, Series, str, str, str | None]
"""Name, values, name of a colour, name of a style, and what the legend says instead of the last value."""


def write_page(tree: str | Path, linear: str | Path | None, out: str | Path) -> Path:
    """Write a self-contained HTML page about one or two runs and return its path.

    Args:
        tree: output folder of a `transformers.Trainer` that shares prefixes.
        linear: that of the same training without shared prefixes; None shows the first run alone.
        out: the file.

    Raises:
        DataError: a folder has no `trainer_state.json`, or one that no run wrote.
    """
    run, other = read_run(tree), defaultdict(dict) if linear is None else read_run(linear)
    names = [name for name in run if linear is None or name in other]
    drawn = [name for name in names if name not in OWN_FIGURE and not name.endswith(NO_FIGURE)]
    # Supervised training logs its loss as nll too.
    others = [name for name in drawn if run[name] not in (run["loss"], run["eval_loss"])]
    text = render(
        files("treetrain.trainers").joinpath("run_page.html.jinja").read_text(encoding="utf-8"),
        run=run,
        linear=other,
        paired=linear is not None,
        others=[name for name in others if len(set(run[name].values())) > 1],
        compared=compare_runs(run, other),
        **{each.__name__: each for each in (draw, ratio, differences, finite, si, written)},
    )
    return write_file(out, text.lstrip(), begins=BEGINS)


def read_run(folder: str | Path) -> Run:
    """The logs of the output folder of a Trainer. Raises DataError if it has no `trainer_state.json`."""
    path = Path(folder, STATE)
    if not path.is_file():
        raise DataError(f"{folder} has no {STATE}; call trainer.save_state() when training ends")
    run: Run = defaultdict(dict)
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError, OSError) as error:
        raise DataError(f"{path}: is no JSON of a run ({shortened(error)})") from error
    history = state.get("log_history") if isinstance(state, dict) else None
    if not isinstance(history, list):
        raise DataError(f"{path}: `log_history` is {quoted(history)}, expected a list of logs")
    for number, entry in enumerate(history):
        place = f"{path}: `log_history.{number}"
        if not isinstance(entry, dict):
            raise DataError(f"{place}` is {quoted(entry)}, expected an object")
        step = entry.get("step")
        if type(step) is not int or not 0 <= step < 1 << 53:
            raise DataError(f"{place}.step` is {quoted(step)}, expected a whole number from 0")
        for name, value in entry.items():
            if isinstance(value, bool) or not isinstance(value, int | float):
                continue
            if not abs(value) <= LARGEST and abs(value) != math.inf and value == value:  # of any length, if an int
                raise DataError(f"{place}.{name}` is {quoted(value)}, which no run logs")
            if name not in ("step", "epoch") and "train_runtime" not in entry:
                run[name.removeprefix(PREFIX)][step] = float(value)
    return run


def compare_runs(run: Run, linear: Run) -> dict[str, object]:
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
    rows, tree = (sum(run[name].get(step, 0.0) for step in common[1:]) for name in ("linear_flops", "tree_flops"))
    speedup = float(np.median(speedups)) if speedups else None
    ideal = rows / tree if same and tree else None
    return {
        "common_steps": len(common),
        "same_work": same,
        "largest_difference": max(apart) if apart else None,
        "speedup": speedup,
        "ideal": ideal,
        "efficiency": speedup / ideal if speedup and ideal else None,
    }


def finite(series: Series) -> np.ndarray:
    """The finite values."""
    values = np.array(list(series.values()), float)
    return values[np.isfinite(values)]


def si(value: float, unit: str = "") -> str:
    """Three digits with an SI prefix: 18.1k, 526 ms, 1.68 GB."""
    return EngFormatter(unit, sep=" " if unit else "")(float(f"{value:.3g}"))


def written(value: float, unit: str | None = None) -> str:
    """A value with its unit: "×", a unit with an SI prefix, or none, with four digits or all of a large number."""
    if unit is None:
        return f"{value:,.4g}" if abs(value) < 1e4 else f"{value:,.0f}"
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
            values = np.maximum(values, LOG_FROM) if log else values
            axes.plot(list(series), values, color=COLOURS[colour], solid_capstyle="round", **STYLES[style])
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
