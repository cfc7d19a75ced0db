"""examples/calculator: problems, an agent whose cache of keys and values is kept, and its training in TRL."""

import re

import pytest
import torch
from examples.calculator import agent, train
from examples.calculator.problems import OTHERS, TRAINED, calculate, correct, draw, tool_result

import treetrain as tt

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")


def test_problems_are_solved_by_their_demonstrations_and_drawn_alike_from_a_seed():
    problems = draw(TRAINED, 60, seed=3)
    assert problems == draw(TRAINED, 60, seed=3)
    assert problems != draw(TRAINED, 60, seed=4)
    for problem in problems:
        *_, result, answer = problem.demonstration()
        assert int(result["content"]) == problem.answer > 0
        assert correct(answer["content"], problem.answer) == 1.0
        for message in problem.demonstration():
            assert (tool_result(message["content"]) is not None) == message["content"].startswith("Calculate:") or (
                message["role"] == "system"
            )


def test_no_held_out_problem_is_trained():
    assert not {text for text, _ in TRAINED} & {text for text, _ in OTHERS}
    numbers = lambda problem: sum(map(int, re.findall(r"\d+", problem.question)))  # noqa: E731
    assert all(numbers(problem) % 5 for seed in (1000, 2000) for problem in draw(TRAINED, 400, seed))
    for problems in train.held_out().values():
        assert len({problem.question for problem in problems}) == len(problems) == 60
        assert not any(numbers(problem) % 5 for problem in problems)


@pytest.mark.parametrize(
    ("expression", "result"),
    [("12 * 7", "84"), (" 9-12 ", "-3"), ("8/2", "4"), ("7 / 2", "error"), ("7 / 0", "error"), ("2 ** 9", "error")],
)
def test_the_calculator_takes_two_whole_numbers(expression, result):
    assert calculate(expression).startswith(result)


@pytest.mark.parametrize(
    ("reply", "right"), [("Answer: 84", 1.0), ("Answer: 85", 0.0), ("84", 0.0), ("Answer: 84 x", 0.0)]
)
def test_a_right_answer_is_the_number_and_nothing_else(reply, right):
    assert correct(reply, 84) == right


@pytest.fixture
def tokenizer(monkeypatch):
    tokenizer = tt.load_tokenizer("tiny")
    tokenizer.chat_template = agent.TEMPLATE
    monkeypatch.setattr(train, "load_tokenizer", lambda: tokenizer)
    return tokenizer


@pytest.fixture
def model(tokenizer):
    """A random model that ends its turns now and then."""
    model = tt.load_model("tiny")
    with torch.no_grad():
        model.lm_head.weight[tokenizer.eos_token_id] *= -5
    return model


def test_the_agent_writes_what_the_model_says_without_a_cache(model, tokenizer, monkeypatch):
    replies = iter(range(1000))
    monkeypatch.setattr(agent, "tool_result", lambda _: str(next(replies) ** 3))
    prompts = [problem.messages for problem in draw(TRAINED, 6, seed=0)]
    episodes = agent.play(model, tokenizer, prompts, sample=False)
    told = [sum(a > b for a, b in zip(one.written, one.written[1:])) for one in episodes]
    assert max(told) == agent.TURNS - 1, "some go through all turns"
    assert min(told) < agent.TURNS - 1, "others end before"
    for one in episodes:
        ids = torch.tensor([one.prompt + one.ids])
        with torch.no_grad():
            likeliest = model(ids).logits[0].argmax(-1)[len(one.prompt) - 1 : -1]
        written = torch.tensor(one.written, dtype=torch.bool)
        assert torch.equal(likeliest[written], ids[0, len(one.prompt) :][written])


@pytest.mark.slow
@pytest.mark.parametrize("make", [train.make_sft, train.make_grpo])
def test_both_trainers_learn_the_same_with_shared_prefixes(make, model, tokenizer, monkeypatch, tmp_path):
    monkeypatch.setattr(train, "reward", lambda reply, **_: [float(len(text) % 5) for text in reply])
    start, found = {name: value.clone() for name, value in model.state_dict().items()}, []
    for share in (False, True):
        one = tt.load_model("tiny")
        one.load_state_dict(start)
        trainer = make(one, steps=2, share=share, output=str(tmp_path))
        trainer.train()
        logs = [entry for entry in trainer.state.log_history if "loss" in entry]
        assert [entry["seconds"] > 0 for entry in logs] == [True, True]
        found.append([(entry["loss"], entry["grad_norm"]) for entry in logs])
    assert found[1] == [pytest.approx(entry, rel=1e-3, abs=1e-6) for entry in found[0]]
