"""Batches, views and transcripts: figures against sums over batches and rows built one by one."""

import dataclasses

import numpy as np
import pytest

from treetrain.core.tree.token_tree import build_tree
from treetrain.layers.trajectory import Trajectory
from treetrain.logs.groups import TOKENS_PER_STEP
from treetrain.logs.inspection.report import Shape, inspect_rows, linear_flops, sharing_in_batches
from treetrain.models.work import linear_work, tree_stats, tree_work
from treetrain.shapes import ModelShape
from treetrain.trainers.groups import StepSampler

COUNTS = ModelShape.named("qwen3-0.6b").counts()
SHAPE = Shape(counts=COUNTS, name="qwen3-0.6b", assumed=False)


def answers(groups, samples):
    """Rows with a prompt of 100 tokens for each group, its samples far apart in the file."""
    drawn = np.random.default_rng(0)
    prompts = drawn.integers(0, 1000, (groups, 100))
    rows = [np.append(prompts[k % groups], drawn.integers(0, 1000, 20)) for k in range(groups * samples)]
    return [Trajectory(ids, loss_weights=[0] * 100 + [1] * 20, group=k % groups) for k, ids in enumerate(rows)]


def calls():
    """Three calls of each of two conversations, the prompt of each call the call before it and 10 tokens."""
    drawn = np.random.default_rng(0)
    rows = []
    for episode in range(2):
        ids = np.arange(50)
        for _ in range(3):
            ids = np.append(ids, drawn.integers(0, 1000, 20))
            weights = np.r_[np.zeros(len(ids) - 10), np.ones(10)]
            rows.append(Trajectory(ids, loss_weights=weights, episode=episode))
    return rows


def test_sharing_in_batches_is_that_of_a_tree_for_each_batch():
    rows = answers(8, 4)
    found = sharing_in_batches(rows, build_tree(rows), COUNTS, 4)
    assert set(found) == {"grouped", "file", "shuffled"}
    batches = [build_tree(rows[first : first + 4]) for first in range(0, 32, 4)]
    linear, ours = (sum(COUNTS.flops(*work(tree)) for tree in batches) for work in (linear_work, tree_work))
    assert found["file"] == pytest.approx(linear / ours)
    assert found["grouped"] == pytest.approx(tree_stats(build_tree(rows), COUNTS).flop_speedup)
    assert 1 <= found["shuffled"] < 1.5 < found["grouped"]
    assert sharing_in_batches(rows, build_tree(rows), COUNTS, 32) == {}


def test_batches_are_sampled_whole_where_there_are_many_tokens(monkeypatch):
    rows = answers(8, 4)
    monkeypatch.setattr("treetrain.logs.inspection.report.SAMPLED", 500)  # the first batch has 480 tokens
    found = sharing_in_batches(rows, build_tree(rows), COUNTS, 4)
    assert found["grouped"] == pytest.approx(tree_stats(build_tree(rows[::8]), COUNTS).flop_speedup)


def test_calls_are_compared_with_their_transcripts_that_train_the_same_tokens():
    rows = calls()
    tree = build_tree(rows)
    longest = [row.replace(loss_weights=sum(np.r_[r.weights, np.zeros(60)][: len(row)] for r in rows[k - 2 : k + 1]))
               for k, row in enumerate(rows) if k % 3 == 2]  # fmt: skip
    linear = COUNTS.flops(*linear_work(build_tree(longest)))
    ours = COUNTS.flops(*tree_work(tree))
    report = inspect_rows(rows, SHAPE, view="calls")
    way, cheapest = report.baseline()
    assert cheapest * report.stats.flop_speedup == pytest.approx(linear / ours) and "no other row extends" in way
    assert inspect_rows(answers(2, 2), SHAPE).baseline() == ("every row by itself", 1.0)  # no row extends another
    assert report.verdict() == (  # both conversations begin with the same 50 tokens
        f"Train as a tree: yes, {linear / ours:.2f}x against {way}, assuming FLOPs of qwen3-0.6b and all rows as one "
        "batch."
    )


