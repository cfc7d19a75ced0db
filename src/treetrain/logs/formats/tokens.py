"""Token ids as they are logged: our token rows, responses of vLLM and SGLang, and records of an agent's calls."""

import math
from collections.abc import Mapping
from functools import reduce

import numpy as np
from numpy.typing import NDArray

from treetrain.core.errors import DataError, quoted
from treetrain.core.tree.token_ids import checked_ids
from treetrain.core.tree.trajectory import per_token
from treetrain.layers.experts.recorded import expert_array
from treetrain.layers.trajectory import Trajectory
from treetrain.logs.messages import IMAGE_PARTS
from treetrain.logs.records import (
    ROW_KEYS,
    Json,
    Notes,
    Record,
    facts,
    field,
    first_of,
    first_path,
    look_up,
    objects,
    parsed,
    row_facts,
    unknown,
)

IGNORED_LABEL = -100  # the Hugging Face and PyTorch mark for "not trained"
# field of Trajectory -> its names in files; a row with two of them is an error
PER_TOKEN_KEYS = {
    "old_logprobs": ("old_logprobs", "logprobs"),
    "ref_logprobs": ("ref_logprobs",),
    "rollout_logprobs": ("rollout_logprobs", "sampling_logprobs"),
    "teacher_logprobs": ("teacher_logprobs",),
    "advantages": ("advantages", "advantage"),
    "values": ("values",),
    "returns": ("returns",),
}
FIELDS = {name: field for field, names in PER_TOKEN_KEYS.items() for name in names}
WEIGHT_KEYS = ("labels", "loss_mask", "loss_weights")
EXPERT_KEYS = ("experts", "routed_experts")
SET_KEYS = ("sampling_mask", "teacher_topk_ids", "teacher_topk_logprobs")
TOKEN_KEYS = frozenset(("input_ids", "attention_mask", *ROW_KEYS, *WEIGHT_KEYS, *EXPERT_KEYS, *SET_KEYS, *FIELDS))
# Names of the same thing in different tools, the first that is there counts.
PROMPT_IDS = ("prompt_ids", "prompt_token_ids", "input_tokens", "prompt.token_ids")
ANSWER_IDS = ("output_ids", "response_ids", "completion_ids", "response_token_ids", "output_tokens")
ANSWER_IDS += ("response.token_ids",)
LOGPROBS = ("logprobs", "output_logprobs", "completion_logprobs", "rollout_logprobs", "response_logprobs")
LOGPROBS += ("response_log_probs", "response.log_probs")
ANSWER_MASK = ("loss_mask", "completion_mask", "response_mask", "loss_masks")
EPISODE = ("trajectory_id", "rollout_id", "episode_id", "episode")
GROUP = ("group_id", "group", "task_id", "instance_id", "example_id", "data_id", "uid")
TOKEN_ID = "token_id:"
"""vLLM writes tokens as `token_id:123` with `return_tokens_as_token_ids`."""


def trajectory_from_token_row(row: Record, notes: Notes) -> Trajectory:
    """Read one token row.

    Args:
        row: `input_ids` [L] and optional keys. `labels` (unshifted: equal to `input_ids`, or -100), `loss_mask` (0/1)
            and `loss_weights` say which tokens are trained; several are multiplied, and without any all tokens are
            trained. `attention_mask`: padding on either side is cut off. Per token [L]: `logprobs`/`old_logprobs`,
            `ref_logprobs`, `rollout_logprobs`/`sampling_logprobs`, `teacher_logprobs`, `values`, `returns`;
            `advantage(s)` may be one number. `experts`/`routed_experts`: [L, layers, k], or [L - 1, layers, k] without
            the last token. Lists of L lists, `null` for none: `sampling_mask`, the ids that the sampler kept;
            `teacher_topk_ids` and `teacher_topk_logprobs`. Per row: `reward`, `group_id`/`group`/`task_id`,
            `episode_id`/`episode`, `pair`, `chosen`, `key`, `id`. A per-token list may hold `null` at tokens that are
            not trained.
        notes: receives remarks on what was ignored.

    Raises:
        DataError: a bad value; the message names the key, both values and what to do.
    """
    notes.unused_keys(unknown(row, TOKEN_KEYS))
    if row.get("input_ids") is None:
        raise DataError(f"no `input_ids` in the row; it has {', '.join(map(quoted, list(row)[:20])) or 'no keys'}")
    whole = checked_ids(row["input_ids"])
    keep = _unpadded(row.get("attention_mask"), len(whole))
    ids = whole[keep]
    weights = _weights(row, ids, keep, len(whole))
    masks = " times ".join(f"`{name}`" for name in WEIGHT_KEYS if row.get(name) is not None)
    notes.masks = f"{masks} of the row" if masks else "all tokens, since nothing says which"
    if weights is None:
        notes.add("no labels, loss_mask or loss_weights: every token is trained")
    given: dict[str, str] = {}  # field of Trajectory -> the key that has it
    for name, value in row.items():
        if name in FIELDS and value is not None and given.setdefault(FIELDS[name], name) != name:
            raise DataError(f"both {given[FIELDS[name]]!r} and {name!r} are there; they mean the same: keep one")
    facts = {field: _fact(row[name], name, len(whole), keep, weights) for field, name in given.items()}
    return Trajectory(
        ids,
        loss_weights=weights,
        **facts,
        **row_facts(row, notes),
        experts=_experts(first_of(row, *EXPERT_KEYS), len(whole), keep),
        **_sets(row, len(whole), keep),
    )


