"""The report as one self-contained HTML page: figures, the tree, histograms, the plan, the diagnosis."""

import json
import os
from importlib.resources import files
from pathlib import Path

import numpy as np
from jinja2 import Environment, StrictUndefined
from markupsafe import Markup
from numpy.typing import NDArray

from treetrain import __version__
from treetrain.core.tree.token_tree import Int64s, TokenTree
from treetrain.logs.files import write_file
from treetrain.logs.inspection.page_rows import page_rows
from treetrain.logs.inspection.picture import BLOCKS, KINDS, draw
from treetrain.logs.inspection.report import Inspection

STYLE = files("treetrain.logs.inspection").joinpath("page.css").read_text(encoding="utf-8")
"""The style sheet of all pages."""
PAGE_BYTES = 3_000_000
BEGINS = "<!DOCTYPE html>"
"""How pages begin; other files are not replaced."""
WIDTH = 270
"""Width of a chart."""


def render(template: str, **values: object) -> str:
    """Render a template's text with the style sheet."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(template).render(style=Markup(STYLE), **values)


def write_page(inspection: Inspection, out: str | os.PathLike[str]) -> Path:
    """Write the page of an inspection and return its path. The page needs no network.

    Large trees are folded (see `inspection.picture`), so that the page stays below PAGE_BYTES.
    """
    blocks, plan = BLOCKS, None if inspection.plan is None else inspection.plan.explain()
    rows = page_rows(inspection.tree, inspection.tokenizer, inspection.remarks)
    bars = charts(inspection.tree)
    while len(text := _page(inspection, blocks, plan, rows, bars).encode(errors="replace")) > PAGE_BYTES and blocks > 1:
        blocks = blocks * 3 // 4
    return write_file(out, text.decode().lstrip(), begins=BEGINS)


def _page(
    inspection: Inspection, most: int, explained: str | None, rows: dict[str, object], bars: list[dict[str, object]]
) -> str:
    tree = inspection.tree
    picture = draw(tree, blocks=most)
    place = np.arange(len(picture.x))
    folded = np.flatnonzero(picture.branches > 0)
    counts = (picture.branches[folded].tolist(), picture.hidden[folded].tolist())
    blocks: dict[str, object] = {
        "parent": np.where(picture.parent < 0, -1, place - picture.parent).tolist(),  # so many blocks before
        "dy": np.diff(picture.y, prepend=0).tolist(),
        "width": [round(width, 2) if width % 1 else int(width) for width in picture.width.tolist()],
        "height": picture.height.tolist(),
        "kind": "".join(map(str, picture.kind.tolist())),
        "folded": dict(zip(folded.tolist(), zip(*counts, picture.trained[folded].round(3).tolist()))),
        "text": picture.texts(inspection.tokenizer),
        "id": picture.ids(),
    }
    modes = ["context and trained"]
    for name, values in (("reward", _rewards(tree)), ("advantage", _advantages(tree))):
        if np.isfinite(values).any():
            modes.append(name)
            blocks[name] = picture.means(values)
    forks = picture.forks(inspection.diagnosis)
    data = {
        "list": rows | {"sampled": inspection.sampled < 1},
        "blocks": blocks,
        "longest": max(picture.longest, 1),
        "rows": max(picture.rows, 1),
        "modes": modes,
        "kinds": KINDS,
        "bands": picture.bands(),
        "marks": forks,
        "causes": [(lost.title, lost.example()) for lost in inspection.diagnosis.causes],
    }
    written = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    return render(
        files("treetrain.logs.inspection").joinpath("page.html.jinja").read_text(encoding="utf-8"),
        title=", ".join(Path(file).name for file in inspection.files) or "rows",
        subtitle=_subtitle(inspection),
        tiles=_tiles(inspection),
        headline=picture.headline(),
        folded=picture.folded(),
        sampled=inspection.sampled < 1,
        view=data,
        forks="A numbered mark is where a row loses sharing; click it for the cause and an example. " if forks else "",
        # Escaped, no text can end the script element.
        data=Markup(written.replace("<", "\\u003c")),
        verdict=inspection.verdict(),
        findings=inspection.diagnosis.sections(),
        charts=bars,
        plan=explained,
        notes=inspection.notes,
        version=__version__,
    )


def _subtitle(inspection: Inspection) -> str:
    view = {"calls": ", one row per LLM call", "transcript": ", one row per conversation"}.get(
        inspection.view or "", ""
    )
    return f"{inspection.format}{view}; FLOPs for the shape {inspection.shape.words}"


def _tiles(inspection: Inspection) -> list[tuple[str, str, str]]:
    stats = inspection.stats
    repeats = f", {stats.duplicates:,} exact repeats" if stats.duplicates else ""
    tiles = [
        ("ideal speed-up", f"{stats.flop_speedup:.2f}×", "by FLOPs, all rows as one batch against each by itself"),
        ("tokens computed", _short(stats.unique), f"of {stats.flat:,} in rows: {stats.token_speedup:.2f}× fewer"),
        ("overlap", f"{stats.overlap:.1%}", "of the tokens in rows are there already"),
        ("trajectories", f"{stats.trajectories:,}", f"in {stats.trees:,} tree{'s' * (stats.trees != 1)}{repeats}"),
        ("trained tokens", _short(stats.trained_flat), f"in rows, {stats.trained_unique:,} in the tree"),
    ]
    way, cheapest = inspection.baseline()
    if cheapest < 1 or inspection.batches:
        tiles.insert(1, _cheapest_tile(inspection, way, cheapest))
    return tiles


def _cheapest_tile(inspection: Inspection, way: str, cheapest: float) -> tuple[str, str, str]:
    title, speeds = inspection.batch_words()
    if not speeds:
        return "over the cheapest", f"{(inspection.stats.flop_speedup or 1.0) * cheapest:.2f}×", f"against {way}"
    (first, grouped), *others = speeds.items()
    orders = ", ".join([first, *(f"{speed}× {order}" for order, speed in others)])
    return title, f"{grouped}×", f"against {way.split(',')[0].split(' (')[0]}, {orders}"


def _short(count: int) -> str:
    """1,234,567 as 1.23M."""
    for unit, size in (("B", 1e9), ("M", 1e6)):
        if count >= size:
            return f"{count / size:.3g}{unit}"
    return f"{count:,}"


def _rewards(tree: TokenTree) -> NDArray[np.float64]:
    return np.array([np.nan if row.reward is None else row.reward for row in tree.trajectories], np.float64)


def _advantages(tree: TokenTree) -> NDArray[np.float64]:
    """[K]: the mean over each row's trained tokens; NaN for none."""
    means = np.full(tree.num_trajectories, np.nan)
    for number, row in enumerate(tree.trajectories):
        if row.advantages is not None and (trained := row.weights != 0).any():
            means[number] = row.advantages[trained].mean()
    return means


