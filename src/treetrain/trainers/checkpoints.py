"""Checkpoints that survive: a mixin for any transformers.Trainer.

transformers writes a checkpoint in place, file by file, and resumes from the folder with the highest number, whatever
is in it (its issues 35525 and 35782). Here transformers and torch.distributed.checkpoint still write the files, but
into a temporary folder that gets its name when it is whole (`checkpoint_folders`), and only whole ones are resumed.
"""

import hashlib
import os
import shutil
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import transformers
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments, set_seed

from treetrain.trainers import checkpoint_folders, shards
from treetrain.trainers.all_ranks import on_all_ranks
from treetrain.trainers.attributes import plain_attributes, set_attributes
from treetrain.trainers.checkpoint_folders import TornCheckpoint
from treetrain.trainers.signals import NAMES, Interrupted, noted_signals

TESTED = "5.17.", "5.23."
"""Versions of transformers whose private methods, which the mixin overrides, are known."""
CALLBACKS = "callbacks.pt"


class SafeCheckpointsMixin(Trainer if TYPE_CHECKING else object):
    """Makes the checkpoints of a `transformers.Trainer` survive kills, full disks and altered files.

    ```python
    class SafeTrainer(SafeCheckpointsMixin, Trainer):  # or any of TRL's trainers; the mixin stands first
        pass

    SafeTrainer(...).train(resume_from_checkpoint=True)
    ```

    A checkpoint has its name only when it is whole, with the SHA-256 of every file in a manifest. Resuming with `True`
    takes the newest whole one, or begins at step 0 where there is none yet. Older ones are deleted (`save_total_limit`)
    only when a new one is whole. Ctrl-C and SIGTERM on any rank stop all ranks after the step, with a checkpoint. A
    resumed run goes on bit for bit on as many ranks, and within rounding on another number of them. Callbacks get their
    state back if they are `ExportableState` or have `state_dict` and `load_state_dict`. Models that were given to
    `fully_shard` are written in shards. All ranks must share `output_dir`, which one run at a time uses.

    Raises:
        TypeError: the mixin stands after the Trainer in the list of bases.
        RuntimeError: another version of transformers than the tested one is installed.
        ValueError: a setting that cannot be made safe (DeepSpeed, `save_on_each_node`).
    """

    how_to_resume = "trainer.train(resume_from_checkpoint=True)"
    """What messages tell the user to go on with."""
    also_saved: tuple[str, ...] = ("_metrics", "_total_train_tokens", "_step", "_buffered_inputs")
    """Attributes that every rank saves and gets back on as many ranks: of TRL's trainers the metrics since the last log
    and the completions that are not trained on yet."""

    _group: "dist.ProcessGroup | None" = None
    _last_good: Path | None = None
    _resumed: dict[str, Any] | None = None
    """The manifest of the checkpoint that is resumed, and its folder under "path"."""
    _writing = _save_postponed = _epoch_ending = False
    _stop = 0
    """The signal that some rank got; the same on all ranks."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        order = cls.__mro__
        if Trainer in order and order.index(Trainer) < order.index(SafeCheckpointsMixin):
            raise TypeError(f"{cls.__name__}: SafeCheckpointsMixin must stand before the Trainer in the list of bases")

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if not transformers.__version__.startswith(TESTED):
            raise RuntimeError(
                f"SafeCheckpointsMixin is tested with transformers {' and '.join(TESTED)}, and "
                f"{transformers.__version__} is installed: install transformers=={TESTED[-1]}*"
            )
        model = kwargs.get("model", args[0] if args else None)
        given = [each for each in (*args, *kwargs.values()) if isinstance(each, TrainingArguments)]
        # transformers refuses checkpoints of models that it has sharded while loading; the mixin writes them itself.
        sharded = given and getattr(model, "is_distributed_loading_by_transformers", False)
        with _set(given[0], save_only_model=True) if sharded else nullcontext():
            super().__init__(*args, **kwargs)
        if self.is_deepspeed_enabled:
            raise ValueError("SafeCheckpointsMixin does not know DeepSpeed's checkpoints: use DDP or FSDP2")
        if self.args.save_on_each_node:
            raise ValueError("save_on_each_node=True: SafeCheckpointsMixin needs one output_dir that all nodes share")
        self._frozen = shards.frozen_digest(self._model)

    def step_size(self) -> str:
        """What an optimiser step takes of the data over all ranks. A trainer that counts otherwise overrides it."""
        return f"{self._train_batch_size * self.args.gradient_accumulation_steps * self.args.world_size} samples"

    # ---- Training: the lock, what is resumed, signals

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Train as `Trainer.train` does.

        Args:
            resume_from_checkpoint: True for the newest whole checkpoint of `output_dir`, or the start of the run where
                there is none yet; a folder for that one.

        Raises:
            TornCheckpoint: the folder named, or every one in `output_dir`, is not what was written.
            CheckpointNotWritten: a checkpoint could not be written; the message names the last good one.
            ValueError: another run uses `output_dir`, or a step takes more or less data than those of the checkpoint.
            Interrupted: Ctrl-C or SIGTERM; a checkpoint of the last step is written.
        """
        folder = Path(self.args.output_dir or ".")
        lock = checkpoint_folders.one_run_at_a_time(folder) if self._is_first else nullcontext()
        self._on_all_ranks(lock.__enter__)
        try:
            with noted_signals() as self._signal:
                self._on_all_ranks(lambda: checkpoint_folders.recover(folder) if self._is_first else None)
                chosen = self._last_good = self._choose(resume_from_checkpoint, folder)
                self._resumed = self._read(chosen) if chosen else None
                self._stop, self._save_postponed, self._epoch_ending = 0, False, False
                return self._train(str(chosen) if chosen else None, *args, **kwargs)
        finally:
            lock.__exit__(None, None, None)

    def _train(self, *args: Any, **kwargs: Any) -> Any:
        callback = _StepCallback(self)
        self.add_callback(callback)
        try:
            with _set(self.args, restore_callback_states_from_checkpoint=True):
                return super().train(*args, **kwargs)
        except Interrupted as stopped:
            self.callback_handler.on_train_end(self.args, self.state, self.control)  # trackers close their files
            if self._is_first:
                print(stopped.message, file=sys.stderr)
            raise
        finally:
            self.remove_callback(callback)
            self._resumed = None

    def _choose(self, wanted: str | bool | None, folder: Path) -> Path | None:
        """The checkpoint to resume; None for the start. Raises TornCheckpoint."""
        if not wanted:
            return None
        if not isinstance(wanted, bool):
            self._check_whole(Path(wanted))
            return Path(wanted)
        torn = []
        for path in self._on_all_ranks(lambda: checkpoint_folders.newest_first(folder))[0]:
            try:
                self._check_whole(path)
                return path
            except TornCheckpoint as error:
                torn.append(str(error))
                self._warn(f"not resumed, since it is not whole: {error}")
        if torn:
            raise TornCheckpoint(f"no checkpoint in {folder} is whole: {'; '.join(torn)}")
        self._warn(f"no checkpoint in {folder} yet: the run begins at step 0")
        return None

    def _check_whole(self, path: Path) -> None:
        """Read every byte of a checkpoint, each rank a part of it. Raises TornCheckpoint on all ranks."""
        self._on_all_ranks(lambda: checkpoint_folders.check_files(path, self.args.process_index, self.args.world_size))

    def _read(self, path: Path) -> dict[str, Any]:
        """The manifest. Raises ValueError where going on would skip other samples than were trained on."""
        manifest = checkpoint_folders.read_manifest(path)
        then, now = manifest["step_size"], self.step_size()
        if then != now and not (self.args.ignore_data_skip or self.args.auto_find_batch_size):
            raise ValueError(
                f"cannot go on from {path}: a step took {then} (on {manifest['ranks']} ranks) and now takes {now} (on "
                f"{self.args.world_size}, with gradient_accumulation_steps={self.args.gradient_accumulation_steps}). "
                "Make it the same, or set ignore_data_skip=True"
            )
        rank, frozen = self.args.process_index, manifest["frozen"]
        if manifest["ranks"] != self.args.world_size:  # whole weights are the same on all ranks, shards are not
            rank, frozen = 0, [self._frozen] if self._is_sharded else frozen
        if frozen[rank] != self._frozen:
            raise ValueError(
                f"cannot go on from {path}: the weights that are not trained, which it does not hold, are others. Load "
                "the base model with which the run began"
            )
        if manifest["save_only_model"]:
            raise ValueError(f"cannot go on from {path}: with save_only_model=True it holds no optimiser state")
        return manifest | {"path": path}

    def _agree_on_stop(self) -> None:
        """Learn whether any rank got a signal: one integer over all ranks, on the CPU."""
        number = torch.tensor([self._signal.number])
        if self.args.world_size > 1:
            dist.all_reduce(number, dist.ReduceOp.MAX, group=self._cpu_group())
        self._stop = int(number)
        self._signal.acted = self._stop > 0

    def _maybe_log_save_evaluate(
        self, tr_loss: Any, grad_norm: Any, model: nn.Module, trial: Any, *args: Any, **kwargs: Any
    ) -> None:
        super()._maybe_log_save_evaluate(tr_loss, grad_norm, model, trial, *args, **kwargs)
        if not self._stop or self._epoch_ending:
            return
        step = self.state.global_step
        place = Path(super()._get_output_dir(trial)) / f"checkpoint-{step}"
        if self._last_good != place:
            self._save_checkpoint(model, trial)
            self.control = self.callback_handler.on_save(self.args, self.state, self.control)
        raise Interrupted(
            f"{NAMES[signal.Signals(self._stop)]}: stopped after step {step} of {self.state.max_steps}; all of it is "
            f"saved in {place}. Go on with {self.how_to_resume}",
            self._stop,
            place,
        )

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        if self.state.global_step >= self.state.max_steps:  # transformers would do one more step of a complete run
            self.control.should_training_stop = True
            return
        super()._run_epoch(*args, **kwargs)

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        if self._resumed and self._resumed["step"] == self.state.global_step:  # there was nothing left to do
            self._load_rng_state(str(self._resumed["path"]))
        # With save_total_limit=1 transformers would delete the newest checkpoint here and leave the best one.
        with _set(self.args, save_total_limit=None):
            return super()._finalize_training(*args, **kwargs)

    # ---- Saving

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Write a checkpoint under a temporary name, give it its place when it is whole, then delete older ones."""
        state, step, index, size = self.state, self.state.global_step, self.args.process_index, self.args.world_size
        folder = Path(super()._get_output_dir(trial))
        temporary = folder / checkpoint_folders.WRITING / f"checkpoint-{step}"
        place, best = folder / temporary.name, state.best_global_step

        def prepare() -> None:
            shutil.rmtree(temporary.parent, ignore_errors=True)
            temporary.mkdir(parents=True)

        def write() -> float:
            # transformers would look for the best checkpoint beside the temporary folder.
            with _set(state, best_global_step=None), _set(self, _writing=True):
                super(SafeCheckpointsMixin, self)._save_checkpoint(model, trial)
            if best and (best == step or (folder / f"checkpoint-{best}").is_dir()):
                state.best_model_checkpoint = str(folder / f"checkpoint-{best}")
            torch.save(plain_attributes(self, self.also_saved), temporary / f"trainer_{index}.pt")
            if self._is_first:
                torch.save(whole_states, temporary / CALLBACKS)
                state.save_to_json(str(temporary / "trainer_state.json"))
            return float(self._tr_loss)

        try:
            self._on_all_ranks(prepare if self._is_first else lambda: None)
            whole_states, sharded_states = shards.split(self._callback_states())
            if self._is_sharded:
                self._save_shards(temporary, sharded_states)
            losses = self._on_all_ranks(write)
            described = self._on_all_ranks(lambda: checkpoint_folders.describe(temporary, index, size))
            files = {name: entry for each in described for name, entry in each.items()}
            facts = {"step": step, "ranks": size, "step_size": self.step_size()}
            frozen = self._on_all_ranks(lambda: self._frozen)
            facts |= {"save_only_model": self.args.save_only_model, "frozen": frozen}
            facts |= {"loss_since_log": losses, "last_logged": self._globalstep_last_logged}
            self._on_all_ranks(lambda: checkpoint_folders.publish(temporary, files, facts) if self._is_first else None)
        except Exception as error:
            if self._is_first:
                shutil.rmtree(temporary.parent, ignore_errors=True)
            raise checkpoint_folders.not_written(place, error, self._last_good, self.how_to_resume) from error
        self._last_good = place
        if self._is_first:
            try:
                checkpoint_folders.rotate(folder, self.args.save_total_limit, state.best_model_checkpoint)
            except OSError as error:
                self._warn(f"older checkpoints in {folder} could not be deleted: {error}")
        if self.args.push_to_hub:
            self._push_from_checkpoint(str(place))

    def _get_output_dir(self, trial: Any) -> str:
        folder = super()._get_output_dir(trial)
        return os.path.join(folder, checkpoint_folders.WRITING) if self._writing else folder

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        if not self._writing:  # only when it has its place
            super()._push_from_checkpoint(checkpoint_folder)

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Write the model card as the trainer does. TRL does so on rank 0 before every checkpoint."""
        try:
            super().create_model_card(*args, **kwargs)
        except OSError as error:
            if not self._writing:
                raise
            # The other ranks are already waiting inside transformers; the checkpoint itself will fail on all of them.
            self._warn(f"the model card could not be written: {error}")

    def _save_shards(self, folder: Path, callback_states: dict[str, Any]) -> None:
        """Write the shards of all ranks, before anything that can fail on one rank alone."""
        group = self._cpu_group()
        shards.save_model(self._model, folder, group)
        if not self.args.save_only_model:
            shards.save_optimizer(self._model, self.optimizer, folder, group)
            if callback_states:
                shards.save_callbacks(callback_states, folder, group)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model as `Trainer.save_model` does; beside the shards of a checkpoint only its configuration."""
        if output_dir is None or not (self._writing and self._is_sharded):
            super().save_model(output_dir, _internal_call)
        elif self._is_first:
            self._model.config.save_pretrained(output_dir)
            if self.processing_class is not None:
                self.processing_class.save_pretrained(output_dir)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if not self._is_sharded:
            super()._save_optimizer_and_scheduler(output_dir)
        elif self._is_first:
            scheduler: Any = self.lr_scheduler
            torch.save(scheduler.state_dict(), os.path.join(output_dir, "scheduler.pt"))

    # ---- Loading

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        if os.path.isdir(os.path.join(resume_from_checkpoint, shards.MODEL)):
            return shards.load_model(model or self._model, Path(resume_from_checkpoint), self._cpu_group())
        if self._is_sharded:
            raise ValueError(
                f"{resume_from_checkpoint} is of a model that was not sharded, and this one is: go on without "
                "fully_shard, or begin a new run with its weights by from_pretrained"
            )
        super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None or not os.path.isdir(os.path.join(checkpoint, shards.OPTIMIZER)):
            return super()._load_optimizer_and_scheduler(checkpoint)
        shards.load_optimizer(self._model, self.optimizer, Path(checkpoint), self._cpu_group())
        scheduler: Any = self.lr_scheduler
        scheduler.load_state_dict(torch.load(os.path.join(checkpoint, "scheduler.pt"), weights_only=True))

    def _load_best_model(self) -> None:
        best = Path(self.state.best_model_checkpoint or "")
        self._check_whole(best)
        if (best / shards.MODEL).is_dir():
            return shards.load_model(self._model, best, self._cpu_group())
        super()._load_best_model()

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint is None or self._resumed is None or self._resumed["ranks"] == self.args.world_size:
            return super()._load_rng_state(checkpoint)
        # Other ranks find no states of their own. Each begins with a seed made of the first rank's state and its own
        # number, the same one whenever this is done again.
        files = self._resumed["files"]
        first = (files.get("rng_state.pth") or files["rng_state_0.pth"])["sha256"]
        digest = hashlib.sha256(f"{first} {self.args.process_index} {self.args.world_size}".encode()).digest()
        set_seed(int.from_bytes(digest[:4], "big"))

    def _restore_progress(self) -> None:
        """Restore what transformers forgets: the loss since the last log, `also_saved`, callbacks with tensors."""
        if self._resumed is None:
            return
        losses, path = self._resumed["loss_since_log"], self._resumed["path"]
        own = losses[self.args.process_index] if len(losses) == self.args.world_size else sum(losses) / len(losses)
        self._tr_loss += own
        self._total_loss_scalar -= own  # the mean that train() returns is that of the steps of this call
        self._globalstep_last_logged = self._resumed["last_logged"]
        own_state = path / f"trainer_{self.args.process_index}.pt"
        if len(losses) == self.args.world_size:
            set_attributes(self, torch.load(own_state, map_location=self.args.device, weights_only=True))
        found = torch.load(path / CALLBACKS, map_location="cpu", weights_only=True)
        sharded = {name: state for name, state in self._callback_states().items() if name not in found}
        if sharded and (path / shards.CALLBACKS).is_dir():
            shards.load_callbacks(sharded, path, self._cpu_group())
            found |= sharded
        for name, callback in self._callbacks().items():
            if name in found:
                callback.load_state_dict(found[name])

    # ---- Helpers

    @property
    def _model(self) -> Any:
        return self.model

    @property
    def _is_first(self) -> bool:
        return self.args.process_index == 0

    @property
    def _is_sharded(self) -> bool:
        """Whether the mixin writes the model itself, in shards, whoever has sharded it."""
        return shards.is_sharded(self._model)

    def _callbacks(self) -> dict[str, Any]:
        """Callbacks with a state of torch's protocol, by number and class."""
        found = [each for each in self.callback_handler.callbacks if hasattr(each, "load_state_dict")]
        return {f"{number}.{type(each).__name__}": each for number, each in enumerate(found)}

    def _callback_states(self) -> dict[str, Any]:
        return {name: callback.state_dict() for name, callback in self._callbacks().items()}

    def _warn(self, message: str) -> None:
        if self._is_first:
            warnings.warn(message, RuntimeWarning, stacklevel=4)

    def _cpu_group(self) -> "dist.ProcessGroup | None":
        """All ranks, with collectives that do not wait for devices; None for one process."""
        if self._group is None and self.args.world_size > 1:
            group: Any = dist.new_group(backend="gloo", timeout=timedelta(seconds=self.args.ddp_timeout))
            self._group = group
        return self._group

    def _on_all_ranks(self, work: Callable[[], Any]) -> list[Any]:
        """See `on_all_ranks`."""
        return on_all_ranks(work, self._cpu_group())


class _StepCallback(TrainerCallback):
    """Tells the mixin when steps and epochs end; added last, so that it sees what other callbacks have decided."""

    def __init__(self, trainer: SafeCheckpointsMixin) -> None:
        self.trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.trainer._restore_progress()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        trainer = self.trainer
        trainer._agree_on_stop()
        control.should_training_stop |= trainer._stop > 0
        # An evaluation may follow the last step of an epoch. A checkpoint before it would lose it, and so waits for it.
        trainer._epoch_ending = float(state.epoch or 0.5).is_integer()
        if trainer._epoch_ending:
            trainer._save_postponed, control.should_save = control.should_save, False

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_save |= self.trainer._save_postponed
        self.trainer._save_postponed = self.trainer._epoch_ending = False


@contextmanager
def _set(target: Any, **values: Any) -> Iterator[None]:
    """Attributes that have other values for a while."""
    before = {name: getattr(target, name) for name in values}
    for name, value in values.items():
        setattr(target, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(target, name, value)
