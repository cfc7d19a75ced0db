"""The comparison as one picture."""

from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib

matplotlib.use("Agg")  # no screen is needed
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

if TYPE_CHECKING:
    from examples.demo.runs import Comparison

TREE, LINEAR, INK, FAINT = "#0f766e", "#f2a65a", "#1f2937", "#6b7280"
STYLE = {
    "font.family": "DejaVu Sans",
    "font.size": 11,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": "#d1d5db",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 12.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 10,
    "xtick.color": FAINT,
    "ytick.color": FAINT,
    "figure.dpi": 110,
}


def draw(result: "Comparison", path: Path) -> Path:
    """Loss curves, their difference, time per step and memory; returns `path`."""
    with plt.rc_context(STYLE):
        figure = plt.figure(figsize=(11.5, 6.4), layout="constrained")
        grid = figure.add_gridspec(2, 2, width_ratios=(1.55, 1), height_ratios=(1.35, 1))
        _losses(figure.add_subplot(grid[0, 0]), result)
        _difference(figure.add_subplot(grid[1, 0]), result)
        _bars(
            figure.add_subplot(grid[0, 1]),
            "Forward + backward, median step",
            {"tree": result.tree.median_seconds, "linear": result.linear.median_seconds},
            "{:.2f} s",
            f"median over steps: {result.speedup:.2f}x as fast; FLOP-ideal (dotted): {result.ideal:.2f}x",
            mark=result.linear.median_seconds / result.ideal,
        )
        _bars(
            figure.add_subplot(grid[1, 1]),
            "Peak memory of the process",
            {"tree": result.tree.peak_bytes / 1e6, "linear": result.linear.peak_bytes / 1e6},
            "{:,.0f} MB",
        )
        figure.suptitle(
            "The same training, every shared prefix computed once", x=0.012, ha="left", fontsize=15, fontweight="bold"
        )
        figure.supxlabel(result.versions, x=0.012, ha="left", fontsize=8, color=FAINT)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)
        plt.close(figure)
    return path


def _losses(axes: Axes, result: "Comparison") -> None:
    steps = range(1, result.steps + 1)
    axes.plot(steps, result.linear.losses, color=LINEAR, linewidth=7, solid_capstyle="round", label="linear")
    axes.plot(steps, result.tree.losses, color=TREE, linewidth=2, label="tree")
    ends, dots = (0, result.steps), {"linestyle": "none", "marker": "o"}
    axes.plot(ends, (result.linear.held_out_before, result.linear.held_out_after), color=LINEAR, markersize=12, **dots)
    held_out = (result.tree.held_out_before, result.tree.held_out_after)
    axes.plot(ends, held_out, color=TREE, markersize=6, label="held out, before and after", **dots)
    for step, loss, shift, side in zip(ends, held_out, ((10, 4), (-4, -24)), ("left", "right")):
        axes.annotate(f"{loss:.2f}", (step, loss), shift, textcoords="offset points", ha=side)
    axes.set_title("Loss, nats per trained token")
    axes.set_xlim(-0.6, result.steps + 0.6)
    axes.set_ylim(bottom=0, top=max(result.tree.losses[0], held_out[0]) * 1.12)
    axes.grid(axis="y", color="#eef0f3")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(frameon=False, loc="upper right")


def _difference(axes: Axes, result: "Comparison") -> None:
    steps = range(1, result.steps + 1)
    smallest = 1e-8  # equal losses have a place on the logarithmic axis too
    axes.plot(steps, [max(value, smallest) for value in result.differences], color=INK, linewidth=1.5, marker=".")
    axes.set_yscale("log")
    axes.set_ylim(smallest, 1)
    axes.set_yticks([1e-8, 1e-6, 1e-4, 1e-2, 1])
    axes.set_xlim(-0.6, result.steps + 0.6)
    axes.set_title(f"Distance of the two curves: at most {result.largest_difference:.0e} nats")
    axes.set_xlabel("optimiser step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(axis="y", color="#eef0f3")


def _bars(
    axes: Axes, title: str, values: dict[str, float], form: str, note: str = "", mark: float | None = None
) -> None:
    axes.barh(list(values), list(values.values()), color=[TREE, LINEAR], height=0.5)
    if mark is not None:
        axes.plot((mark, mark), (-0.36, 0.36), color=INK, linewidth=1.6, linestyle=(0, (1, 1.2)))
    for place, value in enumerate(values.values()):
        right = max(value, mark or 0) if place == 0 else value
        axes.annotate(
            form.format(value), (right, place), (7, 0), textcoords="offset points", va="center", weight="bold"
        )
    axes.invert_yaxis()
    axes.set_xlim(0, max(values.values()) * 1.25)
    axes.set_title(title)
    axes.xaxis.set_visible(False)
    axes.spines["bottom"].set_visible(False)
    axes.tick_params(axis="y", length=0, labelsize=11, labelcolor=INK)
    if note:
        axes.text(0, -0.02, note, transform=axes.transAxes, va="top", fontsize=10, color=FAINT)
