"""GRPO in TRL on games that are played with tools, with shared prefixes computed once.

    python -m examples.trl_grpo                        # warm start (examples/trl_sft.py), then 20 rounds of games
    python -m examples.trl_grpo --model runs/warm      # from a saved warm start

TRL plays: its tool loop calls the methods of `Countdown`. A row is a game of several turns; the tools' answers are
masked. The games of a round share the rules, those of a task its numbers too, and a round is trained as one tree.
"""

import argparse
import json
import os

import torch
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer
from trl.chat_template_utils import qwen3_template

import treetrain as tt
from examples import trl_sft
from examples.countdown.agent import PATIENCE, TASKS, recorded_puzzle
from examples.countdown.chat import begin
from examples.countdown.environment import call, reward, start


class Countdown:
    """One game; TRL offers its public methods to the model as tools and reads the reward at the end."""

    def reset(self, task: str, **row) -> None:
        self.state = start(recorded_puzzle(task))

    def _call(self, name: str, **arguments) -> str:
        self.state, answer = call(self.state, name, json.dumps(arguments))
        return answer

    def calculate(self, expression: str) -> str:
        """Combine two numbers.

        Args:
            expression: Two current numbers and an operator, such as 6 * 4
        """
        return self._call("calculate", expression=expression)

    def undo(self) -> str:
        """Take back the last calculation."""
        return self._call("undo")

    def submit(self, answer: int) -> str:
        """Finish with an answer.

        Args:
            answer: One of the current numbers
        """
        return self._call("submit", answer=answer)

    def get_reward(self) -> float:
        return reward(self.state)


def make(
    rounds: int = 20,
    games: int = 8,
    updates: int = 2,
    seed: int = 0,
    model=None,
    share: bool = True,
    learning_rate: float = 5e-5,
) -> GRPOTrainer:
    """Make a trainer that plays and learns from its games.

    Args:
        rounds: rounds of games.
        games: games per task in a round, which form a group.
        updates: optimizer steps on the games of a round.
        seed: random seed of the run.
        model: a trained model, or its folder; None trains one first.
        share: False trains as TRL alone does, with the same losses.
        learning_rate: of AdamW, constant.
    """
    if model is None:
        model = trl_sft.main().model
    elif isinstance(model, str):
        model = tt.load_model(model)
    tokenizer = trl_sft.tokenizer_of_games()
    tokenizer.response_template = qwen3_template  # format of replies; TRL knows it for templates of known models
    prompts = [list(begin(recorded_puzzle(task)).messages) for task in TASKS]
    args = GRPOConfig(
        "runs/trl_grpo",
        max_steps=rounds * updates,
        num_generations=games,
        num_iterations=updates,
        # One group and task per micro-batch; all micro-batches of a step are still scored as one tree.
        per_device_train_batch_size=games,
        gradient_accumulation_steps=max(len(TASKS) // int(os.environ.get("WORLD_SIZE", "1")), 1),
        max_completion_length=320,
        max_tool_calling_iterations=PATIENCE,
        epsilon_high=0.28,
        learning_rate=learning_rate,
        adam_beta2=0.98,
        lr_scheduler_type="constant",
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        bf16=False,
        use_cpu=not torch.cuda.is_available(),
        seed=seed,
    )
    trainer = GRPOTrainer(
        model,
        args=args,
        train_dataset=Dataset.from_dict({"prompt": prompts, "task": list(TASKS)}),
        processing_class=tokenizer,
        environment_factory=Countdown,
    )
    if share:
        tt.share_prefixes(trainer)
    return trainer


def main(**options) -> GRPOTrainer:
    """Play and update, with the options of `make`; returns the trainer. Its `state.log_history` has the rewards."""
    trainer = make(**options)
    trainer.train()
    return trainer


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="GRPO in TRL on games that are played with tools.")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", help="folder of a trained model, such as examples.trl_sft --output writes")
    main(**vars(parser.parse_args())).accelerator.end_training()  # ends the process group
