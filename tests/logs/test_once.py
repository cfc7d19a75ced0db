"""count="once": each sampled token has its weight in the first row that trains it; facts that differ are an error."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import treetrain as tt
from support import images
from support.models import make_model
from support.tree_runs import apart, run, small_model, steps
from treetrain.check import linear
from treetrain.check.contract import PureFloat64
from treetrain.cli import main
from treetrain.core.errors import DataError
from treetrain.logs.inspection.report import trained_again
from treetrain.logs.once import count_once

# A prompt 1 2, the answer 3 4; its second call answers 7; another branch answers 5 in place of 4; a duplicate.
ROWS = [
    tt.Trajectory([1, 2, 3, 4], loss_weights=[0, 0, 1, 1]),
    tt.Trajectory([1, 2, 3, 4, 6, 7], loss_weights=[0, 0, 1, 1, 0, 1]),
    tt.Trajectory([1, 2, 3, 5], loss_weights=[0, 0, 1, 0.5]),
    tt.Trajectory([1, 2, 3, 4], loss_weights=[0, 0, 1, 1]),
    tt.Trajectory([9, 3, 4], loss_weights=[0, 1, 1]),
]
BY_HAND = [[0, 0, 1, 1], [0, 0, 0, 0, 0, 1], [0, 0, 0, 0.5], [0, 0, 0, 0], [0, 1, 1]]


def weights(rows):
    return [row.weights.tolist() for row in rows]


def test_a_token_weighs_in_the_first_row_through_it_that_trains_it():
    assert weights(count_once(ROWS)) == BY_HAND
    context = ROWS[0].replace(loss_weights=0)  # a row that has the answer as context only
    assert weights(count_once([context, *ROWS[1:]]))[:2] == [[0] * 4, [0, 0, 1, 1, 0, 1]]
    assert weights(count_once([row.replace(key=n) for n, row in enumerate(ROWS)])) == weights(ROWS)
    assert count_once([]) == []


def test_episodes_were_sampled_apart_and_rows_of_one_repeat_each_other():
    episodes = ["a", "a", "b", "b", "a"]
    rows = [row.replace(episode=one, group="g") for row, one in zip(ROWS, episodes)]
    assert weights(count_once(rows)) == [BY_HAND[0], BY_HAND[1], [0, 0, 1, 0.5], [0, 0, 0, 1], BY_HAND[4]]


def test_experts_of_the_tokens_before_tell_tokens_apart_and_their_own_do_not():
    experts = np.zeros((4, 1, 1), int)
    rows = [ROWS[0].replace(experts=experts), ROWS[3].replace(experts=experts), ROWS[3].replace(experts=experts + 1)]
    assert weights(count_once([*rows, ROWS[0]])) == [[0, 0, 1, 1], [0] * 4, [0, 0, 1, 1], [0, 0, 1, 1]]
    later = [np.array([0, 0, 0, 1]).reshape(4, 1, 1), np.array([0, 0, 1, 0]).reshape(4, 1, 1)]
    rows = [rows[0], *(rows[0].replace(experts=own) for own in later)]
    assert weights(count_once(rows)) == [[0, 0, 1, 1], [0, 0, 0, 0], [0, 0, 0, 1]]
    assert trained_again(rows, tt.build_tree(rows)) == 3


def test_a_call_whose_last_token_has_no_record_repeats_in_the_next_call_that_has_it():
    calls = [[1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]]
    own, rows = {4, 5, 7, 8, 10, 11}, []
    for ids in calls:
        record = np.array([[[token % 4, (token + 1) % 4]] * 2 for token in ids])
        record[-1] = -1
        rows.append(tt.Trajectory(ids, loss_weights=[float(x in own) for x in ids], experts=record, episode="e"))
    counted = count_once(rows)
    assert [np.flatnonzero(row.weights).tolist() for row in counted] == [[3, 4], [6, 7], [9, 10]]


def test_tokens_after_different_images_are_different_tokens():
    def row(*parts, answer):
        made = images.row(*parts, *answer)
        return made.replace(loss_weights=[0.0] * (len(made) - len(answer)) + [1.0] * len(answer))

    one, other = images.image(0), images.image(1)
    rows = [row(5, seen, answer=(7, 8)) for seen in (one, other, one)]
    rows.append(row(5, one, 7, 8, other, answer=(9,)))  # a later call, with another image behind the answer
    rows.append(rows[3].replace(loss_weights=1.0))
    counted = [np.flatnonzero(row.weights).tolist() for row in count_once(rows)]
    first = [len(rows[0]) - 2, len(rows[0]) - 1]
    before_answer = set(range(1, first[0]))
    assert counted[:4] == [first, first, [], [len(rows[3]) - 1]]
    assert set(counted[4]) == before_answer | set(range(len(rows[0]), len(rows[3]) - 1))
    model = images.image_model("Qwen3-VL")
    made = [run(model, rows[:3], max_steps=1, loss="sft", save_strategy="no", count="once")]
    assert weights(made[0].train_dataset) == weights(count_once(rows[:3]))


rows_of_files = st.lists(
    st.tuples(st.lists(st.integers(0, 2), max_size=6), st.integers(0, 63), st.sampled_from([None, "a", "b"])),
    max_size=12,
)


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(rows_of_files)
def test_the_weights_are_those_of_a_set_of_prefixes(drawn):
    rows, seen, expected = [], set(), []
    for ids, bits, episode in drawn:
        mask = [(bits >> at) & 1 for at in range(len(ids))]
        rows.append(tt.Trajectory(ids, loss_weights=mask, episode=episode))
        names = [(episode, *ids[: at + 1]) for at in range(len(ids))]
        expected.append([float(at > 0 and on and name not in seen) for at, (on, name) in enumerate(zip(mask, names))])
        seen |= {name for at, (on, name) in enumerate(zip(mask, names)) if at > 0 and on}
    assert weights(count_once(rows)) == expected


def test_one_log_probability_in_two_roundings_is_that_of_the_first_row():
    rows = [ROWS[0].replace(rollout_logprobs=[0, 0, -1, last]) for last in (-2.0, -2.0001, -2.0002)]
    assert weights(count_once(rows[:2])) == [[0, 0, 1, 1], [0] * 4]
    with pytest.raises(DataError, match=r"the rollout_logprobs -2 and -2\.0002; count"):
        count_once([rows[0], rows[2]])
    ids = [[], [], [], [4, 5]]
    sets = [ROWS[0].replace(teacher_topk=([x or None for x in ids], [None, None, None, [-1.0, last]]))
            for last in (-2.0, -2.0001, -2.0002)]  # fmt: skip
    assert weights(count_once(sets[:2])) == [[0, 0, 1, 1], [0] * 4]
    with pytest.raises(DataError, match=r"the teacher_topk .*-2.0002"):
        count_once([sets[0], sets[2]])


def test_numbers_that_differ_late_are_printed_until_they_differ():
    rows = [ROWS[0].replace(advantages=value) for value in (1.0, 1.0000001)]
    with pytest.raises(DataError, match=r"the advantages 1\.0 and 1\.0000001; count"):
        count_once(rows)
    with pytest.raises(DataError, match=r"rows 0 and 1 both train token 3 of one path, with the loss_weights 1 and 5"):
        count_once([ROWS[0], ROWS[0].replace(loss_weights=[0, 0, 1, 5])])


@pytest.mark.parametrize(
    "name", ["advantages", "old_logprobs", "rollout_logprobs", "ref_logprobs", "values", "returns"]
)
def test_facts_that_differ_at_a_shared_trained_token_are_an_error(name):
    first, second = (ROWS[n].replace(**{name: np.full(len(ROWS[n]), -1.0)}) for n in (0, 1))
    assert weights(count_once([first, second])) == BY_HAND[:2]
    untrained = second.replace(**{name: np.array([-7, -7, -1, -1, -7, -2.0])})
    assert weights(count_once([first, untrained])) == BY_HAND[:2]
    other = second.replace(**{name: np.array([0, 0, -1, -2, 0, 0.0])}, id="x")
    with pytest.raises(DataError, match=rf"rows 0 and 1 \('x'\) both train token 3 .* the {name} -1 and -2; .*episode"):
        count_once([first, other])
    with pytest.raises(DataError, match=rf"token 2 of one path, with the {name} -1 and none"):
        count_once([first, ROWS[1]])
    assert weights(count_once([first.replace(episode="a"), other.replace(episode="b")])) == weights([first, other])


def test_pairs_and_unknown_values_are_refused(write_rows):
    with pytest.raises(DataError, match="row 1 is of a pair: pairs compare whole rows"):
        count_once([ROWS[0], ROWS[1].replace(pair=3, chosen=True)])
    with pytest.raises(ValueError, match="count='twice' is neither 'per trajectory' nor 'once'"):
        tt.load(write_rows({"input_ids": [1, 2]}), count="twice")
    with pytest.raises(ValueError, match="count='twice' is neither"):
        tt.TreeArguments(output_dir="x", count="twice")
    with pytest.raises(ValueError, match="count is 'once', but DPOLoss is no sum over tokens"):
        run(small_model(), ROWS, loss="dpo", count="once")


def test_load_and_from_messages_count_once_and_note_rewards_that_differ(write_rows, bytes_tokenizer):
    records = [{"input_ids": row.ids.tolist(), "loss_weights": row.weights.tolist()} for row in ROWS]
    assert weights(tt.load(write_rows(*records), count="once").trajectories) == BY_HAND
    assert weights(tt.from_messages(records, count="once").trajectories) == BY_HAND
    records[1]["reward"] = 1.0
    notes = tt.load(write_rows(*records), count="once").notes
    assert any(
        "rows of different rewards; they count with the first row's (" in note and "line 2" in note for note in notes
    ), notes
    turns = [{"role": role, "content": role} for role in ("user", "assistant")]
    options = {"tokenizer": bytes_tokenizer, "chat_template": "chatml"}
    talks = [{"messages": turns}, {"messages": turns * 2}]
    often, once = (tt.from_messages(talks, **options, count=count).trajectories for count in ("per trajectory", "once"))
    sizes = [int(row.weights.sum()) for row in (*often, *once)]
    assert sizes[1] == 2 * sizes[0] and sizes[2:] == [sizes[0], sizes[0]]


def test_inspect_counts_the_trained_tokens_that_count_once_leaves_out(write_rows, capsys):
    episodes = ["a", "a", "b", None, None]
    for rows in (ROWS, [row.replace(episode=one) for row, one in zip(ROWS, episodes)]):
        trained = [sum(np.count_nonzero(row.weights) for row in some) for some in (rows, count_once(rows))]
        expected = trained[0] - trained[1]
        assert trained_again(rows, tt.build_tree(rows)) == expected > 0
    path = write_rows(*({"input_ids": row.ids.tolist(), "loss_weights": row.weights.tolist()} for row in ROWS))
    assert main(["inspect", str(path)]) == 0
    assert '5 repeat what an earlier row trains; count="once" trains each once' in " ".join(
        capsys.readouterr().out.split()
    )


@pytest.mark.few(1)
@pytest.mark.parametrize("budget", [None, 3])
@pytest.mark.parametrize("loss", ["sft", "reinforce"])
def test_a_step_is_that_of_weights_by_hand_and_of_the_linear_baseline(loss, budget):
    model = make_model("qwen3", dtype=torch.float64)
    rows = [row.replace(advantages=0.5) for row in ROWS]
    by_hand = [row.replace(loss_weights=hand) for row, hand in zip(rows, BY_HAND)]
    made = tt.losses.sft() if loss == "sft" else tt.losses.reinforce()

    def step(batch, **options):
        model.zero_grad()
        with PureFloat64():
            result = tt.TreeEngine(model, **options).forward_backward(batch, made)
        return result.loss, linear.gradients(model)

    with PureFloat64():
        scores, _ = linear.score_rows(model, [row.ids.tolist() for row in rows])
        factor = 1.0 if loss == "sft" else 0.5
        total = sum((-torch.tensor(hand[1:]) * factor * score).sum() for hand, score in zip(BY_HAND, scores))
        expected = total / sum(map(sum, BY_HAND))
        gradient = linear.gradients(model, expected)
    for batch in (count_once(rows), by_hand):
        found, gradients = step(batch, budget=budget)
        assert found == pytest.approx(expected.item(), rel=1e-12)
        assert linear.relative_error(gradients, gradient) <= 1e-12
    often, _ = step(rows, budget=budget)
    assert often != pytest.approx(expected.item(), rel=1e-3)


def test_a_run_that_counts_once_is_the_run_on_weights_by_hand(tmp_path):
    rows = [row.replace(group=n // 3) for n, row in enumerate(ROWS)]
    by_hand = [row.replace(loss_weights=hand) for row, hand in zip(rows, BY_HAND)]
    runs = [
        run(small_model(), data, max_steps=4, count=count)
        for data, count in ((rows, "once"), (by_hand, "per trajectory"))
    ]
    assert len(steps(runs[0])) == 4 and max(apart(*runs).values()) == 0
    rows = [row.replace(group=0, reward=float(n)) for n, row in enumerate(ROWS)]
    with pytest.raises(DataError, match="rows 0 and 1 both train token 2 of one path, with the advantages"):
        run(small_model(), rows, loss="dapo", max_steps=1, count="once")
    episodes = [
        row.replace(episode="a" if n < 2 else n, reward=1.0 if n < 2 else row.reward) for n, row in enumerate(rows)
    ]
    assert len(steps(run(small_model(), episodes, loss="dapo", max_steps=1, count="once"))) == 1
