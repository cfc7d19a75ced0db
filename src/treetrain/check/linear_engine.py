"""The linear baseline: every row by itself."""

from collections.abc import Sequence
from typing import Any

from torch import nn

from treetrain.core.engine.engine_model import Call
from treetrain.core.planning.partition import whole_trees
from treetrain.core.planning.plan import Plan
from treetrain.core.tree.layout import PackedLayout
from treetrain.core.tree.token_tree import Row, TokenTree, as_tree
from treetrain.engine import TreeEngine


class LinearEngine(TreeEngine):
    """The linear baseline: a `TreeEngine` that shares no prefix.

    It is the reference for speed and results, so it is as fast as we can make it. Rows are packed without padding in
    the projections. Short rows share batched attention calls; long ones get one causal call each. Tokens after the
    last trained one are left out, as in a tree.

    Args:
        pack_tokens: maximum tokens of a packed part (a longer row runs alone); None packs the whole batch.
        sharing: ``group``, ``context`` and ``compile_layers``, as for `TreeEngine`.
    """

    merge = False

    def __init__(
        self,
        model: nn.Module,
        *,
        pack_tokens: int | None = None,
        temperature: float = 1.0,
        value_head: nn.Module | None = None,
        **sharing: Any,
    ):
        super().__init__(model, budget=pack_tokens, temperature=temperature, value_head=value_head, **sharing)
        self.pack_tokens = pack_tokens

    def tree_of(self, rows: Sequence[Row] | TokenTree) -> TokenTree:
        """See `TreeEngine.tree_of`; a tree that shares tokens is cut into its rows."""
        if isinstance(rows, TokenTree) and rows.num_tokens != rows.num_flat_tokens:
            rows = rows.trajectories
        return as_tree(rows, merge=False)

    def plan_of(self, call: Call, layout: PackedLayout) -> Plan:
        return whole_trees(layout, self.pack_tokens or max(layout.num_tokens, 1))
