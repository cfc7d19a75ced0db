"""Causes of lost sharing, planted in real conversations: what `treetrain inspect` finds and predicts, and what is true.

Run: python benchmarks/lost_sharing.py [--conversations 40] [--pairs] [--dry-run]

Conversations of tau_airline (workloads.py), one row per LLM call, are rendered with chatml and Qwen3's tokenizer. Each
cause is planted in the conversations, in the history of every call, or in the tokens; with `--pairs` every two of them
together. The diagnosis of the planted rows predicts the ideal speed-up without the causes, and the tokens that each of
them loses; the same conversations without them are then really built, on the shape qwen3-8b. `found` lists the reported
causes. `first_*` is the share of the cause that is repaired first: the truth is the loss against rows that have only
the other cause. Rows are appended to results/lost_sharing.csv; left out without the data.
"""

import argparse
import itertools
import json
import random
import re
import uuid
from collections.abc import Callable
from importlib.resources import files
from typing import Any

import numpy as np

import rows as result_rows
import treetrain as tt
from treetrain.logs.inspection.diagnosis import diagnose
from treetrain.models.work import linear_work, tree_work
from treetrain.shapes import ModelShape
from workloads import DATA, tokenizer

COUNTS = ModelShape.named("qwen3-8b").counts()
CHATML = files("treetrain.logs").joinpath("templates/chatml.jinja").read_text(encoding="utf-8")
LONGEST = 5000
"""Tokens of a row that is cut off."""
COMPACTED, KEPT = 14, 6
"""From this message on, all but the system prompt and the last messages before it are one summary."""
Call = dict[str, Any]
Rows = list[tt.Trajectory]
Change = Callable[[Call], Call]


