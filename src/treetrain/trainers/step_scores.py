"""The scores of an optimizer step: micro-batches in one tree, and the gradients that wait for its backward.

Gradient accumulation separates rows that share a prefix: TRL's GRPO shuffles its completions over micro-batches, and
with four of them a speed-up of 5x becomes 1.5x. But the weights change only at the optimizer step, and the trainer has
all micro-batches of a step before it trains the first. So the model's first call scores all of them. Every micro-batch
computes its own loss from its own rows, as usual. The tree's backward runs once, after the training step of its last
micro-batch.

Exactness does not depend on this order. What was scored ahead of time for a micro-batch answers its first call alone,
and only while the model is what it was then: weights, buffers, settings, hooks, forwards and classes are compared. Any
other call is scored when it is made, from its own rows; so are unexpected rows, and all calls of a model with hooks or
forwards that users have put on it, which may read what differs between micro-batches. If gradients are needed earlier,
those that have arrived run through the tree, and later micro-batches are scored again.

Who keeps the scores, with all graphs of their tree? Before a backward the graph of the loss does, and the step if later
micro-batches need them: a loss that is thrown away frees them. From a backward on, `StepScores.waiting` does.
"""

import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from transformers import Trainer

from treetrain.core.engine.ranks import Ranks
from treetrain.core.tree.token_tree import TokenTree
from treetrain.trainers.batches import ModelInputs, Rows, model_inputs, tree_of

if TYPE_CHECKING:
    from treetrain.core.engine.model_state import ScoredModel
    from treetrain.core.engine.score import Scored
    from treetrain.engine import TreeEngine

CUTS = 2
"""Micro-batches are scored together until so many joint trees were cut, because gradients were needed early."""
WORTH_JOINING = 0.9
"""Micro-batches are scored as one tree if it has at most this share of the tokens of their separate trees. The joint
graphs need more memory; if they do not fit, the forward runs twice."""


class Ask(NamedTuple):
    """The model and the settings that a call asks with."""

    model: int
    """The identity of the model."""
    head: Hashable
    """The settings of the scores."""
    gradients: bool
    autocast: tuple[bool, torch.dtype]

    @classmethod
    def of(cls, model: nn.Module, head: Hashable, device: str) -> "Ask":
        """A call that is made now."""
        autocast = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
        return cls(id(model), head, torch.is_grad_enabled(), autocast)


@dataclass(eq=False)
class TreeScores:
    """The rows of one or several micro-batches as one tree, and its scores."""

    first: int
    """The number of the first of these micro-batches in its step."""
    batches: Sequence[Rows]
    ask: "Ask | None" = None
    """The calls that it may answer."""
    scored: "Scored | None" = None
    """None until the tree is scored."""
    model: "ScoredModel | None" = None
    """The model as it was when it scored several micro-batches."""
    answered: set[int] = field(default_factory=set)
    """The micro-batches whose first call was answered."""
    within: Callable[[], AbstractContextManager[object]] = nullcontext
    """Makes the context in which the model has scored the tree, for its backward."""

    @property
    def last(self) -> int:
        """The number of the last of these micro-batches."""
        return self.first + len(self.batches) - 1

    @cached_property
    def tree(self) -> TokenTree:
        """All rows."""
        return tree_of(self.batches)

    @property
    def masks(self) -> list[np.ndarray]:
        """The wanted predictions of all rows."""
        return [mask for rows in self.batches for mask in rows.masks]

    def has(self, number: int, rows: Rows) -> bool:
        """Whether these are the rows of this micro-batch."""
        return self.first <= number <= self.last and _equal(self.batches[number - self.first], rows)

    def rows_of(self, number: int) -> slice:
        """The rows of this micro-batch among all."""
        begin = sum(len(rows.ids) for rows in self.batches[: number - self.first])
        return slice(begin, begin + len(self.batches[number - self.first].ids))

    def score(self, engine: "TreeEngine", by: "Callable[[TreeEngine, TreeScores], Scored]") -> "Scored":
        """Score the tree, and remember the model if the scores are for other micro-batches too."""
        from treetrain.core.engine.model_state import ScoredModel

        before, joint = None, self.last > self.first
        if joint and not (torch.is_grad_enabled() and any(p.requires_grad for p in engine.model.parameters())):
            engine.prepared.check()
            before = ScoredModel(engine.prepared)
        self.scored = by(engine, self)
        if before is not None:
            before.leave_out_changes()
        self.model = (before or self.scored.model) if joint else None
        return self.scored

    @cached_property
    def tokens(self) -> tuple[int, int]:
        """Tokens of the tree, and of the separate trees of its micro-batches."""
        offsets, tokens = self.tree.paths()
        ends = offsets[np.cumsum([len(rows.ids) for rows in self.batches])]
        return self.tree.num_tokens, sum(len(np.unique(own)) for own in np.split(tokens, ends[:-1]))


