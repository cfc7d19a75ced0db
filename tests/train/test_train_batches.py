"""Steps are made of whole groups, else whole trees."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from treetrain.data.trajectory import Trajectory
from treetrain.errors import DataError
from treetrain.train.batches import make_units, plan_batches, sample_units, split_units
from treetrain.tree.build import build_tree


def as_sets(units: list[np.ndarray]) -> set[frozenset[int]]:
    return {frozenset(unit.tolist()) for unit in units}


def grouped(sizes: list[tuple[int, int]]) -> list[Trajectory]:
    """Groups of (rows, tokens per row)."""
    return [
        Trajectory([number + 1] * tokens, group=number) for number, (n, tokens) in enumerate(sizes) for _ in range(n)
    ]


row_lists = st.lists(
    st.tuples(st.lists(st.integers(0, 2), min_size=2, max_size=12), st.sampled_from([None, None, "a", "b"])),
    min_size=1,
    max_size=20,
)


@settings(max_examples=200, deadline=None)
@given(row_lists, st.integers(1, 60), st.integers(0, 3), st.integers(0, 3))
def test_every_row_is_in_exactly_one_step_of_every_epoch(rows, target, seed, epoch) -> None:
    trajectories = [Trajectory(ids, group=group) for ids, group in rows]
    steps = plan_batches(trajectories, tokens_per_step=target, seed=seed).epoch(epoch)
    assert Counter(np.concatenate(steps).tolist()) == Counter(range(len(rows)))


@settings(max_examples=200, deadline=None)
@given(row_lists, st.integers(1, 60))
def test_a_group_is_never_torn_apart(rows, target) -> None:
    trajectories = [Trajectory(ids, group=group) for ids, group in rows]
    for step in plan_batches(trajectories, tokens_per_step=target, seed=1).epoch(0):
        for group in {trajectories[number].group for number in step} - {None}:
            members = {number for number, row in enumerate(trajectories) if row.group == group}
            assert members <= set(step.tolist())


@settings(max_examples=100, deadline=None)
@given(row_lists, st.integers(1, 60))
def test_a_step_is_filled_until_the_next_unit_would_not_fit(rows, target) -> None:
    plan = plan_batches([Trajectory(ids, group=group) for ids, group in rows], tokens_per_step=target, seed=0)
    order = np.random.default_rng([0, 0]).permutation(len(plan.units)).tolist()
    sizes = [int(plan.unit_tokens[unit]) for unit in order]
    expected, filled = 1, 0
    for size in sizes:
        if filled and filled + size > target:
            expected, filled = expected + 1, 0
        filled += size
    assert plan.steps_per_epoch() == expected


def test_a_unit_larger_than_the_target_is_a_step_of_its_own() -> None:
    rows = grouped([(1, 10), (5, 10), (1, 10)])
    steps = plan_batches(rows, tokens_per_step=20, seed=0).epoch(0)
    assert frozenset({1, 2, 3, 4, 5}) in as_sets(steps)


def test_the_same_seed_gives_the_same_steps_and_another_seed_or_epoch_others() -> None:
    rows = grouped([(2, 5)] * 40)
    plan = plan_batches(rows, tokens_per_step=40, seed=3)
    again = plan_batches(rows, tokens_per_step=40, seed=3)
    other = plan_batches(rows, tokens_per_step=40, seed=4)
    assert [s.tolist() for s in plan.epoch(0)] == [s.tolist() for s in again.epoch(0)]
    assert [s.tolist() for s in plan.epoch(0)] != [s.tolist() for s in plan.epoch(1)]
    assert [s.tolist() for s in plan.epoch(0)] != [s.tolist() for s in other.epoch(0)]


def test_steps_pass_over_the_data_as_often_as_it_takes() -> None:
    plan = plan_batches(grouped([(1, 10)] * 4), tokens_per_step=20, seed=0)
    taken = list(plan.steps(5))
    assert [epoch for epoch, _ in taken] == [0, 0, 1, 1, 2]
    assert plan.total_steps(3) == 6


def test_rows_without_a_group_are_units_by_tree() -> None:
    rows = [Trajectory(ids) for ids in ([1, 2, 3], [7, 8], [1, 2, 4], [7, 9])]
    assert as_sets(make_units(rows, tokens_per_step=100)) == {frozenset({0, 2}), frozenset({1, 3})}


def test_a_tree_larger_than_a_step_is_cut_where_little_sharing_is_lost() -> None:
    template = [1, 2, 3]
    rows = []
    for question in range(10):
        asked = template + [10 + question] * 20
        rows += [Trajectory([*asked, 50 + answer, 60 + answer]) for answer in range(4)]
    assert len(build_tree(rows).segment_parent) and (build_tree(rows).parent < 0).sum() == 1
    units = as_sets(make_units(rows, tokens_per_step=250))
    assert units == {frozenset(range(4 * question, 4 * question + 4)) for question in range(10)}


def test_unrelated_rows_under_one_template_are_shuffled_one_by_one_even_where_first_words_agree() -> None:
    rng = np.random.default_rng(0)
    rows = [Trajectory([1, 2, 3, 4 + first, *rng.integers(20, 1000, 40)]) for first in range(3) for _ in range(10)]
    assert as_sets(make_units(rows, tokens_per_step=500)) == {frozenset({number}) for number in range(30)}


def test_a_row_that_ends_above_a_fork_is_not_lost_by_the_cut() -> None:
    rows = [Trajectory([1, 2]), Trajectory([1, 2, 3, *range(30, 60)]), Trajectory([1, 2, 4, *range(30, 60)])]
    units = make_units(rows, tokens_per_step=40)
    assert sorted(np.concatenate(units).tolist()) == [0, 1, 2] and len(units) == 3


def test_calls_of_one_conversation_stay_together_when_their_prompts_differ_early() -> None:
    rows = [
        Trajectory([1, 2, 10 * number + call, *[call + 5] * 30], episode=episode)
        for number, episode in enumerate(("x", "y"), 1)
        for call in range(3)
    ]
    assert as_sets(make_units(rows, tokens_per_step=100)) == {frozenset({0, 1, 2}), frozenset({3, 4, 5})}


pair_lists = st.lists(
    st.tuples(
        st.lists(st.integers(0, 2), min_size=2, max_size=12),
        st.sampled_from([None, None, "a", "b"]),
        st.sampled_from([None, 1, 2, 3]),
    ),
    min_size=1,
    max_size=20,
)


@settings(max_examples=200, deadline=None)
@given(pair_lists, st.integers(1, 60))
def test_a_pair_is_never_torn_apart_nor_any_row_lost(rows, target) -> None:
    trajectories = [Trajectory(ids, group=group, pair=pair) for ids, group, pair in rows]
    steps = plan_batches(trajectories, tokens_per_step=target, seed=1).epoch(0)
    assert Counter(np.concatenate(steps).tolist()) == Counter(range(len(rows)))
    for name in {row.pair for row in trajectories} - {None}:
        members = {number for number, row in enumerate(trajectories) if row.pair == name}
        assert sum(bool(members & set(step.tolist())) for step in steps) == 1


def test_pairs_whose_prompts_differ_are_one_unit_and_other_rows_stay_apart() -> None:
    rows = [Trajectory([first] * 20, pair=pair) for first, pair in enumerate(("x", "y", "x", "y", None), 1)]
    assert as_sets(make_units(rows, tokens_per_step=30)) == {frozenset({0, 2}), frozenset({1, 3}), frozenset({4})}


def test_a_sample_of_one_large_unit_takes_whole_pairs() -> None:
    rows = [Trajectory([1, 2, number], pair=number % 3) for number in range(6)]
    assert [row.pair for row in sample_units(rows, 5)[0]] == [0, 1, 0, 1]
    assert [row.pair for row in sample_units(rows, 1)[0]] == [0, 0]


def test_rows_with_nothing_to_train_never_make_a_step_by_themselves() -> None:
    rows = [Trajectory([1] * 10, loss_weights=0.0, group=0), Trajectory([2] * 10, group=1), Trajectory([], group=2)]
    steps = plan_batches(rows, tokens_per_step=10, seed=0).epoch(0)
    assert as_sets(steps) == {frozenset({0, 1, 2})}


def test_a_run_in_which_nothing_is_trained_is_refused() -> None:
    with pytest.raises(DataError, match="nothing to train"):
        plan_batches([Trajectory([1, 2], loss_weights=0.0)], tokens_per_step=10)


def test_what_is_held_out_is_whole_groups_and_nothing_is_lost() -> None:
    rows = grouped([(3, 5)] * 10)
    kept, held = ([rows[number] for number in numbers] for numbers in split_units(rows, 0.2, seed=1))
    assert {row.group for row in kept} & {row.group for row in held} == set()
    assert len({row.group for row in held}) == 2 and len(kept) + len(held) == 30
    again = split_units(rows, 0.2, seed=1)[1]
    assert [row.group for row in held] == [rows[number].group for number in again]


def test_the_smallest_share_still_holds_out_one_group_and_the_largest_leaves_one() -> None:
    rows = grouped([(1, 5)] * 3)
    assert len(split_units(rows, 0.01, seed=0)[1]) == 1
    assert len(split_units(rows, 0.99, seed=0)[0]) == 1


def test_holding_out_from_a_single_group_is_refused() -> None:
    with pytest.raises(DataError, match="one group or tree"):
        split_units(grouped([(4, 5)]), 0.5, seed=0)


def test_a_sample_takes_whole_groups_and_cuts_only_the_first() -> None:
    rows = grouped([(3, 5), (4, 5), (2, 5)])
    taken, cut = sample_units(rows, 6)
    assert [row.group for row in taken] == [0, 0, 0, 2, 2] and not cut
    taken, cut = sample_units(rows, 2)
    assert [row.group for row in taken] == [0, 0] and cut
