"""Time and memory of building a token tree from rows. Run: python benchmarks/tree_build.py

Batches of about four million flat tokens. Sharing is drawn like that of rollouts: groups of 16 rows with one prompt
(half to three quarters of a row), and inside a group every row forks from an earlier one at a random position. Each
shape is built REPEATS times on one core; rows are appended to results/tree_build.csv.
"""

import argparse
import time
import tracemalloc

import numpy as np

import rows as result_rows
from treetrain.core.tree.token_tree import TokenTree, build_tree
from treetrain.models.work import tree_stats

REPEATS = 7
GROUP = 16
VOCAB = 151_936
SHAPES = {"65536x64": (65_536, 64), "1000x4096": (1_000, 4_096)}


def rollouts(rows: int, length: int, *, shared: bool, seed: int = 0) -> list[np.ndarray]:
    """int32 rows of one length in shuffled order; unshared rows are random throughout."""
    rng = np.random.default_rng(seed)
    out: list[np.ndarray] = []
    for number in range(rows):
        row = rng.integers(0, VOCAB, length, dtype=np.int32)
        place = number % GROUP
        if shared and place:
            other = out[number - 1 - int(rng.integers(place))]
            keep = int(length * rng.uniform(0.5, 0.75 if place % 2 else 1.0))
            row[:keep] = other[:keep]
        out.append(row)
    return [out[i] for i in rng.permutation(rows)]


def measure(rows: list, repeats: int) -> tuple[np.ndarray, float, TokenTree]:
    """Million flat tokens per second [repeats, 2] by the processor's and the wall clock, peak bytes per token, tree.

    Use the processor time on a busy machine: the build runs on one thread.
    """
    flat = sum(map(len, rows))
    speeds = np.zeros((repeats + 1, 2))
    for repeat in range(repeats + 1):
        processor, wall = time.process_time(), time.perf_counter()
        build_tree(rows)
        speeds[repeat] = flat / 1e6 / (time.process_time() - processor), flat / 1e6 / (time.perf_counter() - wall)
    tracemalloc.start()
    tree = build_tree(rows)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return speeds[1:], peak / flat, tree


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=REPEATS, help="timed builds per shape")
    parser.add_argument("--dry-run", action="store_true", help="print, write nothing")
    arguments = parser.parse_args()
    for shape, (count, length) in SHAPES.items():
        for kind in ("int32 arrays", "lists", "int32 arrays, nothing shared"):
            rows: list = rollouts(count, length, shared="nothing" not in kind)
            if kind == "lists":
                rows = [row.tolist() for row in rows]
            speeds, peak, tree = measure(rows, arguments.repeats)
            result = {
                "shape": shape,
                "rows": kind,
                "flat_tokens": tree.num_flat_tokens,
                "overlap": round(tree_stats(tree).overlap, 3),
                "segments": tree.num_segments,
                "repeats": len(speeds),
                "mtokens_per_cpu_s_median": round(float(np.median(speeds[:, 0])), 2),
                "mtokens_per_cpu_s_min": round(speeds[:, 0].min(), 2),
                "mtokens_per_cpu_s_max": round(speeds[:, 0].max(), 2),
                "mtokens_per_wall_s_median": round(float(np.median(speeds[:, 1])), 2),
                "peak_bytes_per_flat_token": round(peak, 1),
            }
            print(*(f"{name}={value}" for name, value in result.items()), sep="  ", flush=True)
            if not arguments.dry_run:
                result_rows.append("tree_build", result)


if __name__ == "__main__":
    main()
