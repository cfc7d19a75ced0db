"""Which trajectories share a part."""

import numpy as np
import pytest
from hypothesis import given

import treetrain as tt
from support.forests import forests
from support.runs import runs
from treetrain.engine.groups import MAX_REPEATED_PREFIX, _new_and_shared, nearly_disjoint, whole_trees


def unique_tokens(rows, numbers) -> int:
    return tt.build_tree([rows[k] for k in numbers]).num_tokens


@runs(150)
@given(forests(max_rows=12))
def test_every_trajectory_is_in_exactly_one_part(rows):
    tree = tt.build_tree(rows)
    for groups in (nearly_disjoint(tree, 6), whole_trees(tree, max(tree.num_tokens, 1), merge=True)):
        assert sorted(k for group in groups for k in group) == list(range(len(rows)))


@runs(150)
@given(forests(max_rows=12))
def test_a_cut_repeats_no_more_than_the_allowed_prefix(rows):
    groups = nearly_disjoint(tt.build_tree(rows), 6)
    computed = sum(unique_tokens(rows, group) for group in groups)
    assert computed - tt.build_tree(rows).num_tokens <= MAX_REPEATED_PREFIX * (len(groups) - 1)


@runs(150)
@given(forests(max_rows=12))
def test_new_tokens_over_all_rows_are_the_tokens_of_the_tree(rows):
    tree = tt.build_tree(rows)
    new, shared = _new_and_shared(tree, np.argsort(tree.trajectory_last, kind="stable"))
    assert new.sum() == tree.num_tokens and (new + shared).sum() == tree.num_flat_tokens


def test_unrelated_rows_are_cut_at_the_target():
    rows = [[10 * k + t for t in range(10)] for k in range(20)]
    groups = nearly_disjoint(tt.build_tree(rows), 50)
    assert [len(group) for group in groups] == [5, 5, 5, 5]


def test_rows_under_one_long_prompt_are_never_cut():
    prompt = list(range(MAX_REPEATED_PREFIX + 1))
    rows = [[*prompt, 1000 + k, 2000 + k] for k in range(40)]
    assert len(nearly_disjoint(tt.build_tree(rows), 20)) == 1


def test_rows_under_one_short_prompt_are_cut():
    prompt = list(range(MAX_REPEATED_PREFIX))
    rows = [[*prompt, *range(1000 * k + 1000, 1000 * k + 1040)] for k in range(10)]
    groups = nearly_disjoint(tt.build_tree(rows), 150)
    assert len(groups) > 1
    for group in groups:
        assert unique_tokens(rows, group) <= 150 + MAX_REPEATED_PREFIX + 40


def test_parts_cut_for_speed_give_the_gradients_of_one_part(monkeypatch):
    import torch

    from support import linear
    from support.models import make_model
    from treetrain.engine import batch

    rng = np.random.default_rng(0)
    rows = [[1, 2, 3, *rng.integers(0, 20, 12).tolist()] for _ in range(8)] + [[], [5]]
    model = make_model("qwen3", dtype=torch.float64)
    whole = tt.TreeEngine(model).forward_backward([tt.Trajectory(r) for r in rows], tt.losses.sft())
    expected = linear.gradients(model).clone()
    model.zero_grad()
    monkeypatch.setattr(batch, "PART_TOKENS", 20)
    cut = tt.TreeEngine(model).forward_backward([tt.Trajectory(r) for r in rows], tt.losses.sft())
    assert whole.parts == 1 and cut.parts > 2
    assert cut.loss == pytest.approx(whole.loss, rel=1e-6)
    assert linear.relative_error(linear.gradients(model), expected) <= 1e-6
