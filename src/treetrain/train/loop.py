"""The steps of a run. All that they change is in `TrainLoop.state_dict`, so a run can go on from any step boundary."""

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from rich.console import Console
from torch import nn

from treetrain.data.trajectory import Trajectory
from treetrain.engine.engine import TreeEngine
from treetrain.engine.ranks import is_shard
from treetrain.engine.step import StepResult
from treetrain.train.accumulate import Call, StepSplitter, forward_backward, prepare
from treetrain.train.ahead import Ahead
from treetrain.train.average import WeightAverage
from treetrain.train.batches import Int64s
from treetrain.train.best import Best
from treetrain.train.config import TrainConfig
from treetrain.train.evaluation import Evaluation, evaluate
from treetrain.train.facts import Facts
from treetrain.train.metrics import MetricsFile, NoMetrics, peak_memory_bytes
from treetrain.train.optim import make_optimizer
from treetrain.train.parallel import World
from treetrain.train.prepare import Prepared
from treetrain.train.progress import RunDisplay
from treetrain.train.references import ReferencePolicy
from treetrain.train.result import Progress, TrainResult
from treetrain.train.rollouts import Rollouts
from treetrain.train.schedules import make_schedule
from treetrain.train.updates import Update, Updates
from treetrain.tree.token_tree import TokenTree


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
        world: the processes that share every step; each of them has such a loop over the same steps.
    """

    def __init__(
        self,
        config: TrainConfig,
        prepared: Prepared,
        model: nn.Module,
        engine: TreeEngine,
        metrics: MetricsFile | NoMetrics,
        *,
        console: Console,
        total: int,
        world: World,
    ) -> None:
        self.config, self.prepared, self.world, self.total = config, prepared, world, total
        self.ranks, self.device = world.ranks, world.device
        self.model, self.engine, self.metrics = model, engine, metrics
        self.display = RunDisplay(console, total)
        self.facts = Facts(model, engine, world.device)
        self.optimizer = make_optimizer(model, config)
        self.schedule = make_schedule(self.optimizer, config, total)
        self.progress = Progress()
        self.about: dict[str, Any] = {}
        """More for the record that the run starts with."""
        self.after_step: Callable[[], None] | None = None
        """Called between two steps, when the state is whole; what it raises ends the run."""
        self.stop_asked: Callable[[], bool] = lambda: False
        """An evaluation that goes on while this becomes true is left, and made when the run goes on. Asked by all ranks
        at the same places."""
        self.pieces: dict[str, Piece] = {
            "progress": self.progress,
            "optimizer": self.optimizer,
            "schedule": self.schedule,
        }
        self.average = None if config.ema_decay is None else WeightAverage(model, config.ema_decay)
        self.best = Best.of(model, config)
        self.pieces |= {} if self.average is None else {"average": self.average}
        self.pieces |= {} if self.best is None else {"best": self.best}
        self._split = StepSplitter(prepared.plan, config.tokens_per_call)
        self.updates = Updates(config, prepared.plan, total)
        self.rollouts = Rollouts(prepared, self.updates, ReferencePolicy(config, model, engine, world), self._split)
        self.pieces |= {"updates": self.updates, **self.rollouts.pieces}
        self.ahead = Ahead(lambda update: prepare(engine, self._rows_of(update)))
        self._since, self._other = time.perf_counter(), 0.0

    @property
    def step(self) -> int:
        """Steps that are done; the data of the next one is found from `updates` and the seed."""
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
        self.ahead.drop()

    def run(self) -> None:
        """The steps that are left, and their evaluations."""
        if self.step == 0:
            self._record_start()
        self.display.start(self.step)
        try:
            self._score_references()
            # Before the first step, or one that was left when the run was stopped.
            if self._evaluation_is_due():
                self._evaluate()
                if self.stop_asked():
                    self._step_done()
            self._since = time.perf_counter()
            for update in self.updates:
                if self.stopped_early or self.step >= self.total:
                    break
                self._train_step(update)
                with self._aside():
                    if self._evaluation_is_due():
                        self._evaluate()
                    self._step_done()
        finally:
            self.display.stop()

    def _evaluation_is_due(self) -> bool:
        every, done = self.config.eval_every_steps, self.progress.evaluations
        last = self.step == self.total or self.updates.at_end
        due = self.step == 0 or last or (every and self.step % every == 0)
        return bool(due) and not (done and done[-1][0] == self.step)

    @property
    def stopped_early(self) -> bool:
        """Whether no step follows although the run is not at its end."""
        return self.best is not None and self.best.exhausted and self.step < self.total

    @contextlib.contextmanager
    def _aside(self) -> Iterator[None]:
        """What happens in the block is no part of any step's time."""
        self._other += time.perf_counter() - self._since
        yield
        self._since = time.perf_counter()

    def _step_done(self) -> None:
        """The boundary between two steps: everything of the last one, its evaluation included, is done."""
        if self.after_step is not None:
            self.after_step()

    def _record_start(self) -> None:
        """What runs, on what, and how its first step is going to be run."""
        rows = self.prepared.rows
        first = next(iter(self.updates)).rows
        with self._precision():
            facts = self.facts.of_run(rows, self.prepared.eval_rows, [rows[number] for number in first.tolist()])
        record = {"kind": "start", "steps": self.total, "config": self.config.as_dict(), "ranks": self.ranks.size}
        self.metrics.write(record | facts | self.about)

    def _train_step(self, update: Update) -> None:
        with self._precision():
            scored = self.rollouts.begin(self.engine, update)
        calls = self.ahead.take(update)
        rows_of_calls = self._rows_of(update) if calls is None else []
        self.optimizer.zero_grad(set_to_none=True)
        started = time.perf_counter()
        if calls is None:
            calls = prepare(self.engine, rows_of_calls)
        with self._precision():
            result = forward_backward(self.engine, calls, self.prepared.loss)
        facts = self._meanwhile(calls)
        _synchronise(self.device)
        computed = time.perf_counter()
        lr = float(self.schedule.get_last_lr()[0])
        norm = self._update(result.loss)
        _synchronise(self.device)
        updated = time.perf_counter()
        times = {
            "forward_backward_seconds": computed - started,
            "optimizer_seconds": updated - computed,
            "other_seconds": self._other + started - self._since,
        }
        self._since, self._other = updated, 0.0
        self.progress.add(result, **times)
        rows = [row for call in calls for row in call.rows]
        self._record(
            self._about(update, rows, result, calls=len(calls), **scored, **facts),
            result,
            lr=lr,
            grad_norm=norm,
            seconds=updated - started,
            **times,
        )

    def _about(self, update: Update, rows: list[Trajectory], result: StepResult, **more: float) -> dict[str, Any]:
        """What a step was made of, for its record; moves on to the next one."""
        left_out = self.updates.advance(update, self.rollouts.approx_kl(result.metrics))
        record: dict[str, Any] = {"kind": "train", "step": self.step, "epoch": update.epoch, "trajectories": len(rows)}
        if self.config.several_updates:
            record |= {"batch": update.batch + 1, "update": update.number, "minibatch": update.minibatch}
            record |= {} if self.config.target_kl is None else {"steps_left_out": left_out}
        return record | more | self.rollouts.watched(rows, self.ranks)

    def _rows_of(self, update: Update) -> list[list[Trajectory]]:
        """The rows of all calls of a step."""
        return [self.rollouts.rows(call) for call in self._split(update.rows)]

    def _meanwhile(self, calls: Sequence[Call]) -> dict[str, float]:
        """What the host does while a GPU works on a step: facts of its rows, and the rows and trees of the next step.

        Over several ranks the step is over when its numbers have been exchanged, so nothing is made beforehand.
        """
        rows, own = [row for call in calls for row in call.rows], calls[0].own
        merged = len(calls) == 1 and self.config.execution == "tree"
        facts = self.facts.of_step(rows, own if merged and isinstance(own, TokenTree) else None)
        coming = self.updates.following() if self.ranks.alone and self.step + 1 < self.total else None
        if coming is not None and self.rollouts.known_beforehand(coming):
            self.ahead.build(coming)
        return facts

    def _update(self, loss: float) -> float:
        """Move the weights along the gradients; returns the gradients' norm."""
        norm = self._clip(loss)
        self.optimizer.step()
        self.schedule.step()
        if self.average is not None:
            self.average.update()
        return norm

    def _clip(self, loss: float) -> float:
        """Global gradient norm before clipping; nothing is updated by a step that went wrong."""
        limit = math.inf if self.config.max_grad_norm is None else self.config.max_grad_norm
        found = nn.utils.clip_grad_norm_(self.model.parameters(), limit)
        norm = float(found.full_tensor() if is_shard(found) else found)  # type: ignore[attr-defined]
        if not all(self.ranks.gather(math.isfinite(norm) and math.isfinite(loss))):
            raise FloatingPointError(
                f"step {self.step + 1}: the loss is {loss} and the gradient norm {norm}; the weights were not "
                f"updated, no model is saved, metrics and checkpoints up to here are kept. "
                f"A lower lr than {self.config.lr:g}, more warm-up or float32 may help"
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
            "peak_memory_bytes": max(self.ranks.gather(peak_memory_bytes(self.device))),
        }
        self.metrics.write(record)
        self.display.step(record)

    def _evaluate(self) -> None:
        """The held-out rows: their negative log-likelihood, and the loss with its metrics where they have its facts."""
        if not self.prepared.eval_rows:
            return
        started = time.perf_counter()
        try:
            found = self._evaluated()
            record = {"kind": "eval", "step": self.step, **found.as_record()}
            if self.average is not None:
                with self.average.in_place():
                    record |= {f"ema_{name}": value for name, value in self._evaluated().values().items()}
        except _Left:
            return
        if self.best is not None:
            self.best.add(self.step, found.values()[self.config.best_metric])
            record["best_step"] = self.best.step
        self.progress.evaluations.append((self.step, found.nll))
        self.metrics.write(record | {"seconds": time.perf_counter() - started})
        told = f"{found.nll:.4f} nats per token over {found.trained_tokens:,} tokens"
        told += "" if found.loss is None or self.config.loss == "sft" else f", loss {found.loss:.4f}"
        self.display.say(f"step {self.step}/{self.total}  held out: {told}")
        if self.stopped_early:
            self.display.say(f"stopped: no better evaluation since step {self.best.step}")  # type: ignore[union-attr]

    def _score_references(self) -> None:
        """Before the first step, or where a run that goes on is to come to more rows than it was."""

        def between() -> None:
            if self.stop_asked():
                self._step_done()

        started = time.perf_counter()
        with self._precision():
            scored = self.rollouts.score_references(untouched=self.step == 0, between=between)
        if scored:
            seconds = time.perf_counter() - started
            self.metrics.write({"kind": "reference", "step": self.step, "trajectories": scored, "seconds": seconds})
            self.display.say(f"reference log-probabilities of {scored:,} rows: {seconds:,.1f} s")

    def _evaluated(self) -> Evaluation:
        with self._precision():
            found = evaluate(self.engine, self.rollouts.eval_rows(), self._eval_steps(), self.prepared.eval_loss)
        return self.ranks.gather(found)[0]  # ranks must agree on what is best to the last bit

    def _eval_steps(self) -> Iterator[Int64s]:
        for numbers in self.prepared.eval_steps:
            if self.stop_asked():
                raise _Left
            yield numbers

    def _precision(self) -> torch.autocast:
        # FSDP2 casts by itself.
        narrow = self.config.dtype == "bfloat16" and self.config.parallel != "fsdp"
        return torch.autocast(self.device.type, torch.bfloat16, enabled=narrow)

    def result(self, folder: str) -> TrainResult:
        """What was done so far."""
        return self.progress.result(
            folder,
            peak_memory_bytes=max(self.ranks.gather(peak_memory_bytes(self.device))),
            best_step=self.best.step if self.best is not None and self.config.keep_best else None,
            stopped_early=self.stopped_early,
        )


class _Left(Exception):
    """An evaluation was left because the run is to stop."""


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
