"""examples/live without vLLM: agents on a stand-in sampler, the rows of their histories, losses of tree and rows."""

import asyncio
import csv
import math
import random
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from examples.calculator.problems import Problem
from examples.live import agent, train
from examples.live.agent import Agents, Batches, Turn, demonstration, run_all

import treetrain as tt
from treetrain.testing import PureFloat64

PROBLEM = Problem("What is 12 * 7 - 5?", ("12 * 7", "84 - 5"), 79)
ENDS = {
    "12 * 7 - 5?": "<ask>12 * 7</ask>",
    "\n12 * 7": "<tool_call>12 * 7</tool_call>",
    "\n84": "84",
    agent.COMPACT: "12 * 7 = 84",
    "note: 12 * 7 = 84": "<ask>84 - 5</ask>",
    "\n84 - 5": "<tool_call>84 - 5</tool_call>",
    "\n79": "79",
}
"""What agents write, by the end of what they have read."""


@pytest.fixture
def tokenizer():
    return tt.load_tokenizer("tiny")


class Scripted:
    """A sampler that solves `PROBLEM`, with `changes`. The log-probability of a token is its place among all."""

    def __init__(self, tokenizer, changes=(), cut=()):
        self.tokenizer, self.replies, self.cut = tokenizer, ENDS | dict(changes), cut
        self.batches, self.written = [], 0

    def __call__(self, histories):
        self.batches.append(len(histories))
        return [self.turn(self.tokenizer.decode(ids)) for ids in histories]

    def turn(self, text):
        assert text.endswith("<|im_end|>\n<|im_start|>assistant\n"), "a model reads whole turns and its own header"
        read = text.removesuffix("<|im_end|>\n<|im_start|>assistant\n")
        plans = text.startswith(f"<|im_start|>system\n{agent.PLAN}")
        said = next(reply for end, reply in self.replies.items() if read.endswith(end))
        said = "Answer: 79" if plans and said == "79" else said
        ids = self.tokenizer(said, add_special_tokens=False)["input_ids"]
        ids += [] if said in self.cut else [self.tokenizer.eos_token_id]
        self.written += len(ids)
        return Turn(ids, [-float(number) for number in range(self.written - len(ids), self.written)])


def solve(tokenizer, sampler, openings=1, branches=2):
    agents = Agents(tokenizer, Batches(sampler))
    return run_all(agents.solve(PROBLEM.question, branches) for _ in range(openings))


def conversation(*turns):
    return "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in turns).removesuffix("\n")


def test_histories_branch_are_compacted_and_have_sub_agents(tokenizer):
    (episodes,) = solve(tokenizer, Scripted(tokenizer))
    assert [episode.reply for episode in episodes] == ["Answer: 79"] * 2
    ask, dropped = ("assistant", "<ask>12 * 7</ask>"), ("user", PROBLEM.question)
    for episode in episodes:
        assert [tokenizer.decode(history.ids) for history in episode.histories] == [
            conversation(
                ("system", agent.HELP),
                ("user", "12 * 7"),
                ("assistant", "<tool_call>12 * 7</tool_call>"),
                ("tool", "84"),
                ("assistant", "84"),
            ),
            conversation(
                ("system", agent.PLAN),
                dropped,
                ask,
                ("tool", "84"),
                ("user", agent.COMPACT),
                ("assistant", "12 * 7 = 84"),
            ),
            conversation(
                ("system", agent.PLAN),
                ("user", f"{PROBLEM.question}\nYour note: 12 * 7 = 84"),
                ("assistant", "<ask>84 - 5</ask>"),
                ("tool", "79"),
                ("assistant", "Answer: 79"),
            ),
            conversation(
                ("system", agent.HELP),
                ("user", "84 - 5"),
                ("assistant", "<tool_call>84 - 5</tool_call>"),
                ("tool", "79"),
                ("assistant", "79"),
            ),
        ]
    one, other = (episode.histories for episode in episodes)
    fork = one[1].ids.index(tokenizer("note", add_special_tokens=False)["input_ids"][0])
    assert one[0] == other[0]
    assert one[1].logprobs[:fork] == other[1].logprobs[:fork], "written once, before the fork"
    assert one[1].logprobs[fork:] != other[1].logprobs[fork:], "written by each branch"


