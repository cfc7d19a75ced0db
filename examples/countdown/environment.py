"""Countdown: combine given numbers with + - * / until one of them is the target.

An agent acts by three tools: `calculate` replaces two of the numbers by the result, `undo` takes the last
calculation back, `submit` ends the episode. A state never changes: `call` returns the next one. So a snapshot
is the state itself, and any number of continuations can be played from it.

Reward: 1.0 when the submitted number is the target. A miss by less than `NEAR` earns
0.5 * (1 - distance / NEAR), so between 0.45 and 0.05. Nothing (0.0) for a larger miss, for a number that is
not there, for submitting before any calculation stands, and for running out of calls.
"""

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache

MAX_CALLS = 10
NEAR = 10

SYSTEM_PROMPT = f"""You play countdown: combine the given numbers until one of them is the target.

Rules:
- Each turn, say briefly what you think, then call one tool.
- calculate takes two of the current numbers and one of + - * /. The result replaces both numbers.
- Results must be whole numbers above zero.
- undo takes back the last calculation.
- submit a current number to finish. The closer to the target, the better.
- You have {MAX_CALLS} calls."""

_EXPRESSION = {"type": "string", "description": "Two current numbers and an operator, such as 6 * 4"}
_ANSWER = {"type": "integer", "description": "One of the current numbers"}


def _tool(name: str, description: str, **properties: dict) -> dict:
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    return {
        "type": "function",
        "function": {"name": name, "description": description, "parameters": parameters},
    }


TOOLS = [
    _tool("calculate", "Combine two numbers.", expression=_EXPRESSION),
    _tool("undo", "Take back the last calculation."),
    _tool("submit", "Finish with an answer.", answer=_ANSWER),
]


@dataclass(frozen=True, slots=True)
class Puzzle:
    """The numbers given and the number to reach."""

    numbers: tuple[int, ...]
    target: int


@dataclass(frozen=True, slots=True)
class State:
    """One moment of an episode; a snapshot is the state itself.

    `past` holds the numbers before every calculation that still stands, oldest first; `tried` holds every
    (numbers, expression) calculated so far, undone ones included.
    """

    puzzle: Puzzle
    numbers: tuple[int, ...]
    past: tuple[tuple[int, ...], ...] = ()
    tried: tuple[tuple[tuple[int, ...], str], ...] = ()
    calls: int = 0
    submitted: bool = False
    answer: int | None = None

    @property
    def done(self) -> bool:
        """Whether the episode is over: submitted, or out of calls."""
        return self.submitted or self.calls >= MAX_CALLS


class InvalidCall(ValueError):
    """An invalid tool call, which changes nothing; the agent reads its message."""


def start(puzzle: Puzzle) -> State:
    """The first state of an episode."""
    return State(puzzle, puzzle.numbers)


def call(state: State, name: str, arguments: str) -> tuple[State, str]:
    """Run one tool call: the next state and the text that the tool answers.

    `arguments` is a JSON object as text, as in chat APIs. A wrong call costs a call and is
    answered with "Error: ..."; no agent output raises. A finished episode raises ValueError.
    """
    if state.done:
        raise ValueError(f"the episode ended after {state.calls} calls; start a new one")
    counted = replace(state, calls=state.calls + 1)
    try:
        return _run(counted, name, arguments)
    except InvalidCall as error:
        return counted, f"Error: {error}"


def _run(state: State, name: str, arguments: str) -> tuple[State, str]:
    if name == "calculate":
        return _calculate(state, _argument(arguments, "expression", str))
    if name == "undo":
        return _undo(state)
    if name == "submit":
        return _submit(state, _argument(arguments, "answer", int))
    raise InvalidCall(f"there is no tool {name}.")


