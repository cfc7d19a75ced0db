"""The trainer: checked data and settings first, then the model, then steps, then one folder with the result."""

import dataclasses
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from torch import nn

from treetrain import __version__
from treetrain.data.trajectory import Trajectory
from treetrain.engine.batch import check_batch
from treetrain.engine.engine import StepResult, TreeEngine
from treetrain.engine.linear import LinearEngine
from treetrain.models.loading import load_model
from treetrain.train.allocator import keep_memory
from treetrain.train.config import TrainConfig
from treetrain.train.metrics import MetricsFile, peak_memory_bytes
from treetrain.train.optim import make_optimizer, make_schedule
from treetrain.train.prepare import Prepared, prepare
from treetrain.train.progress import RunDisplay
from treetrain.train.save import save_result
from treetrain.tree.build import build_tree

LINEAR_PACK_TOKENS = 8_192  # beyond this, larger packs cost memory and gain no speed


class Interrupted(KeyboardInterrupt):
    """Ctrl-C during a run; its message says what was done."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TrainResult:
    """What a run did."""

    output: str
    """Folder of the trained model."""
    steps: int
    losses: tuple[float, ...]
    """Loss of every step, before its update."""
    eval_nll: tuple[tuple[int, float], ...]
    """(step, nats per trained token) of every evaluation; step 0 is before the first update."""
    flat_tokens: int
    """Tokens of all rows of all steps."""
    unique_tokens: int
    """Tokens of all steps' trees."""
    seconds: float
    """Of the steps, evaluations and loading not counted."""
    forward_backward_seconds: float
    peak_memory_bytes: int
    """Of the whole process."""

    def as_dict(self) -> dict[str, Any]:
        """As plain JSON data."""
        return dataclasses.asdict(self)


class Trainer:
    """One training run. Making it reads and checks all data and settings; `run` loads the model and trains.

    Args:
        config: the run.
        console: where progress is shown; None shows nothing.

    Raises:
        DataError: bad data, naming file and line or row.
        ValueError: settings that cannot be; both before anything is written.
    """

    def __init__(self, config: TrainConfig, *, console: Console | None = None) -> None:
        self.config, self.console = config, console or Console(quiet=True)
        self.device = _device(config.device)
        self.prepared: Prepared = prepare(config)
        for note in self.prepared.notes:
            self.console.print(f"note: {note}", highlight=False, soft_wrap=True)
        self.total_steps = config.steps or self.prepared.plan.total_steps(config.epochs or 1)

    def run(self) -> TrainResult:
        """Train, evaluate and save.

        Raises:
            UnsupportedModel: the model would not be exact on a tree.
            FloatingPointError: a loss or gradient that is no finite number; no model is saved.
            Interrupted: Ctrl-C; metrics are on disk, no model is saved.
        """
        if self.config.threads is not None:
            torch.set_num_threads(self.config.threads)
        torch.manual_seed(self.config.seed)
        model = self._load()
        engine = self._engine(model)
        if self.device.type == "cpu":
            keep_memory()
        self.console.print(f"attention: {engine.attention}", highlight=False, soft_wrap=True)
        for rows in (self.prepared.rows, self.prepared.eval_rows):
            check_batch(build_tree(rows), engine.capabilities)
        folder = Path(self.config.output)
        folder.mkdir(parents=True, exist_ok=True)
        with MetricsFile(folder) as metrics:
            loop = _Loop(self, model, engine, metrics)
            try:
                loop.run()
            except KeyboardInterrupt:
                done = f"interrupted after step {loop.step} of {self.total_steps}"
                metrics.write({"kind": "interrupted", "step": loop.step})
                raise Interrupted(f"{done}; metrics are in {folder}, no model was saved") from None
            save_result(folder, model, self.prepared.tokenizer, self._description())
            result = loop.result(str(folder))
            metrics.write({"kind": "end", **{k: v for k, v in result.as_dict().items() if k not in ("losses",)}})
        return result

    def _load(self) -> nn.Module:
        model = load_model(self.config.model, seed=self.config.seed, dtype=torch.float32)
        nn.Module.to(model, self.device)
        if self.config.gradient_checkpointing:
            # The name of transformers 5.0, and the one that replaced it.
            later = getattr(model, "activation_checkpointing_enable", None)
            (later or model.gradient_checkpointing_enable)({"use_reentrant": False})
            model.train()  # transformers checkpoints only then
        else:
            model.eval()  # dropout off, which trees need; nothing else differs in the models we take
        return model

    def _engine(self, model: nn.Module) -> TreeEngine:
        budget, temperature = self.config.budget, self.config.temperature
        if self.config.execution == "tree":
            return TreeEngine(model, budget=budget, temperature=temperature)
        pack_tokens = LINEAR_PACK_TOKENS if budget is None else int(budget)
        return LinearEngine(model, pack_tokens=pack_tokens, temperature=temperature)

    def _description(self) -> dict[str, Any]:
        versions = {"treetrain": __version__, "torch": torch.__version__}
        return {"config": self.config.as_dict(), "versions": versions, "steps": self.total_steps}


def train(config: TrainConfig, *, console: Console | None = None) -> TrainResult:
    """Train as `config` says; see `Trainer`."""
    return Trainer(config, console=console).run()


