"""The steps of a run. All that they change is in `TrainLoop.state_dict`, so a run can go on from any step boundary."""

import math
import time
from collections.abc import Callable
from typing import Any, Protocol

import torch
from rich.console import Console
from torch import nn

from treetrain.data.trajectory import Trajectory
from treetrain.engine.engine import StepResult, TreeEngine
from treetrain.train.config import TrainConfig
from treetrain.train.evaluation import evaluate
from treetrain.train.facts import Facts
from treetrain.train.metrics import MetricsFile, peak_memory_bytes
from treetrain.train.optim import make_optimizer, make_schedule
from treetrain.train.prepare import Prepared
from treetrain.train.progress import RunDisplay
from treetrain.train.result import Progress, TrainResult


class Piece(Protocol):
    """A part of a run's state."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any], /) -> Any: ...


class TrainLoop:
    """The state of a running run, and the steps that change it.

    Args:
        config, prepared: the run.
        model, engine: loaded; the model's weights are the only state that is not in `state_dict`.
        metrics: where records go.
        console: where progress is shown.
        total: steps of the whole run.
        device: of the model.
    """

    def __init__(
        self,
        config: TrainConfig,
        prepared: Prepared,
        model: nn.Module,
        engine: TreeEngine,
        metrics: MetricsFile,
        *,
        console: Console,
        total: int,
        device: torch.device,
    ) -> None:
        self.config, self.prepared, self.device, self.total = config, prepared, device, total
        self.model, self.engine, self.metrics = model, engine, metrics
        self.display = RunDisplay(console, total)
        self.facts = Facts(model, engine, device)
        self.optimizer = make_optimizer(model, config)
        self.schedule = make_schedule(self.optimizer, config, total)
        self.progress = Progress()
        self.about: dict[str, Any] = {}
        """More for the record that the run starts with."""
        self.after_step: Callable[[], None] | None = None
        """Called between two steps, when the state is whole; what it raises ends the run."""
        self.pieces: dict[str, Piece] = {
            "progress": self.progress,
            "optimizer": self.optimizer,
            "schedule": self.schedule,
        }

    @property
    def step(self) -> int:
        """Steps that are done; the data of the next one is found from it and the seed."""
        return self.progress.step

    def state_dict(self) -> dict[str, Any]:
        """All that steps change but the model's weights and the random states. Tensors are not copied."""
        return {name: piece.state_dict() for name, piece in self.pieces.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state, between two steps; the model's weights must be those of the same moment.

        Raises:
            ValueError: a state of other pieces, so of a run with other settings.
        """
        if state.keys() != self.pieces.keys():
            raise ValueError(
                f"the state holds {', '.join(sorted(state))}, this run has {', '.join(sorted(self.pieces))}: it "
                "belongs to a run with other settings"
            )
        for name, piece in self.pieces.items():
            piece.load_state_dict(state[name])

    def run(self) -> None:
        """The steps that are left, and their evaluations."""
        rows = self.prepared.rows
        if self.step == 0:
            self._record_start()
        self.display.start(self.step)
        try:
            if self.step == 0:
                self._evaluate()
            for epoch, numbers in self.prepared.plan.steps(self.total, skip=self.step):
                self._train_step(epoch, [rows[number] for number in numbers.tolist()])
                every = self.config.eval_every_steps
                if self.step == self.total or (every and self.step % every == 0):
                    self._evaluate()
                self._step_done()
        finally:
            self.display.stop()

    def _step_done(self) -> None:
        """The boundary between two steps: everything of the last one, its evaluation included, is done."""
        if self.after_step is not None:
            self.after_step()

    def _record_start(self) -> None:
        """What runs, on what, and how its first step is going to be run."""
        rows = self.prepared.rows
        _, first = next(iter(self.prepared.plan.steps(self.total)))
        with self._precision():
            facts = self.facts.of_run(rows, self.prepared.eval_rows, [rows[number] for number in first.tolist()])
        record = {"kind": "start", "steps": self.total, "config": self.config.as_dict()}
        self.metrics.write(record | facts | self.about)

    def _train_step(self, epoch: int, rows: list[Trajectory]) -> None:
        started = time.perf_counter()
        self.optimizer.zero_grad(set_to_none=True)
        with self._precision():
            result = self.engine.forward_backward(rows, self.prepared.loss)
        _synchronise(self.device)
        computing = time.perf_counter() - started
        lr = float(self.schedule.get_last_lr()[0])
        norm = self._clip(result.loss)
        self.optimizer.step()
        self.schedule.step()
        _synchronise(self.device)
        seconds = time.perf_counter() - started
        self.progress.add(result, seconds=seconds, forward_backward_seconds=computing)
        record = {"kind": "train", "step": self.step, "epoch": epoch, "trajectories": len(rows)}
        record |= self.facts.of_step(rows)
        self._record(record, result, lr=lr, grad_norm=norm, seconds=seconds, forward_backward_seconds=computing)

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

    def _record(self, record: dict[str, Any], result: StepResult, *, seconds: float, **more: float) -> None:
        record |= {
            "loss": result.loss,
            **{name: value for name, value in result.metrics.items() if name not in record},
            **more,
            "flat_tokens": result.flat_tokens,
            "unique_tokens": result.unique_tokens,
            "computed_tokens": result.computed_tokens,
            "recomputed_tokens": result.recomputed_tokens,
            "parts": result.parts,
            "overlap": 1 - result.unique_tokens / result.flat_tokens,
            "seconds": seconds,
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
        self.progress.evaluations.append((self.step, nll))
        seconds = time.perf_counter() - started
        self.metrics.write(
            {"kind": "eval", "step": self.step, "nll": nll, "trained_tokens": tokens, "seconds": seconds}
        )
        self.display.say(f"step {self.step}/{self.total}  held out: {nll:.4f} nats per token over {tokens:,} tokens")

    def _precision(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.config.dtype == "bfloat16")

    def result(self, folder: str) -> TrainResult:
        """What was done so far."""
        return self.progress.result(folder, peak_memory_bytes(self.device))


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
