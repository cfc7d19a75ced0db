"""Log-probabilities of rows that a run computes itself, by row number, until they are not needed any more."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from treetrain.data.trajectory import Trajectory
from treetrain.engine.engine import TreeEngine
from treetrain.train.batches import Int64s
from treetrain.train.spread import logprobs


class RowScores:
    """Log-probabilities under one policy, of some rows of a run; a part of its state.

    Args:
        fact: the field of a trajectory that they become.
    """

    def __init__(self, fact: str) -> None:
        self.fact = fact
        self._scores: dict[int, NDArray[np.floating]] = {}

    def __len__(self) -> int:
        """Rows."""
        return len(self._scores)

    def missing(self, numbers: Int64s) -> Int64s:
        """Those of the rows that have none yet."""
        return np.array([number for number in numbers.tolist() if number not in self._scores], np.int64)

    def compute(self, engine: TreeEngine, rows: Sequence[Trajectory], numbers: Int64s) -> None:
        """Score rows under the engine's model as it is now, without gradient, with the numerics of training.

        Args:
            rows: all rows of the run.
            numbers: of those to score, in one call, shared by the engine's ranks.
        """
        members = [rows[number] for number in numbers.tolist()]
        for number, scores in zip(numbers.tolist(), logprobs(engine, members), strict=True):
            self._scores[number] = scores.cpu().numpy()

    def attached(self, row: Trajectory, number: int) -> Trajectory:
        """The row with its log-probabilities."""
        values = np.zeros(len(row))
        # An untrained token may be impossible under the policy; no loss reads it.
        values[1:] = np.where(row.weights[1:] != 0, self._scores[number], 0.0)
        return row.replace(**{self.fact: values})

    def clear(self) -> None:
        """Forget all of them."""
        self._scores.clear()

    def state_dict(self) -> dict[str, Any]:
        """All of them, end to end."""
        arrays = list(self._scores.values())
        return {
            "numbers": torch.tensor(list(self._scores), dtype=torch.int64),
            "lengths": torch.tensor([len(array) for array in arrays], dtype=torch.int64),
            "values": torch.from_numpy(np.concatenate(arrays)) if arrays else torch.zeros(0),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with these."""
        ends = torch.cumsum(state["lengths"], 0)[:-1].numpy()
        arrays = np.split(state["values"].numpy().copy(), ends) if len(state["numbers"]) else []
        self._scores = dict(zip(state["numbers"].tolist(), arrays, strict=True))
