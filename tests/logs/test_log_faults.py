"""Logs that were read wrongly: every file of `log_faults` in the shared data, and the same on messages of our own."""

import json
from pathlib import Path

import pytest
from trl import chat_template_utils

from logs.test_trained_spans import reader, runs  # noqa: F401  # `reader` is a fixture
from treetrain.core.errors import DataError
from treetrain.logs.load import from_messages, load

FOLDER = Path(chat_template_utils.__file__).parent / "chat_templates"
ASKED = {"role": "user", "content": "tree?"}
OAK, BUS = ({"role": "assistant", "content": word} for word in ("Oak", "Bus"))


def template(name):
    return (FOLDER / f"{name}.jinja").read_text(encoding="utf-8")


@pytest.fixture
def texts_of(reader):  # noqa: F811
    """The trained texts of every row of records or of a file, and the rows and notes."""

    def texts_of(*records, name="qwen3", **options):
        tokenizer = reader(template(name)).settings.tokenizer
        options = {"tokenizer": tokenizer, "chat_template": template(name), **options}
        found = load(records[0], **options) if isinstance(records[0], Path) else from_messages(records, **options)
        return [runs(tokenizer, row.ids, row.loss_weights) for row in found.trajectories], found

    return texts_of


@pytest.fixture
def faults(shared_data):
    """The folder of the files."""
    return shared_data / "log_faults"


def noted(found, text):
    return any(text in note for note in found.notes)


ENDED = "<|im_end|>"
FIRST_CALL = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
AS_IN_THE_FILES = {
    # file: (template, view, texts that are trained in every row, a part of a note)
    "f1_tool_result_trained": (
        *("gemma4", "transcript"),
        [['<|tool_call>call:weather{city:<|"|>Bern<|"|>}<tool_call|>', "It is sunny.<turn|>"]],
        "",
    ),
    "f3_kto_label": ("qwen3", "transcript", [["Oak" + ENDED], ["Bus" + ENDED]], ""),
    "f4_prompt_doubled": ("qwen3", "transcript", [["Oak" + ENDED], ["Carrot" + ENDED]], ""),
    "f7_orphan_think": (
        *("qwen3", "transcript"),
        [["The answer is 4." + ENDED, "<think>\nThree and three make six.\n</think>\n\nIt is 6." + ENDED]],
        "drops the thinking",
    ),
    "f8_loss_mask_keys": ("qwen3", "transcript", [["two" + ENDED]] * 3, ""),
    "f10_system_prompt_key": ("qwen3", "transcript", [["Arr" + ENDED]], ""),
    "f11_empty_answer": ("qwen3", "calls", [[ENDED]], "an empty answer"),
    "f14_cohere_no_end_of_turn": ("cohere2", "calls", [["Oak<|END_RESPONSE|><|END_OF_TURN_TOKEN|>"]], ""),
    "f6_call_twice": (
        *("qwen3", "transcript"),
        [['<tool_call>\n{"name": "find", "arguments": {"q": "oak"}}\n</tool_call>' + ENDED, "20 m" + ENDED]],
        "has a call in the text and beside it",
    ),
    "f13_resolved_instance_id": (
        "qwen3",
        "transcript",
        [["done" + ENDED], ["cannot" + ENDED]],
        "'resolved' (2); --map",
    ),
}


@pytest.mark.parametrize("name", AS_IN_THE_FILES)
def test_a_log_of_the_shared_data_trains_what_is_right(texts_of, faults, name):
    used, view, expected, note = AS_IN_THE_FILES[name]
    texts, found = texts_of(faults / f"{name}.jsonl", name=used, view=view)
    assert [[text.strip() for text in row] for row in texts] == expected
    assert not note or noted(found, note)


@pytest.mark.parametrize("name", ["llama3", "phi3", "qwen2_5_vl", "smolvlm", "lfm2"])
def test_calls_of_the_shared_data_that_a_template_does_not_write_are_refused(texts_of, faults, name):
    with pytest.raises(DataError, match="writes none or not all of the calls"):
        texts_of(faults / "f2_tool_calls_lost.jsonl", name=name)


