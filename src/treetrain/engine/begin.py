"""Everything that can be wrong with a step, found on every rank before any of them begins."""

import hashlib
from collections.abc import Sequence
from typing import Any, NamedTuple

from treetrain.data.trajectory import Trajectory
from treetrain.engine.batch import Batch, check_batch, predictions_of
from treetrain.engine.checks import check_count, check_loss, check_trainable
from treetrain.engine.lockstep import Reduces
from treetrain.engine.merged import MergedBatch
from treetrain.engine.ranks import Ranks, is_shard
from treetrain.engine.whole_step import Share, every_row, share_of, whole_step
from treetrain.errors import UnsupportedModel
from treetrain.tree.build import as_tree
from treetrain.tree.token_tree import TokenTree


class Begun(NamedTuple):
    """A step that every rank can make."""

    tree: TokenTree
    batch: Batch | MergedBatch
    loss: Any
    normaliser: float
    """Of the whole step, divided by the number of ranks: gradients are averaged over them."""
    rows: list[Trajectory]
    """Of all ranks, where the loss must see them."""
    told: list[Any]
    """What the ranks have told of their rows' scores, where the loss compares them; filled by the step."""
    reduces: Reduces = "each"
    """Which backward reduces sharded gradients."""


def begin(
    engine: Any,
    trajectories: Sequence[Trajectory] | TokenTree,
    loss: Any,
    normaliser: float | None,
    *,
    merge: bool,
    mask: Sequence[Any] | None = None,
) -> Begun:
    """Check a step of an engine, and find what it is divided by.

    Raises:
        DataError, ValueError, UnsupportedModel: what is wrong here.
        RanksDisagree: what is wrong elsewhere.
    """
    ranks: Ranks = engine.ranks

    def checked() -> tuple[tuple[TokenTree, Any, Any], Share]:
        check_loss(loss, normaliser)
        values, entropy = bool(getattr(loss, "needs_values", False)), bool(getattr(loss, "needs_entropy", False))
        engine.prepare(logprobs=entropy or getattr(loss, "needs_logprobs", True), values=values)
        check_trainable(engine.parameters)
        check_hooks(engine)
        tree = as_tree(trajectories, merge=merge)
        check_batch(tree, engine.capabilities)
        check_count(loss, tree)
        # A tree of nodes stays unflattened where the loss can bear it.
        mergeable = mask is None and getattr(loss, "mergeable", False)
        merged = tree.merged(loss.reduction) if mergeable else None
        predicted = predictions_of(tree, mask)
        return (tree, merged, predicted), share_of(tree, merged, loss, normaliser, _settings(engine), ranks)

    (tree, merged, predicted), shares = ranks.agree("forward_backward", checked)
    loss, whole = whole_step(tree, merged, loss, normaliser, shares, ranks)
    every_token = engine.capabilities.auxiliary != 0
    if merged is None:
        batch = Batch.of(tree, weighted=hasattr(loss, "packed"), every_token=every_token, mask=predicted)
    else:
        batch = MergedBatch.of(tree, merged, every_token=every_token)
    return Begun(tree, batch, loss, whole / ranks.size, every_row(shares), [])


def check_hooks(engine: Any) -> None:
    """Raise UnsupportedModel where hooks would act on what a rank has of gradients that are averaged after them."""
    whole = [] if engine.ranks.alone else [p for p in engine.parameters if not is_shard(p)]
    if any(p._post_accumulate_grad_hooks for p in whole):
        raise UnsupportedModel(
            "weights that every rank holds as a whole have hooks that run after their gradients are accumulated (an "
            "optimiser step within backward?): they would see this rank's gradients before those are averaged. Remove "
            "the hooks and step the optimiser after forward_backward, or shard the model with fully_shard."
        )


def _settings(engine: Any) -> dict[str, Any]:
    """What the ranks of a step must not differ in."""
    if engine.ranks.alone:
        return {}
    weights = [(tuple(p.shape), str(p.dtype), p.requires_grad) for p in engine.parameters]
    return {
        "the temperature": engine.temperature,
        "the kind of engine": type(engine).__name__,
        "the model": f"{type(engine.model).__name__} of {len(weights)} weights",
        # A hash that is the same in every process.
        "the weights' shapes and kinds": hashlib.sha256(repr(weights).encode()).hexdigest()[:16],
        "the auxiliary loss": engine.capabilities.auxiliary,
    }
