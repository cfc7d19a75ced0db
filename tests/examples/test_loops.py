"""The flat example loops: they run, they learn, and they say what they share."""

import copy
import json
import math
import re
from random import Random

import pytest
import torch
from examples.countdown import agent
from examples.countdown.agent import TASKS, Game, act, play, prompt_ids, recorded_puzzle, sample
from examples.countdown.chat import begin
from examples.countdown.environment import Puzzle
from examples.countdown.policies import expert, random_walk

from examples import (
    adapters,
    distill,
    dpo,
    grpo,
    own_loss,
    own_model,
    sampling_masks,
    sft,
    stale_sampler,
    tree_objective,
)
from treetrain.models.loading import load_model, load_tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer("tiny")


@pytest.fixture
def model():
    return load_model("tiny")


def scripted(model, tokenizer, puzzles):
    """As `play`, by agents that need no model: now a good one, now a poor one."""
    draws, games = Random(1), [Game(begin(puzzle)) for puzzle in puzzles]
    for number, game in enumerate(games):
        while not game.over:
            reply = (expert if number % 2 else random_walk)(game.episode.state, draws)
            call = f'<tool_call>\n{{"name": {json.dumps(reply.name)}, "arguments": {reply.arguments}}}\n</tool_call>'
            text = "\n".join(filter(None, (reply.content, call)))
            game.calls.append((prompt_ids(tokenizer, game.episode), [*tokenizer(text)["input_ids"], 2]))
            act(game, text)
    return games


@pytest.mark.slow
def test_sft_lowers_the_loss_and_computes_shared_prefixes_once(capsys):
    _, losses = sft.main(steps=4, rows_per_step=6)
    assert losses[0] == pytest.approx(math.log(2048), abs=0.3)
    assert losses[-1] < losses[0] - 1
    computed, flat = capsys.readouterr().out.splitlines()[1].split(", ")[1].split(" of ")
    assert int(computed) < 0.7 * int(flat.split()[0])


@pytest.mark.parametrize("ids", [None, 4])
def test_distillation_brings_a_student_nearer_to_its_teacher(ids):
    _, divergences = distill.main(steps=4, ids=ids, teacher_steps=3)
    assert divergences[-1] < 0.9 * divergences[0]


@pytest.mark.slow
def test_two_adapters_are_trained_in_one_step():
    model, losses = adapters.main(steps=3, rows_per_step=4)
    assert losses[-1] < losses[0]
    for name in ("winner", "loser"):  # peft starts with B = 0
        assert any(p.any() for key, p in model.named_parameters() if f"lora_B.{name}" in key)


@pytest.mark.slow
def test_with_the_kept_ids_the_engine_scores_what_the_sampler_drew_from():
    for record in sampling_masks.main(steps=2, count=4, top_p=0.7, warm_steps=3):
        assert record["gap"] < 1e-4 < 0.1 < record["gap without masks"]
        assert record["ratio"] == pytest.approx(1, abs=1e-4)


@pytest.mark.slow
def test_with_the_experts_of_its_sampler_a_policy_is_nearer_to_it():
    fresh = stale_sampler.main(steps=3, lag=0, answers_per_task=3, warm_steps=12)
    apart, with_its_own = (sum(record[name] for record in fresh) for name in ("kl", "kl_own"))
    assert 0 < apart < 0.9 * with_its_own < 1e-3
    assert all(record["outside"] == 0 for record in fresh)
    stale = stale_sampler.main(steps=3, lag=2, answers_per_task=3, warm_steps=12, lr=3e-3)[-1]
    assert stale["kl"] > 1e-3 and 0 < stale["outside"] < 1


@pytest.mark.slow
def test_moves_that_games_share_are_trained_once(capsys):
    trained = []
    for count in ("per trajectory", "once"):
        sft.main(steps=1, count=count)
        trained.append(int(capsys.readouterr().out.split(" train ")[1].split()[0]))
    assert trained[1] < 0.8 * trained[0]


