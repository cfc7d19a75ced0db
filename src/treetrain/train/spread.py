"""Rows of a step over the ranks, and what each found of its own back on all."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from treetrain.data.trajectory import Trajectory
from treetrain.engine.batch import as_tree
from treetrain.engine.engine import TreeEngine
from treetrain.engine.planning import formula_cost
from treetrain.engine.ranks import is_sharded
from treetrain.plan.dispatch import Dispatch, balance
from treetrain.tree.token_tree import TokenTree


class OwnRows(NamedTuple):
    """A rank's rows of a call."""

    rows: list[Trajectory]
    unique_tokens: int
    """Of the tree of all rows, wherever they are."""
    tree: TokenTree | None = None
    """Of these rows, as the engine would build it; None where it has not been built."""


def spread(engine: TreeEngine, rows: Sequence[Trajectory], *, whole_rows: bool = False) -> Dispatch:
    """Cut rows over the engine's ranks by predicted time; every rank finds the same cut by itself.

    Args:
        whole_rows: they are only scored, and every prediction of them is wanted.
    """
    tree = as_tree(rows, merge=engine._merge)
    return balance(tree, formula_cost(engine.model), engine.ranks.size, whole_rows=whole_rows)


def own_rows(engine: TreeEngine, rows: Sequence[Trajectory]) -> OwnRows:
    """This rank's rows to train on, out of those of all ranks."""
    tree = as_tree(rows, merge=engine._merge)
    if engine.ranks.alone:
        return OwnRows(list(rows), tree.num_tokens, tree)
    numbers = balance(tree, formula_cost(engine.model), engine.ranks.size).trajectories[engine.ranks.rank]
    return OwnRows([rows[number] for number in numbers.tolist()], tree.num_tokens)


def logprobs(engine: TreeEngine, rows: Sequence[Trajectory], *, return_entropy: bool = False) -> Any:
    """`TreeEngine.logprobs` of rows that every rank has: each rank scores a share of them, all get all.

    Returns:
        as `TreeEngine.logprobs`; over several ranks in CPU memory.

    Raises:
        RanksDisagree: another rank could not score its share.
    """
    ranks = engine.ranks
    if ranks.alone:
        return engine.logprobs(rows, return_entropy=return_entropy)
    shares = spread(engine, rows, whole_rows=True).trajectories
    own = [rows[number] for number in shares[ranks.rank].tolist()]

    def score() -> tuple[None, list[list[Any]]]:
        if not own and not engine.in_lockstep:
            return None, [[], []]
        found = engine.logprobs(own, return_entropy=return_entropy)
        lists = found if return_entropy else (found, [])
        return None, [[scores.cpu().numpy() for scores in each] for each in lists]

    if engine.in_lockstep:
        told = ranks.gather(score()[1])  # the passes are collectives: nobody waits here for one that failed in them
        reshard(engine.model)
    else:
        _, told = ranks.agree("scoring", score)
    columns = [_in_order(shares, [each[column] for each in told]) for column in range(1 + return_entropy)]
    return (columns[0], columns[1]) if return_entropy else columns[0]


def reshard(model: Any) -> None:
    """Let go of weights that FSDP2 has left whole after passes without gradient: they may change before the next."""
    if is_sharded(model):
        from torch.distributed.fsdp import FSDPModule

        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


def _in_order(shares: Sequence[Any], told: Sequence[list[Any]]) -> list[Tensor]:
    """What the ranks found, one entry per row, in the order of the rows."""
    found: dict[int, Tensor] = {}
    for numbers, scores in zip(shares, told, strict=True):
        found |= {n: torch.from_numpy(x) for n, x in zip(numbers.tolist(), scores, strict=True)}
    return [found[number] for number in range(len(found))]
