"""What the records of a run say besides losses: on what it runs, what its rows are like, what is planned."""

import os
import platform
import time
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np
import torch
from torch import nn

from treetrain import __version__
from treetrain.data.columns import columns_of
from treetrain.data.trajectory import Trajectory
from treetrain.engine.calibrate import model_shape
from treetrain.engine.engine import TreeEngine
from treetrain.errors import UnsupportedModel
from treetrain.plan.cost import ModelShape
from treetrain.train.sharding import local
from treetrain.train.spread import own_rows
from treetrain.tree.build import build_tree
from treetrain.tree.stats import linear_work, tree_work
from treetrain.tree.token_tree import TokenTree

ADAM_STATES = 2
"""Numbers that AdamW keeps for every trained weight."""


class Facts:
    """Tells the records of a run what the loop does not know itself.

    Args:
        model: loaded, as it will be trained.
        engine: of the run.
        device: of the model.
    """

    def __init__(self, model: nn.Module, engine: TreeEngine, device: torch.device) -> None:
        self._model, self._engine, self._device = model, engine, device
        self._shape = _shape(model)

    def of_run(
        self, rows: Sequence[Trajectory], eval_rows: Sequence[Trajectory], first: Sequence[Trajectory]
    ) -> dict[str, Any]:
        """For the record that a run starts with; `first` are the rows of its first step.

        `bytes_at_rest` is what gradients and AdamW add to `bytes_loaded`; `plan` is that of the first step in words,
        None where there is none (a linear run, an unknown architecture). Over several ranks both are of one of them.
        """
        parameters = list(self._model.parameters())
        trained = [p for p in parameters if p.requires_grad]
        return {
            "time": time.time(),
            "versions": versions(),
            "machine": machine(self._device),
            "attention": str(self._engine.attention),
            "parameters": sum(p.numel() for p in parameters),
            "trained_parameters": sum(p.numel() for p in trained),
            "rows": len(rows),
            "row_tokens": int(columns_of(rows).tokens.sum()),
            "eval_rows": len(eval_rows),
            "bytes_loaded": memory_bytes(self._device),
            "plan": self._plan(first),
            "bytes_at_rest": (1 + ADAM_STATES) * sum(local(p).numel() * p.element_size() for p in trained),
        }

    def of_step(self, rows: Sequence[Trajectory], tree: TokenTree | None = None) -> dict[str, float]:
        """Rewards, lengths, and what the step costs as a tree and row by row, in FLOPs.

        A reward that several calls of one episode share counts once.

        Args:
            tree: of the rows, merged, where it has been built.
        """
        lengths = [len(row.ids) for row in rows]
        found = {"row_tokens_mean": float(np.mean(lengths)), "row_tokens_max": float(max(lengths))}
        trained = sum(int(np.count_nonzero(row.weights[1:])) for row in rows)
        found["trained_tokens"] = float(trained)
        rewards = _rewards(rows)
        if rewards:
            found |= {"reward_mean": float(np.mean(rewards)), "reward_std": float(np.std(rewards))}
        if self._shape is not None:
            tree = build_tree(rows) if tree is None else tree
            found["tree_flops"] = self._shape.flops(*tree_work(tree))
            found["linear_flops"] = self._shape.flops(*linear_work(tree))
        return found

    def _plan(self, rows: Sequence[Trajectory]) -> str | None:
        plan = self._engine.plan(own_rows(self._engine, rows).rows)
        try:
            return plan.explain()
        except ValueError:
            return None


def versions() -> dict[str, str]:
    """Of what decides a run's numbers and speed."""
    found = {"treetrain": __version__, "python": platform.python_version()}
    for name in ("torch", "transformers", "peft"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def machine(device: torch.device) -> str:
    """The device in words."""
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)}, CUDA {torch.version.cuda}"
    threads = torch.get_num_threads()
    return f"CPU, {threads} thread{'s' * (threads != 1)} on {os.cpu_count()} cores"


def memory_bytes(device: torch.device) -> int | None:
    """What the process holds now: resident on a CPU (None where the system does not tell), allocated on a GPU."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return None


def _rewards(rows: Sequence[Trajectory]) -> list[float]:
    seen: dict[Any, float] = {}
    for number, row in enumerate(rows):
        if row.reward is not None:
            seen[number if row.episode is None else (row.group, row.episode)] = row.reward
    return list(seen.values())


def _shape(model: nn.Module) -> ModelShape | None:
    try:
        return model_shape(model)
    except UnsupportedModel:
        return None
