"""Causes of lost sharing, planted in real conversations: what `treetrain inspect` finds and predicts, and what is true.

Run: python benchmarks/lost_sharing.py [--conversations 40] [--dry-run]

Conversations of tau_airline (workloads.py), one row per LLM call, are rendered with chatml and Qwen3's tokenizer. Each
cause is planted in the conversations, the template or the tokens. The diagnosis of the planted rows predicts the
ideal speed-up without it; the same conversations without it are then really built, on the shape qwen3-8b. `found` lists
the reported causes. Rows are appended to results/lost_sharing.csv; left out without the data.
"""

import argparse
import json
import random
import re
import uuid
from collections.abc import Callable, Hashable
from importlib.resources import files
from typing import Any

import numpy as np

import rows as result_rows
import treetrain as tt
from treetrain.inspection.diagnosis import diagnose
from treetrain.planning.cost import ModelShape
from treetrain.tree.stats import linear_work, tree_work
from workloads import DATA, tokenizer

COUNTS = ModelShape.named("qwen3-8b").counts()
CHATML = files("treetrain.data").joinpath("templates/chatml.jinja").read_text(encoding="utf-8")
CONTENT = "{{- message.content if message.content else '' -}}"
LONGEST = 5000
"""Tokens of a row that is cut off."""
Conversation = dict[str, Any]
Rows = list[tt.Trajectory]


class Planting:
    """The conversations, and every cause as a function that returns rows with it and rows without it."""

    def __init__(self, count: int) -> None:
        folder = DATA / "tau_airline"
        self.tokenizer = tokenizer()
        self.tools = json.loads((folder / "tools.json").read_text(encoding="utf-8"))
        lines = (folder / "trajectories.jsonl").read_text(encoding="utf-8").splitlines()[:count]
        self.conversations = [json.loads(line) | {"tools": self.tools} for line in lines]
        self.drawn = random.Random(0)
        self.clean = self.rows(lambda number, one: one)
        self.causes: dict[str, Callable[[], tuple[Rows, Rows]]] = {
            "nothing": lambda: (self.clean, self.clean),
            "tools in another order": lambda: (self.rows(self.other_order), self.clean),
            "keys of tools in another order": lambda: (self.rows(self.other_keys), self.clean),
            "a tool less in every fourth conversation": lambda: (self.rows(self.one_less), self.clean),
            "another date in every system prompt": lambda: (self.rows(self.dated), self.clean),
            "an id before every system prompt": lambda: (
                self.rows(lambda number, one: self.named(one, uuid.UUID(int=self.drawn.getrandbits(128)))),
                self.rows(lambda number, one: self.named(one, uuid.UUID(int=1))),
            ),
            "a line feed after the last answer only": lambda: (self.rows(template=self.last_only()), self.clean),
            "think blocks dropped (Qwen3's template)": lambda: (
                self.rows(template=None),
                self.rows(template=self.kept_think()),
            ),
            "first tokens of earlier answers split": lambda: (self.split(self.clean), self.clean),
            f"rows cut to their last {LONGEST:,} tokens": lambda: ([cut(row) for row in self.clean], self.clean),
            "a token before every second row": lambda: (
                [front(row) if number % 2 else row for number, row in enumerate(self.clean)],
                self.clean,
            ),
            "padding on the left": lambda: (padded(self.clean, self.tokenizer.pad_token_id), self.clean),
        }

    def rows(self, change: Callable[[int, Conversation], Conversation] | None = None, *, template: str | None = CHATML):
        """The calls of all conversations, each changed, by one template (None: Qwen3's)."""
        records = [change(number, one) if change else one for number, one in enumerate(self.conversations)]
        read = tt.from_messages(records, tokenizer=self.tokenizer, view="calls", chat_template=template)
        return list(read.trajectories)

    def other_order(self, number: int, one: Conversation) -> Conversation:
        return one | {"tools": self.drawn.sample(self.tools, len(self.tools))}

    def other_keys(self, number: int, one: Conversation) -> Conversation:
        def shuffled(value: Any) -> Any:
            if isinstance(value, dict):
                return {key: shuffled(value[key]) for key in self.drawn.sample(list(value), len(value))}
            return [shuffled(each) for each in value] if isinstance(value, list) else value

        return one | {"tools": shuffled(self.tools)}

    def one_less(self, number: int, one: Conversation) -> Conversation:
        return one | {"tools": self.tools if number % 4 else self.tools[:3] + self.tools[4:]}

    def dated(self, number: int, one: Conversation) -> Conversation:
        day, hour, minute = (self.drawn.randint(10, most) for most in (28, 23, 59))
        return system(one, lambda text: text.replace("2024-05-15 15:00:00", f"2024-05-{day} {hour}:{minute}:00"))

    def named(self, one: Conversation, name: uuid.UUID) -> Conversation:
        return system(one, lambda text: f"Session {name}\n\n{text}")

    def last_only(self) -> str:
        """chatml with a line feed after an answer that is the last message."""
        assert CONTENT in CHATML
        last = (
            "{%- if loop.last and message.role == 'assistant' and not message.tool_calls -%}{{- '\\n' -}}{%- endif -%}"
        )
        return CHATML.replace(CONTENT, CONTENT + last)

    def kept_think(self) -> str:
        """Qwen3's template with an empty think block in every turn, as it writes that of the last."""
        template = self.tokenizer.chat_template
        found = re.sub(r"loop\.index0 > ns\.last_query_index", "true", template)
        found = re.sub(r"loop\.last or \(not loop\.last and reasoning_content\)", "true", found)
        assert found != template
        return found

    def split(self, rows: Rows) -> Rows:
        """The calls with the first three tokens of every earlier answer as one token for each character."""
        made: Rows = []
        starts: dict[Hashable, list[int]] = {}
        for row in rows:
            ids, earlier = row.ids.tolist(), starts.setdefault((row.group, row.episode), [])
            answer = len(ids) - int((row.weights > 0).argmax())
            for start in reversed(earlier):
                text = self.tokenizer.decode(ids[start : start + 3])
                letters = [token for letter in text for token in self.tokenizer(letter)["input_ids"]]
                if self.tokenizer.decode(letters) == text:
                    ids[start : start + 3] = letters
            earlier.append(len(row) - answer)
            made.append(row.replace(ids=ids, loss_weights=np.arange(len(ids)) >= len(ids) - answer))
        return made


