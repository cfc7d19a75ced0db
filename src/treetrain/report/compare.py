"""Two runs beside each other: a tree run against the linear run that it should equal, or any other two."""

import dataclasses
import statistics
from functools import cached_property
from typing import Any

import numpy as np

from treetrain.report.catalogue import (
    HIDDEN,
    MOST_OTHER_CHARTS,
    SPEED_NAMES,
    TIMES,
    TITLES,
    difference,
    memory_chart,
    ratio,
    safe_key,
)
from treetrain.report.chart import Chart, Line, drawable
from treetrain.report.records import NOTHING, Column, Run
from treetrain.report.words import MINUS, byte_count, duration, number, times, times_tick

SETTLING = 1
"""First steps that are not timed: memory and kernels are set up in them."""
SMALLEST_DIFFERENCE = 1e-9
"""Equal losses have a place on the logarithmic axis too."""
EITHER = (
    "reward_mean",
    "grad_norm",
    "lr",
    "kl",
    "approx_kl",
    "clip_fraction",
    "entropy",
    "ratio",
    "accuracy",
    "margin",
)
"""Measures that are shown where both runs have them, in this order, before any other."""


@dataclasses.dataclass(frozen=True)
class Comparison:
    """`run` is judged, `reference` is what it is judged by."""

    run: Run
    reference: Run

    @cached_property
    def names(self) -> tuple[str, str]:
        """What the two are called: by execution where that differs, else by folder."""
        pair = (self.run, self.reference)
        executions = tuple(str(run.config.get("execution", "")) for run in pair)
        folders = tuple(run.name for run in pair)
        for found in (executions, folders):
            if found[0] and found[0] != found[1]:
                return found[0], found[1]
        return str(self.run.folder), str(self.reference.folder)

    @cached_property
    def common_steps(self) -> int:
        """Steps that both have done."""
        return len(np.intersect1d(self.run.column("loss").steps, self.reference.column("loss").steps))

    @cached_property
    def same_work(self) -> bool:
        """Whether every step that both have done had the same rows, as far as their numbers tell."""
        apart = [
            difference(self.run.column(name), self.reference.column(name)) for name in ("flat_tokens", "trajectories")
        ]
        return self.common_steps > 0 and all(len(column) and not column.values.any() for column in apart)

    @cached_property
    def differences(self) -> Column:
        """Distance of the two losses at every step that both have done."""
        return difference(self.run.column("loss"), self.reference.column("loss"))

    @cached_property
    def largest_difference(self) -> float:
        """Of the losses, evaluations included; NaN where one is no number or there is nothing to compare."""
        held_out = difference(self.run.evaluated("nll"), self.reference.evaluated("nll"))
        values = np.concatenate((self.differences.values, held_out.values))
        return float(values.max()) if len(values) else float("nan")

    @cached_property
    def speedups(self) -> Column:
        """Forward and backward of the reference over that of the run, of every step of the same work."""
        if not self.same_work:
            return Column(np.empty(0, np.int64), np.empty(0))
        return ratio(_seconds(self.reference), _seconds(self.run))

    @cached_property
    def ideals(self) -> Column:
        """FLOPs of the reference over those of the run, of every step of the same work."""
        if not self.same_work:
            return Column(np.empty(0, np.int64), np.empty(0))
        return ratio(_flops(self.reference), _flops(self.run))

    @property
    def speedup(self) -> float | None:
        """Measured: the median over the steps, since something else may disturb a few of them."""
        values = _settled(self.speedups.finite)
        return statistics.median(values) if values else None

    @property
    def ideal(self) -> float | None:
        """What the run would gain if nothing but arithmetic took time, over the timed steps together."""
        theirs, ours = _flops(self.reference), _flops(self.run)
        _, at, there = np.intersect1d(theirs.steps, ours.steps, return_indices=True)
        if not self.same_work or len(at) <= SETTLING:
            return None
        return float(theirs.values[at][SETTLING:].sum() / ours.values[there][SETTLING:].sum())

    @property
    def efficiency(self) -> float | None:
        """Share of the ideal that was reached."""
        return self.speedup / self.ideal if self.speedup is not None and self.ideal else None

    def other_settings(self) -> list[tuple[str, Any, Any]]:
        """(name, here, there) of the settings that differ, where things are written aside."""
        here, there = self.run.config, self.reference.config
        names = sorted(here.keys() | there.keys())
        return [
            (name, here.get(name), there.get(name))
            for name in names
            if here.get(name) != there.get(name) and name not in ("output", "overwrite")
        ]

    def as_dict(self) -> dict[str, Any]:
        """The figures as plain JSON data."""
        names = ("common_steps", "same_work", "largest_difference", "speedup", "ideal", "efficiency")
        return {"names": list(self.names)} | {name: getattr(self, name) for name in names}


