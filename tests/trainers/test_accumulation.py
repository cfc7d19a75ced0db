"""The micro-batches of an optimizer step are scored together, each gets its own rows, and the backward comes once."""

import weakref
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from treetrain.core.engine.deferred import Deferral
from treetrain.trainers.batches import Rows, model_inputs
from treetrain.trainers.step_scores import Arrivals, StepScores, TreeScores, decided


def rows_of(inputs):
    """Every row of a batch without padding, all predictions wanted."""
    ids = [np.array(row) for row in inputs["input_ids"].tolist()]
    return Rows(ids, [np.ones(len(row) - 1, bool) for row in ids], [], torch.empty(0))


class Tree:
    """Stands for `Scored`: a score is a token's id; the parameter gets the sum of the leaves' gradients."""

    def __init__(self, ids, note, weight):
        self.logprobs = [torch.tensor(row[1:], dtype=torch.float32, requires_grad=True) for row in ids]
        self.deferral, self.note, self.weight = Deferral("a tree", [weight]), note, weight
        self.deferral.watch(self.logprobs, refuse=False)

    def drop_gradients(self):
        self.deferral.forget()

    def backward(self, sync):
        assert not sync
        arrived = sum(float(leaf.grad.sum()) for leaf in self.logprobs if leaf.grad is not None)
        with self.deferral.lifted():
            (arrived * self.weight).backward()
        self.note()


class Scores:
    """Stands for the engine; notes what it was asked and the order of the trees' backwards."""

    def __init__(self):
        self.asked, self.log, self.weight = [], [], nn.Parameter(torch.ones(()))
        self.made = []

    def of(self, steps, key, rows, **options):
        """The leaves of a call's rows, as `PrefixSharing` gets them."""
        if torch.is_grad_enabled():
            steps.settle(everything=False)
        scores, own = steps.scores_for(key, rows, **options)
        if scores.scored is None:
            scores.scored = self.run(scores.tree)
        return [steps.keeping(scores, leaf) for leaf in scores.scored.logprobs[own]]

    def run(self, tree):
        ids = [row.ids for row in tree.trajectories]
        self.asked.append([row.tolist() for row in ids])
        number = len(self.asked) - 1
        self.made.append(Tree(ids, lambda: self.log.append(number), self.weight))
        return self.made[-1]


def batch(*rows):
    return {"input_ids": torch.tensor(rows)}


FIRST, SECOND, THIRD = batch([5, 6, 7], [5, 6, 8]), batch([5, 6, 9], [1, 2, 3]), batch([5, 6, 4], [4, 4, 4])


@pytest.fixture
def scores():
    return Scores()


def steps_with(batches, scores, trainer=None):
    steps = StepScores(trainer or SimpleNamespace(), rows_of)
    steps.begin_step(batches)
    return steps


def ask(steps, scores, inputs, **options):
    return scores.of(steps, "model", rows_of(inputs), **options)


def train(steps, scores, inputs, *, last=False, **options):
    """A training step whose loss is the sum of the scores."""
    with steps.step.micro_batch():
        found = ask(steps, scores, inputs, **options)
        sum(row.sum() for row in found).backward()
    steps.settle(everything=last)
    if last:
        steps.step.end()
    return found


def predictions(*batches):
    """How many predictions some micro-batches have: the gradient that the parameter should get."""
    return sum(inputs["input_ids"][:, 1:].numel() for inputs in batches)


def test_all_micro_batches_of_a_step_are_scored_at_once_and_run_backward_once_after_the_last(scores):
    steps = steps_with([FIRST, SECOND, THIRD], scores)
    for inputs in (FIRST, SECOND, THIRD):
        assert scores.log == []
        found = train(steps, scores, inputs, last=inputs is THIRD)
        assert [row.tolist() for row in found] == inputs["input_ids"][:, 1:].tolist()
    assert len(scores.asked) == 1 and len(scores.asked[0]) == 6
    assert scores.log == [0] and scores.weight.grad == predictions(FIRST, SECOND, THIRD)


def test_the_next_step_is_scored_anew(scores):
    steps = steps_with([FIRST, SECOND], scores)
    for _ in range(2):
        steps.begin_step([FIRST, SECOND])
        for inputs in (FIRST, SECOND):
            train(steps, scores, inputs, last=inputs is SECOND)
    assert len(scores.asked) == 2 and scores.log == [0, 1]


