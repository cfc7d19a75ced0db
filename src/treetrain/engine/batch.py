"""From trajectories to packed runs: which trees share a run, which predictions are wanted, who reads which edge."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from treetrain.data.trajectory import Trajectory
from treetrain.engine.groups import nearly_disjoint, whole_trees
from treetrain.errors import DataError
from treetrain.models.capability import Capabilities
from treetrain.tree.build import Row, build_tree
from treetrain.tree.layout import PackedLayout, pack, trained_predictions
from treetrain.tree.token_tree import TokenTree

PART_TOKENS = 8192
"""Tokens of a part where the batch can be cut freely: larger ones were no faster, and take more memory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """Whole trees that are run together, and where their results belong."""

    numbers: list[int]
    """Which trajectories of the batch."""
    trajectories: list[Trajectory]
    tree: TokenTree
    layout: PackedLayout
    used: np.ndarray
    """bool [sum of L_k - 1]: the predictions that are computed."""

    def per_prediction(self, per_edge: Tensor) -> Tensor:
        """[E] -> [T]: what each used prediction reads, in trajectory order."""
        return per_edge.index_select(0, torch.from_numpy(self.layout.flat_edges).to(per_edge.device))

    def per_prediction_entropy(self, per_row: Tensor) -> Tensor:
        """[R] entropies of predicting rows -> [T]."""
        row_of_edge = torch.from_numpy(self.layout.edge_row_index).to(per_row.device)
        return self.per_prediction(per_row.index_select(0, row_of_edge))

    def per_trajectory(self, per_prediction: Tensor) -> list[Tensor]:
        """[T] -> one [L_k - 1] tensor per trajectory; predictions that were not computed hold 0."""
        place = torch.from_numpy(self.layout.flat_index).to(per_prediction.device)
        flat = per_prediction.new_zeros(len(self.used)).index_copy(0, place, per_prediction)
        return list(flat.split([max(len(t) - 1, 0) for t in self.trajectories]))


def as_tree(batch: Sequence[Row] | TokenTree, *, merge: bool) -> TokenTree:
    """The batch as a tree; one that is given is taken as it is."""
    return batch if isinstance(batch, TokenTree) else build_tree(batch, merge=merge)


def check_batch(tree: TokenTree, capabilities: Capabilities) -> None:
    """Every id must be in the vocabulary and every row within the model's positions.

    Raises:
        DataError: naming the trajectory, both values and what to do.
    """
    if tree.num_tokens and int(tree.tokens.max()) >= capabilities.vocab_size:
        token = int(np.argmax(tree.tokens >= capabilities.vocab_size))
        owner = int(np.argmax((tree.trajectory_last >= token) & (tree.trajectory_last < tree.end[token])))
        raise DataError(
            f"{_name(tree, owner)}: token id {tree.tokens[token]} at position {tree.depth[token]} is outside the "
            f"model's vocabulary of {capabilities.vocab_size}; use the tokenizer that belongs to the model."
        )
    longest = capabilities.max_positions
    if longest is not None and tree.num_trajectories and int(tree.trajectory_length.max()) > longest:
        owner = int(tree.trajectory_length.argmax())
        raise DataError(
            f"{_name(tree, owner)} has {tree.trajectory_length[owner]} tokens, the model {longest} positions; "
            "shorten the row or use a model with more positions."
        )


def _name(tree: TokenTree, number: int) -> str:
    row_id = tree.trajectories[number].id
    return f"trajectory {row_id!r}" if row_id is not None else f"trajectory number {number}"


def make_parts(tree: TokenTree, *, budget: int | None, merge: bool, weighted: bool, whole: bool = False) -> list[Part]:
    """Cut a batch into parts.

    Args:
        budget: most tokens in a part, made of whole trees; None cuts nearly disjoint rows to a size that runs well.
        whole: one part in any case: for a loss over several trajectories at once.
        weighted: compute only predictions whose loss weight is not 0; otherwise all of them.

    Raises:
        ValueError: a single tree is larger than the budget; the message names the smallest possible one.
    """
    rows = list(tree.trajectories)
    if whole:
        groups = [list(range(tree.num_trajectories))]
    elif budget is None:
        groups = nearly_disjoint(tree, PART_TOKENS)
    else:
        groups = whole_trees(tree, budget, merge=merge)
    if len(groups) == 1 and len(groups[0]) == tree.num_trajectories:
        return [_make_part(groups[0], rows, tree, weighted)]
    parts = []
    for numbers in groups:
        members = [rows[k] for k in numbers]
        parts.append(_make_part(numbers, members, build_tree(members, merge=merge), weighted))
    return parts


def _make_part(numbers: list[int], rows: list[Trajectory], tree: TokenTree, weighted: bool) -> Part:
    wanted = trained_predictions(rows) if weighted else np.ones(tree.num_flat_tokens, dtype=bool)
    offsets, _ = tree.paths()
    used = np.delete(wanted, offsets[:-1][tree.trajectory_length > 0])
    return Part(numbers=numbers, trajectories=rows, tree=tree, layout=pack(tree, wanted), used=used)
