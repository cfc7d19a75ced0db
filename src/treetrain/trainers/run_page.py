"""A training run beside the same training without shared prefixes, as one self-contained HTML page.

It reads the logs that `transformers.Trainer.save_state` leaves in `trainer_state.json`. Figures are matplotlib's SVG,
whose colours become CSS variables, so that the page is light or dark as the reader's system is. All of them are also
one picture, PNG or SVG, for a report.
"""

import io
import json
import math
import re
from collections import defaultdict
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple

import matplotlib
import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes
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
OWN_FIGURE = {"loss", "eval_loss", "seconds", "tokens_per_second", "computed_tokens", "unique_tokens", "flat_tokens"}
OWN_FIGURE |= {"peak_memory_bytes"}
NO_FIGURE = ("_flops", "_runtime", "_per_second", "num_tokens", "ideal_speedup")
"""Endings of the names of logs that are not drawn."""
LOG_FROM = 1e-9
MADE_BY = "treetrain page"
"""Said in the metadata of a picture; a file without it is not replaced."""
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


class Drawn(NamedTuple):
    """One figure."""

    title: str
    lines: Sequence[Line]
    """Those with any value."""
    unit: str | None = None
    """See `written`."""
    zero: bool = False
    """The axis begins at 0."""
    log: bool = False
    """The axis is logarithmic, from LOG_FROM."""


def write_page(tree: str | Path, linear: str | Path | None, out: str | Path) -> Path:
    """Write a self-contained HTML page about one or two runs and return its path.

    Args:
        tree: output folder of a `transformers.Trainer` that shares prefixes.
        linear: that of the same training without shared prefixes; None shows the first run alone.
        out: the file.

    Raises:
        DataError: a folder has no `trainer_state.json`, or one that no run wrote; or the file is another's.
    """
    run, other = read_run(tree), defaultdict(dict) if linear is None else read_run(linear)
    compared = compare_runs(run, other)
    text = render(
        files("treetrain.trainers").joinpath("run_page.html.jinja").read_text(encoding="utf-8"),
        run=run,
        linear=other,
        paired=linear is not None,
        compared=compared,
        sections=figures(run, other, compared, paired=linear is not None),
        **{each.__name__: each for each in (draw, legend, finite, si, written)},
    )
    return write_file(out, text.lstrip(), begins=BEGINS)