def test_rows_that_come_otherwise_than_foreseen_are_scored_by_themselves(scores):
    steps = steps_with([FIRST, SECOND], scores)
    with steps.step.micro_batch():
        unforeseen = ask(steps, scores, THIRD)
        assert [row.tolist() for row in unforeseen] == [[6, 4], [4, 4]]
        foreseen = ask(steps, scores, FIRST)
        assert [len(rows) for rows in scores.asked] == [2, 4]
        sum(row.sum() for row in [*unforeseen, *foreseen]).backward()
    assert len(steps.settle(everything=False)) == 1
    with steps.step.micro_batch():
        sum(row.sum() for row in [*ask(steps, scores, THIRD), *ask(steps, scores, SECOND)]).backward()
    assert [len(rows) for rows in scores.asked] == [2, 4, 2]
    steps.settle(everything=True)
    assert scores.log == [0, 1, 2] and scores.weight.grad == predictions(THIRD, FIRST, THIRD, SECOND)


def test_another_mask_is_another_question(scores):
    steps = steps_with([FIRST, SECOND], scores)
    train(steps, scores, FIRST)
    with steps.step.micro_batch():
        rows = rows_of(SECOND)
        scores.of(steps, "model", rows._replace(masks=[~mask for mask in rows.masks]))
    assert [len(rows) for rows in scores.asked] == [4, 2]


def test_scores_without_gradient_and_those_of_a_reference_are_their_own(scores):
    steps = steps_with([FIRST, SECOND], scores)
    for inputs in (FIRST, SECOND):
        with steps.step.micro_batch():
            sum(row.sum() for row in ask(steps, scores, inputs)).backward()
            with torch.no_grad():
                if inputs is FIRST:
                    ask(steps, scores, inputs)
                scores.of(steps, "reference", rows_of(inputs))
        assert len(scores.asked) == 3
    steps.settle(everything=True)
    assert scores.log == [0]


def test_what_depends_on_the_whole_batch_is_scored_alone(scores):
    steps = steps_with([FIRST, SECOND], scores)
    for inputs in (FIRST, SECOND):
        train(steps, scores, inputs, together=False)
    assert [len(rows) for rows in scores.asked] == [2, 2] and scores.log == [0, 1]


def test_without_a_loop_that_names_its_micro_batches_each_is_scored_alone(scores):
    steps = StepScores(SimpleNamespace(), rows_of)
    for inputs in (FIRST, SECOND):
        train(steps, scores, inputs)
    assert [len(rows) for rows in scores.asked] == [2, 2] and scores.log == [0, 1]


def test_several_trees_of_a_micro_batch_are_not_alive_at_once(scores):
    steps = steps_with([FIRST], scores)
    with steps.step.micro_batch():
        for number, inputs in enumerate((FIRST, SECOND, THIRD)):
            found = ask(steps, scores, inputs)
            assert scores.log == list(range(number))
            sum(row.sum() for row in found).backward()


def test_gradients_that_are_needed_early_run_through_the_tree_and_the_rest_is_scored_again(scores):
    steps = steps_with([FIRST, SECOND, THIRD], scores)
    train(steps, scores, FIRST)
    steps.settle(everything=True)
    assert scores.log == [0] and scores.weight.grad == predictions(FIRST)
    train(steps, scores, SECOND)
    train(steps, scores, THIRD, last=True)
    assert [len(rows) for rows in scores.asked] == [6, 4]
    assert scores.log == [0, 1] and scores.weight.grad == predictions(FIRST, SECOND, THIRD)


def test_trees_that_are_cut_again_and_again_are_made_no_more(scores):
    steps = steps_with([], scores)
    with pytest.warns(UserWarning, match="between the micro-batches"):
        for _ in range(3):
            steps.begin_step([FIRST, SECOND])
            for inputs in (FIRST, SECOND):
                train(steps, scores, inputs, last=inputs is SECOND)
                steps.settle(everything=True)
    assert [len(rows) for rows in scores.asked] == [4, 2, 4, 2, 2, 2]


def test_dropped_gradients_are_not_trained_and_the_tree_goes_on(scores):
    steps = steps_with([FIRST, SECOND], scores)
    train(steps, scores, FIRST)
    scores.weight.grad = None
    train(steps, scores, SECOND, last=True)
    assert len(scores.asked) == 1 and scores.weight.grad == predictions(SECOND)


def generated(prompt, *completions):
    """A micro-batch as GRPO buffers it."""
    ones, completions = torch.ones(len(completions), len(prompt), dtype=torch.long), torch.tensor(completions)
    return {
        "prompt_ids": torch.tensor(prompt) * ones,
        "prompt_mask": ones,
        "completion_ids": completions,
        "completion_mask": torch.ones_like(completions),
    }


@pytest.mark.parametrize("step, known", [(0, [0, 1, 2]), (2, [2, 3, 0]), (6, [2, 3]), (7, [3])])
def test_generated_micro_batches_are_known_up_to_the_next_generation(scores, step, known):
    # Two passes over four micro-batches: the eighth step generates anew.
    buffered = [generated([5, 6], [number]) for number in range(4)]
    trainer = SimpleNamespace(
        args=SimpleNamespace(steps_per_generation=4), num_iterations=2, _step=step, _buffered_inputs=buffered
    )
    steps = steps_with([None] * 3, scores, trainer)
    with steps.step.micro_batch():
        ask(steps, scores, batch([5, 6, known[0]]))
    assert scores.asked == [[[5, 6, number] for number in known]]


