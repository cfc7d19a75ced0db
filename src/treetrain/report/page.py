"""One HTML file of a run, or of two beside each other: nothing is loaded from anywhere, no script is needed."""

import os
import tempfile
import time
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from treetrain import __version__
from treetrain.report import summary
from treetrain.report.catalogue import (
    POLICY,
    PREFERENCES,
    known_charts,
    learning_charts,
    named_measures,
    other_charts,
    speed_charts,
)
from treetrain.report.chart import NARROW, WIDE, Chart, draw, drawable, legend
from treetrain.report.compare import Comparison, comparison_charts
from treetrain.report.records import Run

PAGE_FILE, COMPARISON_FILE = "report.html", "comparison.html"
REFRESH_SECONDS = 20
"""How often a browser reads the page of a running run again."""


def run_page(run: Run, *, now: float | None = None) -> str:
    """The page of one run.

    Args:
        now: seconds since 1970; the clock's where None.
    """
    now = time.time() if now is None else now
    sections = [
        ("Learning", list(learning_charts(run))),
        ("Policy", list(known_charts(run, POLICY))),
        ("Preferences", list(known_charts(run, PREFERENCES))),
        ("Speed, sharing and memory", list(speed_charts(run))),
        ("More measures", list(other_charts(run, named_measures()))),
    ]
    if run.config.get("loss", "sft") == "sft":
        sections[1] = ("Rows", sections[1][1])
    return _render(
        title=run.name,
        subtitle=summary.subtitle(run),
        runs=[_described(run, now, "")],
        tiles=list(summary.run_tiles(run)),
        bars=[],
        notes=_stop_notes(run),
        sections=sections,
        others=[],
        now=now,
    )


def comparison_page(pair: Comparison, *, title: str = "", note: str = "", now: float | None = None) -> str:
    """The page of two runs.

    Args:
        title: instead of the runs' names.
        note: a sentence under the title.
        now: seconds since 1970; the clock's where None.
    """
    now = time.time() if now is None else now
    one, other = pair.names
    notes = [*_stop_notes(pair.run), *_stop_notes(pair.reference)]
    if not pair.same_work:
        notes.append(("", "The steps of the two runs are not of the same rows: speed-ups and distances are not shown."))
    return _render(
        title=title or f"{one} against {other}",
        subtitle=note or summary.subtitle(pair.run, execution=False),
        runs=[_described(pair.run, now, one), _described(pair.reference, now, other)],
        tiles=list(summary.comparison_tiles(pair)),
        bars=list(summary.comparison_bars(pair)),
        notes=notes,
        sections=comparison_charts(pair),
        others=pair.other_settings(),
        now=now,
    )


def write_page(text: str, path: Path) -> Path:
    """Put a page in its place at once: a reader sees the old one or the new one, never half of one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-", suffix=".tmp")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(name, 0o644)  # temporary files are made for their owner only
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    return path


def _render(*, sections: list[tuple[str, list[Chart]]], now: float, runs: list[dict[str, Any]], **more: Any) -> str:
    drawn = [(title, [_drawn(chart) for chart in charts if drawable(chart)]) for title, charts in sections]
    return _template().render(
        sections=[(title, charts) for title, charts in drawn if charts],
        runs=runs,
        running=any(run["state"] == "running" for run in runs),
        refresh=REFRESH_SECONDS,
        made=summary.moment(now),
        version=__version__,
        **more,
    )


def _drawn(chart: Chart) -> dict[str, Any]:
    """A wide chart is drawn twice, since letters of a wide one could not be read on a phone."""
    return {
        "chart": chart,
        "legend": legend(chart),
        "narrow": draw(chart, NARROW),
        "wide": draw(chart, WIDE) if chart.wide else Markup(),
    }


def _described(run: Run, now: float, label: str) -> dict[str, Any]:
    state, total = run.state(now), run.total_steps
    return {
        "label": label,
        "name": run.name,
        "state": state,
        "state_name": summary.STATES[state],
        "words": summary.state_words(run, now),
        "share": min(run.step / total, 1.0) if total else None,
        "updated": run.updated,
        "silence": run.silence_limit,
        "facts": list(summary.run_facts(run)),
        "settings": summary.settings(run),
        "table": summary.measure_table(run),
        "plan": run.start.get("plan") or "",
    }


def _stop_notes(run: Run) -> list[tuple[str, str]]:
    """(kind, sentence) of what ended a run early."""
    if run.stop.get("kind") == "failed":
        return [("bad", f"{run.stop.get('error') or 'no reason is recorded'}")]
    return []


@cache
def _template() -> Any:
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("page.html.jinja")
