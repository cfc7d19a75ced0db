"""One chart: lines over optimiser steps, as SVG that takes its colours from the page.

Drawn by hand because a page is built again and again beside a training run: no plotting library is loaded, and the
lines are thinned first, so that ten thousand steps cost what three hundred do.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
from markupsafe import Markup, escape
from numpy.typing import NDArray

from treetrain.report.records import Column
from treetrain.report.scales import (
    BUCKETS,
    LOG_SPAN,
    Floats,
    Scale,
    averaged,
    envelope,
    rolling_mean,
    step_ticks,
    thinned,
    value_range,
)
from treetrain.report.words import number, short, tick

TOOLTIPS = 60
"""Most places of a chart that tell their values."""
DOTTED = 40
"""Lines of at most so many points show the points."""
SMOOTHED = 60
"""Noisy lines of at least so many points get a rolling mean over this share of them: 1 / SMOOTH_SHARE."""
SMOOTH_SHARE = 25
Form = Callable[[float], str]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """One measure in a chart."""

    name: str
    column: Column
    colour: int = 0
    """Which of the page's colours, 0 to 5."""
    style: Literal["line", "dashed", "under", "dots"] = "line"
    """under: broad and pale, for what another line may lie on. dots: points, joined by a thin line from three on."""
    said: str = ""
    """Stands in the legend in place of the last value."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Chart:
    """What to draw. Lines without a finite number are left out."""

    key: str
    """Of the chart in the page; letters, digits, - and _."""
    title: str
    lines: Sequence[Line]
    unit: str = ""
    log: bool | None = False
    """None: logarithmic where positive values span that much."""
    zero: bool = False
    """Whether 0 is on the axis."""
    smooth: bool = False
    """Draw a rolling mean over the values where there are many."""
    stacked: bool = False
    """Lines are layers of a sum."""
    wide: bool = False
    form: Form = number
    """How a value reads in the legend and where the pointer is."""
    tick: Form = tick
    note: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Frame:
    """Where things are, in pixels at the size the chart is drawn for."""

    width: float
    height: float
    left: float = 46
    right: float = 10
    top: float = 8
    bottom: float = 32


NARROW, WIDE = Frame(380, 210), Frame(800, 250)


def drawable(chart: Chart) -> bool:
    """Whether there is anything to show."""
    return any(len(line.column.finite) for line in chart.lines)


def legend(chart: Chart) -> list[tuple[str, int, str, str]]:
    """(name, colour, style, last value) of every line with numbers."""
    shown = [line for line in chart.lines if len(line.column.finite)]
    return [
        (line.name, line.colour, line.style, line.said or chart.form(line.column.finite.values[-1])) for line in shown
    ]


def draw(chart: Chart, frame: Frame = NARROW) -> Markup:
    """The SVG element. The chart must be `drawable`."""
    lines = [line for line in chart.lines if len(line.column.finite)]
    layers = _layers(lines) if chart.stacked else None
    values = np.concatenate(layers[1] if layers else [line.column.finite.values for line in lines])
    log = not chart.stacked and _is_log(chart, values)
    steps = np.concatenate([line.column.steps for line in lines])
    first, last = int(steps.min()), int(steps.max())
    x = Scale(first, max(last, first + 1), frame.left, frame.width - frame.right)
    low, high = value_range(values, log=log, zero=chart.zero or chart.stacked)
    y = Scale(low, high, frame.height - frame.bottom, frame.top, log)
    label = f"{chart.title}{f' in {chart.unit}' if chart.unit else ''}, steps {first} to {last}"
    parts = [f'<svg viewBox="0 0 {frame.width:g} {frame.height:g}" role="img" aria-label="{escape(label)}">']
    parts += _axes(chart, frame, x, y, (first, last), log)
    if layers:
        parts += _areas(lines, layers, x, y)
    else:
        for line in sorted(lines, key=lambda line: line.style != "under"):
            parts += _line(chart, line, x, y)
    parts += _tooltips(chart, lines, frame, x)
    return Markup("".join([*parts, "</svg>"]))


def _is_log(chart: Chart, values: Floats) -> bool:
    if not (values > 0).all() or chart.log is False:
        return False
    return bool(chart.log) or float(values.max()) > LOG_SPAN * float(values.min())


def _axes(chart: Chart, frame: Frame, x: Scale, y: Scale, ends: tuple[int, int], log: bool) -> list[str]:
    bottom, right = frame.height - frame.bottom, frame.width - frame.right
    parts = []
    for value in y.ticks(6):
        at = float(y(value))
        parts.append(f'<line class="grid" x1="{frame.left}" x2="{right:g}" y1="{at:.1f}" y2="{at:.1f}"/>')
        words = escape(chart.tick(value))
        parts.append(f'<text class="tick" x="{frame.left - 6}" y="{at + 3.5:.1f}" text-anchor="end">{words}</text>')
    for step in step_ticks(*ends, 6 if frame.width < 500 else 11):
        at = float(x(step))
        anchor = "end" if at > right - 8 else "middle"
        parts.append(f'<text class="tick" x="{at:.1f}" y="{bottom + 14:g}" text-anchor="{anchor}">{short(step)}</text>')
        parts.append(f'<line class="mark" x1="{at:.1f}" x2="{at:.1f}" y1="{bottom:g}" y2="{bottom + 3:g}"/>')
    parts.append(f'<line class="axis" x1="{frame.left}" x2="{right:g}" y1="{bottom:g}" y2="{bottom:g}"/>')
    middle = (frame.left + right) / 2
    name = "optimiser step" + (" · values on a logarithmic axis" if log else "")
    parts.append(f'<text class="name" x="{middle:g}" y="{frame.height - 4:g}" text-anchor="middle">{name}</text>')
    return parts


def _line(chart: Chart, line: Line, x: Scale, y: Scale) -> list[str]:
    style = {"line": "line", "dots": "line thin", "dashed": "line dashed", "under": "line under"}[line.style]
    style += f" c{line.colour}"
    if chart.smooth and line.style != "dots" and len(line.column) >= SMOOTHED:
        mean = rolling_mean(line.column.values, max(len(line.column) // SMOOTH_SHARE, 3))
        smooth = averaged(Column(line.column.steps, mean), BUCKETS)
        return [_spread(line, x, y), _path(x(smooth.steps), y(smooth.values), style)]
    column = thinned(line.column)
    dots = line.style == "dots"
    parts = [] if dots and len(column) < 3 else [_path(x(column.steps), y(column.values), style)]
    all_shown = dots or (len(column) <= DOTTED and line.style == "line")
    at = np.flatnonzero(np.isfinite(column.values)) if all_shown else _lonely(column.values)
    for px, py in zip(x(column.steps[at]), y(column.values[at])):
        parts.append(f'<circle class="dot c{line.colour}" cx="{px:.1f}" cy="{py:.1f}" r="{3.2 if dots else 1.8}"/>')
    return parts


def _spread(line: Line, x: Scale, y: Scale) -> str:
    """What a rolling mean stands for: the values themselves, or from where to where they reach."""
    if len(line.column) <= 2 * BUCKETS:
        return _path(x(line.column.steps), y(line.column.values), f"line raw c{line.colour}")
    steps, lows, highs = envelope(line.column)
    there = "L".join(f"{px:.1f} {py:.1f}" for px, py in zip(x(steps), y(highs)))
    back = "L".join(f"{px:.1f} {py:.1f}" for px, py in zip(x(steps[::-1]), y(lows[::-1])))
    return f'<path class="spread c{line.colour}" d="M{there}L{back}Z"/>'


def _lonely(values: Floats) -> NDArray[np.intp]:
    """Points between two gaps, which no line passes through."""
    good = np.concatenate(([False], np.isfinite(values), [False]))
    return np.flatnonzero(good[1:-1] & ~good[:-2] & ~good[2:])


def _path(xs: Floats, ys: Floats, style: str) -> str:
    words, pen = [], "M"
    for px, py in zip(xs.tolist(), ys.tolist()):
        if np.isnan(py):
            pen = "M"
            continue
        words.append(f"{pen}{px:.1f} {py:.1f}")
        pen = "L"
    return f'<path class="{style}" d="{"".join(words)}"/>'


def _layers(lines: Sequence[Line]) -> tuple[Floats, list[Floats]]:
    """Steps, and the upper edge of every layer of the sum; lines must have the same steps where they have any."""
    steps = lines[0].column.steps
    found: list[Floats] = []
    below = np.zeros(len(averaged(lines[0].column, BUCKETS)))
    for line in lines:
        values = np.zeros(len(steps))
        places = np.searchsorted(line.column.steps, steps).clip(0, len(line.column) - 1)
        same = line.column.steps[places] == steps
        values[same] = np.nan_to_num(line.column.values[places[same]])
        below = below + averaged(Column(steps, values), BUCKETS).values
        found.append(below)
    return averaged(lines[0].column, BUCKETS).steps.astype(float), found


def _areas(lines: Sequence[Line], layers: tuple[Floats, list[Floats]], x: Scale, y: Scale) -> list[str]:
    steps, edges = layers
    parts, lower = [], np.zeros(len(steps))
    for line, upper in zip(lines, edges):
        there = "L".join(f"{px:.1f} {py:.1f}" for px, py in zip(x(steps), y(upper)))
        back = "L".join(f"{px:.1f} {py:.1f}" for px, py in zip(x(steps[::-1]), y(lower[::-1])))
        parts.append(f'<path class="area c{line.colour}" d="M{there}L{back}Z"/>')
        lower = upper
    return parts


def _tooltips(chart: Chart, lines: Sequence[Line], frame: Frame, x: Scale) -> list[str]:
    """Strips over the plot that tell the values of one step each; a browser shows them without any script."""
    steps = np.unique(np.concatenate([line.column.steps for line in lines]))
    if len(steps) > TOOLTIPS:
        steps = steps[np.unique(np.linspace(0, len(steps) - 1, TOOLTIPS).astype(int))]
    middles = x(steps)
    edges = np.concatenate(([frame.left], (middles[1:] + middles[:-1]) / 2, [frame.width - frame.right]))
    height = frame.height - frame.bottom - frame.top
    parts = ['<g class="tips">']
    for step, left, right in zip(steps.tolist(), edges[:-1], edges[1:]):
        words = [f"step {step:,}"]
        for line in lines:
            at = int(np.searchsorted(line.column.steps, step))
            if at < len(line.column) and line.column.steps[at] == step:
                words.append(f"{line.name}: {chart.form(line.column.values[at])}")
        box = f'x="{left:.1f}" y="{frame.top:g}" width="{max(right - left, 0.1):.1f}" height="{height:g}"'
        parts.append(f"<rect {box}><title>{escape(chr(10).join(words))}</title></rect>")
    return [*parts, "</g>"]
