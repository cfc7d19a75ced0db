"""Rollouts of RL frameworks: verl, OpenPipe's ART and AReaL."""

import base64
import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from treetrain.data.formats.conversations import facts, untrained
from treetrain.data.records import Format, Notes, Record, field, look_up, objects, parsed
from treetrain.errors import DataError, quoted, shortened

# verl's names of per-token columns of a batch [rows, response length], and ours
VERL_COLUMNS = {
    "old_log_probs": "old_logprobs",
    "rollout_log_probs": "rollout_logprobs",
    "ref_log_prob": "ref_logprobs",
    "advantages": "advantages",
    "returns": "returns",
    "values": "values",
}


def read_verl(record: Record, notes: Notes) -> list[Record]:
    """A `DataProto` batch; a line of `rollout_data_dir`, which is text; or a row of generated `responses`."""
    if "batch" in record:
        return _dataproto(record)
    if "responses" in record:
        prompt = field(record, "prompt", list)
        answers = [[{"role": "assistant", "content": answer}] for answer in field(record, "responses", list)]
        group = look_up(record, "extra_info.index")
        known = {"group": notes.place if group is None else group} | facts(record)
        return [known | {"messages": untrained(prompt) + answer} for answer in answers]
    notes.add("verl writes this text without special tokens, so its tokens are not those that were sampled")
    known = {"prompt": field(record, "input", str), "completion": field(record, "output", str)}
    group = hashlib.sha256(record["input"].encode("utf-8", "replace")).hexdigest()[:16]  # of answers to one prompt
    return [known | {"reward": record.get("score"), "group": group} | facts(record)]


def _dataproto(record: Record) -> list[Record]:
    """The rows of a padded batch: prompts padded on the left, responses on the right."""
    batch, others = field(record, "batch", dict), look_up(record, "non_tensor_batch") or {}
    for name in ("input_ids", "attention_mask", "responses"):
        if (given := batch.get(name)) is None or np.ndim(given) != 2:
            raise DataError(f"`batch.{name}` is {quoted(given)}, expected [rows, tokens]")
    (rows, length), answer = np.shape(batch["input_ids"]), np.shape(batch["responses"])[1]
    for name, value in batch.items():
        if len(value) != rows:
            raise DataError(f"`batch.{name}` has {len(value)} rows, `batch.input_ids` has {rows}")

    def whole(name: str, row: int) -> list[Any]:
        """A column of the response, with zeros for the prompt."""
        return [0] * (length - answer) + np.asarray(batch[name][row]).tolist()

    made = []
    scores = next((name for name in ("token_level_scores", "rm_scores", "token_level_rewards") if name in batch), None)
    for row in range(rows):
        one: dict[str, Any] = {name: np.asarray(batch[name][row]).tolist() for name in ("input_ids", "attention_mask")}
        mask = whole("response_mask", row) if "response_mask" in batch else one["attention_mask"]
        one["loss_mask"] = [0] * (length - answer) + [int(entry) for entry in mask[length - answer :]]
        one |= {ours: whole(name, row) for name, ours in VERL_COLUMNS.items() if name in batch}
        if scores is not None:
            one["reward"] = float(np.sum(batch[scores][row]))
        if "uid" in others:
            one["group"] = str(others["uid"][row])
        made.append(one)
    return made


def is_verl(record: Record) -> bool:
    """Whether a record is a batch, a dumped rollout or a generated row of verl."""
    if isinstance(record.get("batch"), Mapping):
        return "responses" in record["batch"]
    return {"input", "output", "score"} <= record.keys() or {"prompt", "responses", "data_source"} <= record.keys()


