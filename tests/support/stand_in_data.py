"""Stand-ins for the real trajectories, for who does not have them: the same files with the same keys, made by code.

Conversations of a tool agent in random words, the search trees of a game of arithmetic, sampled programs, small logs
with the habits that were once read wrongly, and the built-in tokenizer. Nothing is copied from anyone, and every call
writes the same.
"""

import itertools
import json
import random
from fractions import Fraction
from pathlib import Path
from typing import Any

from treetrain.models.loading import load_tokenizer

WORDS = (  # noqa: SIM905 # a word a line would be longer
    "anchor basket canal dairy ember fabric gallery hollow insect jacket kettle ladder marble needle orchard pepper "
    "quarry ribbon saddle timber urchin velvet wagon yellow zipper acorn bellows candle dolphin engine feather garnet"
).split()


def write(folder: Path) -> None:
    """Write all files below a folder that is not there yet."""
    tau = folder / "tau_airline"
    _write_lines(tau / "trajectories.jsonl", conversations())
    (tau / "tools.json").write_text(json.dumps(tools()))
    _write_lines(folder / "tot_game24_bfs" / "trajectories.jsonl", search_trees())
    _write_lines(folder / "codet_humaneval100" / "upstream.jsonl", programs())
    for name, records in (FAULTS | {"d1_false_history": calendars(), "d2_tool_keys": key_orders()}).items():
        _write_lines(folder / "log_faults" / f"{name}.jsonl", records)
    load_tokenizer("tiny").save_pretrained(folder / "tokenizer-qwen3")


