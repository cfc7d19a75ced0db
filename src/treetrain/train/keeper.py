"""The checkpoints of a run while it goes on: when one is due, which are kept, what a signal does."""

import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console

from treetrain.train import checkpoint, checkpoint_files
from treetrain.train.checkpoint_files import Checkpoint, CheckpointNotWritten
from treetrain.train.loop import TrainLoop
from treetrain.train.resume import Start, Wanted
from treetrain.train.run_engine import RunEngine
from treetrain.train.same_run import ROUNDING
from treetrain.train.signals import Interrupted, StopRequest


class CheckpointKeeper:
    """Writes the checkpoints of a running run and takes up the one that it begins with.

    Args:
        wanted: the run.
        loop: not yet running.
        start: what the run begins with.
        stop: looked at after every step.
        console: where failures are told; on a quiet one they are warnings.
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
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._wanted, self._loop, self._start, self._stop = wanted, loop, start, stop
        self._console, self._clock = console, clock
        self._output = Path(wanted.config.output)
        self.folder = self._output / checkpoint_files.FOLDER
        self.last = start.checkpoint
        """The newest checkpoint of this run; None while there is none."""
        self._frozen = checkpoint.frozen_digest(loop.model)
        self._saved_at, self._cleaned = clock(), False

    def begin(self) -> None:
        """Set everything as the checkpoint has it, if the run begins with one. The last thing before the first step.

        Raises:
            ValueError: the checkpoint is of another model.
        """
        self._loop.after_step = self._after_step
        self._loop.stop_asked = lambda: self._stop.number is not None
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
        checkpoint.load_weights(path, self._loop.model)
        state = checkpoint.load_state(path)
        self._loop.load_state_dict(state["loop"])
        if isinstance(engine, RunEngine) and self._plans_alike(facts):
            engine.load_state_dict(state["planning"])
        record = {"kind": "resumed", "step": self._loop.step, "steps": self._loop.total, "checkpoint": str(path)}
        self._loop.metrics.write(record | {"time": time.time()})
        checkpoint.set_random_states(state["random"], self._loop.device)

    def _plans_alike(self, facts: dict[str, Any]) -> bool:
        """Whether plans are to be made as before: on the same machine, within the same budget."""
        now = self._wanted.config.as_dict()
        same = all(facts["config"].get(name) == now[name] for name in ROUNDING if name in now)
        return same and facts["environment"].get("machine") == self._wanted.environment.get("machine")

    def save(self) -> Checkpoint:
        """Write a checkpoint of the state as it is, then delete the oldest ones.

        Raises:
            CheckpointNotWritten: older ones are as they were.
        """
        loop, wanted = self._loop, self._wanted
        self._saved_at = self._clock()
        if self.last is not None and self.last.step == loop.step and self.last.path.parent == self.folder:
            return self.last  # the same step of the same run is the same state
        engine = loop.engine
        state = {
            "loop": loop.state_dict(),
            "random": checkpoint.random_states(loop.device),
            "planning": engine.state_dict() if isinstance(engine, RunEngine) else None,
        }
        facts = {
            "config": wanted.config.as_dict(),
            "total": wanted.total,
            "data": dict(wanted.data),
            "frozen": self._frozen,
            "environment": dict(wanted.environment),
            "time": time.time(),
        }

        def fill(folder: Path) -> None:
            loop.metrics.flush()
            checkpoint.fill(folder, model=loop.model, state=state, metrics=loop.metrics.path)

        self.last = checkpoint_files.write(self.folder, loop.step, fill, facts)
        self._saved_at = self._clock()
        checkpoint_files.delete(checkpoint_files.named(self.folder)[wanted.config.keep_checkpoints :])
        return self.last

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
        if self._stop.number is not None:
            raise self._interrupted(self._stop.number)
        if self._is_due():
            try:
                self.save()
            except CheckpointNotWritten as error:
                self._warn(f"{error}; {self.told_last()}, and the run goes on")

    def _is_due(self) -> bool:
        minutes, steps = self._wanted.config.checkpoint_every_minutes, self._wanted.config.checkpoint_every_steps
        by_steps = steps > 0 and self._loop.step % steps == 0
        return by_steps or (minutes > 0 and self._clock() - self._saved_at >= 60 * minutes)

    def _drop_others(self) -> None:
        """Checkpoints that this run does not come from; only now, when its metrics have taken the place of theirs."""
        self._cleaned = True
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
        if self._console.quiet:
            warnings.warn(message, RuntimeWarning, stacklevel=2)
        else:
            self._loop.display.say(f"warning: {message}")
