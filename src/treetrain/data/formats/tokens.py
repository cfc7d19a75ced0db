"""Token ids as samplers and RL frameworks log them: responses of vLLM and SGLang, and records of an agent's calls."""

import math
from collections.abc import Mapping
from typing import Any

from treetrain.data.formats.conversations import facts
from treetrain.data.messages import IMAGE_PARTS
from treetrain.data.records import Format, Notes, Record, field, look_up, objects, parsed
from treetrain.errors import DataError, quoted

# Names of the same thing in different tools, the first that is there counts.
PROMPT_IDS = ("prompt_ids", "prompt_token_ids", "input_tokens", "prompt.token_ids")
ANSWER_IDS = (
    "output_ids",
    "response_ids",
    "completion_ids",
    "response_token_ids",
    "output_tokens",
    "response.token_ids",
)
LOGPROBS = (
    "logprobs",
    "output_logprobs",
    "completion_logprobs",
    "rollout_logprobs",
    "response_logprobs",
    "response_log_probs",
    "response.log_probs",
)
ANSWER_MASK = ("loss_mask", "completion_mask", "response_mask", "loss_masks")
EPISODE = ("trajectory_id", "rollout_id", "episode_id", "episode")
GROUP = ("group_id", "group", "task_id", "instance_id", "example_id", "data_id", "uid")
TOKEN_ID = "token_id:"
"""vLLM writes tokens as `token_id:123` with `return_tokens_as_token_ids`."""


def found(record: Record, names: tuple[str, ...]) -> tuple[str, Any]:
    """The first of these paths that is there, and its value; the first name and None if none is."""
    there = ((name, look_up(record, name)) for name in names)
    return next(((name, value) for name, value in there if value is not None), (names[0], None))


def sampled_row(record: Record, prompt: Any, answer: Any, logprobs: Any, mask: Any = None) -> dict[str, Any]:
    """A token row of a prompt and a sampled answer, which alone is trained; `logprobs` and `mask` are of the answer.

    Raises:
        DataError: names the field that is no list, or two lengths that differ.
    """
    given = {"prompt ids": prompt, "answer ids": answer, "logprobs": logprobs or None, "mask": mask}
    for name, value in given.items():
        if not isinstance(value, list) and not (value is None and name in ("logprobs", "mask")):
            raise DataError(f"the {name} are {'missing' if value is None else quoted(value)}, expected a list")
        if name in ("logprobs", "mask") and value is not None and len(value) != len(answer):
            raise DataError(f"there are {len(value)} {name} for {len(answer)} answer ids; give one for each")
    row = {
        "input_ids": prompt + answer,
        "loss_mask": [0] * len(prompt) + (mask or [1] * len(answer)),
    }
    if given["logprobs"] is not None:
        row["rollout_logprobs"] = [0.0] * len(prompt) + logprobs
    return facts(record) | row


# Responses of servers


def read_server(record: Record, notes: Notes) -> list[Record]:
    """A response of vLLM (`return_token_ids`) or SGLang, with or without its request; every choice is a row."""
    response = parsed(look_up(record, "response.body") or record.get("response") or record)
    request = look_up(record, "request.body") or record.get("request") or record
    rows, found_images = [], _images(look_up(request, "messages"))
    images = {"images": found_images} if found_images else {}
    for place in objects(response, "choices") or [response]:
        _, prompt = found(place, PROMPT_IDS)
        prompt = found(response, PROMPT_IDS)[1] if prompt is None else prompt
        if prompt is None:
            asked = (look_up(request, name) for name in ("input_ids", "prompt"))
            prompt = next((ids for ids in asked if isinstance(ids, list)), None)
        pairs = look_up(place, "meta_info.output_token_logprobs")
        if pairs is not None:  # SGLang: [log-probability, id, text]
            pairs = field(place, "meta_info.output_token_logprobs", list)
            answer, logprobs = ([look_up({"pair": pair}, f"pair.{at}") for pair in pairs] for at in (1, 0))
        else:
            answer, logprobs = _choice_tokens(place)
        rows.append(facts(record, response) | sampled_row(record, prompt, answer, logprobs) | images)
    return rows


def _images(messages: Any) -> list[Any]:
    """The image parts of messages in OpenAI's form."""
    contents = [
        message.get("content")
        for message in (messages if isinstance(messages, list) else [])
        if isinstance(message, Mapping)
    ]
    parts = [part for content in contents if isinstance(content, list) for part in content if isinstance(part, Mapping)]
    return [part for part in parts if part.get("type") in IMAGE_PARTS]


def _choice_tokens(choice: Record) -> tuple[Any, Any]:
    """Ids and log-probabilities of a choice of the chat or the completions API."""
    content = look_up(choice, "logprobs.content")
    if content is not None:
        content = objects(choice, "logprobs.content")
        tokens, logprobs = [one.get("token") for one in content], [one.get("logprob") for one in content]
    else:
        tokens, logprobs = (look_up(choice, f"logprobs.{name}") for name in ("tokens", "token_logprobs"))
    ids = found(choice, ("token_ids", *ANSWER_IDS))[1]
    if ids is None and tokens:
        ids = [str(token).removeprefix(TOKEN_ID) for token in field({"tokens": tokens}, "tokens", list)]
        if not all(one.isdecimal() for one in ids):
            raise DataError(f"the tokens are {quoted(tokens)}, expected ids; log them with return_token_ids")
        ids = [int(one) for one in ids]
    return ids, logprobs


