"""The micro-batches of an optimizer step, scored as one tree.

Gradient accumulation separates rows that share a prefix: TRL's GRPO shuffles its completions over the micro-batches,
and with four of them a speed-up of 5x becomes 1.5x. But the weights change only at the optimizer step, and the trainer
has all micro-batches of a step before it trains the first. So the model's first call scores all of them. Every
micro-batch computes its own loss from its own rows, as usual. The tree's backward runs once, after the backward of its
last micro-batch. The engine's budget bounds the graphs that are alive.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from treetrain.trainers.batches import Rows, model_inputs, tree_of
from treetrain.tree.token_tree import TokenTree

WORTH_JOINING = 0.9
"""Micro-batches are scored as one tree if it has at most this share of the tokens of their separate trees: its graphs
need more memory, and if they do not fit, its forward runs twice."""

Run = Callable[[TokenTree, list[np.ndarray]], Any]
"""Scores a tree, given the masks of its rows; returns a `Scored`."""


class _Joint(NamedTuple):
    """Micro-batches that were scored together."""

    scored: Any
    rows: list[Rows]
    first: int
    """Number of its first micro-batch within the optimizer step."""

    def of(self, number: int) -> tuple[Any, slice]:
        """The scores, and which rows of them are those of one micro-batch."""
        begin = sum(len(rows.ids) for rows in self.rows[:number])
        return self.scored, slice(begin, begin + len(self.rows[number].ids))


class StepScores:
    """Scores the micro-batches of an optimizer step together and returns to each the scores of its rows.

    Unexpected rows are scored by themselves, which is as exact.

    Args:
        trainer: the trainer whose micro-batches these are.
        rows_of: the rows of a micro-batch, from the keyword arguments that the trainer calls its model with.
    """

    def __init__(self, trainer: Any, rows_of: Callable[[dict[str, Any]], Rows]) -> None:
        self._trainer, self._rows_of = trainer, rows_of
        self.begin_step([])

    def begin_step(self, batches: Sequence[Any]) -> None:
        """Set the micro-batches of the next optimizer step, as `Trainer.get_batch_samples` returns them."""
        self._batches, self._position = list(batches), -1
        self._expected: list[Rows] = []
        self._first_expected = 0
        self._joint: dict[Any, _Joint] = {}
        self._apart: set[Any] = set()  # keys that are not worth a joint tree
        self._waiting: list[tuple[Any, int]] = []

    def next_micro_batch(self) -> None:
        """Go on to the next micro-batch."""
        self._position += 1

    def score(self, key: Hashable, rows: Rows, run: Run, *, together: bool = True) -> tuple[Any, slice]:
        """Score the rows of a model call.

        Args:
            key: the model that is called, and its settings.
            rows: of the call.
            run: scores a tree of rows, given their masks.
            together: False scores them by themselves, for losses over a whole batch such as that of routers.

        Returns:
            a `Scored`, and which of its rows these are.
        """
        key = (key, torch.is_grad_enabled())
        joint = self._joint.get(key) if together else None
        number = -1 if joint is None else self._position - joint.first
        in_joint = joint is not None and 0 <= number < len(joint.rows)
        if joint is not None and in_joint and _equal(joint.rows[number], rows):
            return joint.of(number)
        batches = self._expected_rows() if together and not in_joint and key not in self._apart else []
        if not (batches and _equal(batches[0], rows)):
            batches, self._expected = [rows], []  # a generation may be running, with other rows
        tree = _tree_of(batches)
        if len(batches) > 1 and not _shares(tree, batches):
            batches = [rows]
            self._apart.add(key)
            tree = _tree_of(batches)
        scored = run(tree, [mask for rows in batches for mask in rows.masks])
        joint = _Joint(scored, batches, self._position)
        if len(batches) > 1:
            self._joint[key] = joint
        if torch.is_grad_enabled():
            self._waiting.append((scored, self._position + len(batches) - 1))
        return joint.of(0)

    def backward(self, *, sync: bool) -> list[Any]:
        """Run the backward of all trees whose last micro-batch this was; returns their `Scored`.

        Args:
            sync: this is the last micro-batch of the optimizer step: average gradients over the processes.
        """
        due = [scored for scored, last in self._waiting if last <= self._position]
        self._waiting = [(scored, last) for scored, last in self._waiting if last > self._position]
        for scored in due:
            scored.backward(sync=sync and scored is due[-1])
        return due

    def _expected_rows(self) -> list[Rows]:
        """Rows of this and the following micro-batches of the step, as far as they are known."""
        position = max(self._position, 0)
        if not self._expected:
            batches = self._batches[position:]
            if hasattr(self._trainer, "_buffered_inputs"):
                batches = self._generated(len(batches))
            known = [inputs for inputs in map(model_inputs, batches) if inputs is not None]
            self._expected, self._first_expected = [self._rows_of(inputs) for inputs in known], position
        return self._expected[position - self._first_expected :]

    def _generated(self, count: int) -> list[Any]:
        """The next micro-batches of a trainer that generates them, up to its next generation."""
        trainer = self._trainer
        if trainer._buffered_inputs is None:  # it scores its first completions before it has made micro-batches of them
            return []
        each, step = trainer.args.steps_per_generation, trainer._step
        left = each * trainer.num_iterations - step % (each * trainer.num_iterations)
        return [trainer._buffered_inputs[(step + ahead) % each] for ahead in range(min(count, left))]


def _tree_of(batches: list[Rows]) -> TokenTree:
    return tree_of([ids for rows in batches for ids in rows.ids], [mask for rows in batches for mask in rows.masks])


def _shares(tree: TokenTree, batches: list[Rows]) -> bool:
    """Whether micro-batches share enough with each other to be scored as one tree."""
    offsets, tokens = tree.paths()
    ends = offsets[np.cumsum([len(rows.ids) for rows in batches])]
    apart = sum(len(np.unique(own)) for own in np.split(tokens, ends[:-1]))
    return tree.num_tokens <= WORTH_JOINING * apart


def _equal(one: Rows, other: Rows) -> bool:
    pairs = (one.ids, other.ids), (one.masks, other.masks)
    return all(len(a) == len(b) and all(map(np.array_equal, a, b)) for a, b in pairs)
