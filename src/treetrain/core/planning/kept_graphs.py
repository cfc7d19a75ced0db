"""Plans for losses that are known only after all parts are scored: the graphs that are kept until then.

All parts run forward once, in order. The loss gives the gradients of their scores, and the parts run backward, the last
one first. A part whose graph was kept runs backward at once; another runs forward again. While a part runs, the
graphs alive are its own and the kept ones of the parts before it, in both phases: those after it have not run yet, or
have run backward. So a choice fits if, for every part, the kept graphs before it fit beside it.

    kept: 1, 3      P0 F1 P2 F3   loss   B3   F2 B2   B1   F0 B0      F forward, B backward, P without graph
    graphs alive       1  1  13          1    12      .    0

The cache of every part is held from its first forward to its backward, so nothing but the parts that run again runs
twice. Parts are kept in the order of the seconds that running them again would take, per token or byte of their graph,
or of those seconds alone, as long as they fit. An early part's graph is alive while all later parts run again, so the
last parts may be worth more; the search tries beginnings from which on parts may be kept.
"""

import itertools

import numpy as np
from numpy.typing import NDArray

from treetrain.core.planning.cost import CostModel
from treetrain.core.planning.plan import Plan

Floats = NDArray[np.floating]
BEGINNINGS = 8
"""How many parts are tried as the first that may be kept."""
FINER = (2, 4, 6)
"""Parts within these fractions of the budget are tried too, since they fill it better."""
MOST_PARTS = 1024
"""Finer parts are not tried for a plan with more parts than this."""
CACHE_SHARE = 0.25
"""Under a budget in tokens, which does not count the cache, the caches of all parts may take this share of the bytes of
the budget's graphs."""


def most_worth_keeping(worth: Floats, graph: Floats, beside: Floats) -> NDArray[np.bool_] | None:
    """The parts to keep, bool [P]; None if a part does not fit even alone. All arguments are [P].

    Args:
        worth: what is saved if the part does not run again.
        graph: memory of its graph.
        beside: memory that is left for graphs of other parts while the part runs.
    """
    count = len(worth)
    if (beside < 0).any():
        return None
    best, most = np.zeros(count, bool), -1.0
    beginnings = np.unique(np.linspace(0, count, BEGINNINGS, endpoint=False).astype(int)).tolist()
    # Worth for its memory first; and worth alone, since small parts may leave no room for a large one.
    orders = [np.lexsort((-np.arange(count), -key)) for key in (worth / np.maximum(graph, 1e-9), worth)]
    for by_worth, first in itertools.product(orders, beginnings):
        kept, left = np.zeros(count, bool), beside.copy()
        for part in by_worth[by_worth >= first].tolist():
            later = left[part + 1 :]  # a graph stays from its forward until its backward: while later parts run
            if later.min(initial=np.inf) >= graph[part]:
                kept[part] = True
                later -= graph[part]
        if worth[kept].sum() > most:
            best, most = kept, float(worth[kept].sum())
    return best


def keeping_most(plan: Plan, cost: CostModel | None, *, tokens: int | None, room: float) -> Plan | None:
    """The plan with the most worth in kept graphs; None if the caches of all parts, or some part, do not fit.

    Args:
        plan: the parts.
        cost: None for a model that cannot be counted.
        tokens: most tokens whose graph is alive at once; None bounds bytes alone.
        room: bytes that the plan may use, if `tokens` is None.
    """
    held = plan.keeping_graphs()
    sizes = plan.sizes.astype(np.float64)
    worth = sizes if cost is None else cost.again_seconds(plan)
    if tokens is not None:
        if cost is None:
            fits = held.cached_tokens <= tokens
        else:
            fits = cost.cache_bytes(held) <= CACHE_SHARE * cost.counts.saved_token * tokens
        if not fits:
            return None
        graph, beside = sizes, tokens - sizes
    elif cost is None:
        return None
    else:
        graph, beside = cost.graphs_within(held, room)
    kept = most_worth_keeping(worth, graph, beside)
    return None if kept is None else plan.keeping_graphs(kept)