def test_thoughts_and_texts_of_calls_without_results_are_all_trained(texts_of, faults):
    texts, _ = texts_of(faults / "f5_calls_without_results.jsonl", view="calls")
    said = "".join(text for row in texts for text in row)
    assert len(texts) == 2
    words = ("first thought", "First I look.", "second thought", "Now I write.", FIRST_CALL)
    assert all(word in said for word in words)


def test_thoughts_and_calls_of_the_shared_data_are_trained_with_gpt_oss(texts_of, faults):
    texts, _ = texts_of(faults / "r8_gptoss_think_and_call.jsonl", name="gptoss", view="calls")
    assert "I must look." in texts[0][0] and '{"word": "oak"}<|call|>' in texts[0][0]
    assert "It says 20." in texts[1][0] and texts[1][0].endswith("20 m.<|return|>")


def test_arguments_of_the_shared_data_are_their_text_with_deepseek(texts_of, faults):
    texts, _ = texts_of(faults / "r9_deepseek_arguments.jsonl", name="deepseekv3", view="calls")
    assert '{"word": "firstcall"}' in texts[0][0] and texts[1] == ["Twenty metres.<｜end▁of▁sentence｜>"]


def test_pairs_errors_groups_and_scored_answers_of_the_shared_data_are_read(texts_of, faults):
    texts, found = texts_of(faults / "r1_sharegpt_dpo.jsonl")
    assert texts == [["Oak" + ENDED], ["Bus" + ENDED]] and [row.chosen for row in found.trajectories] == [True, False]
    texts, found = texts_of(faults / "r3_first_record_error.jsonl")
    assert texts == [["hi" + ENDED]] and noted(found, "an error in the place of an answer is no row")
    rows = texts_of(faults / "r4_atropos.jsonl")[1].trajectories
    assert [(row.ids.tolist(), row.weights.tolist(), row.reward) for row in rows] == [
        ([5, 6, 7, 8], [0, 0, 1, 1], 1.0),
        ([5, 6, 9], [0, 0, 1], -1.0),
    ]
    assert rows[0].group == rows[1].group is not None
    texts, found = texts_of(faults / "r6_prompt_response_reward.jsonl")
    assert texts == [["4"], ["5"]] and [row.reward for row in found.trajectories] == [1.0, 0.0]


def test_the_label_of_unpaired_preferences_says_whether_an_answer_is_chosen(texts_of):
    rows = [{"messages": [ASKED, one], "label": label} for one, label in ((OAK, True), (BUS, False), (BUS, 0))]
    _, found = texts_of(*rows)
    assert [row.chosen for row in found.trajectories] == [True, False, False]
    with pytest.raises(DataError, match="chosen is 'bad', expected True"):
        texts_of({"messages": [ASKED, OAK], "label": "bad"})


@pytest.mark.parametrize("as_text", [False, True])
def test_a_prompt_that_answers_repeat_stands_once_and_one_beside_them_is_never_lost(texts_of, as_text):
    def written(messages):
        return json.dumps(messages) if as_text else messages

    plain = {"prompt": written([ASKED]), "chosen": written([OAK]), "rejected": written([BUS])}
    doubled = {"prompt": written([ASKED]), "chosen": written([ASKED, OAK]), "rejected": written([ASKED, BUS])}
    words = {"prompt": "tree?", "chosen": written([OAK]), "rejected": written([BUS])}
    ids = [[row.ids.tolist() for row in texts_of(one)[1].trajectories] for one in (plain, doubled, words)]
    assert ids[0] == ids[1] == ids[2] and len(ids[0]) == 2
    texts, _ = texts_of({"prompt": [ASKED], "completion": [ASKED, OAK]})
    assert texts == [["Oak" + ENDED]]


def test_texts_that_repeat_their_prompt_and_answers_without_one_are_noted(texts_of):
    assert noted(texts_of({"prompt": "Name a tree", "completion": "Name a tree: oak"})[1], "then stands twice")
    assert noted(texts_of({"completion": "oak"})[1], "the log has no prompt")