def _equal(one: Rows, other: Rows) -> bool:
    pairs = (one.ids, other.ids), (one.masks, other.masks), (one.asked, other.asked)
    images, others = ([[image.digest for image in own] for own in rows.images] for rows in (one, other))
    routed, routes = ([None if x is None else x.tolist() for x in rows.experts] for rows in (one, other))
    return (
        images == others
        and routed == routes
        and list(one.kept) == list(other.kept)
        and all(len(a) == len(b) and all(map(np.array_equal, a, b)) for a, b in pairs)
    )


@dataclass(eq=False)
class Step:
    """All that is known of one optimizer step. The next step gets a new one, so that nothing has to be reset."""

    batches: Sequence[dict[str, Tensor]] = ()
    """Its micro-batches, as `Trainer.get_batch_samples` returns them; empty if they are not known."""
    number: int = -1
    """The number of the micro-batch that was trained last, or is being trained."""
    training: bool = False
    """Whether a micro-batch is being trained now."""
    trees: list[TreeScores] = field(default_factory=list)
    """Trees of several micro-batches."""
    complete: bool = False
    """Whether the last micro-batch has ended, so that gradients are those of all processes."""

    @contextmanager
    def micro_batch(self) -> Iterator[None]:
        """The next micro-batch is trained inside the block."""
        self.number, self.training, self.complete = self.number + 1, True, False
        try:
            yield
        finally:
            self.training = False

    def end(self) -> None:
        """End the step, after its last micro-batch."""
        self.trees, self.complete = [], True


class Arrivals(NamedTuple):
    """The gradients that one rank has at the scores of a tree."""

    arrived: bool
    """Whether a backward has reached the scores."""
    waiting: bool
    """Whether gradients wait for the tree's backward; ``zero_grad`` may have dropped those that have arrived."""
    set_anew: bool
    """Whether the trainer has set some parameters' gradients anew while those of the others wait."""
    ended: bool
    """Whether no more gradients are expected, or those that have come are needed now."""


def decided(arrivals: Sequence[Arrivals], *, expected: bool) -> Literal["backward", "wait", "drop"]:
    """Decide what happens to a tree next, the same on all ranks that run its passes together.

    Args:
        arrivals: of each of these ranks.
        expected: whether gradients are still expected where none have arrived.
    """
    ended = all(rank.ended for rank in arrivals)
    if any(rank.waiting for rank in arrivals):
        return "backward" if ended or any(rank.set_anew for rank in arrivals) else "wait"
    dropped = any(rank.arrived for rank in arrivals)  # what is still to come is expected all the same
    return "drop" if dropped or (ended and not expected) else "wait"


