"""Which measures a page shows, where, and how; measures that are not named here get a plain chart of their own."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from treetrain.report.chart import Chart, Form, Line, drawable
from treetrain.report.records import Column, Run
from treetrain.report.words import (
    byte_count,
    duration,
    number,
    percent,
    percent_tick,
    times,
    times_tick,
)
from treetrain.report.words import flop_rate as flops_a_second
from treetrain.report.words import tick as tick_words

MOST_OTHER_CHARTS = 40
"""Measures beyond these are in the table only; a page must stay small."""
EVALUATION_FACTS = ("seconds", "trained_tokens", "time", "epoch")
HIDDEN = {
    "epoch",
    "time",
    "seconds",
    "trajectories",
    "computed_tokens",
    "flat_tokens",
    "unique_tokens",
    "tree_flops",
    "linear_flops",
    "reward_std",
}
"""Known, and shown within another chart or in the table only."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Known:
    """A chart of one or several measures of the steps."""

    title: str
    names: Mapping[str, str]
    """Measure -> what it is called in the legend."""
    unit: str = ""
    log: bool | None = False
    zero: bool = False
    smooth: bool = True
    form: Form = number
    tick: Form = tick_words
    note: str = ""


def _one(name: str, title: str, **more) -> Known:
    return Known(title=title, names={name: title.lower()}, **more)


LEARNING = (
    _one("accuracy", "Preference accuracy", zero=True, form=percent, tick=percent_tick, note="pairs ranked as marked"),
    _one("lr", "Learning rate", zero=True, smooth=False),
    _one("grad_norm", "Gradient norm", log=None, note="before clipping"),
)
POLICY = (
    Known(title="KL", names={"kl": "to the reference", "approx_kl": "to the sampler"}, unit="nats per token", log=None),
    Known(
        title="Clipped",
        names={"clip_fraction": "all", "clip_fraction_low": "below", "clip_fraction_high": "above"},
        unit="share of tokens",
        zero=True,
        form=percent,
        tick=percent_tick,
    ),
    _one("entropy", "Entropy", unit="nats per token"),
    _one("ratio", "Probability ratio", note="new policy over the one that sampled"),
    _one("advantage", "Advantage"),
    _one("policy_loss", "Policy loss"),
    Known(
        title="Row length",
        names={"row_tokens_mean": "mean", "row_tokens_max": "longest"},
        unit="tokens",
        zero=True,
    ),
    _one("trained_tokens", "Trained tokens", unit="tokens a step", zero=True),
)
PREFERENCES = (
    Known(title="Implicit reward", names={"chosen_reward": "chosen", "rejected_reward": "rejected"}),
    _one("margin", "Reward margin"),
    Known(title="Log-probability", names={"chosen_logps": "chosen", "rejected_logps": "rejected"}, unit="nats per row"),
)
SPEED_NAMES = ("flat_tokens_per_second", "overlap", "peak_memory_bytes", "calls", "parts", "recomputed_tokens")
TIMES = {
    "forward_backward_seconds": "forward and backward",
    "optimizer_seconds": "optimiser",
    "checkpoint_seconds": "checkpoints",
    "other_seconds": "other",
}
COLOURS = 6
TITLES = {name: known.title for known in (*LEARNING, *POLICY, *PREFERENCES) for name in known.names} | {
    "reward_mean": "Reward",
    "nll": "Log-likelihood loss",
    "approx_kl": "KL to the sampler",
}
"""How measures are called outside their own charts."""


def known_charts(run: Run, catalogue: Sequence[Known]) -> Iterator[Chart]:
    """The charts of a catalogue that the run has numbers for."""
    for known in catalogue:
        lines = [
            Line(name=label, column=run.column(name), colour=place % COLOURS)
            for place, (name, label) in enumerate(known.names.items())
            if name in run.train
        ]
        chart = Chart(
            key=next(iter(known.names)),
            title=known.title,
            lines=lines,
            unit=known.unit,
            log=known.log,
            zero=known.zero,
            smooth=known.smooth,
            form=known.form,
            tick=known.tick,
            note=known.note,
        )
        if lines and drawable(chart):
            yield chart


