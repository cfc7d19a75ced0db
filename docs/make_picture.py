"""Draws the README's picture: recorded games as rows, and the same games as one tree.

Run: python docs/make_picture.py. It needs matplotlib and writes docs/images/tree.svg.
"""

from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.patches import Rectangle

import treetrain as tt

ROOT = Path(__file__).parents[1]
GAMES = 8
SHARED, OWN, INK = "#4c78a8", "#f2a65a", "#57606a"


def main() -> None:
    """Draw both panels and write the file."""
    matplotlib.rcParams.update({"svg.hashsalt": "treetrain", "font.size": 9, "text.color": INK, "axes.labelcolor": INK})
    loaded = tt.load(ROOT / "examples/countdown/train.jsonl.gz", tokenizer=tt.load_tokenizer("tiny"), limit=GAMES)
    tree = tt.build_tree(loaded.trajectories)
    paths = sorted(tree.path(row).tolist() for row in range(tree.num_trajectories))
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 2.3), sharex=True, sharey=True, layout="constrained")
    left.set_title(f"{GAMES} rows: {tree.num_flat_tokens:,} tokens computed", loc="left")
    right.set_title(f"one tree: {tree.num_tokens:,} tokens computed, every block once", loc="left")
    segment_of = tree.segment_of(np.arange(tree.num_tokens))
    segments: dict[int, list[int]] = {}
    for place, path in enumerate(paths):
        for segment in dict.fromkeys(tree.segment_of(np.array(path)).tolist()):
            segments.setdefault(segment, []).append(place)
    for segment, places in segments.items():
        start = int(tree.segment_start[segment])
        depth, length = int(tree.depth[start]), int((segment_of == segment).sum())
        colour = SHARED if len(places) > 1 else OWN
        for place in places:
            left.add_patch(Rectangle((depth, place + 0.08), length, 0.84, color=colour, lw=0))
        height = places[-1] - places[0] + 0.84
        right.add_patch(Rectangle((depth, places[0] + 0.08), length, height, fc=colour, ec="white", lw=0.8))
    for axes in (left, right):
        axes.set(xlim=(0, max(map(len, paths))), ylim=(GAMES, 0), yticks=[], xlabel="tokens from the start of the row")
        axes.spines[:].set_visible(False)
        axes.tick_params(colors=INK)
    figure.legend(
        [Rectangle((0, 0), 1, 1, color=SHARED), Rectangle((0, 0), 1, 1, color=OWN)],
        ["shared by several rows", "of one row"],
        loc="outside lower center",
        ncols=2,
        frameon=False,
    )
    figure.patch.set_facecolor("white")
    figure.savefig(ROOT / "docs" / "images" / "tree.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
