"""The trainer: checked data and settings first, then the model, then steps, then one folder with the result."""

import contextlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from safetensors import SafetensorError
from torch import nn

from treetrain import __version__
from treetrain.engine.allocator import keep_memory
from treetrain.engine.batch import check_batch
from treetrain.engine.engine import TreeEngine
from treetrain.engine.ranks import check_same
from treetrain.models.recurrence import delta_rule_of
from treetrain.train.checkpoint import seed_all
from treetrain.train.config import TrainConfig
from treetrain.train.config_file import settings_as_toml
from treetrain.train.facts import machine, versions
from treetrain.train.keeper import CheckpointKeeper
from treetrain.train.loop import TrainLoop
from treetrain.train.metrics import METRICS_FILE, MetricsFile, NoMetrics
from treetrain.train.model import placed_model
from treetrain.train.output_lock import output_lock
from treetrain.train.parallel import alike, from_main, join
from treetrain.train.prepare import Prepared, prepare
from treetrain.train.result import TrainResult
from treetrain.train.resume import Start, Wanted, clear_leftovers, find_start
from treetrain.train.run_engine import engine_of
from treetrain.train.same_run import data_digests
from treetrain.train.save import CONFIG_FILE, TOML_FILE, save_result
from treetrain.train.signals import stop_requests
from treetrain.train.sinks import Observer, make_sinks
from treetrain.train.updates import total_steps
from treetrain.tree.build import build_tree


class Trainer:
    """One training run. Making it reads and checks all data and settings; `run` loads the model and trains.

    Args:
        config: the run.
        console: where progress is shown; None shows nothing.
        observers: are given every record of the run (see `treetrain.train.sinks.Observer`).
        group: of torch.distributed: the processes of a run over several; None: all of them. The first one alone writes,
            shows progress and calls observers.

    Raises:
        DataError: bad data, naming file and line or row.
        ValueError: settings that cannot be; both before anything is written.
    """

    def __init__(
        self,
        config: TrainConfig,
        *,
        console: Console | None = None,
        observers: Sequence[Observer] = (),
        group: Any = None,
    ) -> None:
        self.config, self.world = config, join(config, group)
        self.ranks, self.device = self.world.ranks, self.world.device
        self.console = console if console is not None and self.world.main else Console(quiet=True)
        self.observers = (*make_sinks(config), *observers) if self.world.main else ()
        self.prepared: Prepared = alike(self.ranks, "reading the data", lambda: prepare(config, self.ranks))
        for note in self.prepared.notes:
            self.console.print(f"note: {note}", highlight=False, soft_wrap=True)
        self.total_steps = total_steps(config, self.prepared.plan)
        self.data = data_digests(self.prepared)
        check_same("the rows that they have read", self.ranks.gather(self.data))
        # Refuses early; what is found is looked for again under the lock.
        find_start(self._wanted(), contents=False, ranks=self.ranks)

    def run(self) -> TrainResult:
        """Train, evaluate and save.

        Raises:
            ValueError: another run is using the output folder, or what it holds cannot be gone on from.
            UnsupportedModel: the model would not be exact on a tree.
            FloatingPointError: a loss or gradient that is no finite number; no model is saved.
            Interrupted: Ctrl-C or SIGTERM; its message says what is saved. A second Ctrl-C saves nothing more.
            OSError: the disk does not take the result.
            RanksDisagree: another process of the run has stopped; it says why.
        """
        if self.config.threads is not None:
            torch.set_num_threads(self.config.threads)
        folder = Path(self.config.output)
        with contextlib.ExitStack() as lock:

            def take() -> None:
                lock.enter_context(output_lock(folder))
                clear_leftovers(folder)

            from_main(self.ranks, "taking the output folder", take)
            start = find_start(self._wanted(), ranks=self.ranks)
            for note in start.notes:
                self.console.print(f"note: {note}", highlight=False, soft_wrap=True)
            return start.finished or self._run(folder, start)

    def leave(self) -> None:
        """Take the process out of the group that was made for the run; for runs over several that came to an end."""
        self.world.leave()

    def _run(self, folder: Path, start: Start) -> TrainResult:
        seed_all(self.config.seed)
        model = self._load()
        engine = self._engine(model)
        if self.device.type == "cpu":
            keep_memory()
        self.console.print(f"attention: {engine.attention}", highlight=False, soft_wrap=True)
        if rule := delta_rule_of(model, self.device):
            self.console.print(f"recurrence: {rule}", highlight=False, soft_wrap=True)
        for rows in (self.prepared.rows, self.prepared.eval_rows):
            check_batch(build_tree(rows), engine.capabilities)
        before = start.checkpoint and start.checkpoint.path / METRICS_FILE
        with (
            MetricsFile(folder, self.observers, before=before) if self.world.main else NoMetrics() as metrics,
            stop_requests(say=not self.console.quiet) as stop,
        ):
            loop = self._loop(model, engine, metrics)
            keeper = CheckpointKeeper(self._wanted(), loop, start, stop, console=self.console, ranks=self.ranks)
            keeper.begin()
            try:
                loop.run()
            except KeyboardInterrupt as stopped:
                metrics.write({"kind": "interrupted", "step": loop.step})
                raise keeper.told(stopped) from None
            finally:
                keeper.finish()  # a write under way is waited for, whatever ended the run
            if loop.best is not None:
                loop.best.restore()
            try:
                text, average = self._description(), loop.average
                save_result(folder, model, self.prepared.tokenizer, text, average=average, ranks=self.ranks)
            except (OSError, SafetensorError) as error:
                raise keeper.not_saved(error) from error
            result = loop.result(str(folder))
            metrics.write({"kind": "end", **{k: v for k, v in result.as_dict().items() if k not in ("losses",)}})
        return result

    def _wanted(self) -> Wanted:
        environment = versions() | {"machine": machine(self.device)}
        return Wanted(config=self.config, total=self.total_steps, data=self.data, environment=environment)

    def _load(self) -> nn.Module:
        model: Any = placed_model(self.config.model, self.config, self.world)
        if self.config.gradient_checkpointing:
            # The name of transformers 5.0, and the one that replaced it.
            later = getattr(model, "activation_checkpointing_enable", None)
            (later or model.gradient_checkpointing_enable)({"use_reentrant": False})  # type: ignore[operator]
            model.train()  # transformers checkpoints only then
        else:
            model.eval()  # dropout off, which trees need; nothing else differs in the models we take
        return model

    def _engine(self, model: nn.Module) -> TreeEngine:
        return engine_of(model, self.config, self.world)

    def _loop(self, model: nn.Module, engine: TreeEngine, metrics: MetricsFile | NoMetrics) -> TrainLoop:
        return TrainLoop(
            self.config,
            self.prepared,
            model,
            engine,
            metrics,
            console=self.console,
            total=self.total_steps,
            world=self.world,
        )

    def _description(self) -> dict[str, str]:
        """What goes beside the model: all settings for programs, and once more as a file that --config takes."""
        versions = {"treetrain": __version__, "torch": torch.__version__}
        described = {"config": self.config.as_dict(), "versions": versions, "steps": self.total_steps}
        return {CONFIG_FILE: json.dumps(described, indent=2) + "\n", TOML_FILE: settings_as_toml(self.config)}


def train(config: TrainConfig, *, console: Console | None = None) -> TrainResult:
    """Train as `config` says; see `Trainer`."""
    trainer = Trainer(config, console=console)
    result = trainer.run()
    trainer.leave()
    return result