def _write_lines(path: Path, records: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")


def sentence(seed: Any, count: int) -> str:
    """Random words, the same for equal seeds."""
    text = " ".join(random.Random(str(seed)).choices(WORDS, k=count))
    return f"{text.capitalize()}."


def said(role: str, content: str | None, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def call(name: str, arguments: dict[str, Any], number: str = "c00000001") -> dict[str, Any]:
    return {"id": number, "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}


# ---- Conversations of a tool agent: four trials of each task, which share policy and tools


def tools() -> list[dict[str, Any]]:
    made = []
    for number in range(6):
        fields = {
            WORDS[4 * number + at]: {"type": "string", "description": sentence(("field", number, at), 6)}
            for at in range(3)
        }
        parameters = {"type": "object", "properties": fields, "required": list(fields)[:1]}
        function = {"name": f"{WORDS[number]}_{WORDS[-number - 1]}", "description": sentence(("tool", number), 10)}
        made.append({"type": "function", "function": function | {"parameters": parameters}})
    return made


def conversations() -> list[dict[str, Any]]:
    policy = "# Policy\n\n" + "\n\n".join(f"- {sentence(('policy', number), 12)}" for number in range(10))
    records = []
    for trial, task in itertools.product(range(4), range(4)):
        messages = [said("system", policy), said("user", sentence(("task", task, trial % 2), 14))]
        for turn in range(4):
            function = tools()[(task + turn) % 6]["function"]
            arguments = {name: sentence((task, trial, turn, name), 2) for name in function["parameters"]["required"]}
            called = call(function["name"], arguments, f"call_{task}_{trial}_{turn}")
            result = json.dumps({word: turn for word in sentence((task, turn), 8).rstrip(".").split()})
            messages += [
                said("assistant", None, tool_calls=[called]),
                said("tool", result, tool_call_id=called["id"], name=function["name"]),
                said("assistant", sentence((task, trial, turn, "answer"), 14)),
                said("user", sentence((task, trial, turn, "reply"), 8)),
            ]
        records.append({"task_id": str(task), "trial": trial, "messages": messages[:-1], "reward": float(trial == 3)})
    return records


# ---- Search trees: numbers are combined until one is left; two states of a depth are looked into


def search_trees() -> list[dict[str, Any]]:
    records = []
    for number, puzzle in enumerate([(3, 5, 7, 9), (2, 4, 6, 12), (1, 6, 8, 11), (4, 5, 8, 10), (2, 7, 9, 13)]):
        beam = [((), tuple(map(Fraction, puzzle)))]
        for depth in range(3):
            children = [
                [((*steps, step), left) for step, left in combined(numbers)[:: depth + 3]] for steps, numbers in beam
            ]
            candidates = [child for family in children for child in family]
            best = sorted(candidates, key=lambda child: min(abs(value - 24) for value in child[1]))[:2]
            beam = best if depth < 2 else []
            for steps, left in candidates:
                if (steps, left) not in beam:
                    messages = [said("user", " ".join(map(str, puzzle))), said("assistant", "".join(steps))]
                    reward = 20.0 if left == (24,) else 1.0 / (1 + depth)
                    facts = {"task_id": f"game24-{number}", "trial": len(records), "reward": reward, "step": depth}
                    records.append(facts | {"messages": messages})
    return records


def combined(numbers: tuple[Fraction, ...]) -> list[tuple[str, tuple[Fraction, ...]]]:
    """Every line that combines two numbers, and what is left then."""
    found = []
    for first, second in itertools.permutations(range(len(numbers)), 2):
        a, b = numbers[first], numbers[second]
        rest = [value for at, value in enumerate(numbers) if at not in (first, second)]
        values = {"-": a - b, "/": a / b if b else None}
        if first < second:
            values |= {"+": a + b, "*": a * b}
        for sign, value in values.items():
            if value is not None:
                left = tuple(sorted([*rest, value]))
                found.append((f"{a} {sign} {b} = {value} (left: {' '.join(map(str, left))})\n", left))
    return found


# ---- Sampled programs: a prompt and samples, some of them equal


def programs() -> list[dict[str, Any]]:
    records = []
    for number in range(4):
        name = f"{WORDS[number]}_{WORDS[number + 9]}"
        prompt = f'def {name}(values, limit):\n    """{sentence(("program", number), 40)}"""\n'
        draw, samples = random.Random(number), []
        for _ in range(20):
            loop = draw.choice(["for value in values:", "for value in sorted(values):"])
            test = draw.choice(["value < limit", "abs(value) < limit", "value == limit"])
            samples.append(f"    {loop}\n        if {test}:\n            return True\n    return False\n\n")
        records.append({"prompt": prompt, "samples": samples})
    return records


# ---- Small logs


def calendars() -> list[dict[str, Any]]:
    """Different customers of one agent that answers all in the same words."""
    answer = said("assistant", '[{"entry": 0}] The entry is in the list, as you wished.')
    records = []
    for number in range(4):
        asked = [said("user", sentence(("customer", number, turn), 24)) for turn in range(number + 1)]
        turns = [message for question in asked for message in (question, answer)]
        messages = [said("system", "You keep a list. " + sentence("rules", 120)), *turns[:-1]]
        records.append({"request": {"messages": messages}, "response": {"choices": [choice(answer)]}})
    return records


def key_orders() -> list[dict[str, Any]]:
    """Two tasks of four calls, whose tools have their keys in one order or the other."""
    records = []
    for number in range(8):
        asked = [said("system", sentence("desk", 24)), said("user", sentence(("ticket", number // 4), 40))]
        offered = [tool if number % 2 == 0 else dict(reversed(tool.items())) for tool in tools()[:2]]
        request = {"model": "m", "messages": asked, "tools": offered}
        response = {"choices": [choice(said("assistant", f"Case {number} is closed."))]}
        records.append({"request": request, "response": response, "group": str(number // 4), "episode": str(number)})
    return records


def choice(message: dict[str, Any], reason: str = "stop") -> dict[str, Any]:
    return {"index": 0, "finish_reason": reason, "message": message}


def logged(message: dict[str, Any], reason: str = "stop") -> dict[str, Any]:
    """A request with its response."""
    return {"request": {"messages": [said("user", "good day")]}, "response": {"choices": [choice(message, reason)]}}


def masked(name: str, low: float, high: float, **of_prompts: float) -> dict[str, Any]:
    """Two answers with a mask of some name, of which the second is trained."""
    turns = [said("user", "p", **of_prompts), said("assistant", "one", **{name: low})]
    return {"messages": [*turns, said("user", "q", **of_prompts), said("assistant", "two", **{name: high})]}


def item(text: str) -> dict[str, Any]:
    """An answer in the form of the responses API."""
    return said("assistant", [{"type": "output_text", "text": text}], type="message")


def looks(word: str, **thought: str) -> list[dict[str, Any]]:
    """A question and a call that looks a word up."""
    return [said("user", "How tall?"), said("assistant", "", tool_calls=[call("look_up", {"word": word})], **thought)]


def result(content: str, number: str = "c00000001") -> dict[str, Any]:
    return said("tool", content, tool_call_id=number)


TREE = said("user", "Which plant is tall?")
OAK, BUS, CARROT = (said("assistant", word) for word in ("Oak", "Bus", "Carrot"))
FORECAST = said("user", "Is it dry in Bern?")
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FIND = {"type": "object", "properties": {"q": {"type": "string"}}}
FAULTS: dict[str, list[dict[str, Any]]] = {
    "f0_rejected_trained": [
        {
            "prompt": TREE["content"],
            "chosen": [TREE, OAK],
            "rejected": [TREE, said("assistant", "A tram is the tallest.")],
        }
    ],
    "f1_tool_result_trained": [
        {
            "messages": [
                *(FORECAST, said("assistant", "", tool_calls=[call("weather", {"city": "Bern"})])),
                *(result("NO_CLOUDS") | {"name": "weather"}, said("assistant", "It is sunny.")),
            ],
            "tools": [
                {"type": "function", "function": {"name": "weather", "description": "The sky", "parameters": CITY}}
            ],
        }
    ],
    "f2_tool_calls_lost": [{"messages": [*looks("firstcall"), result("HEIGHT"), said("assistant", "Twenty metres.")]}],
    "f3_kto_label": [{"messages": [TREE, OAK], "label": True}, {"messages": [TREE, BUS], "label": False}],
    "f4_prompt_doubled": [{"prompt": [TREE], "chosen": [TREE, OAK], "rejected": [TREE, CARROT]}],
    "f5_calls_without_results": [
        {
            "responses_create_params": {"input": [said("user", "tidy the shed", type="message")]},
            "response": {
                "output": [
                    item("<think>first thought</think>First I look."),
                    {"type": "function_call", "name": "look", "arguments": "{}", "call_id": "1"},
                    item("<think>second thought</think>Now I write."),
                    {"type": "function_call", "name": "write", "arguments": "{}", "call_id": "2"},
                ]
            },
            "reward": 0.5,
        }
    ],
    "f6_call_twice": [
        {
            "messages": [
                TREE,
                said(
                    "assistant",
                    '<tool_call>\n{"name": "find", "arguments": {"q": "oak"}}\n</tool_call>',
                    tool_calls=[call("find", {"q": "oak"}, "a")],
                ),
                *(result("20 m", "a"), said("assistant", "20 m")),
            ],
            "tools": [{"type": "function", "function": {"name": "find", "description": "seek", "parameters": FIND}}],
        }
    ],
    "f7_orphan_think": [
        {
            "messages": [
                *(said("user", "1+3?"), said("assistant", "One and three.\n</think>\n\nThe answer is 4.")),
                *(said("user", "3+3?"), said("assistant", "Three and three make six.\n</think>\n\nIt is 6.")),
            ]
        }
    ],
    "f8_loss_mask_keys": [
        masked("step_loss_mask", 0, 1),
        masked("loss_mask", 0, 1),
        masked("loss_weight", 0.0, 1.0, loss_weight=0.0),
    ],
    "f10_system_prompt_key": [
        {"system_prompt": "Talk like a sailor.", "messages": [said("user", "good day"), said("assistant", "Arr")]}
    ],
    "f11_empty_answer": [logged(said("assistant", "")), logged(said("assistant", None), "error")],
    "f13_resolved_instance_id": [
        {
            "instance_id": "a-1",
            "resolved": solved,
            "model": "m",
            "messages": [said("user", "mend"), said("assistant", word)],
        }
        for solved, word in ((True, "done"), (False, "cannot"))
    ],
    "f14_cohere_no_end_of_turn": [{"messages": [TREE, OAK]}],
    "r1_sharegpt_dpo": [
        {
            "conversations": [{"from": "human", "value": TREE["content"]}],
            **{key: {"from": "gpt", "value": word} for key, word in (("chosen", "Oak"), ("rejected", "Bus"))},
        }
    ],
    "r3_first_record_error": [
        logged({}) | {"response": {"error": {"message": "too many requests", "code": 429}}},
        logged(said("assistant", "hi")),
    ],
    "r4_atropos": [
        {
            "seed": 2,
            "tokens": [[5, 6, 7, 8], [5, 6, 9]],
            "masks": [[-100, -100, 7, 8], [-100, -100, 9]],
            "scores": [1.0, -1.0],
            "messages": [[TREE, OAK], [TREE, BUS]],
            "group_overrides": {},
            **dict.fromkeys(("advantages", "ref_logprobs", "overrides")),
        }
    ],
    "r6_prompt_response_reward": [
        {"prompt": "Sum: 1+3\n", "response": answer, "reward": reward} for answer, reward in (("4", 1.0), ("5", 0.0))
    ],
    "r8_gptoss_think_and_call": [
        {
            "messages": [
                *(*looks("oak", reasoning_content="I must look."), result("20 m")),
                said("assistant", "20 m.", reasoning_content="It says 20."),
            ]
        }
    ],
    "r9_deepseek_arguments": [
        {"messages": [*looks("firstcall"), result("HEIGHT"), said("assistant", "Twenty metres.")]}
    ],
}
"""Records of each file, named as the real ones; tests/logs/test_log_faults.py says what is right of each."""
