"""Sets of ids at each token of a row: what is read, and what is refused by position."""

import json

import numpy as np
import pytest
import torch

import treetrain as tt
from treetrain.logs.formats.conversations import _sampled_turns
from treetrain.logs.formats.events import _atif_call
from treetrain.logs.once import count_once
from treetrain.logs.records import Notes

MASK = [None, None, [3, 9], [4], [1, 5, 2]]
IDS = [1, 2, 3, 4, 5]


def lists(sets) -> list[list[int] | None]:
    return [sets.ids[a:b].tolist() or None for a, b in zip(sets.starts, sets.starts[1:])]


def test_lists_and_padded_arrays_are_the_same_sets():
    row = tt.Trajectory(IDS, sampling_mask=MASK)
    padded = np.array([[-1, -1, -1], [-1, -1, -1], [9, -1, 3], [4, -1, -1], [1, 2, 5]])
    assert lists(row.sampling_mask) == [None, None, [3, 9], [4], [5, 1, 2]]  # the token itself comes first
    assert lists(tt.Trajectory(IDS, sampling_mask=padded).sampling_mask) == [None, None, [3, 9], [4], [5, 1, 2]]
    again = row.replace(reward=1.0)
    assert lists(again.sampling_mask) == lists(row.sampling_mask) and "sampling_mask" in repr(again)


def test_a_teachers_ids_keep_their_log_probabilities():
    ids, logprobs = [None, [7, 8], None, [1], None], [None, [-1.0, -2.0], None, [-0.5], None]
    sets = tt.Trajectory(IDS, teacher_topk=(ids, logprobs)).teacher_topk
    assert lists(sets) == ids and sets.logprobs.tolist() == [-1.0, -2.0, -0.5]
    arrays = (
        np.array([[-1, -1], [7, 8], [-1, -1], [1, -1], [-1, -1]]),
        np.array([[0, 0], [-1, -2], [0, 0], [-0.5, 9], [0, 0]]),
    )
    tensors = tuple(map(torch.from_numpy, arrays))
    tensors = tensors[0], tensors[1].bfloat16().requires_grad_()
    by_token = [None if x is None else torch.tensor(x).bfloat16() for x in logprobs]
    for given in (arrays, tensors, (ids, by_token)):
        sets = tt.Trajectory(IDS, teacher_topk=given).teacher_topk
        assert lists(sets) == ids and sets.logprobs.tolist() == [-1.0, -2.0, -0.5]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"sampling_mask": MASK[1:]}, "sampling_mask has 4 entries for 5 tokens"),
        ({"sampling_mask": 7}, "sampling_mask has 7 for 5 tokens"),
        ({"sampling_mask": [None, None, [], None, None]}, r"sampling_mask\[2\] is \[\]; give a list that is not empty"),
        ({"sampling_mask": [None, None, [3, 9, 3], None, None]}, r"sampling_mask\[2\] has the id 3 twice"),
        (
            {"sampling_mask": [None, None, [9, 8], None, None]},
            r"sampling_mask\[2\] is \[9, 8\], without the row's token 3",
        ),
        ({"sampling_mask": [None, None, [3, -2], None, None]}, r"sampling_mask\[2\]: ids\[1\] = -2 is negative"),
        ({"sampling_mask": [None, None, [3, "a"], None, None]}, r"sampling_mask\[2\]: ids hold 'a'"),
        (
            {"sampling_mask": (MASK, [x and [-1.0] * len(x) for x in MASK])},
            "sampling_mask has log-prob.* give ids alone",
        ),
        ({"teacher_topk": MASK}, "teacher_topk has no log-probabilities"),
        ({"teacher_topk": ([[1]] * 5, [["x"]] * 5)}, "teacher_topk: log-probabilities are no lists of numbers .*'x'"),
        ({"teacher_topk": ([[1]] * 5, [[[-1.0]]] * 5)}, r"teacher_topk: log-probabilities are .*\("),
        ({"teacher_topk": ([[1]] * 5, [[-1.0]] * 4)}, "teacher_topk: log-probabilities has 4 entries for 5 tokens"),
        ({"teacher_topk": ([[1]] * 5, [[-1.0]] * 4 + [[-1, -2]])}, r"teacher_topk\[4\] has 1 ids and 2 log-prob"),
        (
            {"teacher_topk": ([[1]] * 5, [[-1.0]] * 4 + [[0.25]])},
            r"teacher_topk\[4\]: id 1 has the log-probability 0.25",
        ),
        (
            {"teacher_topk": ([[1]] * 5, [[-1.0]] * 4 + [[float("nan")]])},
            r"teacher_topk\[4\]: id 1 has the log-prob.* nan",
        ),
    ],
)
def test_wrong_sets_are_refused_with_their_position(fields, message):
    with pytest.raises(tt.DataError, match=f"trajectory 'r7': {message}"):
        tt.Trajectory(IDS, id="r7", **fields)


