"""Data sets of columns, as several tools name them: instructions with answers, pairs, answers with a score.

Each reader gives a record the names of TRL's columns and leaves the rest to `conversations`.
"""

import json

from treetrain.core.digest import digest
from treetrain.core.errors import DataError, quoted
from treetrain.logs.formats.conversations import read_completion, read_preference, read_sharegpt, untrained
from treetrain.logs.formats.tokens import summed_reward
from treetrain.logs.records import Json, Notes, Record, field, first_of, look_up, objects

QUESTIONS = ("instruction", "query")
ANSWERS = ("output", "response")
PROMPTS = ("prompt", "input_prompt", "input")
COMPLETIONS = ("response", "output_response", "output")


def read_instructions(record: Record, notes: Notes) -> list[Record]:
    """Alpaca's `instruction`, `input` and `output`; `query` and `response`; with `system` and `history` beside them."""
    asked = next(name for name in QUESTIONS if name in record)
    rest = _without(record, asked, "input", "history", *ANSWERS)
    messages: list[Json] = []
    for number, turn in enumerate(field({"history": record.get("history") or []}, "history", list)):
        if not isinstance(turn, list) or len(turn) != 2:
            raise DataError(f"`history.{number}` is {quoted(turn)}, expected a question and its answer")
        messages += [{"role": "user", "content": turn[0]}, {"role": "assistant", "content": turn[1]}]
    texts = [field(record, asked, str)]
    if record.get("input"):
        notes.add(f"`input` follows `{asked}` after a line feed")
        texts.append(field(record, "input", str))
    messages.append({"role": "user", "content": "\n".join(texts)})
    if "chosen" in record:
        return read_preference(rest | {"prompt": messages}, notes)
    answer = first_of(record, *ANSWERS)
    if not isinstance(answer, str):
        raise DataError(f"the answer to `{asked}` is {'missing' if answer is None else quoted(answer)}, expected text")
    return [rest | {"messages": [*messages, {"role": "assistant", "content": answer}]}]


def read_answers(record: Record, notes: Notes) -> list[Record]:
    """A prompt and its answer, texts or messages, with a reward: SkyRL's evaluations, and tables of OpenRLHF."""
    prompt, answer = (next(name for name in names if name in record) for names in (PROMPTS, COMPLETIONS))
    score = summed_reward(first_of(record, "reward", "score"))
    if answer == "output_response":
        notes.add("SkyRL decodes the ids that it sampled, so the texts are tokenised again")
    known = _without(record, prompt, answer, "reward", "score")
    if score is not None:  # answers to one prompt are compared with one another
        known = {"group": digest(json.dumps(record[prompt], sort_keys=True))} | known | {"reward": score}
    return read_completion(known | {"prompt": record[prompt], "completion": record[answer]}, notes)


def read_openai_preference(record: Record, notes: Notes) -> list[Record]:
    """OpenAI's preferences: `input` with messages and tools, `preferred_output` and `non_preferred_output`."""
    known = _without(record, "input", "preferred_output", "non_preferred_output")
    tools = look_up(record, "input.tools")
    look_up(record, "input.parallel_tool_calls")  # a setting of the sampler
    pair = {name: field(record, path, list) for name, path in _OPENAI_PAIR.items()}
    return read_preference(known | pair | ({"tools": tools} if tools else {}), notes)


_OPENAI_PAIR = {"prompt": "input.messages", "chosen": "preferred_output", "rejected": "non_preferred_output"}


def read_sharegpt_pair(record: Record, notes: Notes) -> list[Record]:
    """`conversations` of `from` and `value`, and the `chosen` and `rejected` turns that follow it."""

    def messages(name: str) -> list[Json]:
        turns = [record[name]] if isinstance(record[name], dict) else objects(record, name)
        return read_sharegpt({"conversations": turns}, notes)[0]["messages"]  # type: ignore[no-any-return]

    both = {name: messages(name) for name in ("chosen", "rejected")}
    prompt = untrained(messages("conversations"))
    return read_preference(_without(record, "conversations", *both) | {"prompt": prompt} | both, notes)


def _without(record: Record, *names: str) -> dict[str, Json]:
    return {name: value for name, value in record.items() if name not in names}
