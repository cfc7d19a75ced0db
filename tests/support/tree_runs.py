"""Small runs of `TreeTrainer`, and how far two of them are apart."""

import contextlib
import tempfile
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PrinterCallback, Qwen3Config, Qwen3ForCausalLM

from treetrain.check.contract import PureFloat64
from treetrain.layers.trajectory import Trajectory
from treetrain.trainers.arguments import TreeArguments
from treetrain.trainers.tree_trainer import TreeTrainer

VOCABULARY = 64
SKIPPED = ("tree/", "runtime", "per_second", "memory", "flos", "train_loss")
"""Numbers that depend on execution and machine, and the sum that transformers keeps in float32."""


def branching_rows(groups: int = 6, samples: int = 3, *, prompt: int = 12, answer: int = 8, **facts: Any):
    """`samples` answers with rewards to each of `groups` prompts; answers use few tokens, to be learnt.

    Args:
        facts: names of facts, each with a function of the random generator and the row's length.
    """
    random = np.random.default_rng(0)
    rows = []
    for group in range(groups):
        asked = random.integers(8, VOCABULARY, prompt).tolist()
        for _ in range(samples):
            ids = asked + random.integers(1, 4, answer).tolist()
            given = {name: make(random, len(ids)) for name, make in facts.items()}
            weights = [0.0] * prompt + [1.0] * answer
            rows.append(Trajectory(ids, loss_weights=weights, reward=float(random.random()), group=group, **given))
    return rows


def preference_rows(pairs: int = 6):
    """Two answers to each of `pairs` prompts, one of them chosen."""
    rows = branching_rows(pairs, 2)
    return [row.replace(pair=number // 2, chosen=number % 2 == 0) for number, row in enumerate(rows)]


def small_model(dtype: torch.dtype = torch.float32, seed: int = 1) -> nn.Module:
    """A Qwen3 of 20 thousand weights."""
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=128,
        tie_word_embeddings=True,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Qwen3ForCausalLM(config).to(dtype)


def make_arguments(folder: Any = None, **settings: Any) -> TreeArguments:
    """Arguments of a run of two groups a step, logged step by step."""
    common = {
        "output_dir": str(folder or tempfile.mkdtemp()),
        "tokens_per_step": 120,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "seed": 3,
    }
    return TreeArguments(**common | settings)


def pure(dtype: torch.dtype) -> contextlib.AbstractContextManager[Any]:
    """Float64 throughout, where the dtype is float64."""
    return PureFloat64() if dtype == torch.float64 else contextlib.nullcontext()


def run(model: nn.Module, rows: Any, *, eval_rows: Any = None, options: dict | None = None, **settings: Any):
    """A trained trainer."""
    trainer = TreeTrainer(model, make_arguments(**settings), rows, eval_rows, **(options or {}))
    trainer.remove_callback(PrinterCallback)
    with pure(next(model.parameters()).dtype):
        trainer.train()
    return trainer


def steps(trainer: TreeTrainer) -> list[dict[str, float]]:
    """The records of its steps."""
    return [record for record in trainer.state.log_history if "loss" in record]


def weights(model: nn.Module) -> dict[str, np.ndarray]:
    """Trained weights by name."""
    return {name: p.detach().double().cpu().numpy() for name, p in model.named_parameters() if p.requires_grad}


def error(found: Any, truth: Any) -> float:
    """Norm of the difference over the norm; sums that cancel to less than a millionth count as that."""
    found, truth = np.asarray(found, np.float64), np.asarray(truth, np.float64)
    assert found.shape == truth.shape, (found.shape, truth.shape)
    return float(np.linalg.norm(found - truth) / max(float(np.linalg.norm(truth)), 1e-6))


def apart(one: TreeTrainer, other: TreeTrainer) -> dict[str, float]:
    """How far two runs are apart: every logged number over all records, and the final weights."""

    def column(trainer: TreeTrainer, name: str) -> list[float]:
        return [record[name] for record in trainer.state.log_history if name in record]

    names = [
        sorted({n for r in t.state.log_history for n in r if not any(s in n for s in SKIPPED)}) for t in (one, other)
    ]
    assert names[0] == names[1], set(names[0]) ^ set(names[1])
    found = {name: error(column(one, name), column(other, name)) for name in names[0]}
    mine, theirs = weights(one.model), weights(other.model)
    assert mine.keys() == theirs.keys()
    flat = [np.concatenate([each[name].ravel() for name in mine]) for each in (mine, theirs)]
    return found | {"weights": error(*flat)}