class Planting:
    """The calls of the conversations, and every cause as a change of calls or of rows, planted or repaired."""

    def __init__(self, count: int) -> None:
        folder = DATA / "tau_airline"
        self.tokenizer = tokenizer()
        self.tools = json.loads((folder / "tools.json").read_text(encoding="utf-8"))
        lines = (folder / "trajectories.jsonl").read_text(encoding="utf-8").splitlines()[:count]
        self.calls = [call for number, line in enumerate(lines) for call in self.calls_of(number, json.loads(line))]
        chat: dict[str, tuple[str, Change]] = {
            "tools in another order": ("order", self.other_order),
            "keys of tools in another order": ("order", self.other_keys),
            "a tool less in every fourth conversation": ("tool list", self.one_less),
            "another date in every system prompt": ("dates", self.dated),
            "an id before every system prompt": ("ids", self.named),
            "a line feed after the last answer only": ("whitespace", self.line_feed),
            "think blocks dropped": ("think", self.think),
            "history compacted": ("history", self.compacted),
            "old tool results cleared": ("history", self.cleared),
            "a reminder in the last message only": ("history", self.reminded),
            "arguments written differently later": ("history", self.reserialised),
        }
        tokens: dict[str, tuple[str, Callable[[Rows], Rows]]] = {
            "first tokens of earlier answers split": ("retokenised", self.split),
            f"rows cut to their last {LONGEST:,} tokens": ("truncation", lambda rows: [cut(row) for row in rows]),
            "a token before every second row": (
                "front",
                lambda rows: [front(row) if number % 2 else row for number, row in enumerate(rows)],
            ),
            "padding on the left": ("padding", lambda rows: padded(rows, self.tokenizer.pad_token_id)),
        }
        self.chat, self.tokens = chat, tokens
        self.cause = {name: cause for name, (cause, _) in (chat | tokens).items()}

    def calls_of(self, number: int, one: dict[str, Any]) -> list[Call]:
        """A record for each assistant message, with tool calls written as text."""
        messages = [{"role": each["role"], "content": written(each)} for each in one["messages"]]
        return [
            {
                "messages": messages[: at + 1],
                "tools": self.tools,
                "task_id": one["task_id"],
                "number": number,
                "kept": False,
            }
            for at, message in enumerate(messages)
            if message["role"] == "assistant"
        ]

    def rows(self, planted: tuple[str, ...], repaired: tuple[str, ...] = ()) -> Rows:
        """The calls with these causes; repaired ones are as they would be without the difference."""
        calls = self.calls
        for name, (_, change) in self.chat.items():
            if name in planted:
                calls = [change(call | {"kept": name in repaired}) for call in calls]
        named = [{key: call[key] for key in ("messages", "tools", "task_id", "number")} for call in calls]
        chat = {"tokenizer": self.tokenizer, "chat_template": CHATML, "map": {"episode": "number"}}
        read = tt.from_messages(named, train="last", **chat)
        found = list(read.trajectories)
        for name, (_, make) in self.tokens.items():
            if name in planted and name not in repaired:
                found = make(found)
        return found

    # Changes of calls: the same in every call of a conversation, or of what a later call sees

    def other_order(self, call: Call) -> Call:
        drawn = random.Random(call["number"])
        return call if call["kept"] else call | {"tools": drawn.sample(call["tools"], len(call["tools"]))}

    def other_keys(self, call: Call) -> Call:
        drawn = random.Random(call["number"])

        def shuffled(value: Any) -> Any:
            if isinstance(value, dict):
                return {key: shuffled(value[key]) for key in drawn.sample(list(value), len(value))}
            return [shuffled(each) for each in value] if isinstance(value, list) else value

        return call if call["kept"] else call | {"tools": shuffled(call["tools"])}

    def one_less(self, call: Call) -> Call:
        less = [tool for tool in call["tools"] if tool["function"]["name"] != self.tools[3]["function"]["name"]]
        return call if call["kept"] or call["number"] % 4 else call | {"tools": less}

    def dated(self, call: Call) -> Call:
        drawn = random.Random(0 if call["kept"] else call["number"])
        day, hour, minute = (drawn.randint(10, most) for most in (28, 23, 59))
        return system(call, lambda text: text.replace("2024-05-15 15:00:00", f"2024-05-{day} {hour}:{minute}:00"))

    def named(self, call: Call) -> Call:
        name = uuid.UUID(int=random.Random(0 if call["kept"] else call["number"]).getrandbits(128))
        return system(call, lambda text: f"Session {name}\n\n{text}")

    def line_feed(self, call: Call) -> Call:
        return history(call, lambda text: text + "\n" * call["kept"], lambda text: text + "\n")

    def think(self, call: Call) -> Call:
        def thought(text: str) -> str:
            return f"<think>\nThe user wants {text[:40]!r}, so I check the policy first.\n</think>\n\n{text}"

        return history(call, thought if call["kept"] else lambda text: text, thought)

    def reserialised(self, call: Call) -> Call:
        return history(call, lambda text: text if call["kept"] else spaced(text), lambda text: text)

    def compacted(self, call: Call) -> Call:
        first, *others = call["messages"]
        if call["kept"] or len(others) < COMPACTED:
            return call
        old = COMPACTED - KEPT
        told = " ".join(str(each["content"])[:60] for each in others[:old])
        return call | {"messages": [first, {"role": "user", "content": f"Summary so far: {told}"}, *others[old:]]}

    def cleared(self, call: Call) -> Call:
        *others, last = call["messages"]
        results = [at for at, each in enumerate(others) if each["role"] == "tool"][:-2]
        empty = {"role": "tool", "content": "[old result cleared]"}
        made = others if call["kept"] else [empty if at in results else each for at, each in enumerate(others)]
        return call | {"messages": [*made, last]}

    def reminded(self, call: Call) -> Call:
        def reminding(message: dict[str, Any]) -> dict[str, Any]:
            text = f"{message['content']}\n\n<system-reminder>Check the policy before you act.</system-reminder>"
            return message | {"content": text} if message["role"] in ("user", "tool") else message

        *others, before, last = call["messages"]
        others = [reminding(each) for each in others] if call["kept"] else others
        return call | {"messages": [*others, reminding(before), last]}

    # Changes of rows

    def split(self, rows: Rows) -> Rows:
        """The first three tokens of every earlier answer, behind its thoughts, as one token for each character."""
        opening = self.tokenizer("<|im_start|>assistant\n")["input_ids"]
        close, ending = self.tokenizer.convert_tokens_to_ids(["</think>", "<|im_end|>"])
        made: Rows = []
        for row in rows:
            ids = row.ids.tolist()
            answer = len(ids) - int((row.weights > 0).argmax())
            last = len(ids) - answer
            starts = [at + 3 for at in np.flatnonzero(row.ids == opening[0]).tolist() if ids[at : at + 3] == opening]
            for start in reversed([start for start in starts if start < last]):
                end = ids.index(ending, start)
                start = ids.index(close, start, end) + 2 if close in ids[start:end] else start
                text = self.tokenizer.decode(ids[start : start + 3])
                letters = [token for letter in text for token in self.tokenizer(letter)["input_ids"]]
                if self.tokenizer.decode(letters) == text and start + 3 <= end:
                    ids[start : start + 3] = letters
            made.append(row.replace(ids=ids, loss_weights=np.arange(len(ids)) >= len(ids) - answer))
        return made


