"""The batches of TRL's AsyncGRPO, which come as packed trees, as rows of their own length.

TRL folds the samples of a process into a prefix tree and runs it with a kernel for Hopper GPUs. Here the rows are taken
out of the tree again, so that they run wherever the engine does, within its budget, and together with the rows of the
step's other micro-batches.
"""

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from treetrain.trainers.batch_rows import IGNORED

TREE_INDEX = ("tree_kv_index", "tree_cu_seqlens_q", "tree_cu_seqlens_k")
ATTENTION = "tree_fa3"
"""Name of the attention that TRL gives the model of an `AsyncGRPOTrainer`."""
KEYWORDS = {*TREE_INDEX, "tree_max_seqlen_q", "tree_max_seqlen_k", "shift_labels"}


class PackedTreeRows(NamedTuple):
    """The rows of a packed tree of N tokens."""

    ids: list[np.ndarray]
    masks: list[np.ndarray]
    """bool [L_k - 1]: the predictions that are wanted."""
    positions: list[np.ndarray]
    """int64 [L_k]: where each token of a row stands in the tree."""
    wanted: Tensor
    """bool [1, N]: the tokens after which something is predicted, on the device of the labels."""

    def batch(self, rows: list[Tensor] | None) -> Tensor | None:
        """Per-prediction rows as [1, N]: each at the token it is made from, 0 after the last of a row."""
        if rows is None:
            return None
        places, first = np.unique(np.concatenate([row[:-1] for row in self.positions]), return_index=True)
        found = torch.cat(rows)
        index = torch.from_numpy(first).to(found.device)
        packed = found.new_zeros(self.wanted.shape[1])
        packed = packed.index_copy(0, torch.from_numpy(places).to(found.device), found[index])
        return packed[None].to(self.wanted.device)


def rows_of_packed_tree(kwargs: dict[str, Any]) -> PackedTreeRows:
    """The rows of a call of the model by `AsyncGRPOTrainer.compute_loss`.

    Args:
        kwargs: of the call; see `TreeRow.pack` in trl/experimental/async_grpo/packing.py.
    """
    tokens, labels = (kwargs[name][0].cpu().numpy() for name in ("input_ids", "shift_labels"))
    index, starts, path_starts = (kwargs[name].cpu().numpy().astype(np.int64) for name in TREE_INDEX)
    paths = np.split(index, path_starts[1:-1])
    own = np.diff(starts)
    parents = {int(path[-length - 1]) for path, length in zip(paths, own) if len(path) > length}
    # Every sample ends in a segment of its own, which none continues.
    positions = [path for path in paths if int(path[-1]) not in parents]
    return PackedTreeRows(
        ids=[tokens[path] for path in positions],
        masks=[labels[path[:-1]] != IGNORED for path in positions],
        positions=positions,
        wanted=kwargs["shift_labels"] != IGNORED,
    )


def packed_tree_of(batch: dict[str, Any]) -> dict[str, Any]:
    """What the trainer calls its model with for one of its micro-batches."""
    real = batch["attention_mask"].bool()
    inputs = {name: batch[name][real][None] for name in ("input_ids", "shift_labels")}
    return inputs | {name: batch[name][batch[name] >= 0] for name in TREE_INDEX}
