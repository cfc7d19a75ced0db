"""Rollouts of agents, benchmarks and RL frameworks: SWE-agent, tau-bench and tau2-bench, Inspect AI, the search trees
of ToolBench and Tree of Thoughts, verl, ART and AReaL."""

from collections.abc import Iterator, Mapping
from itertools import zip_longest

import numpy as np

from treetrain.core.digest import digest
from treetrain.core.errors import DataError, quoted
from treetrain.logs.formats.conversations import NOT_TRAINED, finished, untrained
from treetrain.logs.formats.events import of_file
from treetrain.logs.records import (
    Json,
    Notes,
    Record,
    facts,
    field,
    first_path,
    look_up,
    objects,
    parsed,
    picked,
)

INSPECT_SCORES = {"C": 1.0, "I": 0.0, "P": 0.5, "N": 0.0}
SWE_KEYS = ("role", "content", "tool_calls")
# verl's names of per-token columns of a batch [rows, response length], and ours
VERL_COLUMNS = {
    "old_log_probs": "old_logprobs",
    "rollout_log_probs": "rollout_logprobs",
    "ref_log_prob": "ref_logprobs",
    "advantages": "advantages",
    "returns": "returns",
    "values": "values",
}


def read_swe_agent(record: Record, notes: Notes) -> list[Record]:
    """A `.traj`: every step is a call with the messages of its `query`; without those the history is one conversation.

    History processors shorten earlier observations, so that a step's `query` may differ from the history before it. The
    answers are in the history, which has their tool calls.
    """
    history = [_swe_message(one) for one in objects(record, "history")]
    answers = [one for one in history if one["role"] == "assistant" and "weight" not in one]
    queries = [step.get("query") for step in objects(record, "trajectory")]
    known = {"episode": notes.place} | facts(record)
    if len(answers) != len(queries) or not all(isinstance(query, list) and len(query) > 1 for query in queries):
        if queries:
            notes.add("the queries of the steps do not fit the answers of the history, which is read in their place")
        return [known | {"messages": history}]
    calls = [[_swe_message(entry) for entry in objects({"query": query}, "query")] for query in queries]
    return [known | {"messages": [*call, answer], "train": "last"} for call, answer in zip(calls, answers)]


def _swe_message(entry: Record) -> dict[str, Json]:
    message = {name: entry[name] for name in SWE_KEYS if entry.get(name) is not None}
    if thinking := objects(entry, "thinking_blocks"):
        text = message.get("content") or ""
        message["content"] = [*thinking, *([{"type": "text", "text": text}] if isinstance(text, str) else text)]
    if (name := look_up(entry, "tool_call_ids.0")) is not None:
        message["tool_call_id"] = name
    return message | ({"weight": 0} if entry.get("is_demo") else {}) | {"role": entry.get("role")}


def read_mini_swe_agent(record: Record, notes: Notes) -> list[Record]:
    """A `.traj.json`. The role `exit` tells why the run ended, and no model saw it."""
    messages = []
    for one in objects(record, "messages"):
        if one.get("role") == "exit":
            notes.add(f"the message of a run's end ({look_up(one, 'extra.exit_status')}) is not in the row")
            continue
        reason = look_up(one, "extra.response.choices.0.finish_reason")
        messages.append({name: one[name] for name in one if name != "extra"} | {"finish_reason": reason})
    known = picked(record, group="instance_id", model="info.config.model.model_name")
    return [known | facts(record) | {"messages": messages}]


def read_tau(record: Record, notes: Notes) -> list[Record]:
    """Results of tau-bench (`traj`), or of a run of tau2-bench: `simulations` in one file, or a file for each."""
    records = objects(record, "records")
    policy = next((found for one in records if (found := look_up(one, "info.environment_info.policy"))), None)
    return [row for one in records for row in _tau_rows(one, policy, notes)]


def of_run(place: str, record: Record) -> str:
    """The folder of a run of tau2-bench for its results and its simulations, or the file."""
    file = of_file(place, record)
    folder, _, name = file.rpartition("/")
    in_folder = folder.endswith("/simulations") or name == "results.json"
    return folder.removesuffix("/simulations") if in_folder else file