def written(message: dict[str, Any]) -> str:
    """The text of a message; tool calls with the fewest characters."""
    calls = [
        {"name": call["function"]["name"], "arguments": json.loads(call["function"]["arguments"])}
        for call in message.get("tool_calls") or []
    ]
    texts = [f"<tool_call>\n{json.dumps(call, separators=(',', ':'))}\n</tool_call>" for call in calls]
    return "\n".join([*([message["content"]] if message.get("content") else []), *texts])


def spaced(text: str) -> str:
    """The text of an answer with the arguments of a tool call written with spaces."""
    return re.sub(r"(?s)(?<=<tool_call>\n).*(?=\n</tool_call>)", lambda call: json.dumps(json.loads(call[0])), text)


def history(call: Call, earlier: Callable[[str], str], last: Callable[[str], str]) -> Call:
    """A call with its earlier answers and its own answer changed."""
    made = [
        each | {"content": (last if at == len(call["messages"]) - 1 else earlier)(each["content"])}
        if each["role"] == "assistant"
        else each
        for at, each in enumerate(call["messages"])
    ]
    return call | {"messages": made}


def system(one: Call, change: Callable[[str], str]) -> Call:
    first, *others = one["messages"]
    return one | {"messages": [first | {"content": change(first["content"])}, *others]}


def cut(row: tt.Trajectory) -> tt.Trajectory:
    return row.replace(ids=row.ids[-LONGEST:], loss_weights=row.weights[-LONGEST:])


def front(row: tt.Trajectory) -> tt.Trajectory:
    """With a token in front that is no padding."""
    return row.replace(ids=[151_646, *row.ids], loss_weights=[0, *row.weights])


def padded(rows: Rows, token: int) -> Rows:
    longest = max(map(len, rows))
    return [
        row.replace(
            ids=[token] * (longest - len(row)) + row.ids.tolist(),
            loss_weights=[0] * (longest - len(row)) + row.weights.tolist(),
        )
        for row in rows
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--conversations", type=int, default=40)
    parser.add_argument("--pairs", action="store_true")
    parser.add_argument("--dry-run", **result_rows.DRY_RUN)
    arguments = parser.parse_args()
    if not DATA.is_dir():
        return print(f"left out: no data at {DATA}")
    planting = Planting(arguments.conversations)
    names = list(planting.cause)
    works = list(itertools.combinations(names, 2)) if arguments.pairs else [(), *((name,) for name in names)]
    for planted in works:
        made = planting.rows(planted)
        tree, without = tt.build_tree(made), tt.build_tree(planting.rows(planted, planted))
        found = diagnose(made, COUNTS, planting.tokenizer, tree=tree)
        rows_flops = COUNTS.flops(*linear_work(tree))
        wanted = {planting.cause[name] for name in planted}
        first: dict[str, Any] = {"first_predicted": "", "first_measured": ""}
        if len(wanted) == 2 and found.causes:
            repaired = [name for name in planted if planting.cause[name] == found.causes[0].cause]
            alone = tt.build_tree(planting.rows(planted, tuple(repaired)))
            first = {"first_predicted": found.causes[0].tokens, "first_measured": tree.num_tokens - alone.num_tokens}
        row = {
            "planted": " + ".join(planted) or "nothing",
            "rows": len(made),
            "found": " + ".join(lost.cause for lost in found.causes) or "nothing",
            "right": {lost.cause for lost in found.causes} == wanted,
            "rows_found": max((lost.rows for lost in found.causes), default=0),
            "speedup": f"{found.flop_speedup:.3f}",
            "predicted": f"{found.repaired_flop_speedup:.3f}",
            "measured": f"{rows_flops / COUNTS.flops(*tree_work(without)):.3f}",
            "lost_tokens_predicted": found.unique - found.repaired_unique,
            "lost_tokens": tree.num_tokens - without.num_tokens,
            **(first if arguments.pairs else {}),
        }
        result_rows.report("lost_sharing_pairs" if arguments.pairs else "lost_sharing", row, dry_run=arguments.dry_run)


if __name__ == "__main__":
    main()