def learning_charts(run: Run) -> Iterator[Chart]:
    """Loss, evaluations, reward, learning rate, gradient norm."""
    held_out = run.evaluated("nll")
    lines = [Line(name="training", column=run.column("loss"))]
    is_sft = run.config.get("loss", "sft") == "sft"
    if is_sft and len(held_out):
        lines.append(Line(name="held out", column=held_out, colour=1, style="dots"))
    unit = "nats per trained token" if is_sft else ""
    yield Chart(key="loss", title="Loss", lines=lines, unit=unit, smooth=True, wide=True)
    if len(held_out) > (2 if is_sft else 1):
        line = Line(name="held out", column=held_out, colour=1, style="dots")
        yield Chart(key="eval-nll", title="Held-out loss", lines=[line], unit="nats per trained token")
    told = ("nll", *(("loss",) if is_sft else ()), *EVALUATION_FACTS)  # the loss of SFT is the nll
    for name, column in run.evaluations.items():
        if name not in told and len(column) > 1:
            line = Line(name="held out", column=column, colour=1, style="dots")
            title = TITLES.get(name, name)
            yield Chart(key=f"eval-{safe_key(name)}", title=f"Held out: {title.lower()}", lines=[line])
    reward, spread = run.column("reward_mean"), run.column("reward_std")
    if len(reward):
        lines = [Line(name="mean", column=reward)]
        if len(spread):
            lines.append(Line(name="standard deviation", column=spread, colour=1, style="dashed"))
        yield Chart(key="reward", title="Reward", lines=lines, smooth=True, note="of the rows of every step")
    nll = run.column("nll")
    if len(nll) and not is_sft:
        yield Chart(
            key="nll", title="Log-likelihood loss", lines=[Line(name="training", column=nll)], unit="nats per token"
        )
    yield from known_charts(run, LEARNING)


def speed_charts(run: Run) -> Iterator[Chart]:
    """Tokens a second, sharing and what it is worth, time, memory."""
    seconds, flat = run.column("seconds"), run.column("flat_tokens")
    unique = ratio(run.column("unique_tokens"), seconds)
    lines = [Line(name="of all rows", column=ratio(flat, seconds))]
    if run.config.get("execution", "tree") == "tree":
        lines.append(Line(name="of the tree", column=unique, colour=1))
    yield Chart(
        key="tokens-per-second", title="Tokens a second", lines=lines, unit="tokens / s", zero=True, smooth=True
    )
    overlap = Line(name="overlap", column=run.column("overlap"))
    yield Chart(
        key="overlap",
        title="Overlap",
        lines=[overlap],
        zero=True,
        smooth=True,
        form=percent,
        tick=percent_tick,
        unit="share of tokens",
        note="tokens that another row of the step has computed already",
    )
    ideal = Line(name="FLOP-ideal", column=ideal_speedup(run), colour=2, style="dashed")
    yield Chart(
        key="ideal",
        title="What sharing is worth",
        lines=[ideal],
        unit="times as fast as row by row",
        zero=True,
        smooth=True,
        form=times,
        tick=times_tick,
        note="by floating-point operations; compare with a linear run to measure it",
    )
    yield Chart(
        key="flops",
        title="Arithmetic",
        lines=[Line(name="forward and backward", column=flop_rate(run))],
        unit="FLOP / s",
        zero=True,
        smooth=True,
        form=flops_a_second,
        note="without what is run twice",
    )
    yield _time_chart(run)
    yield memory_chart(run)
    for name, title, note in (
        ("calls", "Calls", "that a step was split into, by tokens_per_call"),
        ("parts", "Parts", "forward-backward passes of a step"),
        ("recomputed_tokens", "Tokens run twice", "to stay within the budget"),
    ):
        column = run.column(name)
        if len(column) and column.finite.values.max(initial=0) > (name != "recomputed_tokens"):
            line = Line(name=title.lower(), column=column)
            yield Chart(key=name, title=title, lines=[line], zero=True, smooth=True, note=note)


