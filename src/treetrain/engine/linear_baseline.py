"""The linear baseline: the same model, loss and fused head with every trajectory computed by itself.

It is the reference for speed and results, so it is as fast as we can make it: rows are packed without
padding in the projections, short rows share batched attention calls, long ones get one causal call each, and tokens
after the last trained one are left out, as in a tree.
"""

from collections.abc import Sequence
from typing import Any

from torch import nn

from treetrain.data.trajectory import Trajectory
from treetrain.engine.engine import TreeEngine
from treetrain.engine.results import StepResult
from treetrain.engine.routing import RouterBalance
from treetrain.engine.score import Scored
from treetrain.planning.partition import whole_trees
from treetrain.planning.plan import Plan
from treetrain.tree.layout import PackedLayout
from treetrain.tree.token_tree import TokenTree

Batch = Sequence[Trajectory] | TokenTree


class LinearEngine(TreeEngine):
    """A `TreeEngine` that shares no prefix.

    Args:
        pack_tokens: most tokens of a packed part (a longer row runs by itself); None packs the whole batch.
        sharing: ``group`` and ``reduce``, as for `TreeEngine`.
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

    def forward_backward(self, trajectories: Batch, *given: Any, **options: Any) -> StepResult:
        """See `TreeEngine.forward_backward`."""
        return super().forward_backward(_rows(trajectories), *given, **options)

    def score(self, rows: Batch, **options: Any) -> Scored:
        """See `TreeEngine.score`."""
        return super().score(_rows(rows), **options)

    def router_balance(self, trajectories: Batch) -> RouterBalance:
        """See `TreeEngine.router_balance`."""
        return super().router_balance(_rows(trajectories))

    def plan_of(self, layout: PackedLayout) -> Plan:
        """See `TreeEngine.plan_of`."""
        return whole_trees(layout, self.pack_tokens or max(layout.num_tokens, 1))


def _rows(batch: Batch) -> Batch:
    """The rows of a tree that shares tokens; any other batch as it is."""
    if isinstance(batch, TokenTree) and batch.num_tokens != batch.num_flat_tokens:
        return list(batch.trajectories)
    return batch
