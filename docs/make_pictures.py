"""Writes the pictures of the README and of docs/design.md.

- tree.svg: recorded games as rows, and the same games as the tree that `treetrain inspect` draws.
- step.svg: what a batch passes through, with the folders of the source.
- plan.svg: the passes of a plan over time, drawn from `plan.events()`.
- logs.svg: what a `TreeTrainer` logs, drawn from images/logs.json, the `log_history` of a run of 24 steps:
  treetrain train examples/countdown/train.jsonl.gz --view calls --chat_template chatml --model tiny --max_steps 24
  --logging_steps 1 --learning_rate 3e-3 --tokens_per_step 12000 --report_to tensorboard mlflow trackio

Run: python docs/make_pictures.py. It writes them to docs/images.
"""

import json
from pathlib import Path

import numpy as np

import treetrain as tt
from treetrain.logs.inspection.picture import Picture, draw

ROOT = Path(__file__).parents[1]
GAMES = 8
COLOURS = ("#7fb2dd", "#f0a35e")
WIDTH, HEIGHT, GAP, TOP = 430, 190, 40, 30
BUDGET = 400
"""Tokens alive in the picture of a plan."""
EDGED = 5
"""Smaller blocks, in pixels, have no edge, which would cover them."""


def main(folder: Path = ROOT / "docs" / "images") -> None:
    """Draw the pictures and write the files."""
    pictures = {"tree": tree_picture(games(GAMES)), "step": step_picture(), "plan": plan_picture(games(2 * GAMES))}
    pictures["logs"] = logs_picture(json.loads((ROOT / "docs/images/logs.json").read_text(encoding="utf-8")))
    for name, drawn in pictures.items():
        (folder / f"{name}.svg").write_text(drawn, encoding="utf-8")


def games(count: int) -> tt.TokenTree:
    """The tree of the first recorded games."""
    file = ROOT / "examples/countdown/train.jsonl.gz"
    return tt.build_tree(tt.load(file, tokenizer=tt.load_tokenizer("tiny"), limit=count).trajectories)


def page(width: int, height: int, title: str, *body: str) -> str:
    """An SVG file on white ground."""
    return "\n".join(
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
            f'font-size="12.5" fill="#57606a">\n<title>{title}</title>\n'
            '<style>.title{font-size:15px;fill:#24292f}</style>\n<rect width="100%" height="100%" fill="#fff"/>',
            *body,
            "</svg>",
            "",
        )
    )


def key(x: float, y: float, colour: str, name: str, opacity: float = 1.0) -> str:
    """A coloured square and its name."""
    square = f'<rect x="{x:g}" y="{y - 10:g}" width="12" height="12" fill="{colour}" fill-opacity="{opacity:g}"/>'
    return f'{square}<text x="{x + 18:g}" y="{y:g}">{name}</text>'


# ---- Rows and their tree


def tree_picture(tree: tt.TokenTree) -> str:
    """Two panels: each row by itself, and the tree."""
    picture = draw(tree)
    titles = (
        f"{GAMES} rows: {tree.num_flat_tokens:,} tokens computed",
        f"one tree: {tree.num_tokens:,} tokens computed, every block once",
    )
    panels = []
    for number, title in enumerate(titles):
        blocks = svg(picture, rows=number == 0)
        axis = f'<text y="{HEIGHT + 16}">0 tokens</text>'
        end = f'<text x="{WIDTH}" y="{HEIGHT + 16}" text-anchor="end">{picture.longest}</text>'
        place = f'<g transform="translate({number * (WIDTH + GAP) + 10} {TOP})">'
        panels.append(f'{place}<text y="-10" class="title">{title}</text>\n{blocks}\n{axis}{end}</g>')
    names = ("context", "trained: the answers")
    keys = [key(300 + 150 * n, 256, colour, name) for n, (colour, name) in enumerate(zip(COLOURS, names))]
    return page(2 * WIDTH + GAP + 20, 268, "; ".join(titles), *panels, *keys)


def svg(picture: Picture, *, rows: bool) -> str:
    """The blocks as SVG elements; with `rows` every trajectory by itself, as separate rows compute it."""
    across, down = WIDTH / picture.longest, HEIGHT / picture.rows
    shades = 0.6 + 0.4 * np.log(picture.height) / np.log(picture.rows)  # one trajectory to all
    place = zip(picture.x * across, picture.y * down, picture.width * across, picture.height * down)
    drawn = []
    for (x, y, w, h), count, kind, shade in zip(place, picture.height, picture.kind, shades):
        tall = down if rows else h
        edge = ' stroke="#fff"' if min(w, tall) >= EDGED else ""
        look = f'fill="{COLOURS[kind]}"{edge}'
        for top in y + down * np.arange(count if rows else 1):
            box = f'x="{x:.5g}" y="{top:.7g}" width="{w:.5g}" height="{tall:.5g}"'
            drawn.append(f'<rect {box} {look} fill-opacity="{shade:.2f}"/>')
    return "\n".join(drawn)