def _tau_rows(record: Record, policy: Json, notes: Notes) -> list[Record]:
    if "traj" in record:
        return [facts(record) | {"messages": field(record, "traj", list)}]
    if "simulation_index" in record and "simulations" not in record:  # the folder beside it has a file for each
        return []
    notes.add("tau2-bench does not log the agent's system prompt; the policy is given in its place")
    runs = objects(record, "simulations") if "simulations" in record else [record]
    known = {"system": policy} if isinstance(policy, str) else {}
    paths = {"id": "id", "task_id": "task_id", "trial": "trial", "reward": "reward_info.reward"}
    return [known | picked(run, **paths) | {"messages": _tau2_messages(run, notes)} for run in runs]


def _tau2_messages(run: Record, notes: Notes) -> list[dict[str, Json]]:
    """Messages that the agent saw: without the calls of the user's own tools and their results."""
    found: list[Json] = []
    for one in objects(run, "messages"):
        if one.get("role") == "tool" and "tool_messages" in one:
            found += objects(one, "tool_messages")
        elif one.get("role") != "user" or not one.get("tool_calls"):
            found.append(one)
    found = [one for one in found if one.get("requestor") != "user"]
    # The greeting that starts a run and messages that a task begins with were not sampled.
    of_model = [any([one.get(name) for name in ("cost", "usage", "raw_data")]) for one in found]
    measured = any(of for of, one in zip(of_model, found) if one.get("role") == "assistant")
    messages: list[dict[str, Json]] = []
    for one, sampled in zip(found, of_model):
        kept = picked(one, role="role", content="content", tool_calls="tool_calls")
        kept |= {"tool_call_id": one.get("id")} if one.get("role") == "tool" else {}
        kept["finish_reason"] = first_path(one, "raw_data.choices.0.finish_reason", "raw_data.finish_reason")
        if one.get("role") == "assistant" and not sampled and (measured or not messages):
            notes.add("an assistant message without cost, usage and raw data is not trained: nobody sampled it")
            kept |= NOT_TRAINED
        messages.append(kept)
    return messages


def read_bfcl(record: Record, notes: Notes) -> list[Record]:
    """A line of a result file of the Berkeley function-calling leaderboard: turns, and in each the steps of the model.

    Models for function calling answer with lists of `{name: arguments}`, others with text.
    """
    messages: list[Json] = []
    for turn in field(record, "inference_log", list):
        turn = turn if isinstance(turn, Mapping) else {}  # lists hold the state of the environment
        messages += untrained(objects(turn, "begin_of_turn_query"))
        for one in (entry for name in turn if name.startswith("step_") for entry in objects(turn, name)):
            if one.get("role") == "tool":
                messages.append({"role": "tool", "content": one.get("content")})
            elif one.get("role") == "assistant":
                calls = one.get("content")
                message = picked(one, role="role", content="content", reasoning_content="reasoning_content")
                if isinstance(calls, list):
                    calls = [call for entry in objects(one, "content") for call in entry.items()]
                    calls = [{"name": name, "arguments": arguments} for name, arguments in calls]
                    message = message | {"content": None, "tool_calls": calls}
                messages.append(message)
            else:
                notes.add(f"an entry of the role {quoted(one.get('role'))} is not in the row")
    if not messages:
        raise DataError("`inference_log` has no turns; single-turn results of BFCL do not have the prompt")
    notes.add("BFCL logs neither the tools nor how results are written into the prompt (--tools FILE adds tools)")
    return [facts(record) | {"messages": messages}]