@pytest.mark.slow
def test_grpo_trains_on_games_and_scores_the_old_policy_before_the_first_update(model, monkeypatch):
    monkeypatch.setattr(grpo, "play", scripted)
    before, ratios = copy.deepcopy(model.state_dict()), []
    step = grpo.tt.TreeEngine.forward_backward

    def watched(self, rows, loss):
        result = step(self, rows, loss)
        ratios.append(result.metrics["ratio"])
        return result

    monkeypatch.setattr(grpo.tt.TreeEngine, "forward_backward", watched)
    (entry,) = grpo.main(iterations=1, games=2, updates=2, model=model)
    assert 0 < entry["reward"] < 1 and entry["computed"] < 0.4 * entry["tokens"]
    assert ratios[0] == pytest.approx(1, abs=1e-5) and ratios[1] != pytest.approx(1, abs=1e-5)
    assert any(not torch.equal(weight, before[name]) for name, weight in model.state_dict().items())


def test_a_row_of_grpo_trains_the_reply_and_nothing_else(tokenizer):
    (game,) = scripted(None, tokenizer, [recorded_puzzle(TASKS[0])])
    rows = grpo.rows_of(game, 7, "task")
    assert len(rows) == len(game.calls) > 1
    for row, (prompt, reply) in zip(rows, game.calls):
        assert row.ids.tolist() == prompt + reply and row.episode == 7 and row.reward == game.reward
        assert row.ids[row.weights > 0].tolist() == reply


@pytest.mark.slow
def test_dpo_begins_at_the_reference(model):
    (first,) = dpo.main(steps=1, pairs_per_step=2, lr=3e-4, model=model)
    assert first["loss"] == pytest.approx(math.log(2), abs=1e-4) and abs(first["margin"]) < 1e-3


@pytest.mark.slow
def test_dpo_raises_the_margin(model):
    history = dpo.main(steps=3, pairs_per_step=2, lr=3e-4, model=model)
    assert history[-1]["margin"] > 0.01 and history[-1]["accuracy"] > 0.5


def test_a_pair_is_two_games_of_one_task_and_the_better_one_is_chosen():
    rows = [grpo.tt.Trajectory([1, 2, n], reward=r, group="t", id=n) for n, r in enumerate((1.0, 0.0, 0.45, 1.0))]
    pairs = dpo.pairs_of(rows, Random(0))
    assert [pair[1].id for pair in pairs] == [1, 2]
    assert all(better.chosen and not worse.chosen and better.reward > worse.reward for better, worse in pairs)
    assert len({row.pair for pair in pairs for row in pair}) == 2


@pytest.mark.slow
def test_an_own_loss_falls():
    losses = own_loss.main(steps=3, games=2)
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.slow
def test_an_own_loss_is_nearly_the_same_under_autocast():
    losses = own_loss.main(steps=1, games=2)
    (rounded,) = own_loss.main(steps=1, games=2, bfloat16=True)
    assert rounded == pytest.approx(losses[0], rel=0.05) and rounded != losses[0]


@pytest.mark.slow
def test_a_model_of_ones_own_has_the_gradients_of_its_rows_and_learns_in_parts_as_in_one(capsys):
    whole = own_model.main(steps=3, rows=12)
    printed = capsys.readouterr().out
    assert float(re.search(r"differ by (\S+)", printed)[1]) < 1e-6 and whole[-1] < whole[0] - 0.2
    assert own_model.main(steps=3, rows=12, budget=300) == pytest.approx(whole, rel=1e-5)


def test_the_ranking_loss_is_zero_where_scores_are_ordered_as_the_rewards_are():
    rows = [grpo.tt.Trajectory([1, 2, 3], loss_weights=[0, 0, 1], reward=reward) for reward in (1.0, 0.5)]
    agreeing = [torch.tensor([-9.0, -1.0]), torch.tensor([-3.0, -1.5])]  # the first entry is not the agent's
    assert float(own_loss.ranking_loss(agreeing, rows)) == pytest.approx(0, abs=1e-6)
    assert float(own_loss.ranking_loss(agreeing[::-1], rows)) > 0.5