def is_server(record: Record) -> bool:
    """Whether a response has the ids of its tokens."""
    response = parsed(look_up(record, "response.body") or record.get("response") or record)
    choice = look_up(response, "choices.0")
    if choice is None:
        return look_up(response, "meta_info.output_token_logprobs") is not None
    ids = found(choice, ("token_ids", "meta_info.output_token_logprobs"))[1]
    first = look_up(choice, "logprobs.content.0.token") or look_up(choice, "logprobs.tokens.0")
    return ids is not None or str(first).startswith(TOKEN_ID)


# Steps of agents


def read_steps(record: Record, notes: Notes) -> list[Record]:
    """One call of an agent per record; or a record with all calls of a rollout or of a batch."""
    for path in ("triplets", "trajectory"):  # Agent Lightning's rollouts, verifiers' states
        if look_up(record, path) is not None:
            return _rollout(record, objects(record, path), notes.place)
    name, prompts = found(record, PROMPT_IDS)
    if isinstance(prompts, list) and prompts and isinstance(prompts[0], list):
        return _batch(record, name, len(prompts))
    return [_step(record)]


def _step(record: Record) -> dict[str, Any]:
    values = [found(record, names)[1] for names in (PROMPT_IDS, ANSWER_IDS, LOGPROBS, ANSWER_MASK)]
    row = sampled_row(record, *values)
    reward = next((record[name] for name in ("reward", "rewards", "score") if record.get(name) is not None), None)
    if isinstance(reward, list):  # SkyRL's rewards per token
        if not all(isinstance(one, int | float) for one in reward):
            raise DataError(f"the reward is {quoted(reward)}, expected a number or one for each token")
        reward = math.fsum(reward)
    trajectory = found(record, EPISODE)[1]
    group = found(record, GROUP)[1]
    if isinstance(trajectory, Mapping):  # SkyRL's `TrajectoryID`
        group = trajectory.get("instance_id") if group is None else group
        trajectory = f"{trajectory.get('instance_id')}_{trajectory.get('repetition_id')}"
    if not isinstance(trajectory, str | int | None):
        raise DataError(f"the trajectory id is {quoted(trajectory)}, expected text or a number")
    known = {"reward": reward, "group": group, "episode": trajectory, "advantage": record.get("advantage")}
    experts = record.get("routed_experts", record.get("rollout_expert_indices"))
    known["experts"] = experts if isinstance(experts, list) else None
    known |= {name: record.get(name) for name in ("images", "multi_modal_data")}
    return row | {name: value for name, value in known.items() if value is not None}


def _rollout(record: Record, steps: list[dict[str, Any]], place: str) -> list[Record]:
    """All calls of one rollout; they share its reward."""
    reward = record.get("final_reward", record.get("reward"))
    rows = []
    for number, step in enumerate(steps):
        tokens = step.get("tokens")
        if tokens is None and "triplets" not in record:
            raise DataError(f"`trajectory.{number}.tokens` is missing; the rollout was logged without token ids")
        row = _step(
            {
                **step,
                **((tokens and field(step, "tokens", dict)) or {}),
                "reward": step.get("reward") if reward is None else reward,
            }
        )
        episode = found(record, EPISODE)[1] or row.get("episode") or place
        rows.append(row | {"episode": episode, "group": found(record, GROUP)[1], "id": f"{episode}/{number}"})
    return rows


def _batch(record: Record, name: str, rows: int) -> list[Record]:
    """SkyRL's `GeneratorOutput`: every key holds a list with one entry per call."""
    columns = {key: value for key, value in record.items() if isinstance(value, list)}
    for key, value in columns.items():
        if len(value) != rows:
            raise DataError(f"`{key}` has {len(value)} entries, `{name}` has {rows}; give one for each call")
    calls = [
        {key.replace("trajectory_ids", "trajectory_id"): value[row] for key, value in columns.items()}
        for row in range(rows)
    ]
    made = [_step(call) for call in calls]
    # In step-wise training the last step has the trajectory's reward.
    last = {row.get("episode"): row.get("reward") for row, call in zip(made, calls) if call.get("is_last_step")}
    return [row | {"reward": last.get(row.get("episode"), row.get("reward"))} for row in made]


def is_steps(record: Record) -> bool:
    """Whether a record has the ids of a prompt and of its answer apart, or calls that do."""
    if isinstance(look_up(record, "triplets.0"), Mapping) or look_up(record, "trajectory.0.tokens") is not None:
        return True
    return found(record, PROMPT_IDS)[1] is not None and found(record, ANSWER_IDS)[1] is not None


TOKENS = Format(
    "tokens", "`input_ids`", lambda record: "input_ids" in record, lambda record, notes: [record], tokens=True
)
SERVER = Format("server", "the token ids of a server's response", is_server, read_server, tokens=True)
STEPS = Format("steps", "the token ids of prompts and answers", is_steps, read_steps, tokens=True)