def system(one: Conversation, change: Callable[[str], str]) -> Conversation:
    first, *others = one["messages"]
    return one | {"messages": [first | {"content": change(first["content"])}, *others]}


def cut(row: tt.Trajectory) -> tt.Trajectory:
    return row.replace(ids=row.ids[-LONGEST:], loss_weights=row.weights[-LONGEST:])


def front(row: tt.Trajectory) -> tt.Trajectory:
    return row.replace(ids=[151_643, *row.ids], loss_weights=[0, *row.weights])


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
    parser.add_argument("--dry-run", **result_rows.DRY_RUN)
    arguments = parser.parse_args()
    if not DATA.is_dir():
        return print(f"left out: no data at {DATA}")
    planting = Planting(arguments.conversations)
    for name, make in planting.causes.items():
        planted, clean = make()
        tree, without = tt.build_tree(planted), tt.build_tree(clean)
        found = diagnose(planted, COUNTS, planting.tokenizer, tree=tree)
        rows_flops = COUNTS.flops(*linear_work(tree))
        row = {
            "planted": name,
            "rows": len(planted),
            "found": " + ".join(lost.cause for lost in found.causes) or "nothing",
            "rows_found": sum(lost.rows for lost in found.causes),
            "speedup": f"{found.flop_speedup:.3f}",
            "predicted": f"{found.repaired_flop_speedup:.3f}",
            "measured": f"{rows_flops / COUNTS.flops(*tree_work(without)):.3f}",
            "lost_tokens_predicted": found.unique - found.repaired_unique,
            "lost_tokens": tree.num_tokens - without.num_tokens,
        }
        result_rows.report("lost_sharing", row, dry_run=arguments.dry_run)


if __name__ == "__main__":
    main()