def _argument(arguments: str, key: str, kind: type):
    try:
        value = json.loads(arguments)[key]
    except (ValueError, TypeError, KeyError, RecursionError):
        raise InvalidCall(f'the arguments must be a JSON object with "{key}".') from None
    if not isinstance(value, kind) or isinstance(value, bool):
        raise InvalidCall(f"{key} must be {'text' if kind is str else 'a whole number'}.")
    return value


def _calculate(state: State, expression: str) -> tuple[State, str]:
    match = re.fullmatch(r"\s*([0-9]{1,9})\s*([-+*/])\s*([0-9]{1,9})\s*", expression)
    if match is None:
        raise InvalidCall("an expression is two numbers and one of + - * /.")
    left, operator, right = int(match[1]), match[2], int(match[3])
    rest = list(state.numbers)
    for number in (left, right):
        if number not in rest:
            again = "used only once" if number in state.numbers else "not among the numbers"
            raise InvalidCall(f"{number} is {again}: {listed(state.numbers)}.")
        rest.remove(number)
    result = _result(left, operator, right)
    numbers = (*rest, result)
    text = f"{left} {operator} {right}"
    past = (*state.past, state.numbers)
    tried = (*state.tried, (state.numbers, text))
    after = replace(state, numbers=numbers, past=past, tried=tried)
    return after, f"{text} = {result}. Numbers: {listed(numbers)}."


def _result(left: int, operator: str, right: int) -> int:
    if operator == "/":
        if right == 0 or left % right:
            raise InvalidCall(f"{left} / {right} is not a whole number.")
        return left // right
    result = left + right if operator == "+" else left - right if operator == "-" else left * right
    if result < 1:
        raise InvalidCall(f"{left} {operator} {right} is not above zero.")
    return result


def _undo(state: State) -> tuple[State, str]:
    if not state.past:
        raise InvalidCall("there is nothing to undo.")
    numbers = state.past[-1]
    return replace(state, numbers=numbers, past=state.past[:-1]), f"Undone. Numbers: {listed(numbers)}."


def _submit(state: State, answer: int) -> tuple[State, str]:
    ended = replace(state, submitted=True, answer=answer)
    if answer not in state.numbers or not state.past:
        return ended, f"Submitted {answer}: not a calculated number. The end."
    if answer == state.puzzle.target:
        return ended, f"Submitted {answer}: solved!"
    return ended, f"Submitted {answer}: {abs(answer - state.puzzle.target)} away from {state.puzzle.target}."


def reward(state: State) -> float:
    """The reward of the episode so far, 0.0 to 1.0 (the rule is at the top of this file)."""
    if not state.submitted or state.answer not in state.numbers or not state.past:
        return 0.0
    assert state.answer is not None
    distance = abs(state.answer - state.puzzle.target)
    if distance == 0:
        return 1.0
    return round(0.5 * max(0.0, 1 - distance / NEAR), 4)


def listed(numbers: Iterable[int]) -> str:
    """Numbers as the tools and agents write them: "3, 8, 12"."""
    return ", ".join(map(str, numbers))


def legal_moves(numbers: tuple[int, ...]) -> list[tuple[str, tuple[int, ...]]]:
    """Every calculation the environment accepts, larger number first: (expression, numbers after)."""
    moves: dict[str, tuple[int, ...]] = {}
    for i, first in enumerate(numbers):
        for j in range(i + 1, len(numbers)):
            left, right = max(first, numbers[j]), min(first, numbers[j])
            rest = numbers[:i] + numbers[i + 1 : j] + numbers[j + 1 :]
            for operator in "+-*/":
                try:
                    moves.setdefault(f"{left} {operator} {right}", (*rest, _result(left, operator, right)))
                except InvalidCall:
                    continue
    return list(moves.items())


@lru_cache(maxsize=1 << 16)
def solvable(numbers: tuple[int, ...], target: int) -> bool:
    """Whether the target can be reached. Recurses once per calculation, so at most len(numbers) - 1 deep."""
    if target in numbers:
        return True
    return any(solvable(tuple(sorted(after)), target) for _, after in legal_moves(numbers))