@pytest.mark.parametrize("key", ["loss_mask", "step_loss_mask", "loss_weight", "train", "weight"])
def test_a_message_that_its_log_masks_is_not_trained_under_any_name_of_the_mask(texts_of, key):
    texts, _ = texts_of({"messages": [ASKED, OAK | {key: False if key == "train" else 0}, ASKED, BUS | {key: 1}]})
    assert texts == [["Bus" + ENDED]]


def test_masks_that_are_not_read_stop_the_reading_or_leave_the_record_out(texts_of):
    with pytest.raises(DataError, match="message 1 has `train_detail`"):
        texts_of({"messages": [ASKED, OAK | {"train_detail": [{"begin_offset": 0, "end_offset": 1, "train": False}]}]})
    texts, found = texts_of({"messages": [ASKED, OAK], "mask_sample": True}, {"messages": [ASKED, BUS]})
    assert texts == [["Bus" + ENDED]] and noted(found, "a record with `mask_sample` is no row")


@pytest.mark.parametrize("name", ["audios", "videos"])
def test_media_beside_messages_that_nobody_reads_are_refused(texts_of, name):
    with pytest.raises(DataError, match=f"the record has `{name}`, which the model saw"):
        texts_of({"messages": [ASKED, OAK], name: ["a.bin"]})


def test_a_system_prompt_beside_messages_is_the_system_prompt(texts_of, bytes_tokenizer):
    beside, inside = (
        texts_of(one)[1].trajectories[0].ids.tolist()
        for one in (
            {"system_prompt": "be brief", "messages": [ASKED, OAK]},
            {"messages": [{"role": "system", "content": "be brief"}, ASKED, OAK]},
        )
    )
    assert beside == inside
    with pytest.raises(DataError, match="the record has `system_prompt` and a system message"):
        texts_of({"system_prompt": "x", "messages": [{"role": "system", "content": "y"}, ASKED, OAK]})


def test_an_answer_that_failed_before_it_said_anything_is_no_row_and_an_empty_one_is_noted(texts_of):
    def logged(content, reason):
        choice = {"index": 0, "finish_reason": reason, "message": {"role": "assistant", "content": content}}
        return {"request": {"messages": [ASKED]}, "response": {"choices": [choice]}}

    texts, found = texts_of(logged("", "stop"), logged(None, "error"), logged("Oak", "error"))
    assert texts == [[ENDED], ["Oak"]]
    assert noted(found, "an empty answer: only the end") and noted(found, "or failed, before it said anything")


def test_a_thought_or_a_call_in_the_text_and_beside_it_is_in_the_row_once(texts_of):
    thought = OAK | {"content": "<think>\nI know.\n</think>\n\nOak", "reasoning_content": "I know."}
    texts, found = texts_of({"messages": [ASKED, thought]})
    assert texts == [["<think>\nI know.\n</think>\n\nOak" + ENDED]]
    assert noted(found, "its thinking in the text and beside")
    spelt = '{"q": "a large oak"}'
    call = {"id": "a", "type": "function", "function": {"name": "find", "arguments": spelt}}
    block = f'Look.\n<tool_call>\n{{"name": "find", "arguments": {spelt}}}\n</tool_call>'
    texts, found = texts_of({"messages": [ASKED, OAK | {"content": block, "tool_calls": [call]}]})
    assert texts[0][0].count("large oak") == 1 and texts[0][0].startswith("Look.")
    texts, found = texts_of({"messages": [ASKED, OAK | {"content": f"find({spelt})", "tool_calls": [call]}]})
    assert noted(found, "has the arguments of a call that is also beside it")


def test_what_a_model_says_after_a_call_without_result_is_another_answer(texts_of):
    def item(**fields):
        return {"type": "message", "role": "assistant", **fields}

    call = {"type": "function_call", "name": "look", "arguments": "{}", "call_id": "1"}
    output = [item(content=[{"type": "output_text", "text": "First."}]), call, call | {"call_id": "2"}]
    output += [item(content=[{"type": "output_text", "text": "Second."}])]
    texts, _ = texts_of({"responses_create_params": {"input": [ASKED]}, "response": {"output": output}})
    assert texts == [[f"First.\n{FIRST_CALL}\n{FIRST_CALL}{ENDED}", f"Second.{ENDED}"]]


