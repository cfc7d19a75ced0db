"""Balance and speed of dispatch over ranks, compared with other divisions. Run: python benchmarks/dispatch.py

1. Whole files as one batch: tau_airline with a row per LLM call, and all samples of codet_humaneval100. The
   ranks of every division get a tree of their own rows: seconds by the cost model of the CPU benchmarks' model
   (nothing recomputed, passes of 8,192 tokens), tokens computed on the ranks over those of one process, and the bound
   that no division can beat (an even share, or the longest row, whose tokens stay on one rank). Predicted, not
   measured. Rows go to results/dispatch.csv; left out without the data.
2. The same file and the leaves of tot_game24_bfs as a stream (`tt.group_batches`, trainers/streams.py): steps of so
   many rows per rank, and the work of the slowest rank over the mean in all steps together. For 64 ranks the stream is
   several copies of the file, each with other ids. "by number" is how accelerate divides the same steps. Rows go to
   results/dispatch_streams.csv.
3. 65,536 trajectories over 64 ranks: seconds by the processor's clock, from a token tree (its building is not counted)
   to every rank's row numbers; the trained predictions of the rows are counted again each time. Rows go to
   results/dispatch_speed.csv.
"""

import argparse
import heapq
import time
from collections.abc import Callable, Iterator

import numpy as np

import rows as result_rows
import treetrain as tt
from planning import PRICES, batches
from tree_shapes import codet_rows
from treetrain.core.tree.layout import pack
from treetrain.core.tree.token_tree import TokenTree, build_tree
from treetrain.parallel.balance import PASS_TOKENS, dispatch
from treetrain.trainers.batches import IGNORED
from treetrain.trainers.streams import GroupStream, trajectory
from workloads import DATA, tokenizer

RANKS = (2, 4, 8, 16, 64)
REPEATS = 5
Ranks = list[np.ndarray]


def tau_airline_calls() -> list[tt.Trajectory]:
    """Every LLM call of all 200 conversations; completions trained."""
    path = DATA / "tau_airline" / "trajectories.jsonl"
    return tt.load(path, tokenizer=tokenizer(), view="calls", chat_template="chatml").trajectories


def codet_humaneval() -> list[tt.Trajectory]:
    """All 16,400 samples; samples trained."""
    return [row for number in range(164) for row in codet_rows(number)]


def tot_game24() -> list[tt.Trajectory]:
    """All 6,898 leaves of the search trees."""
    path = DATA / "tot_game24_bfs" / "trajectories.jsonl"
    return tt.load(path, tokenizer=tokenizer(), chat_template="chatml").trajectories


FILES: dict[str, Callable[[], list[tt.Trajectory]]] = {
    "tau_airline, calls": tau_airline_calls,
    "codet_humaneval100": codet_humaneval,
}


def longest_first(weights: np.ndarray, ranks: int) -> Ranks:
    """Assign the heaviest rows first, each to the rank with the least work."""
    heap, members = [(0, rank) for rank in range(ranks)], [[] for _ in range(ranks)]
    for row in np.argsort(-weights, kind="stable").tolist():
        filled, rank = heapq.heappop(heap)
        members[rank].append(row)
        heapq.heappush(heap, (filled + int(weights[row]), rank))
    return [np.array(sorted(rows), np.int64) for rows in members]


def added_tokens(tree: TokenTree) -> np.ndarray:
    """Per row, the number of tokens that no earlier row in pre-order has; the sum is the size of the tree."""
    order = np.argsort(tree.trajectory_last, kind="stable")
    before = np.searchsorted(tree.trajectory_last[order], np.arange(tree.num_tokens))
    return np.bincount(order[before], minlength=tree.num_trajectories)


def ways(tree: TokenTree, ranks: int) -> Iterator[tuple[str, Ranks]]:
    """The rows per rank of every division."""
    yield "ours", dispatch(tree, PRICES, ranks)
    yield "contiguous, unique tokens", dispatch(tree, None, ranks)
    yield "longest first, unique tokens", longest_first(added_tokens(tree), ranks)
    yield "longest first, flat tokens", longest_first(tree.trajectory_length, ranks)


def priced(rows: list[tt.Trajectory], members: Ranks) -> tuple[np.ndarray, np.ndarray]:
    """Seconds and tokens of every rank, each with a tree of its own rows."""
    seconds, tokens = [], []
    for numbers in members:
        tree = build_tree([rows[number] for number in numbers])
        layout = pack(tree, tree.trained_edges()[0] > 0)
        passes = PRICES.speeds.graph_pass * layout.num_tokens / PASS_TOKENS
        seconds.append(PRICES.token_seconds(layout.positions).sum() + PRICES.row_seconds * len(layout.rows) + passes)
        tokens.append(layout.num_tokens)
    return np.array(seconds), np.array(tokens)


