"""Arithmetic and word problems for an agent with a calculator, and how such an agent works.

A problem takes two calculations, and the calculator does one at a time, so an episode has several turns. Word problems
are drawn from stories. Numbers whose sum five divides are kept for tests, so that no held-out problem was trained on;
`OTHERS` are stories that only tests tell.
"""

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass

SYSTEM_PROMPT = """Solve the problem with a calculator, one calculation at a time. Then write the answer. For example:
A box holds 12 cups. How many cups are in 7 boxes, if 5 cups are broken?
Calculate: 12 * 7
84
Calculate: 84 - 5
79
Answer: 79"""

Story = tuple[str, tuple[str, ...]]
"""A text with numbers {a}, {b}, {c}, and its calculations; {r} is the result of the one before."""

TRAINED: tuple[Story, ...] = (
    ("What is {a} * {b} + {c}?", ("{a} * {b}", "{r} + {c}")),
    ("What is {a} * {b} - {c}?", ("{a} * {b}", "{r} - {c}")),
    ("What is ({a} + {b}) * {c}?", ("{a} + {b}", "{r} * {c}")),
    ("What is {a} + {b} - {c}?", ("{a} + {b}", "{r} - {c}")),
    ("What is {a} + {b} * {c}?", ("{b} * {c}", "{a} + {r}")),
    (
        "Ann buys {a} boxes with {b} pencils each. She gives {c} pencils to her class. How many pencils has she left?",
        ("{a} * {b}", "{r} - {c}"),
    ),
    (
        "A train has {a} cars with {b} seats each, and {c} more seats at the bar. How many seats does the train have?",
        ("{a} * {b}", "{r} + {c}"),
    ),
    (
        "Tom has {a} marbles. He finds {b} more and then loses {c}. How many marbles has he now?",
        ("{a} + {b}", "{r} - {c}"),
    ),
    (
        "A baker makes {a} rolls in the morning and {b} in the afternoon. A roll costs {c} cents. How many cents do "
        "they all cost?",
        ("{a} + {b}", "{r} * {c}"),
    ),
    (
        "Mia has {a} stamps. Her aunt gives her {b} sheets with {c} stamps each. How many stamps has she now?",
        ("{b} * {c}", "{a} + {r}"),
    ),
    (
        "There are {a} birds in a tree. {b} fly away, and {c} others come. How many birds are in the tree?",
        ("{a} - {b}", "{r} + {c}"),
    ),
    (
        "A garden has {a} rows of {b} tulips and {c} roses. How many flowers are in the garden?",
        ("{a} * {b}", "{r} + {c}"),
    ),
    (
        "A school has {a} classes with {b} pupils each. {c} pupils are ill today. How many pupils are there today?",
        ("{a} * {b}", "{r} - {c}"),
    ),
    (
        "Leo reads {a} pages a day for {b} days, and {c} pages on the last day. How many pages has he read?",
        ("{a} * {b}", "{r} + {c}"),
    ),
    (
        "A cook has {a} white eggs and {b} brown eggs. She uses {c} eggs for a cake. How many eggs are left?",
        ("{a} + {b}", "{r} - {c}"),
    ),
    (
        "A band sells {a} tickets on Monday and {b} on Friday. A ticket costs {c} euros. How many euros does it earn?",
        ("{a} + {b}", "{r} * {c}"),
    ),
    (
        "There are {a} cars in a street. {b} drive off, and {c} more arrive. How many cars are in the street?",
        ("{a} - {b}", "{r} + {c}"),
    ),
    (
        "Nina has {a} photos. She puts {b} more on each of {c} pages. How many photos has she in all?",
        ("{b} * {c}", "{a} + {r}"),
    ),
    (
        "A club has {a} members. {b} leave it, and then {c} join. How many members does it have?",
        ("{a} - {b}", "{r} + {c}"),
    ),
    (
        "A shop has {a} red and {b} blue shirts. Each shirt has {c} buttons. How many buttons are on the shirts?",
        ("{a} + {b}", "{r} * {c}"),
    ),
)
OTHERS: tuple[Story, ...] = (
    (
        "A farmer fills {a} baskets with {b} apples each and sells {c} apples. How many apples does he still have?",
        ("{a} * {b}", "{r} - {c}"),
    ),
    (
        "A library has {a} shelves with {b} books each. It gets {c} new books. How many books are there in all?",
        ("{a} * {b}", "{r} + {c}"),
    ),
    (
        "Sam saved {a} coins in May and {b} coins in June. In July he spent {c} coins. How many coins remain?",
        ("{a} + {b}", "{r} - {c}"),
    ),
    (
        "A team has {a} girls and {b} boys. Every child drinks {c} glasses of water. How many glasses do they drink?",
        ("{a} + {b}", "{r} * {c}"),
    ),
    (
        "A bus starts with {a} people. At the first stop {b} get off and {c} get on. How many people ride on?",
        ("{a} - {b}", "{r} + {c}"),
    ),
)


@dataclass(frozen=True, slots=True)
class Problem:
    """A question, its calculations in order, and the answer."""

    question: str
    calculations: tuple[str, ...]
    answer: int

    @property
    def messages(self) -> list[dict[str, str]]:
        """What an agent is told at the start."""
        return [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": self.question}]

    def demonstration(self) -> list[dict[str, str]]:
        """The conversation of an agent that solves it."""
        messages = self.messages
        for expression in self.calculations:
            messages.append({"role": "assistant", "content": f"Calculate: {expression}"})
            messages.append({"role": "tool", "content": calculate(expression)})
        return [*messages, {"role": "assistant", "content": f"Answer: {self.answer}"}]


def draw(stories: Sequence[Story], count: int, seed: int, *, held_out: bool = False) -> list[Problem]:
    """Problems with numbers of 2 to 20 and results above zero, all stories equally often, in random order.

    Args:
        held_out: draw from the numbers that are kept for tests.
    """
    rng = random.Random(seed)
    found: dict[str, Problem] = {}
    while len(found) < count:
        text, calculations = stories[len(found) % len(stories)]
        numbers = {name: rng.randint(2, 20) for name in "abc"}
        results: list[int] = []
        done = []
        for pattern in calculations:
            done.append(pattern.format(**numbers, r=results[-1] if results else 0))
            results.append(int(calculate(done[-1])))
        if min(results) > 0 and (sum(numbers.values()) % 5 == 0) == held_out:
            question = text.format(**numbers)
            found[question] = Problem(question, tuple(done), results[-1])
    problems = list(found.values())
    rng.shuffle(problems)
    return problems


_CALCULATION = re.compile(r"\s*(-?\d{1,9})\s*([-+*/])\s*(-?\d{1,9})\s*")


def calculate(expression: str) -> str:
    """The calculator's reply to an expression, such as 12 * 7."""
    match = _CALCULATION.fullmatch(expression)
    if match is None:
        return "error: write two whole numbers with one of + - * / between them"
    a, sign, b = int(match[1]), match[2], int(match[3])
    if sign == "/":
        return str(a // b) if b and a % b == 0 else "error: not a whole number"
    return str({"+": a + b, "-": a - b, "*": a * b}[sign])


def tool_result(reply: str) -> str | None:
    """What the calculator says to a reply of the agent; None if the reply calls no tool."""
    match = re.fullmatch(r"\s*Calculate:(.*)", reply)
    return None if match is None else calculate(match[1])


def correct(reply: str, answer: int) -> float:
    """1.0 if the agent's last reply is the right answer and nothing else, else 0.0."""
    match = re.fullmatch(r"\s*Answer: (-?\d+)\s*", reply)
    return float(match is not None and int(match[1]) == answer)