def _time_chart(run: Run) -> Chart:
    lines = [
        Line(name=label, column=run.column(name), colour=place)
        for place, (name, label) in enumerate(TIMES.items())
        if name in run.train
    ]
    known = sum_of([line.column for line in lines])
    seconds = run.column("seconds")
    if "other_seconds" not in run.train and len(seconds) and len(known) == len(seconds):
        rest = Column(seconds.steps, np.maximum(seconds.values - known.values, 0.0))
        lines.append(Line(name="optimiser and other", column=rest, colour=3))
    return Chart(key="time", title="Time of a step", lines=lines, unit="s", stacked=True, form=duration)


def memory_chart(run: Run) -> Chart:
    """The peak so far, and what a budget in bytes allows."""
    peak = run.column("peak_memory_bytes")
    lines = [Line(name="peak so far", column=peak)]
    allowed = allowed_bytes(run)
    if allowed is not None and len(peak):
        ends = np.array(sorted({int(peak.steps[0]), int(peak.steps[-1])}), np.int64)
        within = Column(ends, np.full(len(ends), allowed))
        lines.append(Line(name="budget and what is at rest", column=within, colour=1, style="dashed"))
    device = "of the process" if str(run.start.get("machine", "CPU")).startswith("CPU") else "allocated by torch"
    return Chart(
        key="memory", title="Memory", lines=lines, zero=True, form=byte_count, tick=byte_count, note=f"peak {device}"
    )


def other_charts(run: Run, shown: set[str]) -> Iterator[Chart]:
    """A chart for every measure that no other one shows."""
    left = [name for name in sorted(run.train) if name not in shown and name not in HIDDEN]
    for name in left[:MOST_OTHER_CHARTS]:
        chart = Chart(
            key=f"other-{safe_key(name)}",
            title=name,
            lines=[Line(name=name, column=run.column(name))],
            log=None,
            smooth=True,
        )
        if drawable(chart):
            yield chart


def named_measures() -> set[str]:
    """Measures that have a place of their own."""
    groups = (*LEARNING, *POLICY, *PREFERENCES)
    return {name for known in groups for name in known.names} | {*SPEED_NAMES, *TIMES, "loss", "reward_mean", "nll"}


def ideal_speedup(run: Run) -> Column:
    """FLOPs row by row over FLOPs of the tree, of every step."""
    return ratio(run.column("linear_flops"), run.column("tree_flops"))


def flop_rate(run: Run) -> Column:
    """FLOPs that a step needs, by its seconds in forward and backward."""
    name = "linear_flops" if run.config.get("execution") == "linear" else "tree_flops"
    return ratio(run.column(name), run.column("forward_backward_seconds"))


def allowed_bytes(run: Run) -> float | None:
    """What a run with a budget in bytes may hold: what is at rest besides, and the budget."""
    from treetrain.plan.budget import Bytes, parse_budget

    try:
        budget = parse_budget(run.config.get("budget"))
    except ValueError:
        return None
    loaded, rest = run.start.get("bytes_loaded"), run.start.get("bytes_at_rest")
    if not (isinstance(budget, Bytes) and isinstance(loaded, int) and isinstance(rest, int)):
        return None
    return float(loaded + rest + budget.count)


def ratio(above: Column, below: Column) -> Column:
    """Quotient at the steps that both have; NaN where it is none."""
    return _joined(above, below, np.divide)


def difference(one: Column, other: Column) -> Column:
    """Distance at the steps that both have."""
    return _joined(one, other, lambda a, b: np.abs(a - b))


def sum_of(columns: Sequence[Column]) -> Column:
    """Sum at the steps that all have."""
    total = columns[0] if columns else Column(np.empty(0, np.int64), np.empty(0))
    for column in columns[1:]:
        total = _joined(total, column, np.add)
    return total


def _joined(one: Column, other: Column, combine: Callable) -> Column:
    steps, at, there = np.intersect1d(one.steps, other.steps, assume_unique=True, return_indices=True)
    with np.errstate(divide="ignore", invalid="ignore"):
        values = combine(one.values[at], other.values[there])
    return Column(steps, np.where(np.isfinite(values), values, np.nan))


def safe_key(name: str) -> str:
    """Letters, digits, - and _ only."""
    return "".join(letter if letter.isalnum() or letter in "-_" else "-" for letter in name)
