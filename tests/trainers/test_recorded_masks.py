"""Sampling masks that a rollout of GRPO, or a batch, has: scores of all policies are over the ids that were kept."""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import trainer_runs as runs
from test_adapter_names import batch
from transformers import Trainer, TrainingArguments
from trl import GRPOConfig, GRPOTrainer

import treetrain as tt
from treetrain.core.errors import DataError

RATE, TEMPERATURE, BETA = 0.05, 0.8, 0.1


def kept_of(row: int, completion: list[int]) -> list[list[int] | None] | None:
    """What a sampler keeps of 42 ids for each token: other sets in other rows, none for some tokens and a whole row."""
    if row == 3:
        return None
    return [
        None if (row + t) % 5 == 4 else sorted({token, *((token * 7 + 3 * k + t + row % 2) % 42 for k in range(t + 1))})
        for t, token in enumerate(completion)
    ]


class Rollouts:
    """A `rollout_func` whose completions share beginnings; it keeps what it gave."""

    def __init__(self, **change: Any):
        self.given: list[tuple[list[int], list[int], Any]] = []
        self._change = change

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        ids = [trainer.processing_class(prompt)["input_ids"] for prompt in prompts]
        made = [[2 + k // 4, 5, 7 + k % 2, 4 + k * k % 5] for k in range(len(ids))]
        kept = [kept_of(k, completion) for k, completion in enumerate(made)]
        for row, value in self._change.items():
            kept[int(row[1:])] = value
        self.given += zip(ids, made, kept)
        logprobs = [[-1.0] * len(completion) for completion in made]
        return {"prompt_ids": ids, "completion_ids": made, "logprobs": logprobs, "sampling_mask": kept}


def grpo(folder: Path, rollouts: Rollouts, **own: Any) -> Any:
    """GRPO for two optimizer steps on the same eight completions, in two micro-batches each."""
    settings = {
        "output_dir": str(folder), "max_steps": 2, "num_iterations": 2, "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2, "max_completion_length": 4, "learning_rate": RATE, "optim": "sgd",
        "lr_scheduler_type": "constant", "loss_type": "grpo", "scale_rewards": "none", "beta": BETA,
        "temperature": TEMPERATURE, "use_bias_correction_kl": False, "save_strategy": "no", "report_to": [],
        "use_cpu": True, "bf16": False,
        "gradient_checkpointing": False, "disable_tqdm": True, "logging_steps": 1, "max_grad_norm": 0.0, **own,
    }  # fmt: skip
    kind = functools.partial(GRPOTrainer, rollout_func=rollouts)
    return runs._online(kind, GRPOConfig, settings, runs.model(dtype=torch.float64), folder, False)


def scores(model: Any, prompt: list[int], completion: list[int], kept: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities and entropies of a completion, each over the ids that were kept for its token."""
    logits = model(input_ids=torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1] / TEMPERATURE
    logprobs, entropies = [], []
    for t, token in enumerate(completion):
        ids = list(range(logits.shape[-1])) if kept is None or kept[t] is None else kept[t]
        over = logits[t, ids].log_softmax(-1)
        logprobs.append(over[ids.index(token)])
        entropies.append(-(over.exp() * over).sum())
    return torch.stack(logprobs), torch.stack(entropies)


def test_grpo_scores_old_new_and_reference_policies_over_the_ids_that_were_kept(tmp_path):
    rollouts = Rollouts()
    trainer = tt.share_prefixes(grpo(tmp_path, rollouts))
    plain = runs.model(dtype=torch.float64)
    start = {name: p.detach().clone() for name, p in plain.named_parameters()}
    with runs.double():
        trainer.train()
        rows = rollouts.given
        assert len(rows) == 8
        rewards = torch.tensor(runs.word_reward([trainer.processing_class.decode(c) for _, c, _ in rows]))
        advantages = (rewards.view(2, 4) - rewards.view(2, 4).mean(1, keepdim=True)).flatten().double()
        with torch.no_grad():
            references = [scores(plain, *row)[0] for row in rows]
        for step in range(2):
            losses, entropies = [], []
            for row, reference, advantage in zip(rows, references, advantages):
                logprobs, entropy = scores(plain, *row)
                ratio = (logprobs - reference).exp()  # the old policy is the first one, as the reference is
                gain = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
                kl = (reference - logprobs).exp() - (reference - logprobs) - 1
                losses.append((-gain + BETA * kl).mean())
                entropies.append(entropy.mean())
            loss = torch.stack(losses).mean()
            plain.zero_grad()
            loss.backward()
            assert trainer.state.log_history[step]["entropy"] == pytest.approx(
                torch.stack(entropies).mean().item(), rel=1e-6
            )
            with torch.no_grad():
                for p in plain.parameters():
                    p -= RATE * p.grad
    moved = 0.0
    for (name, p), q in zip(plain.named_parameters(), trainer.model.parameters(), strict=True):
        torch.testing.assert_close(q.detach(), p.detach(), rtol=0, atol=1e-11, msg=name)
        moved = max(moved, float((p - start[name]).abs().max()))
    assert moved > 1e-3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"r1": [[5], [5]]},
            "sampling_mask of row 1 of the rollout has 2 lists of ids, and its completion has 4 tokens",
        ),
        ({"r2": [[2], None, [9], [6]]}, r"trajectory '2 of the rollout': .*sampling_mask.*7"),
    ],
)
def test_masks_of_other_tokens_are_refused_with_the_row(change, message, tmp_path):
    with pytest.raises(DataError, match=message):
        tt.share_prefixes(grpo(tmp_path, Rollouts(**change))).train()


def test_masks_in_a_batch_are_of_its_loss_or_refused(tmp_path):
    rows = [[2, 3, 4, 5], [2, 3, 4, 6], [2, 3, 7]]
    kept = [[None, None, [4, 9], [5, 6, 7]], None, [None, None, [7, 8]]]
    plain = runs.model(dtype=torch.float64)

    def collate(given: list[dict[str, Any]]) -> dict[str, Any]:
        named = batch([{**row, "adapter_names": ""} for row in given])
        return {**{name: named[name] for name in ("input_ids", "attention_mask", "labels")}, "sampling_mask": kept}

    args = TrainingArguments(
        output_dir=str(tmp_path), max_steps=1, per_device_train_batch_size=3, learning_rate=RATE, optim="sgd",
        lr_scheduler_type="constant", save_strategy="no", use_cpu=True, bf16=False, report_to=[], disable_tqdm=True,
        max_grad_norm=0.0, remove_unused_columns=False, train_sampling_strategy="sequential",
    )  # fmt: skip
    data = [{"input_ids": row, "labels": row} for row in rows]
    trainer = tt.share_prefixes(
        Trainer(runs.model(dtype=torch.float64), args, train_dataset=data, data_collator=collate)
    )
    with runs.double():
        trainer.train()
        total = torch.zeros((), dtype=torch.float64)
        for ids, sets in zip(rows, kept):
            logits = plain(input_ids=torch.tensor([ids])).logits[0]
            for t in range(1, len(ids)):
                own = range(logits.shape[-1]) if sets is None or sets[t] is None else sets[t]
                total = total - logits[t - 1, list(own)].log_softmax(-1)[list(own).index(ids[t])]
        (total / 8).backward()
    for (name, p), q in zip(plain.named_parameters(), trainer.model.parameters(), strict=True):
        torch.testing.assert_close(q.detach(), p.detach() - RATE * p.grad, rtol=0, atol=1e-12, msg=name)
    trainer.compute_metrics = lambda _: {}
    with pytest.raises(ValueError, match="reads logits runs the plain model, which does not read sampling_mask"):
        trainer.evaluate(data)
    inputs = collate(data)
    for wrong, message in ((kept[:2], "is lists of 2 rows, and the batch has 3"), (kept[::-1], "has 3 lists for 4")):
        with pytest.raises(DataError, match=f"sampling_mask of .*{message}"):
            tt.token_logprobs(trainer.model, inputs | {"sampling_mask": wrong})
    with pytest.raises(ValueError, match="the batch has sampling_mask, which is the support of each distribution only"):
        tt.token_logprobs(plain, inputs)
