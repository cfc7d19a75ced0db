"""A pretrained model learns to use a calculator: SFT on a few demonstrations, then GRPO, both in TRL.

    python -m examples.calculator.train                 # SmolLM2-135M-Instruct, LoRA, on CPUs
    python -m examples.calculator.train --no-share      # the same without tt.share_prefixes

The agent plays through TRL's `rollout_func`: several turns, whose tool results are masked. All rows of a step share
the system prompt, the answers to a problem its question too, and the step is computed as one tree.
"""

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

import treetrain as tt
from examples.calculator.agent import Episode, load, load_tokenizer, play
from examples.calculator.problems import OTHERS, TRAINED, Problem, correct, draw

GROUP, GROUPS = 6, 8
"""Answers to a problem, and problems, of a step of GRPO."""
LORA = LoraConfig(
    r=16,
    lora_alpha=32,
    target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    layers_to_transform=list(range(15, 30)),
    task_type="CAUSAL_LM",
)
"""What is trained: adapters of the upper half of the layers. The lower half needs no backward pass."""


def load_adapters(path: str | Path | None = None, *, seed: int = 0) -> Any:
    """The pretrained model with the adapters of a folder, or with new ones, which change nothing yet."""
    if path is not None:
        return PeftModel.from_pretrained(load(), path, is_trainable=True)
    model = load()
    torch.manual_seed(seed)
    return get_peft_model(model, LORA)


def make_sft(model: Any, *, seed: int = 0, steps: int = 12, share: bool = True, output: str = "runs/sft") -> SFTTrainer:
    """SFT on demonstrations, eight a step; a step sees each of its problems for the first time."""
    args = SFTConfig(
        output,
        max_steps=steps,
        per_device_train_batch_size=8,
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        assistant_only_loss=True,
        max_length=None,
        seed=seed,
        **_common(),
    )
    problems = draw(TRAINED, 8 * steps, seed=1000 + seed)
    rows = Dataset.from_dict({"messages": [problem.demonstration() for problem in problems]})
    return _shared(SFTTrainer(model, args, train_dataset=rows, processing_class=load_tokenizer()), share)


def make_grpo(
    model: Any, *, seed: int = 0, steps: int = 20, share: bool = True, output: str = "runs/grpo", save_steps: int = 0
) -> GRPOTrainer:
    """GRPO with the calculator as a tool, one update on the answers of a step.

    Args:
        save_steps: steps from one checkpoint to the next; 0 for none.
    """
    args = GRPOConfig(
        output,
        max_steps=steps,
        num_generations=GROUP,
        per_device_train_batch_size=GROUP,
        gradient_accumulation_steps=GROUPS,
        learning_rate=2e-4,
        lr_scheduler_type="constant",
        save_strategy="steps" if save_steps else "no",
        save_steps=save_steps or 500,
        save_total_limit=1,
        seed=seed,
        **{key: value for key, value in _common().items() if key != "save_strategy"},
    )
    problems = draw(TRAINED, GROUPS * max(steps, 40), seed=2000 + seed)
    columns = {
        "prompt": [problem.messages for problem in problems],
        "answer": [problem.answer for problem in problems],
    }
    trainer = GRPOTrainer(
        model,
        reward_funcs=reward,
        rollout_func=rollouts,
        args=args,
        train_dataset=Dataset.from_dict(columns),
        processing_class=load_tokenizer(),
    )
    return _shared(trainer, share)


def rollouts(prompts: list[list[dict[str, str]]], trainer: GRPOTrainer) -> dict[str, Any]:
    """TRL's `rollout_func`: an episode for every prompt."""
    start = time.process_time()
    model = trainer.accelerator.unwrap_model(trainer.model)
    episodes = play(model, trainer.processing_class, prompts, sample=True)
    trainer.seconds.sampling += time.process_time() - start
    return {
        "prompt_ids": [one.prompt for one in episodes],
        "completion_ids": [one.ids for one in episodes],
        "env_mask": [one.written for one in episodes],
        "logprobs": None,  # TRL's policy scores them itself
        "reply": [one.reply for one in episodes],
    }


def reward(reply: list[str], answer: list[int], **_: Any) -> list[float]:
    """TRL's reward: 1.0 for a right answer."""
    return [correct(said, right) for said, right in zip(reply, answer)]


def _common() -> dict[str, Any]:
    cpu = not torch.cuda.is_available()
    return {
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "bf16": False,
        "gradient_checkpointing": False,
        "use_cpu": cpu,
        "disable_tqdm": True,
    }


def _shared(trainer: Any, share: bool) -> Any:
    if share:
        tt.share_prefixes(trainer)
    trainer.seconds = Seconds()
    trainer.add_callback(trainer.seconds)
    return trainer


class Seconds(TrainerCallback):
    """Adds to every entry of the log the seconds of training so far, those of earlier runs that it resumes included.

    `seconds` are of the clock, `cpu_seconds` of the processor in all threads, `sampling` those of them that the agent
    played.
    """

    def __init__(self) -> None:
        self.sampling = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        before = state.log_history[-1] if state.log_history else {}
        self.start = {name: value - before.get(name, 0.0) for name, value in self._now().items()}

    def on_log(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        now = self._now().items()
        state.log_history[-1] |= {name: round(value - self.start[name], 2) for name, value in now}

    def _now(self) -> dict[str, float]:
        return {"seconds": time.perf_counter(), "cpu_seconds": time.process_time(), "sampling": self.sampling}


def held_out(count: int = 60) -> dict[str, list[Problem]]:
    """The problems of the tests, the same for every model: numbers that were not trained, stories that were not."""
    return {
        "other numbers": draw(TRAINED, count, seed=8, held_out=True),
        "other stories": draw(OTHERS, count, seed=8, held_out=True),
    }


def accuracy(model: Any, problems: Sequence[Problem]) -> tuple[float, list[Episode]]:
    """The share of right answers, decoded greedily, and the episodes."""
    episodes: list[Episode] = []
    for start in range(0, len(problems), 64):
        prompts = [problem.messages for problem in problems[start : start + 64]]
        episodes += play(model, load_tokenizer(), prompts, sample=False)
    right = [correct(one.reply, problem.answer) for one, problem in zip(episodes, problems)]
    return sum(right) / len(right), episodes


def main(seed: int = 0, sft_steps: int = 12, steps: int = 20, share: bool = True, test: int = 60) -> GRPOTrainer:
    """Train and test; returns the trainer of GRPO."""
    model, problems = load_adapters(seed=seed), held_out(test)

    def show(when: str) -> None:
        for name, asked in problems.items():
            right, episodes = accuracy(model, asked)
            said = load_tokenizer().decode(episodes[0].ids)
            print(f"\n== {when}, {name}: {right:.0%} of {test} problems\n{asked[0].question}\n{said}\n", flush=True)

    show("pretrained")
    make_sft(model, seed=seed, steps=sft_steps, share=share).train()
    show("after SFT")
    trainer = make_grpo(model, seed=seed, steps=steps, share=share)
    trainer.train()
    show("after GRPO")
    return trainer


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="A pretrained model learns to use a calculator.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sft-steps", type=int, default=12)
    parser.add_argument("--steps", type=int, default=20, help="of GRPO")
    parser.add_argument("--no-share", dest="share", action="store_false", help="train as TRL alone does")
    main(**vars(parser.parse_args()))
