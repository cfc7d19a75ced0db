"""`values` and `rewards`: what a critic or a reward model says of every token, or of every row; live in autograd."""

from collections.abc import Sequence

import numpy as np
from torch import Tensor, nn

from treetrain.device_arrays import on_device
from treetrain.engine.batch import check_batch, rewards_layout
from treetrain.engine.engine import TreeEngine
from treetrain.engine.primitive import check_alone_where_live, scored
from treetrain.engine.routing import check_auxiliary
from treetrain.engine.score import is_live
from treetrain.planning.budget import Bytes
from treetrain.tree.build import Row, as_tree
from treetrain.tree.layout import PackedLayout, pack_states
from treetrain.tree.token_tree import TokenTree


def values(
    model: nn.Module,
    sequences: Sequence[Row] | TokenTree,
    budget: int | str | Bytes | None = None,
    *,
    head: nn.Module | None = None,
) -> list[Tensor]:
    """The value of every token's state, for every sequence; every shared prefix computed once.

    Entry t of a row is the value of the state after its tokens 0 to t, before token t + 1 is known. The facts `values`
    and `returns` of a `Trajectory` count by the predicted token instead: ``values[t + 1]`` there is entry t here.

    Args:
        model: a model for the classification of tokens (a critic) or sequences (a reward model), plain or wrapped by
            peft; or, with `head`, a causal LM.
        sequences: K lists or arrays of token ids (or trajectories, or a tree).
        budget: as that of `treetrain.logprobs`.
        head: maps the hidden states that a causal LM hands to its head, [n, hidden], to values [n] or [n, c].

    Returns:
        K tensors [L_k], or [L_k, c] for a head of several labels, float32 or wider, with gradients to the parameters of
        model and head. ``.backward()`` and ``torch.autograd.grad`` both work, once.

    Raises:
        DataError, UnsupportedModel, ValueError, RuntimeError: as `treetrain.logprobs`.
    """
    engine, tree = _prepared(model, sequences, budget, head)
    offsets, index = tree.paths()
    found = _values_at(engine, tree, pack_states(tree), index)
    return list(found.split(np.diff(offsets).tolist()))


def rewards(
    model: nn.Module,
    sequences: Sequence[Row] | TokenTree,
    budget: int | str | Bytes | None = None,
    *,
    head: nn.Module | None = None,
) -> Tensor:
    """Rewards of sequences by a reward model: the value of each one's last token; shared prefixes computed once.

    A model for sequence classification takes the last token that is not its configuration's ``pad_token_id``, as it
    does by itself (its first token where there is no other); any other model takes the last one.

    Args:
        model, sequences, budget, head: as `values`.

    Returns:
        [K], or [K, c] for a head of several labels; live as `values` are.

    Raises:
        DataError: a sequence without tokens; otherwise as `values`.
    """
    engine, tree = _prepared(model, sequences, budget, head)
    layout, last = rewards_layout(tree, engine.capabilities)
    return _values_at(engine, tree, layout, last)


def _prepared(
    model: nn.Module, sequences: Sequence[Row] | TokenTree, budget: int | str | Bytes | None, head: nn.Module | None
) -> tuple[TreeEngine, TokenTree]:
    engine = TreeEngine(model, budget=budget, value_head=head)

    def prepared() -> TokenTree:
        engine.prepare(logprobs=False, values=True)
        check_alone_where_live(engine, "treetrain.values")
        if is_live(engine):
            check_auxiliary(engine.capabilities.experts, False)
        tree = as_tree(sequences, merge=True)
        check_batch(tree, engine.capabilities)
        return tree

    return engine, engine.together("treetrain.values", prepared)


def _values_at(engine: TreeEngine, tree: TokenTree, layout: PackedLayout, index: np.ndarray) -> Tensor:
    """[T] or [T, c] values at rows of a layout.

    Args:
        index: int64 [T]: the rows that are read, in order.
    """
    board, _ = scored(engine, tree, layout, "treetrain.values")
    if board.values is None:
        return board.logprobs.new_zeros(0)
    return board.values.index_select(0, on_device(index, board.values.device))