def read_inspect(record: Record, notes: Notes) -> list[Record]:
    """The samples of an Inspect AI log, each its conversation; the tools are those of its first model event."""
    samples = objects(record, "samples") if "samples" in record else [record]
    rows = []
    for number, sample in enumerate(samples):
        attachments, scores = (field({name: sample.get(name) or {}}, name, dict) for name in ("attachments", "scores"))
        events = [event for event in objects(sample, "events") if event.get("event") == "model"]
        name, trial = sample.get("id", number), sample.get("epoch")
        row = {"task_id": name, "trial": trial, "messages": _inspect_messages(sample, attachments, notes)}
        value = look_up(next(iter(scores.values()), None), "value")
        row["reward"] = INSPECT_SCORES.get(value, value) if isinstance(value, str) else value
        if not isinstance(row["reward"], int | float | None):
            raise DataError(f"`scores` has the value {quoted(value)}, expected a number or C, I, P, N")
        if len(scores) > 1:
            notes.add("the first of several scores is the reward")
        rows.append(row | ({"tools": events[0]["tools"]} if events and events[0].get("tools") else {}))
    return rows


def _inspect_messages(sample: Record, attachments: Mapping[str, Json], notes: Notes) -> list[Json]:
    """The messages; those of the assistant that the task or a solver wrote are not trained."""
    given, messages = objects(sample, "messages"), _attached(field(sample, "messages", list), attachments)
    sampled = {"generate"} if any(one.get("source") == "generate" for one in given) else {"generate", None}
    for number, one in enumerate(given):
        if one.get("role") == "assistant" and one.get("source") not in sampled:
            notes.add('an assistant message with `source` other than "generate" was not sampled; it is not trained')
            messages[number] |= NOT_TRAINED
    return messages


def _attached(value: Json, attachments: Mapping[str, Json]) -> Json:
    """Long texts of a log lie in its `attachments`."""
    if isinstance(value, list):
        return [_attached(entry, attachments) for entry in value]
    if isinstance(value, dict):
        kept = value.keys() - {"source", "model", "id"}
        return {name: _attached(entry, attachments) for name, entry in value.items() if name in kept}
    if isinstance(value, str) and value.startswith("attachment://"):
        if (found := attachments.get(value.removeprefix("attachment://"))) is None:
            raise DataError(f"{quoted(value)} is not in `attachments`")
        return found
    return value


def read_toolbench(record: Record, notes: Notes) -> list[Record]:
    """A search tree of ToolBench: every leaf is a conversation; what its branches share is shared."""
    messages = look_up(record, "answer_generation.train_messages.0")
    if not isinstance(messages, list):
        raise DataError("`answer_generation.train_messages.0` is missing, so the prompt of the tree is not in the log")
    prompt = []
    for message in messages:
        if look_up(message, "role") == "assistant":
            break
        prompt.append(message)
    notes.add("ToolBench's prompts for another action at a fork are not in the log")
    known = {"group": notes.place, "functions": look_up(record, "answer_generation.function")} | facts(record)
    return [
        known | {"id": f"{notes.place}/{number}", "messages": prompt + path}
        for number, path in enumerate(_toolbench_paths(field(record, "tree.tree", dict)))
    ]


def _toolbench_paths(root: Record) -> Iterator[list[dict[str, Json]]]:
    """The messages from the root to every leaf. A thought, an action and its input are one answer."""
    pending: list[tuple[Record, list[dict[str, Json]], dict[str, Json]]] = [(root, [], {})]
    while pending:
        node, path, answer = pending.pop()
        kind, text = node.get("node_type"), node.get("description") or ""
        if kind == "Thought" and text:
            path, answer = ([*path, answer] if "content" in answer else path), {"role": "assistant", "content": text}
        elif kind == "Action" and text:
            answer = {"role": "assistant", "content": None, **answer}
            answer["function_call"] = {"name": text, "arguments": "{}"}
        elif kind == "Action Input" and "function_call" in answer:
            name = answer["function_call"]["name"]
            answer = answer | {"function_call": {"name": name, "arguments": text}}
            path = [*path, answer, {"role": "function", "name": name, "content": node.get("observation") or ""}]
            answer = {}
        children = objects(node, "children")
        if not children and (path or answer):
            yield [*path, answer] if answer else path
        pending += [(child, path, answer) for child in reversed(children)]