class _Loop:
    """The state of a running run: what the steps change."""

    def __init__(self, trainer: Trainer, model: nn.Module, engine: TreeEngine, metrics: MetricsFile) -> None:
        self.config, self.prepared, self.device = trainer.config, trainer.prepared, trainer.device
        self.model, self.engine, self.metrics = model, engine, metrics
        self.total = trainer.total_steps
        self.optimizer = make_optimizer(model, self.config)
        self.schedule = make_schedule(self.optimizer, self.config, self.total)
        self.display = RunDisplay(trainer.console, self.total)
        self.step = 0
        self.losses: list[float] = []
        self.evaluations: list[tuple[int, float]] = []
        self.flat = self.unique = 0
        self.seconds = self.compute_seconds = 0.0

    def run(self) -> None:
        """All steps and evaluations."""
        rows = self.prepared.rows
        self.metrics.write({"kind": "start", "steps": self.total, "config": self.config.as_dict()})
        self.display.start()
        try:
            self._evaluate()
            for epoch, numbers in self.prepared.plan.steps(self.total):
                self._train_step(epoch, [rows[number] for number in numbers.tolist()])
                every = self.config.eval_every_steps
                if self.step == self.total or (every and self.step % every == 0):
                    self._evaluate()
        finally:
            self.display.stop()

    def _train_step(self, epoch: int, rows: list[Trajectory]) -> None:
        started = time.perf_counter()
        self.optimizer.zero_grad(set_to_none=True)
        with self._precision():
            result = self.engine.forward_backward(rows, self.prepared.loss)
        _synchronise(self.device)
        computed = time.perf_counter()
        lr = float(self.schedule.get_last_lr()[0])
        norm = self._clip(result.loss)
        self.optimizer.step()
        self.schedule.step()
        _synchronise(self.device)
        self.step += 1
        record = {"kind": "train", "step": self.step, "epoch": epoch, "trajectories": len(rows)}
        self._record(record, result, lr, norm, time.perf_counter() - started, computed - started)

    def _clip(self, loss: float) -> float:
        """Global gradient norm before clipping; nothing is updated by a step that went wrong."""
        limit = math.inf if self.config.max_grad_norm is None else self.config.max_grad_norm
        norm = float(nn.utils.clip_grad_norm_(self.model.parameters(), limit))
        if not (math.isfinite(norm) and math.isfinite(loss)):
            raise FloatingPointError(
                f"step {self.step + 1}: the loss is {loss} and the gradient norm {norm}; nothing was saved but the "
                f"metrics up to here. A lower lr than {self.config.lr:g}, more warm-up or float32 may help"
            )
        return norm

    def _record(
        self, record: dict[str, Any], result: StepResult, lr: float, norm: float, seconds: float, computing: float
    ) -> None:
        self.losses.append(result.loss)
        self.flat += result.flat_tokens
        self.unique += result.unique_tokens
        self.seconds += seconds
        self.compute_seconds += computing
        record |= {
            "loss": result.loss,
            **{name: value for name, value in result.metrics.items() if name not in record},
            "lr": lr,
            "grad_norm": norm,
            "flat_tokens": result.flat_tokens,
            "unique_tokens": result.unique_tokens,
            "computed_tokens": result.computed_tokens,
            "overlap": 1 - result.unique_tokens / result.flat_tokens,
            "seconds": seconds,
            "forward_backward_seconds": computing,
            "flat_tokens_per_second": result.flat_tokens / seconds,
            "peak_memory_bytes": peak_memory_bytes(self.device),
        }
        self.metrics.write(record)
        self.display.step(record)

    def _evaluate(self) -> None:
        """Mean negative log-likelihood of the trained tokens of the held-out rows."""
        if not self.prepared.eval_rows:
            return
        started = time.perf_counter()
        with self._precision():
            nll, tokens = evaluate(self.engine, self.prepared.eval_rows, self.prepared.eval_steps)
        self.evaluations.append((self.step, nll))
        seconds = time.perf_counter() - started
        self.metrics.write(
            {"kind": "eval", "step": self.step, "nll": nll, "trained_tokens": tokens, "seconds": seconds}
        )
        self.display.say(f"step {self.step}/{self.total}  held out: {nll:.4f} nats per token over {tokens:,} tokens")

    def _precision(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.config.dtype == "bfloat16")

    def result(self, folder: str) -> TrainResult:
        """What was done so far."""
        return TrainResult(
            output=folder,
            steps=self.step,
            losses=tuple(self.losses),
            eval_nll=tuple(self.evaluations),
            flat_tokens=self.flat,
            unique_tokens=self.unique,
            seconds=self.seconds,
            forward_backward_seconds=self.compute_seconds,
            peak_memory_bytes=peak_memory_bytes(self.device),
        )


def evaluate(engine: TreeEngine, rows: Sequence[Trajectory], steps: Sequence[np.ndarray]) -> tuple[float, int]:
    """Mean negative log-likelihood of weighted tokens, in nats, and how many there are; no gradient.

    Args:
        engine: tree or linear; it is what decides the numerics.
        rows: the held-out rows.
        steps: row numbers of every call, so that memory does not grow with the rows.
    """
    total, weight, tokens = 0.0, 0.0, 0
    for numbers in steps:
        members = [rows[number] for number in numbers.tolist()]
        for row, logprobs in zip(members, engine.logprobs(members), strict=True):
            weights = row.weights[1:]
            total -= float(weights @ logprobs.double().cpu().numpy())
            weight += float(weights.sum())
            tokens += int(np.count_nonzero(weights))
    return total / weight, tokens


def _device(name: str) -> torch.device:
    """Raises ValueError for a GPU that is not there."""
    available = torch.cuda.is_available()
    if name == "cuda" and not available:
        raise ValueError("device is 'cuda', but torch sees no GPU; use device cpu or auto")
    return torch.device("cuda" if available and name == "auto" else "cpu" if name == "auto" else name)


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
