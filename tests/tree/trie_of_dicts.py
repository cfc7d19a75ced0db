"""The token tree the slow and obvious way: a trie of dicts, one dict per token. Tests only."""

from typing import Any

import numpy as np

from treetrain.core.tree.token_tree import TokenTree


def trie_of(rows: list[list[int]], keys: list[Any] | None = None) -> dict:
    root: dict = {"children": {}, "token": None, "rows": []}
    for number, row in enumerate(rows):
        node = root
        for depth, token in enumerate(row):
            name = (keys[number] if keys and depth == 0 else None, token)
            node = node["children"].setdefault(name, {"children": {}, "token": token, "rows": []})
            node["rows"].append(number)
    return root


def leaves(node: dict) -> int:
    return sum(leaves(child) for child in node["children"].values()) or 1


def tokens(node: dict) -> int:
    return (node["token"] is not None) + sum(tokens(child) for child in node["children"].values())


def arrays(rows: list[list[int]], keys: list[Any] | None = None) -> dict[str, np.ndarray]:
    """tokens, parent, depth, end in pre-order, heaviest first, and every row's path as tree indices."""
    out: dict[str, list] = {"tokens": [], "parent": [], "depth": [], "end": []}
    paths: list[list[int]] = [[] for _ in rows]

    def visit(node: dict, parent: int, depth: int) -> None:
        index = len(out["tokens"])
        if node["token"] is not None:
            out["tokens"].append(node["token"])
            out["parent"].append(parent)
            out["depth"].append(depth)
            out["end"].append(0)
            for row in node["rows"]:
                paths[row].append(index)
        ordered = sorted(node["children"].values(), key=lambda c: (-leaves(c), -tokens(c), min(c["rows"])))
        for child in ordered:
            visit(child, index if node["token"] is not None else -1, depth + (node["token"] is not None))
        if node["token"] is not None:
            out["end"][index] = len(out["tokens"])

    visit(trie_of(rows, keys), -1, 0)
    result = {name: np.array(values, np.int64) for name, values in out.items()}
    result["paths"] = np.array([i for path in paths for i in path], np.int64)
    return result


def check_tree(tree: TokenTree) -> None:
    """Every invariant of the arrays of a token tree."""
    count = tree.num_tokens
    index = np.arange(count)
    start, above = tree.segment_start, tree.segment_parent
    assert len(tree.parent) == len(tree.depth) == len(tree.end) == count
    assert len(start) == len(above) + 1 and start[-1] == count and start[0] == 0
    assert (np.diff(start) > 0).all(), "an empty segment"
    assert (above < np.arange(len(above))).all(), "a segment before its parent"
    expected = index - 1
    if len(above):
        expected[start[:-1]] = np.where(above >= 0, start[above + 1] - 1, -1)
    assert (tree.parent == expected).all(), "parents disagree with segments"
    inner = tree.parent >= 0
    assert (tree.depth[~inner] == 0).all()
    assert (tree.depth[inner] == tree.depth[tree.parent[inner]] + 1).all(), "depths disagree with parents"
    assert (tree.end > index).all() and (tree.end[inner] <= tree.end[tree.parent[inner]]).all()
    children = np.bincount(tree.parent[inner], minlength=count) if count else np.zeros(0, np.int64)
    closing = np.zeros(count, bool)
    closing[start[1:] - 1] = True
    assert (children[~closing] == 1).all() and (children[closing] != 1).all(), "segments are not maximal"
    last = tree.trajectory_last
    assert (tree.trajectory_length == np.where(last >= 0, tree.depth[last] + 1 if count else 0, 0)).all()
    assert np.isin(np.flatnonzero(children == 0), last).all(), "a leaf where no trajectory ends"
