"""Which trajectories share a part of the packed plan."""

import numpy as np

from treetrain.tree.token_tree import TokenTree

MAX_REPEATED_PREFIX = 64
"""A shared prefix up to this long may be computed in two parts instead of one."""


def whole_trees(tree: TokenTree, budget: int, *, merge: bool) -> list[list[int]]:
    """Trees of the forest one after the other, as many as fit.

    Args:
        budget: most tokens in a part.
        merge: whether rows share prefixes; where they do not, a row longer than the budget runs by itself.

    Raises:
        ValueError: a single tree is larger than the budget; the message names the smallest possible one.
    """
    roots = np.flatnonzero(tree.parent < 0)
    sizes = tree.end[roots] - roots
    if merge and len(roots) and sizes.max() > budget:
        raise ValueError(
            f"budget={budget} tokens, but one tree has {sizes.max()} unique tokens and whole trees are run at once; "
            f"the smallest possible budget is {sizes.max()}."
        )
    root_of = np.searchsorted(roots, tree.trajectory_last, side="right") - 1
    group_of_root, filled, group = np.zeros(len(roots), dtype=np.int64), 0, 0
    for number, size in enumerate(sizes.tolist()):
        if filled + size > budget and filled:
            group, filled = group + 1, 0
        group_of_root[number] = group
        filled += size
    # Empty trajectories have no root; they go with the first group.
    group_of = group_of_root[np.maximum(root_of, 0)] if len(roots) else np.zeros(tree.num_trajectories, dtype=np.int64)
    return [np.flatnonzero(group_of == g).tolist() for g in range(group + 1)]


def nearly_disjoint(tree: TokenTree, target: int) -> list[list[int]]:
    """Cut a batch where almost nothing is shared, into parts of about ``target`` new tokens.

    Larger runs gain no speed and cost memory. A cut makes the prefix that the rows on its two sides share be computed
    twice, so it is made only where that is short; a batch under one long prompt is never cut.
    """
    order = np.argsort(tree.trajectory_last, kind="stable")
    new, shared = _new_and_shared(tree, order)
    groups, filled = [[]], 0
    for number, fresh, prefix in zip(order.tolist(), new.tolist(), shared.tolist()):
        if filled + fresh > target and filled >= target // 2 and prefix <= MAX_REPEATED_PREFIX:
            groups.append([])
            filled = 0
        groups[-1].append(number)
        filled += fresh
    return [sorted(group) for group in groups]


def _new_and_shared(tree: TokenTree, order: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of each trajectory in pre-order of last tokens: tokens not on the path before it, and those that are."""
    offsets, index = tree.paths()
    last_before = np.concatenate([[-1], tree.trajectory_last[order][:-1]])
    limit = np.empty(len(order), dtype=np.int64)
    limit[order] = last_before
    # A path token up to the last token of the row before it in pre-order is an ancestor of that one too.
    on_both = index <= np.repeat(limit, tree.trajectory_length)
    running = np.concatenate([[0], np.cumsum(on_both)])
    shared = (running[offsets[1:]] - running[offsets[:-1]])[order]
    return tree.trajectory_length[order] - shared, shared
