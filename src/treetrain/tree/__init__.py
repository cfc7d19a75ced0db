"""The token tree: a batch's rows merged by shared prefix. Numpy only."""

from treetrain.tree.build import build_tree
from treetrain.tree.layout import PackedLayout, cut, flat_reads, pack
from treetrain.tree.stats import TreeStats, tree_stats
from treetrain.tree.token_tree import TokenTree

__all__ = [
    "PackedLayout",
    "TokenTree",
    "TreeStats",
    "build_tree",
    "cut",
    "flat_reads",
    "pack",
    "tree_stats",
]