def test_a_reply_does_not_depend_on_the_prompts_beside_it(model, tokenizer, monkeypatch):
    monkeypatch.setattr(agent, "REPLY_TOKENS", 8)
    game = scripted(None, tokenizer, [recorded_puzzle(TASKS[0])])[0]
    short, long = game.calls[0][0], game.calls[-1][0]
    assert len(long) > len(short)
    alone = [sample(model, tokenizer, [prompt], temperature=1e-4)[0] for prompt in (short, long)]
    assert sample(model, tokenizer, [short, long], temperature=1e-4) == alone


def test_replies_are_drawn_from_the_whole_vocabulary(model, tokenizer, monkeypatch):
    monkeypatch.setattr(agent, "REPLY_TOKENS", 1)
    torch.manual_seed(0)
    drawn = sample(model, tokenizer, [[5, 6, 7]] * 120, temperature=100.0)
    assert len({token for (token,) in drawn}) > 90  # transformers' default leaves 50 candidates


def test_a_model_that_writes_no_call_ends_its_game_without_reward(model, tokenizer, monkeypatch):
    monkeypatch.setattr(agent, "REPLY_TOKENS", 4)
    torch.manual_seed(0)
    games = play(model, tokenizer, [recorded_puzzle(task) for task in TASKS[:2]])
    assert [(len(game.calls), game.readable, game.reward) for game in games] == [(1, False, 0.0)] * 2
    assert all(1 <= len(reply) <= 4 for game in games for _, reply in game.calls)


def test_a_model_that_never_submits_is_not_asked_for_ever(tokenizer, monkeypatch):
    undo = tokenizer('<tool_call>\n{"name": "undo", "arguments": {}}\n</tool_call>')["input_ids"]
    monkeypatch.setattr(agent, "sample", lambda model, tokenizer, prompts, temperature: [undo] * len(prompts))
    (game,) = play(None, tokenizer, [Puzzle((1, 2, 3), 7)])
    assert len(game.calls) == agent.PATIENCE and game.readable and game.reward == 0


def test_a_task_that_was_not_recorded_is_an_error_that_names_it():
    assert recorded_puzzle("train-018") == Puzzle((6, 11, 3), 20)
    with pytest.raises(ValueError, match="no task 'train-999'"):
        recorded_puzzle("train-999")


@pytest.mark.slow
def test_grpo_raises_the_reward():
    rewards = [entry["reward"] for entry in grpo.main(iterations=14)]
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.1


@pytest.mark.slow
def test_rewards_of_steps_rise_when_every_step_of_a_tree_is_trained_once():
    history = tree_objective.main(iterations=8, branches=6, depth=2, tokens=4, lr=1e-2)
    assert {entry["trained"] for entry in history} == {(6 + 36) * 4}
    assert all(entry["flat"] > 36 * 2 * 4 for entry in history)
    rewards = [entry["reward"] for entry in history]
    assert sum(rewards[-3:]) > sum(rewards[:3]) + 0.3


def test_a_step_is_worth_what_came_of_it_above_the_prompt_and_above_the_step_before():
    low, high = 1, tree_objective.WANTED
    ids, parents = [[9], [low], [high], [low], [high], [high]], [-1, 0, 0, 1, 1, 2]
    gains, leaves, reward = tree_objective.advantages_of(ids, parents)  # rewards of the leaves: 1, 1/2, 0
    assert (leaves, reward) == ([3, 4, 5], 0.5)
    assert gains == [0.0, 2 * 0.75 - 0.5 - 0.5, 0.0 - 0.5 - 0.5, 2 - 0.5 - 0.75, 1 - 0.5 - 0.75, 0 - 0.5 - 0.0]