def test_agents_that_wait_at_once_are_one_batch(tokenizer):
    sampler = Scripted(tokenizer)
    solve(tokenizer, sampler, openings=3, branches=2)
    assert sampler.batches == [3, 3, 3, 6, 6, 6, 6, 6]


def test_an_agent_that_goes_on_waits_for_the_branches_of_others():
    sizes = []
    batches = Batches(lambda histories: sizes.append(len(histories)) or [Turn(ids, [0.0]) for ids in histories])

    async def forks():
        return await asyncio.gather(batches([2]), batches([3]))

    assert run_all([batches([1]), forks()]) == [Turn([1], [0.0]), [Turn([2], [0.0]), Turn([3], [0.0])]]
    assert sizes == [3]


@pytest.mark.parametrize("error", [RuntimeError("out of memory"), StopIteration("out of memory"), None])
def test_a_sampler_that_fails_ends_all_agents(tokenizer, error):
    def sampler(_):
        if error is None:
            return []
        raise error

    with pytest.raises(RuntimeError, match=r"the sampler failed: .*(out of memory|0 turns for 2 histories)"):
        solve(tokenizer, sampler, openings=2)


@pytest.mark.parametrize(
    ("changes", "cut", "histories", "reply"),
    [
        ({"12 * 7 - 5?": "Answer: 79"}, (), 1, "Answer: 79"),
        ({}, ("<ask>12 * 7</ask>",), 1, ""),
        ({"note: 12 * 7 = 84": "Answer: 79"}, (), 3, "Answer: 79"),
        ({"\n84 - 5": "Ask again", "\nAsk again": "<ask>84 - 5</ask>"}, (), 3 + agent.ASKS, "<ask>84 - 5</ask>"),
    ],
    ids=["no question", "a turn that is cut off", "no second question", "questions without end"],
)
def test_agents_may_do_otherwise(tokenizer, changes, cut, histories, reply):
    (episodes,) = solve(tokenizer, Scripted(tokenizer, changes, cut))
    assert {len(episode.histories) for episode in episodes} == {histories}
    assert {episode.reply for episode in episodes} == {reply}


def test_rows_train_what_was_written_with_the_log_probabilities_of_the_sampler(tokenizer):
    sampler = Scripted(tokenizer)
    (episodes,) = solve(tokenizer, sampler)
    rows = [row for number, episode in enumerate(episodes) for row in episode.rows(PROBLEM, number)]
    assert {(row.reward, row.group) for row in rows} == {(1.0, PROBLEM.question)}
    assert [row.episode for row in rows] == [0] * 4 + [1] * 4
    found = {}
    for row in rows:
        assert not row.rollout_logprobs[row.loss_weights == 0].any()
        parts = tokenizer.decode(row.ids[row.loss_weights == 1])
        assert parts.endswith("<|im_end|>")
        found |= dict(zip((-row.rollout_logprobs[row.loss_weights == 1]).tolist(), row.ids[row.loss_weights == 1]))
    assert sorted(found) == list(range(sampler.written)), "all that was sampled is trained, and nothing else"


def test_a_demonstration_is_what_agents_play(tokenizer):
    shown = demonstration(tokenizer, PROBLEM)
    ((played,),) = solve(tokenizer, Scripted(tokenizer), branches=1)
    assert [history.ids for history in shown.histories] == [history.ids for history in played.histories]
    assert [history.written for history in shown.histories] == [history.written for history in played.histories]
    assert shown.reply == played.reply