def test_token_rows_and_responses_of_servers_have_sets(tmp_path):
    path = tmp_path / "rows.jsonl"
    topk = {
        "teacher_topk_ids": [None, [7, 8], None, None, [1]],
        "teacher_topk_logprobs": [None, [-1, -2], None, None, [-3]],
    }
    path.write_text(json.dumps({"input_ids": [0, *IDS[:4]], "attention_mask": [0, 1, 1, 1, 1]} | topk) + "\n")
    (row,) = tt.load(path).trajectories
    assert lists(row.teacher_topk) == [[7, 8], None, None, [1]]
    vllm = {
        "prompt_token_ids": [1, 2],
        "choices": [
            {
                "token_ids": [3, 4],
                "sampling_mask": [[9, 3], [4]],
                "logprobs": {"tokens": ["a", "b"], "token_logprobs": [-0.7, 0]},
            }
        ],
    }
    meta = {
        "output_token_logprobs": [[-0.9, 3, None], [-0.2, 4, None]],
        "output_token_sampling_mask": [[9, 3], [4]],
        "output_token_sampling_logprobs": [-0.7, 0.0],
    }
    sglang, newer = (
        {"request": {"input_ids": [1, 2]}, "response": {"text": "ab", "meta_info": meta | over_kept}}
        for over_kept in ({}, {"output_token_sampling_logprobs": [[-0.69, -0.7], [0.0]]})
    )
    for number, response in enumerate((vllm, sglang, newer)):
        path = tmp_path / f"response{number}.jsonl"
        path.write_text(json.dumps(response) + "\n")
        (row,) = tt.load(path).trajectories
        assert lists(row.sampling_mask) == [None, None, [3, 9], [4]]
        assert row.rollout_logprobs.tolist() == [0, 0, -0.7, 0]


OWN = {"sampling_mask": [[3, 9], None], "teacher_topk_ids": [[5], [6, 7]], "teacher_topk_logprobs": [[-1], [-2, -3]]}
"""Of two sampled tokens, 3 and 4."""
CALL = {"prompt_ids": [1, 2], "completion_ids": [3, 4], "completion_logprobs": [-1, -1], **OWN}
GYM = {"prompt_token_ids": [1, 2], "generation_token_ids": [3, 4], "generation_log_probs": [-1, -1], **OWN}
ATIF = {"prompt_token_ids": [1, 2], "completion_token_ids": [3, 4], "logprobs": [-1, -1], **OWN}
RECORDS = {
    "steps": CALL,
    "steps of verifiers": {"trajectory": [{"tokens": CALL}], "reward": 1},
    "steps of SkyRL": {
        "prompt_token_ids": [[1, 2]],
        "response_ids": [[3, 4]],
        "rollout_logprobs": [[-1, -1]],
        "rollout_sample_support": [OWN["sampling_mask"]],
        **{name: [value] for name, value in OWN.items() if name != "sampling_mask"},
    },
    "nodes": {
        "nodes": [
            {"id": "p", "parent": None, "tokens": [1, 2], "loss_weights": 0},
            {"id": "a", "parent": "p", "tokens": [3, 4], "rollout_logprobs": [-1, -1], **OWN},
        ]
    },
    "nodes of verifiers": {
        "id": "t",
        "nodes": [
            {"parent": None, "sampled": False, "message": {}, "token_ids": [1, 2], "mask": [0, 0]},
            {"parent": 0, "sampled": True, "message": {}, "token_ids": [3, 4], "mask": [1, 1], "logprobs": [-1, -1]}
            | OWN,
        ],
    },
    "server": {
        "prompt_token_ids": [1, 2],
        "choices": [{"token_ids": [3, 4], "logprobs": {"tokens": ["a", "b"], "token_logprobs": [-1, -1]}, **OWN}],
    },
    "prime-rl": {
        "token_ids": [1, 2, 3, 4],
        "loss_mask": [0, 0, 1, 1],
        "inference_logprobs": [0, 0, -1, -1],
        **{name: [None, None, *value] for name, value in OWN.items()},
    },
}


