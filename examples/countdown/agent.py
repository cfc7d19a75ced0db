"""A language model that plays countdown: prompts, sampling, and games with every call that the model made."""

import gzip
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from examples.countdown.chat import Episode, begin, parse_reply
from examples.countdown.environment import Puzzle, reward

FOLDER = Path(__file__).parent
RECORDED = FOLDER / "train.jsonl.gz"
TASKS = ("train-002", "train-018", "train-024", "train-050")
"""Recorded tasks of three numbers, whose games are short: what the example loops train on."""
TEMPLATE = (FOLDER / "short.jinja").read_text(encoding="utf-8")
REPLY_TOKENS = 48
PATIENCE = 6
"""A model that has not submitted after so many calls is not asked again, and has earned nothing."""


@dataclass(slots=True)
class Game:
    """An episode in progress and its model calls, as token ids."""

    episode: Episode
    calls: list[tuple[list[int], list[int]]] = field(default_factory=list)
    """(prompt, completion) of every call. The ids are those that were sampled; text is never tokenised again."""
    readable: bool = True
    """False once a reply held no tool call; that ends the game."""

    @property
    def over(self) -> bool:
        """Whether the game has ended."""
        return self.episode.state.done or not self.readable or len(self.calls) >= PATIENCE

    @property
    def reward(self) -> float:
        """The environment's reward, 0.0 to 1.0."""
        return reward(self.episode.state)


def recorded_puzzle(task: str) -> Puzzle:
    """The puzzle of a recorded task, such as "train-002"."""
    with gzip.open(RECORDED, "rt", encoding="utf-8") as lines:
        for row in map(json.loads, lines):
            if row["task_id"] == task:
                *numbers, target = map(int, re.findall(r"\d+", row["messages"][1]["content"]))
                return Puzzle(tuple(numbers), target)
    raise ValueError(f"{RECORDED} has no task {task!r}")


def play(model: Any, tokenizer: Any, puzzles: Sequence[Puzzle], *, temperature: float = 1.0) -> list[Game]:
    """Play one game per puzzle to the end, all in one batch."""
    games = [Game(begin(puzzle)) for puzzle in puzzles]
    while live := [game for game in games if not game.over]:
        prompts = [prompt_ids(tokenizer, game.episode) for game in live]
        for game, prompt, reply in zip(live, prompts, sample(model, tokenizer, prompts, temperature)):
            game.calls.append((prompt, reply))
            act(game, tokenizer.decode(reply, skip_special_tokens=True))
    return games


def act(game: Game, text: str) -> None:
    """Run the tool call that the model wrote."""
    reply = parse_reply(text)
    game.readable = reply is not None
    if reply is not None:
        game.episode = game.episode.after(reply)


def prompt_ids(tokenizer: Any, episode: Episode) -> list[int]:
    """The prompt of the model's next reply."""
    text = tokenizer.apply_chat_template(
        list(episode.messages), chat_template=TEMPLATE, add_generation_prompt=True, tokenize=False
    )
    return tokenizer(text, add_special_tokens=False)["input_ids"]


@torch.no_grad()
def sample(model: Any, tokenizer: Any, prompts: Sequence[list[int]], temperature: float = 1.0) -> list[list[int]]:
    """Sample one reply per prompt, including the end token unless the reply was cut off."""
    longest, pad, end = max(map(len, prompts)), tokenizer.pad_token_id, tokenizer.eos_token_id
    ids = torch.tensor([[pad] * (longest - len(prompt)) + prompt for prompt in prompts], device=model.device)
    seen = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=model.device)
    written = model.generate(
        input_ids=ids,
        attention_mask=seen,
        max_new_tokens=REPLY_TOKENS,
        do_sample=True,
        temperature=temperature,
        top_k=0,  # transformers' default truncates the distribution; training would score another policy
        top_p=1.0,
        pad_token_id=pad,
        eos_token_id=end,
    )[:, longest:].tolist()
    return [reply[: reply.index(end) + 1] if end in reply else reply for reply in written]