def _sets(row: Record, length: int, keep: slice) -> dict[str, Json]:
    """Sets of ids at each token."""
    mask, ids, logprobs = (row.get(name) for name in SET_KEYS)
    if (ids is None) != (logprobs is None):
        there, missing = SET_KEYS[1:] if logprobs is None else SET_KEYS[:0:-1]
        raise DataError(f"{there} is there and {missing} is not; give a log-probability for each id, or neither")
    for name, value in zip(SET_KEYS, (mask, ids, logprobs)):
        if value is not None and (not isinstance(value, list) or len(value) != length):
            given = f"{len(value)} entries" if isinstance(value, list) else quoted(value)
            raise DataError(f"{name} has {given} for {length} input_ids; give a list for each, null for none")
    return {
        "sampling_mask": None if mask is None else mask[keep],
        "teacher_topk": None if ids is None or logprobs is None else (ids[keep], logprobs[keep]),
    }


def _unpadded(mask: Json, length: int) -> slice:
    if mask is None:
        return slice(0, length)
    entries = _zeros_and_ones(mask, "attention_mask", length, "give 1 for tokens and 0 for padding")
    real = np.flatnonzero(entries)
    if real.size == 0:
        return slice(0, 0)
    first, last = int(real[0]), int(real[-1])
    if real.size != last + 1 - first:
        hole = first + int(np.argmin(entries[first : last + 1]))
        raise DataError(
            f"attention_mask is 0 at {hole}, between tokens {first} and {last}; padding can be left or "
            "right, not inside: write the row without those tokens"
        )
    return slice(first, last + 1)


def _weights(row: Record, ids: NDArray[np.int32], keep: slice, length: int) -> NDArray[np.float64] | None:
    """The product of labels, mask and weights given in the row; None if there are none."""
    given = []
    if row.get("labels") is not None:
        labels = per_token(row["labels"], "labels", length)[keep]
        wrong = (labels != IGNORED_LABEL) & (labels != ids)
        if wrong.any():
            at, trained = int(wrong.argmax()), labels[:-1] != IGNORED_LABEL
            shifted = ids.size > 1 and (labels[:-1] == ids[1:])[trained].all()
            cure = "they are shifted by one; give them unshifted" if shifted else "another token's prediction is no SFT"
            raise DataError(
                f"labels[{at}] = {labels[at]:g} but input_ids[{at}] = {ids[at]}; labels must equal input_ids "
                f"or be {IGNORED_LABEL} ({cure})"
            )
        given.append(labels != IGNORED_LABEL)
    if row.get("loss_mask") is not None:
        given.append(_zeros_and_ones(row["loss_mask"], "loss_mask", length, "use loss_weights for other weights")[keep])
    if row.get("loss_weights") is not None:
        weights = per_token(row["loss_weights"], "loss_weights", length)[keep]
        if weights.min(initial=0) < 0:
            at = int(weights.argmin())
            raise DataError(
                f"loss_weights[{at}] = {weights[at]:g}, but weights are 0 or more; put signs into advantages and use "
                "the reinforce loss"
            )
        given.append(weights)
    return reduce(np.multiply, given).astype(np.float64) if given else None