class StepScores:
    """Finds the tree that a call of the model is answered from, and runs gradients through it.

    Args:
        trainer: a `transformers.Trainer`.
        rows_of: the rows in the arguments of a call.
    """

    def __init__(self, trainer: Trainer, rows_of: Callable[[ModelInputs], Rows]) -> None:
        self._trainer, self._rows_of = trainer, rows_of
        self.step = Step()
        self.all_ranks = Ranks()
        """The processes whose rows make up a step."""
        self.ranks = Ranks()
        """The processes that run every pass of the model together with this one, where weights are sharded. They score
        the same micro-batches as one tree, and run the same trees backward, in the same order."""
        self.waiting: list[TreeScores] = []
        """Scores that a backward has reached, and whose gradients have not gone through their tree. If `ranks` are
        several, also scores that a backward may still reach."""
        self._cuts = 0  # joint trees that did not serve their last micro-batch

    def begin_step(self, batches: Sequence[dict[str, Tensor]]) -> None:
        """Set the micro-batches of the next optimizer step."""
        self.step = Step(list(batches))

    def scores_for(self, ask: Ask, rows: Rows, *, together: bool = True) -> tuple[TreeScores, slice]:
        """The tree to answer a call from, which may have been scored already, and the slice of its rows that these are.

        Args:
            together: False for this micro-batch alone, for losses over a whole batch such as the routers', and for
                models with hooks of users.
        """
        joint = None
        # All ranks of `ranks` have the same settings, and have cut the same trees, so they decide alike here.
        if together and self.step.training and self._cuts < CUTS:
            joint = self._joint_scores(ask, rows)
        scores = TreeScores(self.step.number, [rows]) if joint is None else joint
        scores.answered.add(self.step.number)
        return scores, scores.rows_of(self.step.number)

    def _joint_scores(self, ask: Ask, rows: Rows) -> TreeScores | None:
        """The scores of these rows and those of other micro-batches in one tree; a collective call of `ranks`.

        None if this is not the first call for them, if the ranks have other micro-batches, or if the tree is hardly
        smaller than those of its micro-batches.
        """
        step = self.step
        known = [tree for tree in step.trees if tree.ask == ask and tree.has(step.number, rows)]
        scores = next((tree for tree in known if tree.model is None or tree.model.change() is None), None)
        # The model was another one when these were scored ahead.
        stale = scores is None and any(step.number not in tree.answered for tree in known)
        if scores is None:
            scores = TreeScores(step.number, self._following(rows), ask)
            step.trees.append(scores)
        several = scores.last > scores.first
        with self.ranks.together("the scores of a micro-batch"):
            batches = scores.first, scores.last, scores.scored is None, step.number in scores.answered
            answers = self.ranks.exchange((batches, stale, scores.tokens if several else (0, 0)))
        if any(was_stale for _, was_stale, _ in answers):
            self._cut(
                "the model changes between the micro-batches of a step (weights, settings, hooks), so they do not "
                "share prefixes with each other any more; results are exact"
            )
        if not several or batches[-1] or any(other != batches for other, _, _ in answers):
            return None
        joint, apart = (sum(tokens) for tokens in zip(*(counts for _, _, counts in answers)))
        return scores if joint <= WORTH_JOINING * apart else None

    def keeping(self, scores: TreeScores, output: Tensor) -> Tensor:
        """The output, which is computed from the leaves of these scores; its graph keeps them until a backward."""
        if self.ranks.alone:
            return _Keeps.apply(output, scores, self.waiting)
        # A rank whose loss has no gradient runs this tree backward with the others.
        if scores.scored is not None and scores.scored.live and scores not in self.waiting:
            self.waiting.append(scores)
        return output.clone()

    def drop_failed(self) -> None:
        """Forget what backwards have left that failed; for moments at which none is running."""
        for scores in list(self.waiting):
            if scores.scored is not None and not scores.scored.deferral.arrived:
                scores.scored.drop_gradients()
                if self.ranks.alone:
                    self.waiting.remove(scores)

    @property
    def gradients_wait(self) -> bool:
        """Whether gradients have arrived that have not gone through their trees."""
        return any(scores.scored.deferral.arrived for scores in self.waiting if scores.scored is not None)

    def settle(self, *, everything: bool, sync: bool = False) -> "list[Scored]":
        """Run gradients that wait through their trees; returns the `Scored` of these trees.

        Args:
            everything: also trees from which more gradients are expected. Such rows are then scored again.
            sync: with `ranks`, reduce the gradients over them.
        """
        done = []
        for scores in list(self.waiting):
            if (scored := scores.scored) is None:
                continue
            arrivals = self._arrivals(scores, scored, ended=everything or self._has_ended(scores))
            outcome = decided(arrivals, expected=self.ranks.alone or self.step.training)
            if outcome == "wait":
                continue
            self.waiting.remove(scores)
            if outcome == "drop":
                scored.drop_gradients()
            else:
                self._run_backward(scores, scored, sync=sync)
                done.append(scored)
        return done

    def _arrivals(self, scores: TreeScores, scored: "Scored", *, ended: bool) -> list[Arrivals]:
        """The gradients that each of `ranks` has at the scores of a tree; a collective call of them."""
        deferral = scored.deferral
        waiting = deferral.waiting() if deferral.arrived else []
        set_anew = 0 < len(waiting) < len(deferral.parameters)
        with self.ranks.together("the backward of the step's trees"):
            return self.ranks.exchange(Arrivals(deferral.arrived, bool(waiting), set_anew, ended))

    def _run_backward(self, scores: TreeScores, scored: "Scored", *, sync: bool) -> None:
        """Run a tree backward, and forget its scores, so that later micro-batches are scored again."""
        self.step.trees = [tree for tree in self.step.trees if tree is not scores]
        self._count_cut(scores)
        with scores.within():
            if not (scored.deferral.arrived and scored.deferral.waiting()):
                scored.zero_gradients()  # other ranks have some
            try:
                scored.backward(sync=sync)
            except RuntimeError as error:
                if not scored.model_has_changed:
                    raise
                raise RuntimeError(
                    f"{error}. It must not change before the trees of a step have run backward: after the last "
                    "micro-batch for a tree with rows of other micro-batches, and after training_step where several "
                    "processes train. In one process with gradient_accumulation_steps=1 they run within "
                    "loss.backward()"
                ) from error

    def _has_ended(self, scores: TreeScores) -> bool:
        """Whether no more gradients are expected: the model may be called for a joint tree again in a micro-batch."""
        step, joint = self.step, any(scores is tree for tree in self.step.trees)
        return scores.last < step.number or (scores.last == step.number and not (step.training and joint))

    def _count_cut(self, scores: TreeScores) -> None:
        if scores.last > self.step.number:
            self._cut(
                "gradients are read, clipped or changed between the micro-batches of a step, so micro-batches do not "
                "share prefixes with each other any more; results are exact. Do it after the last micro-batch "
                "(on_pre_optimizer_step) or take larger micro-batches to share more"
            )

    def _cut(self, why: str) -> None:
        self._cuts += 1
        if self._cuts == CUTS:
            warnings.warn(why, stacklevel=2)

    def _following(self, rows: Rows) -> list[Rows]:
        """These rows and those of the following micro-batches, as far as they are known; else only these."""
        trainer: Any = self._trainer  # one of TRL, if it generates
        batches = self.step.batches[self.step.number :]
        if hasattr(trainer, "_buffered_inputs"):  # its first completions are scored before they are split
            each = trainer.args.steps_per_generation
            left = each * trainer.num_iterations - trainer._step % (each * trainer.num_iterations)
            buffered, numbers = trainer._buffered_inputs, range(trainer._step, trainer._step + min(len(batches), left))
            batches = [] if buffered is None else [buffered[number % each] for number in numbers]
        known = [inputs for inputs in map(model_inputs, batches) if inputs is not None]
        if not known:
            return [rows]
        # A loss of the user's own may have taken the labels out of its batch.
        for drop in ((), ("labels",)):
            first, *others = ({name: x for name, x in inputs.items() if name not in drop} for inputs in known)
            if _equal(self._rows_of(first), rows):
                return [rows, *map(self._rows_of, others)]
        return [rows]


class _Keeps(torch.autograd.Function):
    """The identity, whose node in the graph keeps the scores that the input was computed from."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, scores: TreeScores, waiting: list[TreeScores]) -> Tensor:
        ctx.scores, ctx.waiting = scores, waiting
        return output.clone()  # a view could not be changed in place, which the plain output can be

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        if ctx.scores not in ctx.waiting:
            ctx.waiting.append(ctx.scores)
        return gradient, None, None