class Inexact(Scripted):
    """Answers wrongly now and then; log-probabilities are off those of its model, as another engine's are."""

    def __init__(self, tokenizer, model):
        super().__init__(tokenizer)
        self.model, self.random, self.loads = model, random.Random(0), 0

    @torch.no_grad()
    def __call__(self, histories):
        turns = []
        for ids in histories:
            (turn,) = super().__call__([ids])
            if self.tokenizer.decode(turn.ids).startswith("Answer") and self.random.random() < 0.5:
                turn.ids[-2] = self.tokenizer("8", add_special_tokens=False)["input_ids"][0]
            scores = self.model(torch.tensor([ids + turn.ids])).logits[0, len(ids) - 1 : -1].log_softmax(-1)
            exact = scores.gather(1, torch.tensor(turn.ids)[:, None])[:, 0].tolist()
            turns.append(Turn(turn.ids, [value + self.random.gauss(0, 0.5) for value in exact]))
        return turns

    def load(self, weights):
        self.model.load_state_dict(weights, strict=False)
        self.loads += 1


def test_tree_and_rows_have_one_loss_and_its_ratios_are_those_of_trainer_to_sampler(tokenizer):
    model = tt.load_model("tiny").double()
    rows = train.play(Inexact(tokenizer, model), tokenizer, [PROBLEM])
    assert len(rows) == 16
    assert {row.reward for row in rows} == {0.0, 1.0}
    with PureFloat64():
        result = tt.TreeEngine(model).forward_backward(rows, train.LOSS)
    assert result.computed_tokens < result.flat_tokens / 2
    gradients = [weight.grad.clone() for weight in model.parameters()]
    model.zero_grad()
    with PureFloat64():
        assert train.rows_one_by_one(model, rows, train.LOSS) == pytest.approx(result.loss, rel=1e-12)
    worst = max((weight.grad - tree).abs().max() for weight, tree in zip(model.parameters(), gradients))
    assert worst < 1e-12 * max(tree.abs().max() for tree in gradients)

    ratios, losses = [], []
    for row in rows:
        with torch.no_grad():
            scores = model(torch.from_numpy(row.ids).long()[None]).logits[0].log_softmax(-1)
        for at in row.loss_weights.nonzero()[0].tolist():
            ratios.append(math.exp(scores[at - 1, row.ids[at]].item() - row.rollout_logprobs[at]))
            losses.append(-row.advantages[at] * min(ratios[-1], 2.0))
    count = len(ratios)
    assert max(ratios) > 2
    assert result.loss == pytest.approx(sum(losses) / count)
    metrics = result.metrics
    assert metrics["importance"] == pytest.approx(sum(min(ratio, 2.0) for ratio in ratios) / count)
    assert (metrics["importance_min"], metrics["importance_max"]) == pytest.approx((min(ratios), 2.0))
    assert metrics["rollout_kl"] == pytest.approx(sum(ratio - 1 - math.log(ratio) for ratio in ratios) / count)


def test_the_sampler_gets_the_weights_of_every_round(tokenizer, monkeypatch, tmp_path):
    model, sampler = tt.load_model("tiny"), Inexact(tokenizer, tt.load_model("tiny"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(train, "load_tokenizer", lambda: tokenizer)
    monkeypatch.setattr(train, "load", lambda _=None: model)
    monkeypatch.setattr(train, "draw", lambda *_, seed: [PROBLEM] * 3)
    fake = SimpleNamespace(VLLM=lambda folder, seed: sampler)
    monkeypatch.setitem(sys.modules, "examples.live.sampler", fake)
    sampler.load(dict(model.named_parameters()))
    history = train.main(rounds=2, problems=1, warm_steps=1, lr=1e-3, check_rows=2)
    assert sampler.loads == 3
    for mine, of_sampler in zip(model.parameters(), sampler.model.parameters()):
        assert torch.equal(mine, of_sampler)
    for entry in history:
        assert entry["loss_one_by_one"] == pytest.approx(entry["loss"], abs=1e-6)
    with (tmp_path / "runs/live/rounds.csv").open() as file:
        assert [row["round"] for row in csv.DictReader(file)] == ["0", "1"]
    assert (tmp_path / "runs/live/rounds.png").is_file()
    assert (tmp_path / "runs/live/warm-1-0/config.json").is_file()


def test_the_environment_of_make_live_has_all_that_is_imported():
    """It is made with the extra `train`, which has neither peft nor TRL."""
    code = "import sys; sys.modules.update(peft=None, trl=None); import examples.live.train"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(train.__file__).parents[2])
