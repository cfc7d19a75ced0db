"""The token tree: a batch's rows merged by shared prefix. Numpy only."""

from treetrain.tree.build import build_tree
from treetrain.tree.token_tree import TokenTree

__all__ = ["TokenTree", "build_tree"]