def write_picture(tree: str | Path, linear: str | Path | None, out: str | Path) -> Path:
    """Write all figures of the page as one picture, PNG or SVG by the file's ending; see `write_page`."""
    run, other, out = read_run(tree), defaultdict(dict) if linear is None else read_run(linear), Path(out)
    sections = figures(run, other, compare_runs(run, other), paired=linear is not None)
    drawn = [each for section in sections.values() for each in section]
    across = min(3, max(len(drawn), 1))
    down = -(-len(drawn) // across)
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "run", "font.size": 10}):
        figure = Figure(figsize=(4.7 * across, 3.1 * max(down, 1)), dpi=144, layout="constrained")
        figure.get_layout_engine().set(w_pad=0.12, h_pad=0.12)  # type: ignore[union-attr,call-arg]  # inches
        for number, each in enumerate(drawn, start=1):
            axes = figure.add_subplot(down, across, number)
            plot(axes, each)
            axes.set_title(each.title, fontsize=11, loc="left", pad=8 + 14 * -(-len(each.lines) // 2))
            names = [legend(line, each.unit) for line in each.lines]
            place = {"loc": "lower left", "bbox_to_anchor": (-0.02, 1.0), "ncols": 2, "borderaxespad": 0.2}
            axes.legend(names, fontsize=8, frameon=False, **place)
        file = io.BytesIO()
        kind = out.suffix.removeprefix(".").lower()
        named = {"Software": MADE_BY} if kind == "png" else {"Creator": MADE_BY, "Date": None}
        figure.savefig(file, format=kind, metadata=named)
    if out.is_file() and not out.is_symlink() and MADE_BY.encode() not in out.read_bytes()[:1000]:
        raise DataError(f"{out} is there, and treetrain did not write it; give another name, or delete it")
    return write_file(out, file.getvalue())


def figures(run: Run, linear: Run, compared: dict[str, object], *, paired: bool) -> dict[str, list[Drawn]]:
    """The figures under each heading; those without any value are left out."""

    def both(title: str, name: str, style: str = "line", unit: str | None = None, *, zero: bool = False) -> list[Drawn]:
        if not run[name] or (paired and not linear[name]):
            return []
        lines = [("linear", linear[name], "c1", style, None), ("tree", run[name], "c0", "line", None)]
        return [Drawn(title, lines, unit, zero)]

    apart = differences(run["loss"], linear["loss"])
    distance = f"at most {compared['largest_difference'] or 0:.2g}"
    distance += f"; 0 is drawn at {LOG_FROM:g}" if 0 in apart.values() else ""
    losses = [
        ("linear", linear["loss"], "c1", "under", None),
        ("tree", run["loss"], "c0", "line", None),
        ("linear, held out", linear["eval_loss"], "c1", "dots", None),
        ("tree, held out", run["eval_loss"], "c0", "dots", None),
    ]
    learned = [Drawn("Loss", losses)]
    learned += [Drawn("Distance of the losses", [("|tree − linear|", apart, "c3", "line", distance)], log=True)]
    speed = []
    if compared["same_work"]:
        measured = ratio(linear["seconds"], run["seconds"])
        by_flops = ratio(run["linear_flops"], run["tree_flops"])
        median = f"median {compared['speedup'] or 0:.2f}×"
        lines = [("measured", measured, "c0", "line", median)]
        lines += [("FLOP-ideal", by_flops, "c2", "dashed", f"{compared['ideal'] or 0:.2f}×")]
        speed += [Drawn("Speed-up", lines, "×", zero=True)]
    speed += both("Forward and backward", "seconds", unit="s", zero=True)
    speed += both("Tokens a second", "tokens_per_second", unit="", zero=True)
    speed += both("Tokens through the model", "computed_tokens", unit="", zero=True)
    speed += both("Peak memory", "peak_memory_bytes", unit="B", zero=True)
    names = [name for name in run if not paired or name in linear]
    names = [name for name in names if name not in OWN_FIGURE and not name.endswith(NO_FIGURE)]
    # Supervised training logs its loss as nll too.
    names = [name for name in names if run[name] not in (run["loss"], run["eval_loss"])]
    more = [each for name in names if len(set(run[name].values())) > 1 for each in both(name, name, "under")]
    sections = {"Do they learn the same?" if paired else "Loss": learned, "Speed and memory": speed}
    sections["More measures"] = more
    with_values = {
        heading: [each._replace(lines=[line for line in each.lines if line[1]]) for each in drawn]
        for heading, drawn in sections.items()
    }
    return {heading: [each for each in drawn if each.lines] for heading, drawn in with_values.items()}


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


def legend(line: Line, unit: str | None) -> str:
    """The name of a line, and its word or last value."""
    name, series, _, _, word = line
    return f"{name} {word or f'{written(list(series.values())[-1], unit)} at step {list(series)[-1]}'}"


def plot(axes: Axes, drawn: Drawn) -> None:
    """Draw the lines of a figure into axes of matplotlib."""
    axes.set_yscale("log" if drawn.log else "linear")
    axes.set_xmargin(0.02)
    for _, series, colour, style, _ in drawn.lines:
        values = np.array(list(series.values()), float)
        values = np.maximum(values, LOG_FROM) if drawn.log else values
        axes.plot(list(series), values, color=COLOURS[colour], solid_capstyle="round", **STYLES[style])
    axes.set_ymargin(0.08)
    if drawn.zero:
        axes.set_ylim(bottom=0)
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 3), numticks=6) if drawn.log else MaxNLocator(5))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: written(value, drawn.unit)))
    axes.yaxis.set_minor_formatter("")
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.set_xlabel("optimiser step", color=COLOURS["soft"])
    axes.grid(axis="y", color=COLOURS["grid"], linewidth=1)
    axes.tick_params(which="both", length=0, labelcolor=COLOURS["soft"])
    axes.spines[["left", "top", "right"]].set_visible(False)
    axes.spines["bottom"].set_color(COLOURS["soft"])


def draw(drawn: Drawn) -> Markup:
    """A figure as inline SVG: text stays text, colours become CSS variables."""
    # The salt keeps the ids of a page's figures apart, and makes them the same in every page.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": drawn.title, "font.size": 11}):
        figure = Figure(figsize=(4.7, 2.5), dpi=72, layout="constrained")
        plot(figure.add_subplot(), drawn)
        file = io.StringIO()
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    text = re.sub(r"(?s)^.*?(?=<svg)|<metadata>.*?</metadata>", "", file.getvalue())
    for name, colour in COLOURS.items():
        text = text.replace(colour, f"var(--{name})")
    text = re.sub(r"font: ([\d.]+px)[^;\"]*", r"font-size: \1", text)
    return Markup(re.sub(r' id="[a-zA-Z_.0-9]*_\d+"', "", text))