def _fact(
    value: Json, name: str, length: int, keep: slice, weights: NDArray[np.float64] | None
) -> NDArray[np.float64] | float:
    if FIELDS[name] == "advantages" and not isinstance(value, list):
        return value  # one number for the whole row; the trajectory checks it
    entries, raw = per_token(value, name, length, nulls=True)[keep], value[keep]
    for at in np.flatnonzero(np.isnan(entries)):
        if raw[at] is not None:
            raise DataError(f"{name}[{at}] is NaN; give a finite number")
        if at > 0 and (weights is None or weights[at] != 0):
            raise DataError(f"{name}[{at}] is null but the token is trained; give a number, or do not train it")
        entries[at] = 0.0
    return entries


def _experts(value: Json, length: int, keep: slice) -> NDArray[np.generic] | None:
    """Recorded experts [L, layers, k]; the last token may be missing, since samplers do not run it."""
    if value is None:
        return None
    array = expert_array(value)
    if len(array) == length - 1 and len(array):
        array = np.concatenate([array, np.full_like(array[:1], -1)])
    if len(array) != length:
        raise DataError(f"experts have shape {array.shape}, expected [{length}, layers, k] for {length} input_ids")
    return array[keep]


def _zeros_and_ones(value: Json, name: str, length: int, cure: str) -> NDArray[np.float64]:
    entries = per_token(value, name, length)
    odd = (entries != 0) & (entries != 1)
    if odd.any():
        raise DataError(f"{name}[{int(odd.argmax())}] is {entries[odd][0]:g}, expected 0 or 1; {cure}")
    return entries


# Prompts and answers


def sets_of(record: Record) -> dict[str, Json]:
    """The sets of ids for each token that a record has; they lie beside the log-probabilities."""
    return {name: value for name in SET_KEYS if (value := record.get(name)) is not None}


def sampled_row(
    record: Record, prompt: Json, answer: Json, logprobs: Json, mask: Json = None, *, sets: Record | None = None
) -> dict[str, Json]:
    """A token row of a prompt and a sampled answer, which alone is trained.

    Args:
        logprobs, mask: of the answer.
        sets: see `sets_of`; of the answer.

    Raises:
        DataError: names the field that is no list, or two lengths that differ.
    """
    given = {"prompt ids": prompt, "answer ids": answer}
    optional = {"logprobs": logprobs or None, "mask": mask, **(sets or {})}
    for name, value in (given | optional).items():
        if not isinstance(value, list) and not (value is None and name in optional):
            raise DataError(f"the {name} are {'missing' if value is None else quoted(value)}, expected a list")
        if name in optional and value is not None and len(value) != len(answer):
            raise DataError(f"there are {len(value)} {name} for {len(answer)} answer ids; give one for each")
    row = {"input_ids": prompt + answer, "loss_mask": [0] * len(prompt) + (mask or [1] * len(answer))}
    row |= {name: [None] * len(prompt) + value for name, value in (sets or {}).items()}
    return facts(record) | row | ({"rollout_logprobs": [0.0] * len(prompt) + logprobs} if logprobs else {})


# Responses of servers


