"""Everything that can be wrong with a step, found on every rank before any of them begins."""

import hashlib
from collections.abc import Sequence
from typing import Any, NamedTuple

from treetrain.data.trajectory import Trajectory
from treetrain.engine.batch import Batch, check_batch, predictions_of
from treetrain.engine.checks import check_trainable
from treetrain.engine.lockstep import Reduces
from treetrain.engine.loss import PackedLoss, as_loss, check_count, needs_logprobs
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
    loss: PackedLoss
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

    def checked() -> tuple[tuple[TokenTree, PackedLoss, Any, Any], Share]:
        packed = as_loss(loss, normaliser)
        engine.prepare(logprobs=needs_logprobs(packed), values="predicted_values" in packed.needs)
        check_trainable(engine.parameters)
        check_hooks(engine)
        tree = as_tree(trajectories, merge=merge)
        check_batch(tree, engine.capabilities)
        check_count(packed, tree)
        # A tree of nodes stays unflattened where the loss can bear it.
        merged = tree.merged(packed.reduction) if mask is None and packed.mergeable else None
        predicted = predictions_of(tree, mask)
        return (tree, packed, merged, predicted), share_of(tree, merged, packed, normaliser, _settings(engine), ranks)

    (tree, packed, merged, predicted), shares = ranks.agree("forward_backward", checked)
    packed, whole = whole_step(tree, merged, packed, normaliser, shares, ranks)
    every_token = engine.capabilities.auxiliary != 0
    if merged is None:
        batch = Batch.of(tree, weighted=not packed.reads_untrained, every_token=every_token, mask=predicted)
    else:
        batch = MergedBatch.of(tree, merged, every_token=every_token)
    return Begun(tree, batch, packed, whole / ranks.size, every_row(shares), [])


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
