"""Scripted agents of different skill. Each reads the state, nothing else, and answers with one turn.

They keep no memory (the state records what was tried), so any of them can continue from any state. The recorder
grows a search tree this way.
"""

import json
from collections.abc import Callable, Sequence
from random import Random
from typing import TypeVar

from examples.countdown.chat import Reply
from examples.countdown.environment import MAX_CALLS, State, legal_moves, listed, solvable

Policy = Callable[[State, Random], Reply]
Move = tuple[str, tuple[int, ...]]
T = TypeVar("T")

SILENCE = 0.15  # share of turns with no words: `content` is null


def pick(rng: Random, items: Sequence[T]) -> T:
    """A uniform choice by `rng.random()` alone, the one method whose results Python promises to keep."""
    return items[int(rng.random() * len(items))]


def random_walk(state: State, rng: Random) -> Reply:
    """Random calculations without undo; submits the target, or the last number."""
    ending = _submit_if_over(state, rng)
    if ending is not None:
        return ending
    if rng.random() < 0.12:
        return _slip(state, rng)
    return _calculate(state, pick(rng, legal_moves(state.numbers)), rng)


def greedy(state: State, rng: Random) -> Reply:
    """Mostly the calculation nearest to the target; never undoes."""
    ending = _submit_if_over(state, rng)
    if ending is not None:
        return ending
    if rng.random() < 0.05:
        return _slip(state, rng)
    best = _nearest_first(state, legal_moves(state.numbers))
    return _calculate(state, pick(rng, best[:3]) if rng.random() < 0.35 else best[0], rng)


def search(state: State, rng: Random) -> Reply:
    """Depth first with backtracking: looks one calculation ahead, undoes if two numbers cannot reach the target."""
    target = state.puzzle.target
    hit = _hit(state, rng)
    if hit is not None:
        return hit
    if _last_chance(state):
        return _submit_nearest(state, rng)
    if rng.random() < 0.04:
        return _slip(state, rng)
    moves = _untried(state)
    winning = [move for move in moves if target in move[1]]
    if winning:
        return _calculate(state, pick(rng, winning), rng)
    if not moves or len(state.numbers) <= 2:
        return _undo(state, rng)
    nearest = _nearest_first(state, moves)
    return _calculate(state, pick(rng, nearest[:6]), rng)


def expert(state: State, rng: Random) -> Reply:
    """Nearly always knows whether and how the target can be reached."""
    target = state.puzzle.target
    hit = _hit(state, rng)
    if hit is not None:
        return hit
    if _last_chance(state):
        return _submit_nearest(state, rng)
    if not solvable(tuple(sorted(state.numbers)), target):
        return _undo(state, rng)
    moves = legal_moves(state.numbers)
    if rng.random() < 0.85:
        moves = [move for move in moves if solvable(tuple(sorted(move[1])), target)]
    return _calculate(state, pick(rng, _nearest_first(state, moves)[:4]), rng)


POLICIES: dict[str, Policy] = {
    "random_walk": random_walk,
    "greedy": greedy,
    "search": search,
    "expert": expert,
}


def _nearest_first(state: State, moves: list[Move]) -> list[Move]:
    return sorted(moves, key=lambda move: abs(move[1][-1] - state.puzzle.target))


def _untried(state: State) -> list[Move]:
    tried = {expression for numbers, expression in state.tried if numbers == state.numbers}
    return [move for move in legal_moves(state.numbers) if move[0] not in tried]


def _last_chance(state: State) -> bool:
    return state.calls == MAX_CALLS - 1


def _hit(state: State, rng: Random) -> Reply | None:
    target = state.puzzle.target
    if target not in state.numbers:
        return None
    words = (f"{target} is the target.", f"We have {target}. Done.", "That is the target. Submit it.")
    return _reply(rng, words, "submit", answer=target)


def _submit_if_over(state: State, rng: Random) -> Reply | None:
    over = len(state.numbers) == 1 or _last_chance(state)
    return _hit(state, rng) or (_submit_nearest(state, rng) if over else None)


def _submit_nearest(state: State, rng: Random) -> Reply:
    target = state.puzzle.target
    best = min(state.numbers, key=lambda number: abs(number - target))
    distance = abs(best - target)
    words = (f"{best} is {distance} off. It has to do.", f"Not {target}, but {best} is what we have.")
    return _reply(rng, words, "submit", answer=best)


def _undo(state: State, rng: Random) -> Reply:
    target, numbers = state.puzzle.target, listed(state.numbers)
    if len(state.numbers) == 2:
        results = listed(sorted({after[-1] for _, after in legal_moves(state.numbers)}))
        words = (f"{numbers} make only {results}. Go back.", f"{numbers} cannot make {target}. Go back.")
    elif len(state.numbers) == 1:
        words = (f"{numbers} is not {target}. Go back.", f"{numbers} is left, a miss. Undo.")
    else:
        words = (f"{target} is out of reach with {numbers}. Go back.", "This leads nowhere. Undo.")
    return _reply(rng, words, "undo")


def _calculate(state: State, move: Move, rng: Random) -> Reply:
    expression, after = move
    result, target = after[-1], state.puzzle.target
    if result == target:
        words = (f"{expression} makes {target}, the target.", f"{expression} = {result}: that is it.")
    else:
        gap = abs(result - target)
        side = "short" if result < target else "over"
        words = (
            f"{expression} is {result}, {gap} {side}.",
            f"Try {expression}, which leaves {listed(after)}.",
            f"{target} is wanted. Start from {expression}." if not state.past else f"Next, {expression}.",
        )
    return _reply(rng, words, "calculate", expression=expression)


def _slip(state: State, rng: Random) -> Reply:
    """A mistake: a number that is not there any more, or a division with a remainder."""
    left, right = max(state.numbers), min(state.numbers)
    gone = [number for number in state.puzzle.numbers if number not in state.numbers]
    if gone:
        expression = f"{left} + {pick(rng, gone)}"
    elif left % right:
        expression = f"{left} / {right}"
    else:
        expression = f"{right} - {left}"
    words = (f"Perhaps {expression}.", f"Try {expression}.")
    return _reply(rng, words, "calculate", expression=expression)


def _reply(rng: Random, words: Sequence[str], name: str, **arguments: str | int) -> Reply:
    content = None if rng.random() < SILENCE else pick(rng, words)
    return Reply(content, name, json.dumps(arguments))