def test_batches_of_calls_are_compared_with_transcripts_too_which_no_batch_cuts():
    rows = calls()
    report = inspect_rows(rows, SHAPE, view="calls", batch_size=2)
    trees = [build_tree([rows[k] for k in batch]) for batch in ((0, 1), (2, 3), (4, 5))]
    # Either way of cutting costs more than two transcripts by themselves.
    transcripts = sum(COUNTS.flops(*linear_work(build_tree(one))) for one in ([rows[2]], [rows[5]]))
    assert sum(COUNTS.flops(*tree_work(tree)) for tree in trees) > transcripts
    assert report.verdict().startswith("Train as a tree: no, 0.") and report.batches["grouped"] > 1.3


def test_conversations_whose_calls_do_not_extend_each_other_are_compared_with_their_transcripts():
    rows = calls()
    for k, row in enumerate(rows):
        rows[k] = row.replace(ids=np.r_[900 + k % 3, row.ids[1:]])  # broken at the first token
    ratio = linear_flops(rows[2::3], COUNTS) / linear_flops(rows, COUNTS)
    report = dataclasses.replace(inspect_rows(rows, SHAPE, view="calls"), transcripts=ratio)
    way, cheapest = report.baseline()
    assert "--view transcript" in way and cheapest == ratio < 1


def test_the_verdict_says_yes_no_or_what_to_fix_first():
    rows = answers(4, 8)
    assert inspect_rows(rows, SHAPE).verdict().startswith("Train as a tree: yes, ")
    alone = [rows[0], *(row.replace(ids=row.ids[::-1] + 1000 * k) for k, row in enumerate(rows[1:6]))]
    assert inspect_rows(alone, SHAPE).verdict().startswith("Train as a tree: no, 1.00x")
    dated = [
        row.replace(ids=np.r_[2000 + k, 3000 + k, row.ids], loss_weights=np.r_[0, 0, row.loss_weights])
        for k, row in enumerate(rows[::4])
    ]
    report = inspect_rows(dated, SHAPE)
    assert report.verdict().startswith("Train as a tree: not yet") and "first change what is named" in report.verdict()


def test_the_default_verdict_is_that_of_the_steps_of_train_which_keep_groups_whole():
    drawn = np.random.default_rng(0)
    rows = []
    for group in range(4):  # conversations of 26 calls: 41,000 tokens, more than a step is filled with
        ids = drawn.integers(0, 1000, 300)
        for _ in range(26):
            ids = np.append(ids, drawn.integers(0, 1000, 100))
            weights = np.r_[np.zeros(len(ids) - 20), np.ones(20)]
            rows.append(Trajectory(ids, loss_weights=weights, group=group, episode=group))
    order = drawn.permutation(len(rows))
    rows = [rows[number] for number in order]
    steps = [call.rows for (call,) in StepSampler(rows, tokens_per_step=TOKENS_PER_STEP, seed=1)]
    assert sorted(map(len, steps)) == [26] * 4
    linear, ours = (
        sum(COUNTS.flops(*work(build_tree([rows[number] for number in step]))) for step in steps)
        for work in (linear_work, tree_work)
    )
    report, eight = inspect_rows(rows, SHAPE, view="calls"), inspect_rows(rows, SHAPE, view="calls", batch_size=8)
    assert report.batches["grouped"] == pytest.approx(linear / ours)
    assert report.batches["grouped"] > 1.5 * max(eight.batches["grouped"], report.batches["shuffled"])
    assert "steps of treetrain train (whole groups" in report.verdict()
    assert eight.verdict().startswith("Train as a tree: no") and report.as_dict()["tokens_per_step"] == TOKENS_PER_STEP


def test_small_groups_fill_a_step_of_train_together():
    rows = [row.replace(group=None) for row in answers(800, 4)]  # 384,000 tokens in groups of 480
    report = inspect_rows(rows, SHAPE)
    whole = tree_stats(build_tree(rows), COUNTS).flop_speedup
    assert report.batches["grouped"] == pytest.approx(whole, rel=1e-3) and report.batches["shuffled"] < 1.2