def read_art(record: Record, notes: Notes) -> list[Record]:
    """ART's trajectories or groups of them; every additional history is a row of the same episode."""
    if "trajectories" in record:
        shared = {"group": look_up(record, "metadata.id") or notes.place}
        members = objects(record, "trajectories")
    else:
        shared, members = {}, [dict(record)]
    rows = []
    for number, one in enumerate(members):
        metadata = parsed(one.get("metadata"))
        group = one.get("group_index", look_up(metadata, "scenario_id"))
        known = ({} if group is None else {"group": group}) | shared | facts(one)
        name = f"{notes.place}/{number}"
        histories = [one, *objects(one, "additional_histories")]
        for part, history in enumerate(histories):
            row = known | {"id": f"{name}/{part}" if len(histories) > 1 else name, "episode": name}
            rows.append(row | {"messages": _art_messages(history), "tools": parsed(history.get("tools"))})
    return rows


def _art_messages(history: Record) -> list[Any]:
    """Choices are the model's and trained; assistant messages beside them were given to it."""
    if "messages_and_choices" not in history:
        return [message | {"tool_calls": parsed(message.get("tool_calls"))} for message in objects(history, "messages")]
    entries = objects(history, "messages_and_choices")
    return [entry["message"] if "message" in entry else entry | {"weight": 0} for entry in entries]


def is_art(record: Record) -> bool:
    """Whether a record is a trajectory, a group, or a row of ART's Parquet files."""
    one = look_up(record, "trajectories.0") or record
    return look_up(one, "messages_and_choices") is not None or {"group_index", "messages"} <= record.keys()


def read_areal(record: Record, notes: Notes) -> list[Record]:
    """AReaL's interactions, each one LLM call; or a line of dumped rollouts, which is text with special tokens.

    An interaction's parent is the one whose messages it continues. It is not needed: tokens show it.
    """
    if "head_version" in record:
        known = {"group": record.get("task_id"), "id": f"{record.get('task_id')}/{record.get('sample_idx')}"}
        text = {name: field(record, name, str) for name in ("prompt", "completion")}
        return [known | text | {"reward": record.get("reward"), "decoded": True}]
    listed = record.get("interactions")
    interactions = (
        objects(record, "interactions") if listed is not None else [field(record, name, dict) for name in record]
    )
    rows = []
    for number, one in enumerate(interactions):
        known = {"reward": one.get("reward"), "id": one.get("interaction_id", f"{notes.place}/{number}")}
        if "tensor_dict" in one:
            tensors = field(one, "tensor_dict", dict)
            row = {name: _array(tensors, name) for name in ("input_ids", "loss_mask", "logprobs")}
            rows.append(known | {"rollout_logprobs" if name == "logprobs" else name: row[name] for name in row})
            continue
        prompt, answer = one.get("messages", one.get("request")), one.get("output_message_list", one.get("response"))
        if isinstance(answer, str):
            answer = [{"role": "assistant", "content": answer}]
        if not isinstance(prompt, list) or not isinstance(answer, list):
            raise DataError(f"interaction {number} has the messages {quoted(prompt)} and the answer {quoted(answer)}")
        rows.append(known | {"messages": prompt + answer, "train": "last"})
    return rows


def _array(tensors: Record, name: str) -> list[Any]:
    """A row of a tensor [1, tokens], as AReaL serialises them for HTTP: base64 bytes, shape and dtype."""
    dtype, data = field(tensors, f"{name}.dtype", str).removeprefix("torch."), field(tensors, f"{name}.data", str)
    try:
        return np.frombuffer(base64.b64decode(data), dtype).tolist()
    except (TypeError, ValueError) as error:
        raise DataError(f"`tensor_dict.{name}` cannot be decoded ({shortened(error)})") from error


def is_areal(record: Record) -> bool:
    """Whether a record is a dumped rollout of AReaL, or interactions by id or as a list."""
    if "head_version" in record and "completion" in record:
        return True
    first = look_up(record, "interactions.0") or next(iter(record.values()), None)
    return isinstance(first, Mapping) and (
        "interaction_id" in first or {"request", "response", "reward"} <= first.keys()
    )


VERL = Format("verl", "a batch, a dumped rollout or responses of verl", is_verl, read_verl)
ART = Format("art", "`messages_and_choices`, or `group_index` and `messages`", is_art, read_art)
AREAL = Format("areal", "interactions or a dumped rollout of AReaL", is_areal, read_areal)
