"""Writes the README's picture: recorded games as rows, and the same games as the tree that `treetrain inspect` draws.

Run: python docs/make_picture.py. It writes docs/images/tree.svg.
"""

from pathlib import Path

import numpy as np

import treetrain as tt
from treetrain.inspection.picture import Picture, draw

ROOT = Path(__file__).parents[1]
GAMES = 8
COLOURS = ("#7fb2dd", "#f0a35e")
WIDTH, HEIGHT, GAP, TOP = 430, 190, 40, 30
EDGED = 5
"""Smaller blocks, in pixels, have no edge, which would cover them."""


def main() -> None:
    """Draw both panels and write the file."""
    loaded = tt.load(ROOT / "examples/countdown/train.jsonl.gz", tokenizer=tt.load_tokenizer("tiny"), limit=GAMES)
    tree = tt.build_tree(loaded.trajectories)
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
    keys = "".join(
        f'<rect x="{300 + 150 * n}" y="246" width="12" height="12" fill="{colour}"/>'
        f'<text x="{318 + 150 * n}" y="256">{name}</text>'
        for n, (colour, name) in enumerate(zip(COLOURS, ("context", "trained: the answers")))
    )
    (ROOT / "docs" / "images" / "tree.svg").write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {2 * WIDTH + GAP + 20} 268" font-family="sans-serif" '
        f'font-size="12.5" fill="#57606a">\n<title>{"; ".join(titles)}</title>\n'
        '<style>.title{font-size:15px;fill:#24292f}</style>\n<rect width="100%" height="100%" fill="#fff"/>\n'
        + "\n".join([*panels, keys, "</svg>", ""]),
        encoding="utf-8",
    )


def svg(picture: Picture, *, rows: bool) -> str:
    """The blocks as SVG elements; with `rows` every trajectory by itself, as separate rows compute it."""
    across, down = WIDTH / picture.longest, HEIGHT / picture.rows
    shades = 0.6 + 0.4 * np.log(picture.height) / np.log(picture.rows)  # one trajectory to all
    place = zip(picture.x * across, picture.y * down, picture.width * across, picture.height * down)
    drawn = []
    for (x, y, w, h), count, kind, shade in zip(place, picture.height, picture.kind, shades):
        tall = down if rows else h
        look = f'fill="{COLOURS[kind]}"{" stroke=" * (min(w, tall) >= EDGED)}'.replace("stroke=", 'stroke="#fff"')
        for top in y + down * np.arange(count if rows else 1):
            box = f'x="{x:.5g}" y="{top:.7g}" width="{w:.5g}" height="{tall:.5g}"'
            drawn.append(f'<rect {box} {look} fill-opacity="{shade:.2f}"/>')
    return "\n".join(drawn)


if __name__ == "__main__":
    main()
