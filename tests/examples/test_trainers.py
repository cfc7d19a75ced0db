"""The examples inside TRL's and transformers' trainers: they run, they share, and they learn."""

import copy
import json
import math
import re
from random import Random

import pytest
import torch
from examples.countdown.agent import TASKS
from examples.countdown.environment import legal_moves

from treetrain.models.loading import load_model

pytest.importorskip("trl")
from examples import hf_trainer, trl_dpo, trl_grpo, trl_sft


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path, monkeypatch):
    """The examples write to `runs/`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")


def logged(trainer, name):
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def written(name, arguments):
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


def scripted_turns(trainer, prompt_ids, *_, **__):
    """Replies without a model: calculations drawn at random, then the last number."""
    draws, replies = Random(len(prompt_ids[0]) + trainer.state.global_step), []
    for ids in prompt_ids:
        text = trainer.processing_class.decode(ids)
        numbers = tuple(map(int, re.findall(r"\d+", re.findall(r"Numbers: ([\d, ]+)", text)[-1])))
        if "Submitted" in text:
            reply = "Done."
        elif len(numbers) > 1:
            reply = written("calculate", {"expression": draws.choice(legal_moves(numbers))[0]})
        else:
            reply = written("submit", {"answer": numbers[0]})
        replies.append([*trainer.processing_class(reply)["input_ids"], trainer.processing_class.eos_token_id])
    return replies, None


@pytest.mark.slow
def test_sft_in_trl_trains_on_the_recorded_games(tmp_path):
    trainer = trl_sft.main(steps=1, output=str(tmp_path))
    (loss,) = logged(trainer, "train_loss")
    assert loss == pytest.approx(math.log(2048), abs=0.3)


@pytest.mark.slow
def test_sft_in_trl_lowers_the_loss_and_shares_the_rules(tmp_path):
    trainer = trl_sft.main(steps=3, output=str(tmp_path))
    (loss,) = logged(trainer, "train_loss")
    assert loss < math.log(2048) - 0.3
    assert trainer.state.global_step == 3


def test_what_the_agent_wrote_is_trained_and_its_last_word_ends_the_game():
    games = trl_sft.recorded_games()
    assert {game["task_id"] for game in games} == set(TASKS)
    tokenizer = trl_sft.tokenizer_of_games()
    encoded = tokenizer.apply_chat_template(
        games[0]["messages"], tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    ids, mask = encoded["input_ids"], encoded["assistant_masks"]
    said = tokenizer.decode([id for id, trained in zip(ids, mask) if trained])
    assert said.endswith("Done.<|im_end|>") and "submit" in said and "Submitted" not in said


@pytest.mark.slow
def test_grpo_in_trl_plays_with_tools_and_trains_a_round_as_one_tree(monkeypatch):
    monkeypatch.setattr(trl_grpo.GRPOTrainer, "_generate_single_turn", scripted_turns)
    model = load_model("tiny")
    before = copy.deepcopy(model.state_dict())
    trainer = trl_grpo.main(rounds=1, games=4, updates=2, model=model)
    (reward,) = logged(trainer, "reward")
    assert 0 < reward < 1 and logged(trainer, "tools/call_frequency")[0] > 2
    assert logged(trainer, "tools/failure_frequency")[0] == 0
    assert logged(trainer, "tree/parts") == [1, 1] and min(logged(trainer, "tree/overlap")) > 0.5
    assert any(not torch.equal(weight, before[name]) for name, weight in model.state_dict().items())


def test_a_game_is_played_by_the_methods_that_trl_offers_as_tools():
    game = trl_grpo.Countdown()
    game.reset(task=TASKS[0], prompt=[])
    numbers = game.state.numbers
    assert game.calculate(f"{numbers[0]} + {numbers[1]}").startswith(f"{numbers[0]} + {numbers[1]} = ")
    assert game.undo().startswith("Undone.") and game.get_reward() == 0
    assert game.submit(numbers[0]).endswith("The end.")


@pytest.mark.slow
def test_dpo_in_trl_begins_at_the_reference_and_shares_its_pairs():
    trainer = trl_dpo.main(steps=2, model=load_model("tiny"))
    losses = logged(trainer, "loss")
    assert losses[0] == pytest.approx(math.log(2), abs=1e-4) and losses[1] != losses[0]
    assert min(logged(trainer, "tree/overlap")) > 0.4


@pytest.mark.slow
def test_a_plain_trainer_shares_the_calls_of_a_game_over_its_micro_batches():
    trainer = hf_trainer.main(steps=2)
    assert logged(trainer, "loss")[1] < math.log(2048) - 0.3
    assert logged(trainer, "tree/parts") == [1, 1] and min(logged(trainer, "tree/overlap")) > 0.7


@pytest.mark.slow
def test_a_plain_trainer_with_a_loss_of_its_own_learns_the_same():
    shared, alone = (hf_trainer.main(steps=2, focus=2.0, share=share) for share in (True, False))
    assert logged(shared, "loss") == pytest.approx(logged(alone, "loss"), rel=1e-5)
    assert min(logged(shared, "tree/overlap")) > 0.7


@pytest.mark.slow
def test_grpo_in_trl_raises_the_reward():
    rewards = logged(trl_grpo.main(rounds=10), "reward")
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.05