def balanced(name: str) -> Iterator[dict]:
    """Figures of a file for all divisions and numbers of ranks."""
    rows = FILES[name]()
    tree = build_tree(rows)
    whole, unique = (float(found[0]) for found in priced(rows, [np.arange(len(rows))]))
    heaviest = float(PRICES.token_seconds(np.arange(tree.trained_edges()[1].max())).sum())
    for ranks in RANKS:
        for way, members in ways(tree, ranks):
            seconds, tokens = priced(rows, members)
            yield {
                "batch": name,
                "trajectories": len(rows),
                "unique_tokens": int(unique),
                "ranks": ranks,
                "way": way,
                "slowest_over_mean": round(float(seconds.max() / seconds.mean()), 4),
                "duplicated_tokens": round(float(tokens.sum() / unique - 1), 4),
                "bound_share": round(max(whole / ranks, heaviest) / float(seconds.max()), 4),
                "speedup": round(whole / float(seconds.max()), 2),
                "speedup_share": round(whole / float(seconds.max()) / ranks, 4),
            }


STREAMS: dict[str, tuple[Callable[[], list[tt.Trajectory]], dict[int, tuple[int, int]]]] = {
    "tau_airline, calls": (tau_airline_calls, {2: (128, 1), 8: (256, 1), 64: (512, 14)}),
    "tot_game24_bfs": (tot_game24, {2: (128, 1), 8: (128, 1), 64: (128, 2)}),
}
"""Rows, and for each number of ranks the rows of a step per rank, and the copies of the file."""


def streamed(name: str, ranks: int) -> Iterator[dict]:
    """Balance of a stream's steps, as `tt.group_batches` divides them and by number."""
    read, sizes = STREAMS[name]
    per_rank, copies = sizes[ranks]
    loaded = read()
    rows = [
        {
            "input_ids": row.ids.astype(np.int64) + copy * 200_000,
            "labels": np.where(row.weights > 0, row.ids, IGNORED),
            "group": f"{row.group} {copy}",
        }
        for copy in range(copies)
        for row in loaded
    ]
    stream = GroupStream(rows, per_rank, cost=PRICES, key="group", processes=ranks)
    slowest: dict[str, list[float]] = {"ours": [], "by number": []}
    mean: dict[str, list[float]] = {"ours": [], "by number": []}
    steps = 0
    for step in stream.steps():
        if len(step) < stream.rows_of_step and steps:
            continue  # the last, smaller one
        steps += 1
        whole = [trajectory(row) for row in step]
        by_number = [np.arange(first, first + per_rank) for first in range(0, len(step), per_rank)]
        for way, members in (("ours", stream.divide(step)), ("by number", by_number)):
            seconds, _ = priced(whole, [np.array(numbers, np.int64) for numbers in members])
            slowest[way].append(float(seconds.max()))
            mean[way].append(float(seconds.mean()))
    for way in slowest:
        yield {
            "stream": name,
            "copies": copies,
            "rows": len(rows),
            "ranks": ranks,
            "rows_per_rank": per_rank,
            "steps": steps,
            "way": way,
            "slowest_over_mean": round(sum(slowest[way]) / sum(mean[way]), 4),
            "most_slowest_over_mean": round(max(s / m for s, m in zip(slowest[way], mean[way])), 4),
        }


def timed(name: str, rows: list, repeats: int, ranks: int = 64) -> dict:
    """Processor seconds of a dispatch; prompts (the first half of every row) are not trained."""
    trained = [tt.Trajectory(row, loss_weights=(np.arange(len(row)) >= len(row) // 2).astype(float)) for row in rows]
    clocks = []
    for _ in range(repeats):
        tree = build_tree(trained)
        clock = time.process_time()
        members = dispatch(tree, PRICES, ranks)
        clocks.append(time.process_time() - clock)
    return {
        "batch": name,
        "trajectories": len(rows),
        "flat_tokens": tree.num_flat_tokens,
        "unique_tokens": tree.num_tokens,
        "ranks": len(members),
        "repeats": repeats,
        "cpu_s_median": round(float(np.median(clocks)), 3),
        "cpu_s_max": round(max(clocks), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=REPEATS, help="timed dispatches per batch")
    parser.add_argument("--streams", action="store_true", help="streams alone")
    parser.add_argument("--dry-run", action="store_true", help="print, write nothing")
    arguments = parser.parse_args()
    for name, rows in ({} if arguments.streams else batches()).items():
        result_rows.report("dispatch_speed", timed(name, rows, arguments.repeats), dry_run=arguments.dry_run)
    if not DATA.is_dir():
        print(f"whole files are left out: {DATA} is not there; set TREETRAIN_SHARED_DATA")
        return
    for name, (_, sizes) in STREAMS.items():
        for ranks in sizes:
            for row in streamed(name, ranks):
                result_rows.report("dispatch_streams", row, dry_run=arguments.dry_run)
    if arguments.streams:
        return
    for name in FILES:
        for row in balanced(name):
            result_rows.report("dispatch", row, dry_run=arguments.dry_run)


if __name__ == "__main__":
    main()
