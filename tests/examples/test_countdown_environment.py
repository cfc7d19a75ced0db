"""The rules of countdown, by cases worked out by hand."""

import json

import pytest
from examples.countdown.environment import (
    MAX_CALLS,
    Puzzle,
    call,
    legal_moves,
    reward,
    start,
)

PUZZLE = Puzzle((3, 8, 4), 20)


def calculate(state, expression):
    return call(state, "calculate", json.dumps({"expression": expression}))


def submit(state, answer):
    return call(state, "submit", json.dumps({"answer": answer}))[0]


def after(*expressions, puzzle=PUZZLE):
    state = start(puzzle)
    for expression in expressions:
        state, answer = calculate(state, expression)
        assert not answer.startswith("Error"), answer
    return state


def test_a_calculation_replaces_its_two_numbers_by_the_result():
    state, answer = calculate(start(PUZZLE), "3 * 4")
    assert state.numbers == (8, 12)
    assert answer == "3 * 4 = 12. Numbers: 8, 12."
    assert calculate(state, "8 + 12")[0].numbers == (20,)


@pytest.mark.parametrize(
    ("expression", "error"),
    [
        ("7 + 3", "Error: 7 is not among the numbers: 3, 8, 4."),
        ("3 + 3", "Error: 3 is used only once: 3, 8, 4."),
        ("8 / 3", "Error: 8 / 3 is not a whole number."),
        ("3 - 8", "Error: 3 - 8 is not above zero."),
        ("3 + 8 + 4", "Error: an expression is two numbers and one of + - * /."),
        ("", "Error: an expression is two numbers and one of + - * /."),
        ("__import__('os')", "Error: an expression is two numbers and one of + - * /."),
    ],
)
def test_a_wrong_expression_is_answered_by_an_error_and_costs_one_call(expression, error):
    before = start(PUZZLE)
    state, answer = calculate(before, expression)
    assert answer == error
    assert (state.numbers, state.past, state.calls) == (before.numbers, (), 1)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("calculate", "not json"),
        ("calculate", "[1]"),
        ("calculate", '"3 + 4"'),
        ("calculate", "{}"),
        ("calculate", '{"expression": 5}'),
        ("submit", '{"answer": "20"}'),
        ("submit", '{"answer": true}'),
        ("submit", '{"answer": 1e400}'),
        ("submit", '{"answer": ' + "9" * 5000 + "}"),
        ("submit", "[" * 100_000),
        ("divide", "{}"),
    ],
)
def test_a_malformed_call_is_answered_by_an_error_and_does_not_end_the_episode(name, arguments):
    state, answer = call(start(PUZZLE), name, arguments)
    assert answer.startswith("Error: ")
    assert not state.done
    assert state.numbers == PUZZLE.numbers


def test_undo_takes_back_one_calculation_at_a_time():
    state = after("3 * 4", "12 + 8")
    state, answer = call(state, "undo", "{}")
    assert (state.numbers, answer) == ((8, 12), "Undone. Numbers: 8, 12.")
    state, _ = call(state, "undo", "{}")
    assert state.numbers == PUZZLE.numbers
    state, answer = call(state, "undo", "{}")
    assert answer == "Error: there is nothing to undo."
    assert state.calls == 5


@pytest.mark.parametrize(
    ("expressions", "answer", "earned"),
    [
        (("3 * 4", "8 + 12"), 20, 1.0),  # solved
        (("3 * 8",), 24, 0.3),  # 4 away: 0.5 * (1 - 4/10)
        (("8 + 3",), 11, 0.05),  # 9 away
        (("8 - 3",), 5, 0.0),  # 15 away
        (("8 + 4",), 20, 0.0),  # the target, but not there
        ((), 20, 0.0),  # not there
        ((), 8, 0.0),  # given, nothing calculated
    ],
)
def test_the_reward_is_one_for_the_target_less_for_a_near_miss_and_nothing_else(expressions, answer, earned):
    state = submit(after(*expressions), answer)
    assert state.done
    assert reward(state) == pytest.approx(earned)


def test_an_episode_out_of_calls_is_over_and_earns_nothing():
    state = start(PUZZLE)
    for _ in range(MAX_CALLS):
        assert not state.done
        state, _ = call(state, "undo", "{}")
    assert state.done
    assert reward(state) == 0.0
    with pytest.raises(ValueError, match=f"ended after {MAX_CALLS} calls"):
        call(state, "undo", "{}")


def test_legal_moves_are_those_the_environment_accepts():
    expected = {"8 + 2": (10,), "8 - 2": (6,), "8 * 2": (16,), "8 / 2": (4,)}
    assert dict(legal_moves((2, 8))) == expected
    assert "3 - 3" not in dict(legal_moves((3, 3)))
    for expression, numbers in legal_moves((3, 8, 4, 8)):
        assert calculate(start(Puzzle((3, 8, 4, 8), 99)), expression)[0].numbers == numbers
