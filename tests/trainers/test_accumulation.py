"""The micro-batches of an optimizer step are scored together, each gets its own rows, and the backward comes once."""

from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
import torch

from treetrain.trainers.batches import model_inputs
from treetrain.trainers.share_prefixes import StepScores


class Rows(NamedTuple):
    ids: list
    masks: list


def rows_of(inputs):
    """Every row of a batch without padding, all predictions wanted."""
    ids = [np.array(row) for row in inputs["input_ids"].tolist()]
    return Rows(ids, [np.ones(len(row) - 1, bool) for row in ids])


class Scores:
    """Stands for the engine: a score is a token's id; notes what it was asked and when its backward came."""

    def __init__(self):
        self.asked, self.log = [], []

    def run(self, tree, masks):
        ids = [row.ids for row in tree.trajectories]
        self.asked.append([row.tolist() for row in ids])
        leaves = [torch.tensor(row[1:], dtype=torch.float32, requires_grad=True) for row in ids]
        number = len(self.asked) - 1
        return SimpleNamespace(logprobs=leaves, backward=lambda sync: self.log.append((number, sync)))


def batch(*rows):
    return {"input_ids": torch.tensor(rows)}


FIRST, SECOND, THIRD = batch([5, 6, 7], [5, 6, 8]), batch([5, 6, 9], [1, 2, 3]), batch([5, 6, 4], [4, 4, 4])


@pytest.fixture
def scores():
    return Scores()


def steps_with(batches, trainer=None):
    steps = StepScores(trainer or SimpleNamespace(), rows_of)
    steps.begin_step(batches)
    return steps


def ask(steps, scores, inputs, **options):
    scored, own = steps.score("model", rows_of(inputs), scores.run, **options)
    return scored.logprobs[own]


def test_all_micro_batches_of_a_step_are_scored_at_once_and_run_backward_once_after_the_last(scores):
    steps = steps_with([FIRST, SECOND, THIRD])
    for number, inputs in enumerate((FIRST, SECOND, THIRD)):
        steps.next_micro_batch()
        found = ask(steps, scores, inputs)
        assert [row.tolist() for row in found] == inputs["input_ids"][:, 1:].tolist()
        assert steps.backward(sync=number == 2) == [] or number == 2
    assert len(scores.asked) == 1 and len(scores.asked[0]) == 6
    assert scores.log == [(0, True)]


def test_the_next_step_is_scored_anew(scores):
    steps = steps_with([FIRST, SECOND])
    for _ in range(2):
        steps.begin_step([FIRST, SECOND])
        for inputs in (FIRST, SECOND):
            steps.next_micro_batch()
            ask(steps, scores, inputs)
            steps.backward(sync=inputs is SECOND)
    assert len(scores.asked) == 2 and scores.log == [(0, True), (1, True)]


def test_rows_that_come_otherwise_than_foreseen_are_scored_by_themselves(scores):
    steps = steps_with([FIRST, SECOND])
    steps.next_micro_batch()
    assert [row.tolist() for row in ask(steps, scores, THIRD)] == [[6, 4], [4, 4]]
    ask(steps, scores, FIRST)
    assert [len(rows) for rows in scores.asked] == [2, 4]
    assert len(steps.backward(sync=False)) == 1
    steps.next_micro_batch()
    ask(steps, scores, THIRD)
    ask(steps, scores, SECOND)
    assert [len(rows) for rows in scores.asked] == [2, 4, 2]
    steps.backward(sync=True)
    assert scores.log == [(0, False), (1, False), (2, True)]  # gradients are averaged after the last alone


def test_another_mask_is_another_question(scores):
    steps = steps_with([FIRST, SECOND])
    steps.next_micro_batch()
    ask(steps, scores, FIRST)
    steps.next_micro_batch()
    rows = rows_of(SECOND)
    steps.score("model", rows._replace(masks=[~mask for mask in rows.masks]), scores.run)
    assert [len(rows) for rows in scores.asked] == [4, 2]


def test_scores_without_gradient_and_those_of_a_reference_are_their_own(scores):
    steps = steps_with([FIRST, SECOND])
    steps.next_micro_batch()
    ask(steps, scores, FIRST)
    with torch.no_grad():
        ask(steps, scores, FIRST)
        steps.score("reference", rows_of(FIRST), scores.run)
    assert len(scores.asked) == 3
    steps.next_micro_batch()
    ask(steps, scores, SECOND)
    with torch.no_grad():
        steps.score("reference", rows_of(SECOND), scores.run)
    assert len(scores.asked) == 3
    steps.backward(sync=True)
    assert scores.log == [(0, True)]


def test_what_depends_on_the_whole_batch_is_scored_alone(scores):
    steps = steps_with([FIRST, SECOND])
    for inputs in (FIRST, SECOND):
        steps.next_micro_batch()
        ask(steps, scores, inputs, together=False)
        steps.backward(sync=inputs is SECOND)
    assert [len(rows) for rows in scores.asked] == [2, 2] and scores.log == [(0, False), (1, True)]


def test_without_a_loop_that_names_its_micro_batches_each_is_scored_alone(scores):
    steps = StepScores(SimpleNamespace(), rows_of)
    for inputs in (FIRST, SECOND):
        steps.next_micro_batch()
        ask(steps, scores, inputs)
        steps.backward(sync=True)
    assert [len(rows) for rows in scores.asked] == [2, 2] and scores.log == [(0, True), (1, True)]


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
    steps = steps_with([None] * 3, trainer)
    steps.next_micro_batch()
    ask(steps, scores, batch([5, 6, known[0]]))
    assert scores.asked == [[[5, 6, number] for number in known]]


def test_completions_alone_are_predicted_and_their_padding_is_not():
    inputs = model_inputs(generated([5, 6], [7, 0]) | {"completion_mask": torch.tensor([[1, 0]])})
    assert inputs["labels"].tolist() == [[-100, -100, 7, -100]]
    assert inputs["attention_mask"].tolist() == [[1, 1, 1, 0]]


def test_micro_batches_that_share_next_to_nothing_are_scored_alone(scores):
    apart = [batch([5, 6, 7], [5, 6, 8]), batch([1, 2, 3], [1, 2, 4])]
    steps = steps_with(apart)
    for inputs in apart:
        steps.next_micro_batch()
        ask(steps, scores, inputs)
        steps.backward(sync=inputs is apart[1])
    assert [len(rows) for rows in scores.asked] == [2, 2] and scores.log == [(0, False), (1, True)]