def test_a_text_that_begins_with_the_first_token_does_not_get_it_twice(texts_of):
    (plain,), (begun,) = (
        texts_of({"prompt": prompt, "completion": "oak"}, name="llama3")[1].trajectories
        for prompt in ("a tree", "<bos>a tree")
    )
    assert begun.ids.tolist().count(begun.ids[0]) == 1 and begun.ids[-5:].tolist() == plain.ids[-5:].tolist()


def test_keys_that_may_say_what_to_train_are_named_and_the_others_counted(texts_of):
    _, found = texts_of({"messages": [ASKED, OAK], "resolved": True, "is_labelled": 1, "colour": 1, "size": 2})
    assert noted(found, "keys that may say what to train and are not used: 'resolved' (1), 'is_labelled' (1); --map")
    assert noted(found, "keys that are not used: 2, such as 'colour'")


def test_keys_that_are_facts_of_a_row_come_with_the_option_that_reads_them(texts_of):
    record = {"messages": [ASKED, OAK], "instance_id": "x-1", "resolved": True}
    _, found = texts_of(record)
    assert noted(found, "'instance_id' (1), 'resolved' (1); --map group=instance_id or reward=resolved reads one")
    _, found = texts_of(record, map={"group": "instance_id", "reward": "resolved"})
    (row,) = found.trajectories
    assert (row.group, row.reward) == ("x-1", 1.0) and not noted(found, "keys")


def test_counts_of_tokens_and_switches_are_not_among_the_keys_that_may_say_what_to_train(texts_of):
    counts = {"total_tokens": 16, "return_token_ids": True, "tokenUsage": {"input": 9}, "input_token_count": [[9]]}
    _, found = texts_of({"messages": [ASKED, OAK], **counts})
    assert noted(found, "keys that are not used: 4") and not noted(found, "may say what to train")
    _, found = texts_of({"messages": [ASKED, OAK], "token_scales": [1.0, 0.0], "tokens": "[1, 0]"})
    assert noted(found, "may say what to train and are not used: 'token_scales' (1), 'tokens' (1)")


def test_an_answer_that_its_log_masks_is_named(texts_of):
    _, found = texts_of({"messages": [ASKED, OAK | {"step_loss_mask": 0}, ASKED, BUS]})
    assert noted(found, "not trained: the log masks it, or it is part of a prompt (row 0 message 1)")


def test_a_call_without_result_before_the_next_answer_is_noted(texts_of):
    call = {"id": "a", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    result = {"role": "tool", "tool_call_id": "a", "content": "an oak"}
    calling = OAK | {"tool_calls": [call]}
    for messages, lacks in (([calling, BUS], True), ([calling, result, BUS], False), ([calling], False)):
        _, found = texts_of({"messages": [ASKED, *messages]})
        assert noted(found, "the log has no result of a call before the next answer (row 0 message 1)") == lacks


def test_what_a_template_drops_of_earlier_answers_comes_with_the_view_in_which_every_answer_is_the_last(texts_of):
    call = {"id": "a", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    messages = [ASKED, OAK | {"tool_calls": [call]}, {"role": "tool", "tool_call_id": "a", "content": "1"}, BUS]
    with pytest.raises(DataError, match=r"message 1 .* cannot be found .*; --view calls renders every answer"):
        texts_of({"messages": messages}, name="gptoss")
    texts, _ = texts_of({"messages": messages}, name="gptoss", view="calls")
    assert "Oak" in texts[0][0] and "Bus" in texts[1][0]
    messages[1] = {"role": "assistant", "content": "", "reasoning_content": "I look.", "tool_calls": [call]}
    _, found = texts_of({"messages": messages}, name="gptoss")
    assert noted(found, "so it is not trained; --view calls renders every answer as the last message (row 0 message 1)")