def read_server(record: Record, notes: Notes) -> list[Record]:
    """A response of vLLM (`return_token_ids`) or SGLang, with or without its request; every choice is a row."""
    response, request = _response(record), look_up(record, "request.body") or record.get("request") or record
    images = _images(look_up(request, "messages"))
    asked = [ids for name in ("input_ids", "prompt") if isinstance(ids := look_up(request, name), list)]
    if isinstance(
        pairs := look_up(response, "meta_info.input_token_logprobs"), list
    ):  # SGLang, with `logprob_start_len=0`
        asked.append([look_up({"pair": pair}, "pair.1") for pair in pairs])
    rows = []
    for place in objects(response, "choices") or [response]:
        known = [first_path(one, *PROMPT_IDS) for one in (place, response)]
        prompt = next((ids for ids in [*known, *asked] if ids is not None), None)
        pairs = look_up(place, "meta_info.output_token_logprobs")
        if pairs is not None:  # SGLang: [log-probability, id, text]
            pairs = field(place, "meta_info.output_token_logprobs", list)
            answer, logprobs = ([look_up({"pair": pair}, f"pair.{at}") for pair in pairs] for at in (1, 0))
        else:
            answer, logprobs = _choice_tokens(place)
        # Of vLLM (`--return-sampling-mask`) and SGLang (`return_sampling_mask`), whose other log-probabilities are of
        # the whole vocabulary.
        kept = first_path(place, "sampling_mask", "meta_info.output_token_sampling_mask")
        over_kept = look_up(place, "meta_info.output_token_sampling_logprobs")
        if over_kept is not None:
            logprobs = _own_of_kept(over_kept, kept, answer)
        elif kept is not None and logprobs:
            notes.add(
                "there are sampling masks: `logprobs` are taken to be those over the kept ids, as vLLM gives them with "
                "`--logprobs-mode processed_logprobs`"
            )
        sets = sets_of(place) | ({} if kept is None else {"sampling_mask": kept})
        row = facts(record, response) | sampled_row(record, prompt, answer, logprobs, sets=sets)
        rows.append(row | ({"images": images} if images else {}))
    return rows


def _own_of_kept(logprobs: Json, kept: Json, answer: Json) -> Json:
    """The tokens' log-probabilities over the kept ids; newer versions of SGLang log those of all kept ids."""
    if not all(isinstance(x, list) for x in (logprobs, kept, answer)):
        return logprobs
    found = []
    for one, ids, token in zip(logprobs, kept, answer):
        inside = isinstance(one, list) and isinstance(ids, list) and token in ids and len(one) == len(ids)
        found.append(one[ids.index(token)] if inside else one)
    return found


def is_sglang_text(record: Record) -> bool:
    """Whether a response of SGLang's `/generate` lacks the ids of its prompt, but its request has the text."""
    response, request = _response(record), look_up(record, "request.body") or record.get("request") or record
    known = first_path(response, *PROMPT_IDS, "meta_info.input_token_logprobs") or look_up(request, "input_ids")
    answered = isinstance(look_up(response, "meta_info"), Mapping) and isinstance(look_up(response, "text"), str)
    return answered and known is None and isinstance(_sglang_prompt(request, response), str)


def read_sglang_text(record: Record, notes: Notes) -> list[Record]:
    """A response of SGLang without the ids of its prompt, as text."""
    response, request = _response(record), look_up(record, "request.body") or record.get("request") or record
    notes.add(
        "the log lacks the ids of the prompt, so prompt and answer are tokenised again, and the log-probabilities that "
        "were sampled are not used; log the request's `input_ids`, or set `logprob_start_len=0`"
    )
    row = facts(record, response) | {"prompt": _sglang_prompt(request, response), "completion": response["text"]}
    reason = look_up(response, "meta_info.finish_reason.type")
    look_up(response, "meta_info.output_token_logprobs")
    return [row | ({} if reason is None else {"finish_reason": reason})]


def _sglang_prompt(request: Json, response: Json) -> Json:
    """The prompt of a request; a record that is the response alone has its answer under `text`."""
    return first_path(request, "prompt") if request is response else first_path(request, "text", "prompt")


def _response(record: Record) -> Json:
    return parsed(look_up(record, "response.body") or record.get("response") or record)


def _images(messages: Json) -> list[Json]:
    """The image parts of messages in OpenAI's form."""
    contents = [look_up(message, "content") for message in (messages if isinstance(messages, list) else [])]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return [part for part in parts if look_up(part, "type") in IMAGE_PARTS]


def _choice_tokens(choice: Record) -> tuple[Json, Json]:
    """Ids and log-probabilities of a choice of the chat or the completions API."""
    content = look_up(choice, "logprobs.content")
    if content is not None:
        content = objects(choice, "logprobs.content")
        tokens, logprobs = [one.get("token") for one in content], [one.get("logprob") for one in content]
    else:
        tokens, logprobs = (look_up(choice, f"logprobs.{name}") for name in ("tokens", "token_logprobs"))
    ids = first_path(choice, "token_ids", *ANSWER_IDS)
    if ids is None and tokens:
        ids = [str(token).removeprefix(TOKEN_ID) for token in field({"tokens": tokens}, "tokens", list)]
        if not all(one.isdecimal() for one in ids):
            raise DataError(f"the tokens are {quoted(tokens)}, expected ids; log them with return_token_ids")
        ids = [int(one) for one in ids]
    return ids, logprobs


