"""Which rows every optimiser step has when a batch is updated several times, and where a run is in its batches."""

import numpy as np
import pytest
from branching import branching_rows, write_rows
from hypothesis import given
from hypothesis import strategies as st

from support.runs import runs
from treetrain.data.load import load
from treetrain.train.batches import BatchPlan, Units, plan_batches
from treetrain.train.config import TrainConfig
from treetrain.train.updates import UpdatePlan, Updates, total_steps


@pytest.fixture(scope="module")
def plan(tmp_path_factory) -> BatchPlan:
    """Two batches of four groups and one of one, 60 tokens a group."""
    data = write_rows(tmp_path_factory.mktemp("rows") / "rows.jsonl", branching_rows(groups=9))
    return plan_batches(load(data).trajectories, tokens_per_step=240, seed=3)


def config(**changes) -> TrainConfig:
    return TrainConfig(data=("x",), model="m", output="o", loss="grpo", **changes)


def walked(updates: Updates, kl=lambda step: 0.0) -> list[tuple[int, int, int, int]]:
    """(epoch, batch, update, minibatch) of every step until the run is at its end."""
    seen = []
    for update in updates:
        if len(seen) == updates.total:
            break
        seen.append((update.epoch, update.batch, update.number, update.minibatch))
        updates.advance(update, kl(len(seen)))
    return seen


@given(sizes=st.lists(st.integers(1, 1000), min_size=1, max_size=12), minibatches=st.integers(1, 6))
@runs(60)
def test_every_pass_over_a_batch_has_each_of_its_units_once_whole_and_no_empty_part(sizes, minibatches) -> None:
    units = Units.of_labels(np.repeat(np.arange(len(sizes)), [1 + size % 3 for size in sizes]))
    made = BatchPlan(units, np.array(sizes), 10**6, seed=1)
    [(epoch, rows)] = made.steps(1)
    steps = UpdatePlan(made, updates_per_batch=2, minibatches=minibatches).of_batch(0, epoch, rows)
    count = min(minibatches, len(units))
    assert [(step.number, step.minibatch) for step in steps] == [(u, m) for u in (1, 2) for m in range(1, count + 1)]
    for passed in (steps[:count], steps[count:]):
        assert np.sort(np.concatenate([step.rows for step in passed])).tolist() == rows.tolist()
        for step in passed:
            assert len(step.rows) and (np.diff(step.rows) > 0).all()
            of_step = set(step.rows.tolist())
            assert all(of_step.issuperset(unit.tolist()) or of_step.isdisjoint(unit.tolist()) for unit in units)


def test_minibatches_are_of_about_equal_size_and_other_ones_in_every_pass_but_not_in_another_run(plan) -> None:
    made = UpdatePlan(plan, updates_per_batch=4, minibatches=2)
    epoch, rows = next(iter(plan.steps(1)))
    steps = made.of_batch(0, epoch, rows)
    assert [len(step.rows) for step in steps] == [6] * 8
    again = UpdatePlan(plan, updates_per_batch=4, minibatches=2).of_batch(0, epoch, rows)
    assert [step.rows.tolist() for step in steps] == [step.rows.tolist() for step in again]
    assert len({tuple(step.rows.tolist()) for step in steps[::2]}) > 1


def test_one_update_of_whole_batches_is_the_plan_of_the_batches(plan) -> None:
    updates = Updates(config(steps=7), plan, 7)
    seen = []
    for update in updates:
        seen.append((update.epoch, update.rows.tolist()))
        updates.advance(update, None)
    assert seen == [(epoch, rows.tolist()) for epoch, rows in plan.steps(7)]


@pytest.mark.parametrize(("passes", "minibatches", "steps"), [(1, 1, 3), (3, 1, 9), (1, 2, 5), (2, 3, 14), (2, 9, 18)])
def test_all_steps_of_a_run_are_counted(plan, passes, minibatches, steps) -> None:
    settings = config(epochs=2, updates_per_batch=passes, minibatches=minibatches)
    assert total_steps(settings, plan) == 2 * steps == len(walked(Updates(settings, plan, 2 * steps)))
    assert total_steps(config(steps=5, updates_per_batch=passes), plan) == 5


def test_a_policy_that_went_too_far_leaves_the_rest_of_its_batch_and_the_data_goes_on(plan) -> None:
    settings = config(epochs=1, updates_per_batch=3, minibatches=2, target_kl=0.1)
    updates = Updates(settings, plan, total_steps(settings, plan))
    seen = walked(updates, lambda step: 0.2 if step == 2 else 0.1)
    assert seen[:3] == [(0, 0, 1, 1), (0, 0, 1, 2), (0, 1, 1, 1)]
    assert updates.at_end and len(seen) == updates.total - 4
    updates = Updates(config(steps=9, updates_per_batch=3, target_kl=0.1), plan, 9)
    assert [batch for _, batch, _, _ in walked(updates, lambda step: 1.0)] == list(range(9))


def test_the_number_of_steps_that_are_left_out_is_told(plan) -> None:
    updates = Updates(config(epochs=1, updates_per_batch=2, minibatches=2, target_kl=0.1), plan, 10)
    update = next(iter(updates))
    assert updates.advance(update, 0.05) == 0 and updates.advance(update, 0.3) == 2 and updates.batch == 1


def test_all_rows_that_a_run_comes_to_are_known_beforehand(plan) -> None:
    for settings, batches in (
        (config(steps=7, updates_per_batch=3), 3),
        (config(steps=7, updates_per_batch=3, target_kl=0.1), 7),
        (config(epochs=2, minibatches=2), 6),
        (config(epochs=2, minibatches=2, target_kl=0.1), 6),
    ):
        visited = list(Updates(settings, plan, total_steps(settings, plan)).visited())
        assert [rows.tolist() for rows in visited] == [rows.tolist() for _, rows in plan.steps(batches)]


def test_the_place_in_a_batch_is_part_of_the_state(plan) -> None:
    settings = config(epochs=2, updates_per_batch=3, minibatches=2)
    total = total_steps(settings, plan)
    whole = walked(Updates(settings, plan, total))
    updates = Updates(settings, plan, total)
    for done, update in enumerate(updates):
        if done == 8:
            break
        updates.advance(update, None)
    rest = Updates(settings, plan, total)
    rest.load_state_dict(updates.state_dict())
    assert walked(rest) == whole[8:]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"updates_per_batch": 0}, "updates_per_batch"),
        ({"minibatches": 0}, "minibatches"),
        ({"target_kl": 0.1}, "target_kl is 0.1, which needs updates_per_batch or minibatches above 1"),
        ({"target_kl": 0.0, "minibatches": 2}, "target_kl is 0.0; it must be above 0"),
        ({"advantage_leave_one_out": True, "advantage_mean": False}, "needs advantage_mean"),
        ({"advantage_clip": 0.0}, "advantage_clip"),
        ({"reference_model": " "}, "reference_model is empty"),
        ({"old_logprobs": "none"}, "auto, recorded, recompute"),
    ],
)
def test_settings_of_updates_that_cannot_be_are_refused(changes, message) -> None:
    with pytest.raises(ValueError, match=message):
        config(**changes)
