"""The checkpoints of a run while it goes on: when one is due, which are kept, what a signal does."""

import dataclasses
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console

from treetrain.engine.ranks import Ranks
from treetrain.train import checkpoint, checkpoint_files
from treetrain.train.checkpoint_files import Checkpoint, CheckpointNotWritten
from treetrain.train.loop import TrainLoop
from treetrain.train.resume import Start, Wanted
from treetrain.train.run_engine import RunEngine
from treetrain.train.same_run import RANKS, ROUNDING
from treetrain.train.sharded_checkpoint import ShardedWriter
from treetrain.train.signals import Interrupted, StopRequest


class CheckpointKeeper:
    """Writes the checkpoints of a running run and takes up the one that it begins with.

    Args:
        wanted: the run.
        loop: not yet running.
        start: what the run begins with.
        stop: looked at after every step.
        console: where failures are told, by the first rank; on a quiet one they are warnings.
        ranks: that share the run; making this and all methods but `told*` and `not_saved` are collective.
        clock: seconds.
    """

    def __init__(
        self,
        wanted: Wanted,
        loop: TrainLoop,
        start: Start,
        stop: StopRequest,
        *,
        console: Console,
        ranks: Ranks | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ranks = ranks or Ranks()
        if not self._ranks.alone:
            wanted = dataclasses.replace(wanted, environment={**wanted.environment, RANKS: self._ranks.size})
        self._wanted, self._loop, self._start, self._stop = wanted, loop, start, stop
        self._console, self._clock = console, clock
        self._output = Path(wanted.config.output)
        self.folder = self._output / checkpoint_files.FOLDER
        self.last = start.checkpoint
        """The newest checkpoint of this run; None while there is none."""
        keep = wanted.config.keep_checkpoints
        self._writer = None if self._ranks.alone else ShardedWriter(self.folder, self._ranks, keep=keep)
        self._frozen = checkpoint.frozen_digest(loop.model, self._ranks)
        self._saved_at, self._cleaned = clock(), False

    def begin(self) -> None:
        """Set everything as the checkpoint has it, if the run begins with one. The last thing before the first step.

        Raises:
            ValueError: the checkpoint is of another model.
        """
        self._loop.after_step = self._after_step
        self._loop.stop_asked = lambda: self._asked()[0] is not None
        self._loop.about["data"] = dict(self._wanted.data)
        engine = self._loop.engine
        if isinstance(engine, RunEngine):
            engine.settle()
        if self._start.checkpoint is None:
            return
        path, facts = self._start.checkpoint.path, self._start.checkpoint.facts
        if facts["frozen"] != self._frozen:
            raise ValueError(
                f"cannot go on from {path}: the weights that are not trained are not those of the run (another base "
                "model, or another version of it); name the former model"
            )
        self._ranks.agree("taking up the checkpoint", lambda: (None, self._take_up(path, facts)))
        record = {"kind": "resumed", "step": self._loop.step, "steps": self._loop.total, "checkpoint": str(path)}
        self._loop.metrics.write(record | {"time": time.time()})
        checkpoint.go_on_drawing(self._drawn, self._loop.device, self._ranks)

    def _take_up(self, path: Path, facts: dict[str, Any]) -> None:
        loop = self._loop
        checkpoint.load_weights(path, loop.model)
        state = checkpoint.load_state(path, loop.model, loop.optimizer)
        loop.load_state_dict(state["loop"])
        if isinstance(loop.engine, RunEngine) and self._plans_alike(facts):
            loop.engine.load_state_dict(state["planning"])
        self._drawn = state["random"]

    def _plans_alike(self, facts: dict[str, Any]) -> bool:
        """Whether plans are to be made as before: on the same machine, within the same budget."""
        now = self._wanted.config.as_dict()
        same = all(facts["config"].get(name) == now[name] for name in ROUNDING if name in now)
        here, there = self._wanted.environment, facts["environment"]
        return same and all(there.get(name) == here.get(name) for name in ("machine", RANKS))

    def save(self) -> Checkpoint:
        """Write a checkpoint of the state as it is, then delete the oldest ones; on return it is on the disk.

        Raises:
            CheckpointNotWritten: older ones are as they were.
        """
        self._begin_saving()
        if self._writer is not None:
            self.last = self._writer.wait() or self.last
            self._saved_at = self._clock()
        assert self.last is not None
        return self.last

    def finish(self) -> None:
        """Wait for a checkpoint that is still being written; to be called when the run is over, however it ended."""
        self._collect()
        if self._writer is not None:
            self._writer.close()

    def _begin_saving(self) -> None:
        """One process writes at once, several begin to.

        Raises:
            CheckpointNotWritten: older ones are as they were.
        """
        loop = self._loop
        self._collect()
        self._saved_at = self._clock()
        if self.last is not None and self.last.step == loop.step and self.last.path.parent == self.folder:
            return  # the same step of the same run is the same state
        engine, alone = loop.engine, self._ranks.alone
        state = {
            "loop": loop.state_dict(),
            "random": checkpoint.random_states(loop.device, alone=alone),
            "planning": engine.state_dict() if isinstance(engine, RunEngine) else None,
        }
        if self._writer is not None:
            self._begin_shares(self._writer, state)
            return

        def fill(folder: Path) -> None:
            loop.metrics.flush()
            checkpoint.fill(folder, model=loop.model, state=state, metrics=loop.metrics.path)

        self.last = checkpoint_files.write(self.folder, loop.step, fill, self._facts())
        self._saved_at = self._clock()
        checkpoint_files.delete(checkpoint_files.named(self.folder)[self._wanted.config.keep_checkpoints :])

    def _begin_shares(self, writer: ShardedWriter, state: dict[str, Any]) -> None:
        loop = self._loop
        state["random"] = self._ranks.gather(state["random"])
        tensors, plain = checkpoint.parts(loop.model, loop.optimizer, state)

        def fill(folder: Path) -> None:
            loop.metrics.flush()
            checkpoint.fill_beside_shares(folder, model=loop.model, plain=plain, metrics=loop.metrics.path)

        writer.begin(loop.step, tensors, fill, self._facts())

    def _facts(self) -> dict[str, Any]:
        wanted = self._wanted
        return {
            "config": wanted.config.as_dict(),
            "total": wanted.total,
            "data": dict(wanted.data),
            "frozen": self._frozen,
            "environment": dict(wanted.environment),
            "time": time.time(),
        }

    def _collect(self) -> None:
        """Wait for what is being written, and say what became of it."""
        if self._writer is None:
            return
        try:
            self.last = self._writer.wait() or self.last
        except CheckpointNotWritten as error:
            self._warn(f"{error}; {self.told_last()}, and the run goes on")

    def told(self, stopped: KeyboardInterrupt) -> Interrupted:
        """What to say of a run that was stopped, in the middle of a step or after one."""
        if isinstance(stopped, Interrupted):
            return stopped
        done = f"interrupted after step {self._loop.step} of {self._loop.total}, in the middle of the next"
        kept = f"metrics are in {self._output}, no model was saved; {self.told_last()}"
        return Interrupted(f"{done}; {kept}", resumable=self.last is not None)

    def not_saved(self, error: Exception) -> OSError:
        """What to raise where the result could not be written."""
        reason = " ".join(str(error).split())
        return OSError(
            f"all {self._loop.step} steps are done, but the model could not be written to {self._output} ({reason}; "
            f"{checkpoint_files.free_space(self._output)}); {self.told_last()}. Make room and run it again with "
            "--resume auto"
        )

    def told_last(self) -> str:
        """Where the run could go on from."""
        if self.last is None:
            return "no checkpoint was written"
        return f"the checkpoint of step {self.last.step} is in {self.last.path}"

    def _after_step(self) -> None:
        """Between two steps.

        Raises:
            Interrupted: a signal asked for it; a checkpoint was written if the disk took it.
        """
        if self._loop.step > 0 and not self._cleaned:
            self._drop_others()
        number, due = self._asked()
        if number is not None:
            raise self._interrupted(number)
        if self._writer is not None and self._writer.done:
            self._collect()
        if due:
            try:
                self._begin_saving()
            except CheckpointNotWritten as error:
                self._warn(f"{error}; {self.told_last()}, and the run goes on")

    def _asked(self) -> tuple[int | None, bool]:
        """The signal that some rank has got, and whether a checkpoint is due; the same on all ranks."""
        told = self._ranks.gather((self._stop.number, self._is_due()))
        return next((number for number, _ in told if number is not None), None), told[0][1]

    def _is_due(self) -> bool:
        minutes, steps = self._wanted.config.checkpoint_every_minutes, self._wanted.config.checkpoint_every_steps
        by_steps = steps > 0 and self._loop.step % steps == 0
        return by_steps or (minutes > 0 and self._clock() - self._saved_at >= 60 * minutes)

    def _drop_others(self) -> None:
        """Checkpoints that this run does not come from; only now, when its metrics have taken the place of theirs."""
        self._cleaned = True
        if self._ranks.rank:
            return
        here = self._start.checkpoint is not None and self._start.checkpoint.path.parent == self.folder
        step = self._start.checkpoint.step if here and self._start.checkpoint is not None else 0
        try:
            checkpoint_files.delete(checkpoint_files.after(self.folder, step))
        except OSError as error:
            self._warn(f"earlier checkpoints in {self.folder} cannot be deleted: {error}")

    def _interrupted(self, number: int) -> Interrupted:
        if self._loop.step == 0:
            return Interrupted("stopped before the first step; there is nothing to save", number=number)
        done = f"stopped after step {self._loop.step} of {self._loop.total}"
        try:
            saved = self.save()
        except CheckpointNotWritten as error:
            return Interrupted(f"{done}; {error}; {self.told_last()}", number=number, resumable=self.last is not None)
        return Interrupted(f"{done}; all of it is saved in {saved.path}", number=number, resumable=True)

    def _warn(self, message: str) -> None:
        if self._ranks.rank:
            return
        if self._console.quiet:
            warnings.warn(message, RuntimeWarning, stacklevel=2)
        else:
            self._loop.display.say(f"warning: {message}")
