"""Steps are made of whole groups, else whole trees."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from treetrain.core.errors import DataError
from treetrain.core.tree.token_tree import build_tree
from treetrain.layers.trajectory import Trajectory
from treetrain.trainers.groups import StepSampler, make_groups, sample_groups


def as_sets(groups) -> set[frozenset[int]]:
    return {frozenset(group.tolist()) for group in groups}


def grouped(sizes: list[tuple[int, int]]) -> list[Trajectory]:
    """Groups of (rows, tokens per row)."""
    return [
        Trajectory([number + 1] * tokens, group=number) for number, (n, tokens) in enumerate(sizes) for _ in range(n)
    ]


def calls_of(rows: list[Trajectory], epoch: int = 0, **options) -> list:
    sampler = StepSampler(rows, **options)
    sampler.set_epoch(epoch)
    calls = [call for (call,) in sampler]
    assert len(calls) == len(sampler)
    return calls


def steps_of(rows: list[Trajectory], epoch: int = 0, **options) -> list[np.ndarray]:
    """Row numbers of every step, where a step is one call."""
    return [call.rows for call in calls_of(rows, epoch, **options)]


row_lists = st.lists(
    st.tuples(st.lists(st.integers(0, 2), min_size=2, max_size=12), st.sampled_from([None, None, "a", "b"])),
    min_size=1,
    max_size=20,
)


@settings(max_examples=60, deadline=None)
@given(row_lists, st.integers(1, 60), st.integers(0, 3), st.integers(0, 3))
def test_every_row_is_in_exactly_one_step_of_every_epoch(rows, target, seed, epoch) -> None:
    trajectories = [Trajectory(ids, group=group) for ids, group in rows]
    steps = steps_of(trajectories, epoch, tokens_per_step=target, seed=seed)
    assert Counter(np.concatenate(steps).tolist()) == Counter(range(len(rows)))


@settings(max_examples=60, deadline=None)
@given(row_lists, st.integers(1, 60))
def test_a_group_is_never_torn_apart(rows, target) -> None:
    trajectories = [Trajectory(ids, group=group) for ids, group in rows]
    for step in steps_of(trajectories, tokens_per_step=target, seed=1):
        for group in {trajectories[number].group for number in step} - {None}:
            members = {number for number, row in enumerate(trajectories) if row.group == group}
            assert members <= set(step.tolist())


def test_rows_without_a_group_are_units_by_tree() -> None:
    rows = [Trajectory(ids) for ids in ([1, 2, 3], [7, 8], [1, 2, 4], [7, 9])]
    assert as_sets(make_groups(rows, tokens_per_step=100)) == {frozenset({0, 2}), frozenset({1, 3})}


def test_a_tree_larger_than_a_step_is_cut_where_little_sharing_is_lost() -> None:
    template = [1, 2, 3]
    rows = []
    for question in range(10):
        asked = template + [10 + question] * 20
        rows += [Trajectory([*asked, 50 + answer, 60 + answer]) for answer in range(4)]
    assert len(build_tree(rows).segment_parent) and (build_tree(rows).parent < 0).sum() == 1
    units = as_sets(make_groups(rows, tokens_per_step=250))
    assert units == {frozenset(range(4 * question, 4 * question + 4)) for question in range(10)}


def test_unrelated_rows_under_one_template_are_shuffled_one_by_one_even_where_first_words_agree() -> None:
    rng = np.random.default_rng(0)
    rows = [Trajectory([1, 2, 3, 4 + first, *rng.integers(20, 1000, 40)]) for first in range(3) for _ in range(10)]
    assert as_sets(make_groups(rows, tokens_per_step=500)) == {frozenset({number}) for number in range(30)}


def test_a_row_that_ends_above_a_fork_is_not_lost_by_the_cut() -> None:
    rows = [Trajectory([1, 2]), Trajectory([1, 2, 3, *range(30, 60)]), Trajectory([1, 2, 4, *range(30, 60)])]
    units = make_groups(rows, tokens_per_step=40)
    assert sorted(np.concatenate(units).tolist()) == [0, 1, 2] and len(units) == 3


def test_calls_of_one_conversation_stay_together_when_their_prompts_differ_early() -> None:
    rows = [
        Trajectory([1, 2, 10 * number + call, *[call + 5] * 30], episode=episode)
        for number, episode in enumerate(("x", "y"), 1)
        for call in range(3)
    ]
    assert as_sets(make_groups(rows, tokens_per_step=100)) == {frozenset({0, 1, 2}), frozenset({3, 4, 5})}


pair_lists = st.lists(
    st.tuples(
        st.lists(st.integers(0, 2), min_size=2, max_size=12),
        st.sampled_from([None, None, "a", "b"]),
        st.sampled_from([None, 1, 2, 3]),
    ),
    min_size=1,
    max_size=20,
)


@settings(max_examples=60, deadline=None)
@given(pair_lists, st.integers(1, 60))
def test_a_pair_is_never_torn_apart_nor_any_row_lost(rows, target) -> None:
    trajectories = [Trajectory(ids, group=group, pair=pair) for ids, group, pair in rows]
    steps = steps_of(trajectories, tokens_per_step=target, seed=1)
    assert Counter(np.concatenate(steps).tolist()) == Counter(range(len(rows)))
    for name in {row.pair for row in trajectories} - {None}:
        members = {number for number, row in enumerate(trajectories) if row.pair == name}
        assert sum(bool(members & set(step.tolist())) for step in steps) == 1


def test_pairs_whose_prompts_differ_are_one_unit_and_other_rows_stay_apart() -> None:
    rows = [Trajectory([first] * 20, pair=pair) for first, pair in enumerate(("x", "y", "x", "y", None), 1)]
    assert as_sets(make_groups(rows, tokens_per_step=30)) == {frozenset({0, 2}), frozenset({1, 3}), frozenset({4})}


def test_rows_with_nothing_to_train_never_make_a_step_by_themselves() -> None:
    rows = [Trajectory([1] * 10, loss_weights=0.0, group=0), Trajectory([2] * 10, group=1), Trajectory([], group=2)]
    steps = steps_of(rows, tokens_per_step=10, seed=0)
    assert as_sets(steps) == {frozenset({0, 1, 2})}


def test_a_run_in_which_nothing_is_trained_is_refused() -> None:
    with pytest.raises(DataError, match="nothing to train"):
        StepSampler([Trajectory([1, 2], loss_weights=0.0)], tokens_per_step=10)


def test_a_sample_takes_whole_groups_and_cuts_only_the_first() -> None:
    rows = grouped([(3, 5), (4, 5), (2, 5)])
    taken, cut = sample_groups(rows, 6)
    assert [row.group for row in taken] == [0, 0, 0, 2, 2] and not cut
    taken, cut = sample_groups(rows, 2)
    assert [row.group for row in taken] == [0, 0] and cut


@settings(max_examples=60, deadline=None)
@given(row_lists, st.integers(1, 60), st.integers(1, 3), st.integers(1, 3), st.integers(1, 4), st.integers(0, 2))
def test_every_update_of_a_batch_has_each_of_its_groups_once_in_minibatches_and_calls(
    rows, target, updates, minibatches, calls, epoch
) -> None:
    trajectories = [Trajectory(ids, group=group) for ids, group in rows]
    options = {"updates_per_batch": updates, "minibatches": minibatches, "calls": calls, "seed": 2}
    if len(make_groups(trajectories, tokens_per_step=target)) < minibatches:
        with pytest.raises(ValueError, match="lower minibatches"):
            StepSampler(trajectories, tokens_per_step=target, **options)
        return
    found = calls_of(trajectories, epoch, tokens_per_step=target, **options)
    assert len(found) == len(calls_of(trajectories, epoch + 1, tokens_per_step=target, **options))
    assert [call.batch for call in found] == sorted(call.batch for call in found)
    for first in range(0, len(found), calls):
        assert len(found[first + calls - 1].rows), "a step must end with a call that has rows"
    for batch in {call.batch for call in found}:
        members = [call for call in found if call.batch == batch]
        assert len(members) == updates * minibatches * calls
        wanted = Counter(members[0].batch_rows.tolist())
        for parts in np.split(np.arange(len(members)), updates):
            rows_of_parts = [members[number].rows for number in parts.tolist()]
            assert Counter(np.concatenate(rows_of_parts).tolist()) == wanted


def test_batches_are_of_about_the_tokens_that_were_asked_for() -> None:
    rows = grouped([(3, 7), (2, 4), (5, 9), (1, 20)] * 25)
    sizes = [sum(len(rows[n]) for n in step) for step in steps_of(rows, tokens_per_step=200, seed=0)]
    assert len(sizes) == -(-sum(map(len, rows)) // 200)
    assert max(abs(size - np.mean(sizes)) for size in sizes) <= 45  # the largest group


def test_the_same_seed_gives_the_same_steps_and_another_seed_or_epoch_others() -> None:
    rows = grouped([(2, 5)] * 40)

    def steps(epoch: int, seed: int) -> list[list[int]]:
        return [step.tolist() for step in steps_of(rows, epoch, tokens_per_step=40, seed=seed)]

    assert steps(0, 3) == steps(0, 3)
    assert steps(0, 3) != steps(1, 3) != steps(0, 4) != steps(0, 3)


def test_minibatches_are_other_ones_in_every_pass_over_a_batch() -> None:
    calls = calls_of(grouped([(2, 5)] * 40), tokens_per_step=400, updates_per_batch=2, minibatches=2, seed=0)
    first, second = ([call.rows.tolist() for call in update] for update in (calls[:2], calls[2:4]))
    assert first != second