def comparison_charts(pair: Comparison) -> list[tuple[str, list[Chart]]]:
    """(section, charts) of what both runs have."""
    seconds = {"unit": "s", "apart": True, "zero": True, "smooth": True, "form": duration}
    rate = {"unit": "tokens / s of all rows", "apart": True, "zero": True, "smooth": True}
    sections = [
        ("Do they learn the same?", [_loss_chart(pair), _difference_chart(pair)]),
        (
            "Speed and memory",
            [
                _speedup_chart(pair),
                _both(pair, "forward_backward_seconds", "Forward and backward", **seconds),
                _both(pair, "flat_tokens_per_second", "Tokens a second", **rate),
                _memory(pair),
            ],
        ),
        ("More", [_both(pair, name, TITLES.get(name, name), smooth=name != "lr") for name in _other_measures(pair)]),
    ]
    return [(title, [chart for chart in charts if drawable(chart)]) for title, charts in sections]


def _other_measures(pair: Comparison) -> list[str]:
    """What both have and no other chart shows, the well-known ones first."""
    both = pair.run.train.keys() & pair.reference.train.keys()
    rest = sorted(both - {"loss", *SPEED_NAMES, *TIMES, *HIDDEN, *EITHER})
    return [name for name in (*EITHER, *rest) if name in both][:MOST_OTHER_CHARTS]


def _difference_chart(pair: Comparison) -> Chart:
    apart = pair.differences if pair.same_work else NOTHING
    shown = Column(apart.steps, np.maximum(apart.values, SMALLEST_DIFFERENCE))
    said = f"at most {number(float(apart.finite.values.max()), 2)}" if len(apart.finite) else ""
    return Chart(
        key="difference",
        title="Distance of the losses",
        lines=[Line(name=f"|{pair.names[0]} {MINUS} {pair.names[1]}|", column=shown, colour=3, said=said)],
        unit=_loss_unit(pair.run),
        log=True,
        note=f"at least {number(SMALLEST_DIFFERENCE)} is drawn, to give equal losses a place",
    )


def _speedup_chart(pair: Comparison) -> Chart:
    measured = "" if pair.speedup is None else f"median {times(pair.speedup)}"
    ideal = "" if pair.ideal is None else f"{times(pair.ideal)} of all steps"
    return Chart(
        key="speedup",
        title="Speed-up",
        lines=[
            Line(name="measured", column=pair.speedups, said=measured),
            Line(name="FLOP-ideal", column=pair.ideals, colour=2, style="dashed", said=ideal),
        ],
        unit=f"times as fast as {pair.names[1]}",
        zero=True,
        smooth=True,
        form=times,
        tick=times_tick,
        note="forward and backward of each step",
    )


def _loss_chart(pair: Comparison) -> Chart:
    one, other = pair.names
    lines = [
        Line(name=other, column=pair.reference.column("loss"), colour=1, style="under"),
        Line(name=one, column=pair.run.column("loss")),
    ]
    if _loss_unit(pair.run):
        for name, run, colour in ((other, pair.reference, 1), (one, pair.run, 0)):
            lines.append(Line(name=f"{name}, held out", column=run.evaluated("nll"), colour=colour, style="dots"))
    return Chart(key="loss", title="Loss", lines=lines, unit=_loss_unit(pair.run), smooth=True, wide=True)


def _loss_unit(run: Run) -> str:
    return "nats per trained token" if run.config.get("loss", "sft") == "sft" else ""


def _both(pair: Comparison, name: str, title: str, *, apart: bool = False, **more: Any) -> Chart:
    """`apart`: the two are not expected to lie on each other."""
    one, other = pair.names
    columns = (pair.run.column(name), pair.reference.column(name))
    lines = [
        Line(name=other, column=columns[1], colour=1, style="line" if apart else "under"),
        Line(name=one, column=columns[0]),
    ]
    return Chart(key=safe_key(name), title=title, lines=lines if all(map(len, columns)) else [], **more)


def _memory(pair: Comparison) -> Chart:
    one, other = pair.names
    ours, theirs = memory_chart(pair.run), memory_chart(pair.reference)
    lines = [
        dataclasses.replace(theirs.lines[0], name=other, colour=1),
        dataclasses.replace(ours.lines[0], name=one),
        *(dataclasses.replace(line, name=f"{one}: {line.name}", colour=2) for line in ours.lines[1:]),
    ]
    return dataclasses.replace(ours, lines=lines, form=byte_count)


def _seconds(run: Run) -> Column:
    return run.column("forward_backward_seconds")


def _flops(run: Run) -> Column:
    return run.column("linear_flops" if run.config.get("execution") == "linear" else "tree_flops")


def _settled(column: Column) -> list[float]:
    return column.values[SETTLING:].tolist()