@pytest.mark.parametrize("name", RECORDS)
def test_every_format_with_log_probabilities_of_ids_reads_the_sets_beside_them(tmp_path, name):
    path = tmp_path / "records.jsonl"
    path.write_text(json.dumps(RECORDS[name]) + "\n")
    (row,) = tt.load(path).trajectories
    assert row.ids.tolist() == [1, 2, 3, 4] and row.rollout_logprobs.tolist() == [0, 0, -1, -1]
    assert lists(row.sampling_mask) == [None, None, [3, 9], None]
    assert lists(row.teacher_topk) == [None, None, [5], [6, 7]] and row.teacher_topk.logprobs.tolist() == [-1, -2, -3]


def test_calls_inside_of_conversations_read_the_sets_beside_them():
    message = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "a"}]}
    for row in (_atif_call({"metrics": ATIF}), _sampled_turns({"output": [message | GYM]}, {}, Notes("p"))[0]):
        assert row["input_ids"] == [1, 2, 3, 4] and row["rollout_logprobs"] == [0, 0, -1, -1]
        assert {name: row[name] for name in OWN} == {name: [None, None, *value] for name, value in OWN.items()}


def test_a_set_under_another_name_is_read_by_map_and_another_length_is_an_error(tmp_path):
    path = tmp_path / "records.jsonl"
    path.write_text(json.dumps({**CALL, "kept": CALL["sampling_mask"], "sampling_mask": None}) + "\n")
    (row,) = tt.load(path, map={"sampling_mask": "kept"}).trajectories
    assert lists(row.sampling_mask) == [None, None, [3, 9], None]
    for name, value, message in (
        ("sampling_mask", [[3]], "there are 1 sampling_mask for 2 answer ids; give one for each"),
        ("sampling_mask", {"ids": "AA"}, "the sampling_mask are .*, expected a list"),
        ("teacher_topk_logprobs", None, "teacher_topk_ids is there and teacher_topk_logprobs is not"),
    ):
        path.write_text(json.dumps({**CALL, name: value}) + "\n")
        with pytest.raises(tt.DataError, match=f"line 1.*{message}"):
            tt.load(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sampling_mask": [None, [3]]}, "sampling_mask has 2 entries for 3 input_ids"),
        ({"sampling_mask": [None, None, [4, 5]]}, r"line 1.*sampling_mask\[2\] is \[4, 5\], without the row's token 3"),
        ({"teacher_topk_ids": [[1]] * 3}, "teacher_topk_ids is there and teacher_topk_logprobs is not"),
        ({"teacher_topk_logprobs": [[1]] * 3}, "teacher_topk_logprobs is there and teacher_topk_ids is not"),
    ],
)
def test_wrong_sets_of_a_file_are_named_by_line(tmp_path, change, message):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"input_ids": [1, 2, 3]} | change) + "\n")
    with pytest.raises(tt.DataError, match=message):
        tt.load(path)


def test_a_token_that_counts_once_has_one_set():
    rows = [tt.Trajectory([1, 2, 3], sampling_mask=[None, None, [3, k]]) for k in (4, 4, 5)]
    assert [row.weights.sum() for row in count_once(rows[:2])] == [2, 0]
    with pytest.raises(tt.DataError, match=r"rows 0 and 1 both train token 2 .*sampling_mask"):
        count_once(rows[1:])
