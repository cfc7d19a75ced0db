"""Waiting of ranks for one another under FSDP, with their own plans and with aligned plans.

Run: python benchmarks/alignment.py [--ranks 2 4 8 64] [--dry-run]

Whole files as one batch, dispatched over ranks; qwen3-0.6b on h100 by its description, with budgets in tokens and
without one (then by the device's memory). All ranks run every pass together, so a step takes the sum, over the
common order of passes, of the slowest rank's time. Rows hold that sum divided by the ranks' mean work with their own
plans (1 is perfect; below 1: fewer passes) and the share that waiting adds to the slowest rank's own work. Times are
predicted, without communication.
Rows go to results/alignment.csv; files are left out where the data is not there.
"""

import argparse
import time
from collections.abc import Callable, Iterator

import numpy as np

import rows as result_rows
import treetrain as tt
from dispatch import codet_humaneval, tau_airline_calls
from tree_build import rollouts
from treetrain.core.planning.cost import CostModel
from treetrain.core.planning.devices import DEVICES
from treetrain.core.tree.layout import PackedLayout, pack
from treetrain.core.tree.token_tree import TokenTree, build_tree
from treetrain.parallel.collective_order import (
    Candidate,
    Passes,
    candidates,
    choose,
    offers_of,
    order_seconds,
)
from treetrain.shapes import ModelShape
from treetrain.simulation.rank_plans import plan_ranks
from treetrain.simulation.simulate import state_bytes
from treetrain.simulation.splits import Split
from workloads import DATA, tokenizer

RANKS, BUDGETS = (2, 4, 8, 64), (None, 8_192, 16_384, 32_768)
SHAPE, DEVICE = ModelShape.named("qwen3-0.6b"), DEVICES["h100"]


def tot_game24() -> list[tt.Trajectory]:
    """All leaves of all search trees; assistant text trained."""
    path = DATA / "tot_game24_bfs" / "trajectories.jsonl"
    return tt.load(path, tokenizer=tokenizer(), chat_template="chatml").trajectories


def synthetic() -> list[tt.Trajectory]:
    """16,384 rows of 64 tokens in groups of 16 that share half and more."""
    return [tt.Trajectory(row) for row in rollouts(16_384, 64, shared=True)]


BATCHES: dict[str, Callable[[], list[tt.Trajectory]]] = {
    "synthetic groups of 16": synthetic,
    "tau_airline, calls": tau_airline_calls,
    "codet_humaneval100": codet_humaneval,
    "tot_game24": tot_game24,
}


def trained(tree: TokenTree) -> PackedLayout:
    """The layout of what training computes."""
    return pack(tree, tree.trained_edges()[0] > 0)


def total(work: list[Passes]) -> tuple[float, float]:
    """Seconds of the common order, and the share it adds to the slowest rank's own work."""
    seconds = order_seconds(work)
    return seconds, seconds / max(sum(own.seconds) for own in work) - 1


def compared(name: str, rows: list[tt.Trajectory], tree: TokenTree, ranks: int) -> Iterator[dict]:
    """A row per budget."""
    counts = SHAPE.counts(dtype_bytes=DEVICE.dtype_bytes)
    cost, state = CostModel.on(DEVICE, counts), state_bytes(counts, Split(ranks, shards=ranks))
    free = int(DEVICE.memory_bytes - sum(state.values()))
    for budget in BUDGETS:
        limit = free if budget is None else None
        dispatch, plans = plan_ranks(tree, cost, ranks, budget=budget, free_bytes=limit)
        trees = [build_tree([rows[number] for number in own.tolist()]) for own in dispatch.trajectories]
        clock = time.process_time()
        ways = [candidates(own, plan, trained, free_bytes=limit) for own, plan in zip(trees, plans)]
        offers = [offers_of(own) for own in ways]
        looking = (time.process_time() - clock) / ranks
        clock = time.process_time()
        chosen = choose(offers)
        choosing = time.process_time() - clock
        taken: list[Candidate] = [own[number] for own, number in zip(ways, chosen)]
        before = [offers_of([Candidate(plan, own, "")])[0].passes for plan, own in zip(plans, trees)]
        after = [own[number].passes for own, number in zip(offers, chosen)]
        seconds = np.array([sum(own.seconds) for own in before])
        mean = float(seconds.mean())
        tokens = sum(way.plan.layout.num_tokens for way in taken)
        yield {
            "batch": name,
            "ranks": ranks,
            "budget": budget or "none",
            "imbalance": f"{seconds.max() / mean:.3f}",
            "own_plans_over_mean": f"{total(before)[0] / mean:.3f}",
            "own_plans_waiting": f"{total(before)[1]:.3f}",
            "aligned_over_mean": f"{total(after)[0] / mean:.3f}",
            "aligned_waiting": f"{total(after)[1]:.3f}",
            "duplicated_tokens": f"{tokens / dispatch.unique - 1:.3f}",
            "passes": max(len(own.kinds) for own in after),
            "ways_cpu_s_per_rank": f"{looking:.3f}",
            "choice_cpu_s": f"{choosing:.3f}",
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS)
    parser.add_argument("--dry-run", action="store_true", help="print, write nothing")
    options = parser.parse_args()
    for name, load in BATCHES.items():
        if load is not synthetic and not DATA.is_dir():
            print(f"{name} is left out: {DATA} is not there; set TREETRAIN_SHARED_DATA")
            continue
        rows = load()
        tree = build_tree(rows)
        for ranks in options.ranks:
            for row in compared(name, rows, tree, ranks):
                result_rows.report("alignment", row, dry_run=options.dry_run)


if __name__ == "__main__":
    main()