def charts(tree: TokenTree) -> list[dict[str, object]]:
    """Histograms of path length, fork depth and fan-out, and sharing by depth."""
    lengths = tree.trajectory_length[tree.trajectory_length > 0]
    children = np.bincount(tree.parent[tree.parent >= 0], minlength=tree.num_tokens)
    forks = np.flatnonzero(children > 1)
    return [
        _histogram("Path length", lengths, "tokens", "trajectories"),
        _histogram("Depth of forks", tree.depth[forks], "tokens from the start", "forks"),
        _histogram("Fan-out", children[forks], "branches", "forks"),
        _by_depth(tree, lengths),
    ]


def _histogram(title: str, values: Int64s, unit: str, counted: str) -> dict[str, object]:
    if not len(values):
        return {"title": title, "words": f"there are no {counted}", "bars": [], "ticks": [], "most": ""}
    low, high = int(values.min()), int(values.max())
    edges = _edges(low, high + 1, 28)
    counts, _ = np.histogram(values, edges)
    bars = [
        (count / counts.max(), count / counts.max(), f"{counted} of {_range(a, b)} {unit}: {count:,}")
        for count, a, b in zip(counts.tolist(), edges.tolist(), edges[1:].tolist())
    ]
    middle, late = np.percentile(values, (50, 95))
    words = f"median {middle:,.0f} {unit}, 95% up to {late:,.0f}, at most {high:,}"
    ticks = [(0, "start", f"{low:,}"), (WIDTH, "end", f"{high:,} {unit}")] if high > low else [(0, "start", f"{low:,}")]
    return {"title": title, "words": words, "bars": bars, "ticks": ticks, "most": f"{counted}: {counts.max():,}"}


def _range(start: int, stop: int) -> str:
    return f"{start:,}" if stop == start + 1 else f"{start:,} to {stop - 1:,}"


def _edges(low: int, stop: int, most: int) -> NDArray[np.int64]:
    """Edges of at most `most` bins of one whole width that cover [low, stop); the last may end after it."""
    step = max(-(-(stop - low) // most), 1)
    return np.arange(low, stop + step, step)


def _by_depth(tree: TokenTree, lengths: NDArray[np.int64]) -> dict[str, object]:
    longest = int(lengths.max(initial=0))
    edges = _edges(0, longest, 56)
    through = len(lengths) - np.cumsum(np.bincount(lengths, minlength=longest + 1))[:longest]
    flat = np.add.reduceat(through, edges[:-1]) if longest else through
    unique, _ = np.histogram(tree.depth, edges) if longest else (flat, edges)
    most = flat.max(initial=1)
    bars = [
        (own / most, all_ / most, f"tokens {a:,} to {b:,}: {all_:,} in rows, {own:,} in the tree, {all_ / own:.1f}×")
        for own, all_, a, b in zip(unique.tolist(), flat.tolist(), edges.tolist(), edges[1:].tolist())
    ]
    ticks = [(0, "start", "0"), (WIDTH, "end", f"{longest:,} tokens from the start")]
    words = "pale: tokens in rows at this depth; strong: those that the tree computes"
    return {"title": "Sharing by depth", "words": words, "bars": bars, "ticks": ticks, "most": f"{most:,} tokens"}
