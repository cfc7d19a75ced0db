"""Forests as the attention layer sees them."""

from treetrain.softmax_attention.schedule import Forest
from treetrain.testing.forests import Rows
from treetrain.tree.build import build_tree
from treetrain.tree.layout import pack


def attention_forest(rows: Rows) -> Forest:
    """The attention layer's view of a merged batch, every token kept."""
    return forest_of(pack(build_tree(rows), trim=False))


def forest_of(layout) -> Forest:
    """The attention layer's view of a layout."""
    return Forest.of(layout)