def is_server(record: Record) -> bool:
    """Whether a response has the ids of its tokens."""
    response = _response(record)
    if (choice := look_up(response, "choices.0")) is None:
        return look_up(response, "meta_info.output_token_logprobs") is not None
    first = first_path(choice, "logprobs.content.0.token", "logprobs.tokens.0")
    known = first_path(choice, "token_ids", "meta_info.output_token_logprobs")
    return known is not None or str(first).startswith(TOKEN_ID)


# Steps of agents


def read_steps(record: Record, notes: Notes) -> list[Record]:
    """One call of an agent per record; or a record with all calls of a rollout or of a batch."""
    for path in ("triplets", "trajectory"):  # Agent Lightning's rollouts, verifiers' states
        if look_up(record, path) is not None:
            return _rollout(record, objects(record, path), notes)
    prompts = first_path(record, *PROMPT_IDS)
    return _batch(record, len(prompts)) if isinstance(look_up(prompts, "0"), list) else [_step(record)]


def summed_reward(reward: Json) -> Json:
    """The reward of a row, which SkyRL logs for each token; raises DataError for a list of anything but numbers."""
    if not isinstance(reward, list):
        return reward
    if not all(isinstance(one, int | float) for one in reward):
        raise DataError(f"the reward is {quoted(reward)}, expected a number or one for each token")
    return math.fsum(reward)


def _step(record: Record) -> dict[str, Json]:
    columns = (first_path(record, *one) for one in (PROMPT_IDS, ANSWER_IDS, LOGPROBS, ANSWER_MASK))
    sets = sets_of(record)
    if (kept := record.get("rollout_sample_support")) is not None:  # SkyRL's name of sampling masks
        sets["sampling_mask"] = kept
    row = sampled_row(record, *columns, sets=sets)
    reward = summed_reward(first_of(record, "reward", "rewards", "score"))
    trajectory, group = first_path(record, *EPISODE), first_path(record, *GROUP)
    if isinstance(trajectory, Mapping):  # SkyRL's `TrajectoryID`
        group = trajectory.get("instance_id") if group is None else group
        trajectory = f"{trajectory.get('instance_id')}_{trajectory.get('repetition_id')}"
    if not isinstance(trajectory, str | int | None):
        raise DataError(f"the trajectory id is {quoted(trajectory)}, expected text or a number")
    experts = first_of(record, "routed_experts", "rollout_expert_indices")
    known = {"reward": reward, "group": group, "episode": trajectory, "experts": experts}
    known |= {name: record.get(name) for name in ("advantage", "images", "multi_modal_data")}
    return row | {name: value for name, value in known.items() if value is not None}


def _rollout(record: Record, steps: list[dict[str, Json]], notes: Notes) -> list[Record]:
    """All calls of one rollout; they share its reward."""
    reward = record.get("final_reward", record.get("reward"))
    rows = []
    for number, step in enumerate(steps):
        tokens = step.get("tokens")
        if tokens is None and "triplets" not in record:
            raise DataError(f"`trajectory.{number}.tokens` is missing; the rollout was logged without token ids")
        own = field(step, "tokens", dict) if tokens else {}
        row = _step(step | dict(own) | {"reward": step.get("reward") if reward is None else reward})
        episode = first_path(record, *EPISODE) or row.get("episode") or notes.place
        rows.append(row | {"episode": episode, "group": first_path(record, *GROUP), "id": f"{episode}/{number}"})
    return rows


def _batch(record: Record, rows: int) -> list[Record]:
    """SkyRL's `GeneratorOutput`: every key holds a list with one entry per call."""
    columns = {key: value for key, value in record.items() if isinstance(value, list)}
    for key, value in columns.items():
        if len(value) != rows:
            raise DataError(f"`{key}` has {len(value)} entries for {rows} prompts; give one for each call")
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
    return first_path(record, *PROMPT_IDS) is not None and first_path(record, *ANSWER_IDS) is not None