# ---- A step


STEP = (
    ("rows", "token ids, weights,", "advantages", "logs/"),
    ("token tree", "prefixes merged,", "in pre-order", "core/tree/"),
    ("plan", "parts that fit", "the budget", "core/planning/"),
    ("model", "unmodified, runs", "a part per pass", "core/engine/"),
    ("LM head", "a log-probability", "per prediction", "core/head/"),
    ("loss", "yours, or a sum", "over rows", "losses/"),
)
"""Boxes of the upper line: the title, two lines of text, the folder."""


def step_picture() -> str:
    """Boxes from rows to the loss, the way back, and the KV cache that parts share."""
    wide, high, apart, top = 128, 84, 22, 46
    drawn = ['<text x="10" y="24" class="title">One step, from rows to gradients</text>']
    drawn.append(
        '<defs><marker id="to" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
        '<path d="M0 0L8 4L0 8z" fill="#57606a"/></marker></defs>'
    )

    def box(x: float, y: float, width: float, texts: tuple[str, ...], colour: str) -> None:
        drawn.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{high}" rx="6" fill="{colour}" fill-opacity="0.25" '
            f'stroke="{colour}"/>'
        )
        for line, text in enumerate(texts):
            look = ' class="title"' if line == 0 else ' font-family="monospace"' if text.endswith("/") else ""
            at = f'x="{x + width / 2:g}" y="{y + 22 + 17 * line:g}"'
            drawn.append(f'<text {at} text-anchor="middle"{look}>{text}</text>')

    def arrow(*points: tuple[float, float]) -> None:
        path = "L".join(f"{x:g} {y:g}" for x, y in points)
        drawn.append(f'<path d="M{path}" fill="none" stroke="#57606a" stroke-width="1.5" marker-end="url(#to)"/>')

    left = [10 + number * (wide + apart) for number in range(len(STEP))]
    for number, (x, texts) in enumerate(zip(left, STEP)):
        box(x, top, wide, texts, COLOURS[number >= 3])
        if number:
            arrow((x - apart, top + high / 2), (x - 1, top + high / 2))
    below = top + high + 40
    cache = ("KV cache of the path", "keys, values and their gradients", "core/attention/")
    box(left[3] - 60, below, wide + 120, cache, COLOURS[0])
    middle = left[3] + wide / 2
    arrow((middle - 12, top + high), (middle - 12, below - 1))
    arrow((middle + 12, below), (middle + 12, top + high + 1))
    last = left[5] + wide / 2
    arrow((last, top + high), (last, below + high / 2), (left[3] + wide + 61, below + high / 2))
    back = (last + left[3] + wide + 60) / 2
    for line, text in enumerate(("backward:", "branches add up")):
        drawn.append(f'<text x="{back:g}" y="{below + high / 2 - 8 + 24 * line:g}" text-anchor="middle">{text}</text>')
    arrow((left[3] - 60, below + high / 2), (left[0] + wide + 1, below + high / 2))
    box(left[0], below, wide, ("gradients", "as from each row", "alone, added up", ".grad"), COLOURS[1])
    drawn.append(f'<text x="{left[1] + 60:g}" y="{below + high / 2 - 8:g}" text-anchor="middle">every part once</text>')
    width = left[-1] + wide + 10
    return page(int(width), below + high + 14, "what a batch passes through in one step", *drawn)


# ---- A plan over time