def test_completions_alone_are_predicted_and_their_padding_is_not():
    inputs = model_inputs(generated([5, 6], [7, 0]) | {"completion_mask": torch.tensor([[1, 0]])})
    assert inputs["labels"].tolist() == [[-100, -100, 7, -100]]
    assert inputs["attention_mask"].tolist() == [[1, 1, 1, 0]]


def test_micro_batches_that_share_next_to_nothing_are_scored_alone(scores):
    apart = [batch([5, 6, 7], [5, 6, 8]), batch([1, 2, 3], [1, 2, 4])]
    steps = steps_with(apart, scores)
    for inputs in apart:
        train(steps, scores, inputs)
    assert [len(rows) for rows in scores.asked] == [2, 2] and scores.log == [0, 1]


def test_a_loss_that_is_thrown_away_frees_its_tree_and_one_with_a_backward_does_not(scores):
    steps = StepScores(SimpleNamespace(), rows_of)
    found = [ask(steps, scores, FIRST) for _ in range(3)]
    trees = [weakref.ref(tree) for tree in scores.made]
    scores.made.clear()
    loss = sum(row.sum() for row in found[1])
    found.clear()
    assert [tree() is not None for tree in trees] == [False, True, False]
    loss.backward()
    del loss
    assert [tree() is not None for tree in trees] == [False, True, False] and steps.gradients_wait
    assert len(steps.settle(everything=True)) == 1 and scores.weight.grad == predictions(FIRST)
    assert not any(tree() for tree in trees)


def fail(gradient):
    raise ArithmeticError


def test_a_backward_that_fails_half_way_leaves_nothing(scores):
    steps = steps_with([FIRST, SECOND], scores)
    with steps.step.micro_batch():
        one, two = ask(steps, scores, FIRST)
        one.register_hook(fail)  # after the backward of `two`: autograd runs what was made last first
        with pytest.raises(ArithmeticError):
            (one.sum() + two.sum()).backward()
    (tree,) = scores.made
    assert tree.logprobs[1].grad is not None and steps.waiting
    steps.drop_failed()
    assert tree.logprobs[1].grad is None and not steps.waiting
    train(steps, scores, SECOND, last=True)
    assert scores.log == [0] and scores.weight.grad == predictions(SECOND)


def test_a_backward_looks_at_every_parameter_a_few_times(monkeypatch):
    """Not at all of them for each of them."""
    weights, looks = [nn.Parameter(torch.ones(())) for _ in range(50)], []
    deferral = Deferral("a tree", weights)
    hash_ = torch.Tensor.__hash__
    monkeypatch.setattr(torch.Tensor, "__hash__", lambda self: looks.append(0) or hash_(self))
    leaf = torch.ones((), requires_grad=True)
    deferral.watch([leaf], refuse=False)
    scored = SimpleNamespace(deferral=deferral, backward=lambda sync: None, live=True)
    steps = StepScores(SimpleNamespace(), rows_of)
    scores = TreeScores(steps.step.number, [rows_of(FIRST)], scored=scored)
    steps.keeping(scores, leaf).backward()
    weights[0].grad = torch.zeros(())
    assert len(steps.settle(everything=True)) == 1 and len(looks) <= 4 * len(weights)


NOTHING = Arrivals(arrived=False, waiting=False, set_anew=False, ended=False)
SOME = NOTHING._replace(arrived=True, waiting=True)
OUTCOMES = {
    "gradients wait and more are expected": ([SOME], "wait"),
    "the last ones have come": ([SOME._replace(ended=True)], "backward"),
    "another rank expects more": ([SOME._replace(ended=True), SOME], "wait"),
    "some parameters' gradients are new": ([SOME, SOME._replace(set_anew=True)], "backward"),
    "one rank's loss has no gradient": ([SOME._replace(ended=True), NOTHING._replace(ended=True)], "backward"),
    "zero_grad has dropped all": ([NOTHING._replace(arrived=True)], "drop"),
    "no rank's loss has a gradient": ([NOTHING._replace(ended=True)] * 2, "drop"),
    "none have come yet": ([NOTHING], "wait"),
}


@pytest.mark.parametrize("name", OUTCOMES)
def test_all_ranks_do_the_same_with_a_tree(name):
    ranks, outcome = OUTCOMES[name]
    assert decided(ranks, expected=False) == outcome


def test_scores_without_gradients_are_kept_while_these_are_expected():
    assert decided([NOTHING._replace(ended=True)], expected=True) == "wait"
    assert decided([NOTHING._replace(arrived=True, ended=True)], expected=True) == "drop"