def read_thoughts(record: Record, notes: Notes) -> list[Record]:
    """A task of Tree of Thoughts: every candidate that was never expanded is a row, its value the reward."""
    steps = objects(record, "steps")
    rows = []
    for step, following in zip(steps, [*steps[1:], {}]):
        expanded = field(following, "ys", list) if following.get("ys") is not None else []
        candidates = field(step, "new_ys", list)
        values = field(step, "values", list) if step.get("values") is not None else []
        for number, (candidate, value) in enumerate(zip_longest(candidates, values[: len(candidates)])):
            if candidate in candidates[:number]:
                notes.add("a candidate that is proposed again in one step is no row: its logged value is 0, unrated")
            elif candidate not in expanded:
                said = [{"role": "user", "content": step.get("x")}, {"role": "assistant", "content": candidate}]
                rows.append({"messages": said, "reward": value, "group": record.get("idx", notes.place)})
    return rows


# RL frameworks: verl, OpenPipe ART and AReaL


def read_verl(record: Record, notes: Notes) -> list[Record]:
    """A `DataProto` batch or a row of one; a line of `rollout_data_dir`, which is text; a row of `responses`."""
    if "batch" in record:
        return _dataproto(record)
    if "input_ids" in record:
        batch = {name: [value] for name, value in record.items() if isinstance(value, list)}
        return _dataproto({"batch": batch, "non_tensor_batch": {"uid": [record["uid"]]} if "uid" in record else {}})
    if "responses" in record:
        prompt = field(record, "prompt", list)
        answers = [[{"role": "assistant", "content": answer}] for answer in field(record, "responses", list)]
        record.get("reward_model")  # how an answer is to be scored, and no score
        group = look_up(record, "extra_info.index")
        known = {"group": notes.place if group is None else group} | facts(record)
        return [known | {"messages": untrained(prompt) + answer} for answer in answers]
    notes.add("verl writes this text without special tokens, so its tokens are not those that were sampled")
    known = {"prompt": field(record, "input", str), "completion": field(record, "output", str)}
    group = digest(record["input"])  # of answers to one prompt
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

    def whole(name: str, row: int) -> list[Json]:
        """A column of the response, with zeros for the prompt."""
        return [0] * (length - answer) + np.asarray(batch[name][row]).tolist()

    made = []
    scores = next((name for name in ("token_level_scores", "rm_scores", "token_level_rewards") if name in batch), None)
    for row in range(rows):
        one: dict[str, Json] = {name: np.asarray(batch[name][row]).tolist() for name in ("input_ids", "attention_mask")}
        mask = whole("response_mask", row) if "response_mask" in batch else one["attention_mask"]
        one["loss_mask"] = [0] * (length - answer) + [int(entry) for entry in mask[length - answer :]]
        one |= {ours: whole(name, row) for name, ours in VERL_COLUMNS.items() if name in batch}
        if scores is not None:
            one["reward"] = float(np.sum(batch[scores][row]))
        if "uid" in others:
            one["group"] = str(others["uid"][row])
        made.append(one)
    return made


def read_art(record: Record, notes: Notes) -> list[Record]:
    """ART's trajectories or groups of them; every additional history is a row of the same episode."""
    shared, members = {}, [record]
    if "trajectories" in record:
        shared = {"group": look_up(record, "metadata.id") or notes.place}
        members = objects(record, "trajectories")
    rows = []
    for number, one in enumerate(members):
        known = picked(one, group=("group_index", "metadata.scenario_id")) | shared | facts(one)
        name = f"{notes.place}/{number}"
        more = objects(one, "additional_histories")
        for part, history in enumerate([one, *more]):
            row = known | {"id": f"{name}/{part}" if more else name, "episode": name}
            rows.append(row | {"messages": _art_messages(history), "tools": parsed(history.get("tools"))})
    return rows


def _art_messages(history: Record) -> list[Json]:
    """Choices are the model's and trained; assistant messages beside them were given to it."""
    if "messages_and_choices" not in history:
        return [message | {"tool_calls": parsed(message.get("tool_calls"))} for message in objects(history, "messages")]
    entries = objects(history, "messages_and_choices")
    return [finished(entry["message"], entry) if "message" in entry else entry | {"weight": 0} for entry in entries]