def plan_picture(tree: tt.TokenTree) -> str:
    """Above a line per part with its passes, below the tokens whose graph is alive; time in tokens of forward work."""
    plan = tt.make_plan(tree, tt.ModelShape.named("qwen3-0.6b"), budget=BUDGET)
    sizes, passes, clock = plan.sizes.tolist(), [], 0.0
    for kind, number in plan.events():
        # A prefill computes the exported tokens of its parts; a backward costs two forwards.
        parts = [number] if kind != "prefill" else [p for p in range(plan.num_parts) if plan.prefill[p] == number]
        for part in parts:
            work = {"prefill": len(plan.exported_tokens(part)), "forward": sizes[part], "backward": 2 * sizes[part]}[
                kind
            ]
            passes.append((kind, part, clock, clock + work))
            clock += work
    scale, row, left, top = 780 / clock, 22, 80, 40
    place = {part: top + row * line for line, part in enumerate(dict.fromkeys(part for _, part, *_ in passes))}
    colour = {"prefill": "#b7a5d9", "forward": COLOURS[0], "backward": COLOURS[1]}
    drawn = [f'<text x="10" y="24" class="title">{plan.num_parts} parts, at most {BUDGET} tokens alive at once</text>']
    started: dict[int, float] = {}
    alive, steps = 0, [(0.0, 0)]
    for kind, part, begin, end in passes:
        if kind == "forward":
            started[part], alive = begin, alive + sizes[part]
            steps.append((begin, alive))
        if kind == "backward":
            band = f'x="{left + started[part] * scale:.5g}" width="{(end - started[part]) * scale:.5g}"'
            drawn.append(f'<rect {band} y="{place[part] + 2:g}" height="{row - 6}" fill="#d0d7de" fill-opacity="0.6"/>')
            alive -= sizes[part]
            steps.append((end, alive))
    for kind, part, begin, end in passes:
        bar = f'x="{left + begin * scale:.5g}" width="{(end - begin) * scale:.5g}"'
        drawn.append(f'<rect {bar} y="{place[part] + 2:g}" height="{row - 6}" fill="{colour[kind]}" stroke="#fff"/>')
    drawn += [f'<text x="{left - 8}" y="{y + 14:g}" text-anchor="end">part {part}</text>' for part, y in place.items()]
    base, tall = top + row * len(place) + 96, 70
    up = tall / BUDGET
    line, level = f"M{left} {base}", 0
    for at, count in steps:
        line += f"H{left + at * scale:.5g}V{base - count * up:.5g}"
        level = max(level, count)
    assert level <= BUDGET, "the plan has more tokens alive than its budget"
    drawn += [
        f'<path d="{line}V{base}Z" fill="#d0d7de" stroke="#8c959f"/>',
        f'<path d="M{left} {base - tall}H{left + 780}" stroke="#cf222e" stroke-dasharray="5 4"/>',
        f'<text x="{left - 8}" y="{base - tall + 4}" text-anchor="end">budget</text>',
        f'<text x="{left - 8}" y="{base}" text-anchor="end">alive</text>',
        f'<text x="{left + 780}" y="{base + 18}" text-anchor="end">time &#8594;</text>',
    ]
    names = {**colour, "graph alive": "#d0d7de"}
    drawn += [key(left + 130 * n, base + 18, shade, name) for n, (name, shade) in enumerate(names.items())]
    return page(left + 790, base + 30, "the passes of a plan over time, and the tokens alive", *drawn)


# ---- The logs of a run


LOGGED = (
    (("loss",), "nats"),
    (("tree/overlap",), "of all tokens are shared"),
    (("tree/flat_tokens", "tree/unique_tokens"), "tokens of a step"),
    (("tree/ideal_speedup",), "times as fast by FLOPs"),
    (("tree/tokens_per_second",), "tokens of rows a second"),
    (("tree/seconds",), "s, forward and backward"),
)
"""Names that are drawn together, and what their axis counts."""


def logs_picture(history: list[dict[str, float]]) -> str:
    """A small figure for every name, its values over the optimizer steps, from 0."""
    wide, high, apart, top, across = 270, 90, 30, 52, 3
    last = history[-1]["step"]
    drawn = ['<text x="10" y="24" class="title">The logs of a TreeTrainer, by optimizer step</text>']
    for number, (names, unit) in enumerate(LOGGED):
        x, y = 10 + number % across * (wide + apart), top + number // across * (high + 50)
        most = max(entry[name] for entry in history for name in names)
        written = f"{most:,.0f}" if most >= 1000 else f"{most:.3g}"
        drawn.append(f'<path d="M{x} {y + high}H{x + wide}M{x} {y + 26}H{x + wide}" stroke="#d0d7de"/>')
        for line, name in enumerate(names):
            points = (
                f"{x + (entry['step'] - 1) / (last - 1) * wide:.5g} {y + high - entry[name] / most * (high - 26):.5g}"
                for entry in history
            )
            drawn.append(f'<path d="M{"L".join(points)}" fill="none" stroke="{COLOURS[line]}" stroke-width="2"/>')
            drawn.append(key(x + 135 * line, y + 4, COLOURS[line], name))
        drawn.append(f'<text x="{x}" y="{y + 21}" font-size="11">0 to {written} {unit}</text>')
        drawn.append(f'<text x="{x}" y="{y + high + 16}" font-size="11">1</text>')
        drawn.append(f'<text x="{x + wide}" y="{y + high + 16}" font-size="11" text-anchor="end">{last}</text>')
    width = across * (wide + apart) - apart + 20
    return page(width, top + 2 * high + 50 + 24, "the logs of a TreeTrainer over 24 steps", *drawn)


if __name__ == "__main__":
    main()
