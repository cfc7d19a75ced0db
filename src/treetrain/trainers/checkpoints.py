"""Checkpoints that survive: a mixin for any transformers.Trainer.

transformers writes a checkpoint in place, file by file, and resumes from the folder with the highest number, whatever
is in it (its issues 35525 and 35782). Here transformers and torch.distributed.checkpoint still write the files, but
into a temporary folder. When every file is on the disk, a manifest with the sizes and SHA-256 of all files (and of
itself) is added, and one rename gives the folder its name. So a kill at any moment leaves a complete checkpoint or
none. Later changes by a disk, a copy or an editor are seen before loading.
"""

import errno
import hashlib
import json
import math
import os
import shutil
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
import transformers
from accelerate.utils import FullyShardedDataParallelPlugin
from accelerate.utils.constants import FSDP_MODEL_NAME
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as distributed_load
from torch.distributed.checkpoint.state_dict_saver import save as distributed_save
from torch.distributed.tensor import DTensor
from transformers import Trainer, TrainerCallback

from treetrain.engine.distributed import Ranks
from treetrain.errors import RanksDisagree

T = TypeVar("T")
TESTED = "5.17.", "5.23."
"""Versions of transformers with which the overridden private methods are tested."""
MANIFEST, CALLBACKS = "manifest.json", "callbacks"
WRITING = ".writing"
"""The folder, beside the checkpoints, in which one is written."""
DELETING = ".deleting-"
"""Prefix of checkpoints that are being deleted."""
SIGNALS = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM"}
SAME_PRESS_SECONDS = 2.0
"""A second Ctrl-C within this time is the same one: torchrun forwards it to processes that already got it."""


class TornCheckpoint(ValueError):
    """A checkpoint that differs from what was written. The message names the file and what differs."""


class CheckpointNotWritten(OSError):
    """A checkpoint that could not be written. Nothing of it is left, and older ones are as they were."""


class Interrupted(SystemExit):
    """A run that Ctrl-C or SIGTERM stopped; `checkpoint` is the folder to go on from.

    A script that does not catch it ends with the exit code of that signal.
    """

    def __init__(self, message: str, number: int, checkpoint: Path) -> None:
        super().__init__(128 + number)  # what shells expect: 130 after Ctrl-C, 143 after SIGTERM
        self.message, self.number, self.checkpoint = message, number, checkpoint

    def __str__(self) -> str:
        return self.message


# ---- Checkpoints as folders


def describe(folder: Path, rank: int = 0, ranks: int = 1) -> dict[str, dict[str, Any]]:
    """Sync the files of a folder to disk and compute their sizes and SHA-256; each rank does a share of them."""
    found = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file())[rank::ranks]:
        _sync(path)
        found[path.relative_to(folder).as_posix()] = {"bytes": path.stat().st_size, "sha256": _sha256(path)}
    return found


def commit(temporary: Path, files: Mapping[str, Mapping[str, Any]], facts: Mapping[str, Any]) -> None:
    """Write the manifest of a checkpoint whose files are on the disk, and move the folder to its place.

    `<folder>/.writing/<name>` becomes `<folder>/<name>`. The manifest holds `files`, from `describe`, and `facts`.
    """
    folder = temporary.parents[1]
    order = 1 + max((order for order in newest_first(folder).values() if order < math.inf), default=0)
    contents = {"order": order, "files": dict(sorted(files.items())), **facts}
    text = json.dumps({"contents": contents, "sha256": _digest(contents)}, indent=1)
    (temporary / MANIFEST).write_text(text + "\n", encoding="utf-8")
    for path in [temporary / MANIFEST, *temporary.rglob("*/"), temporary, temporary.parent]:
        _sync(path)
    place = folder / temporary.name
    replaced = place.with_name(f"{DELETING}{place.name}")
    if place.exists():  # torn, or of a run that was abandoned; see `recover` for a kill between the two renames
        shutil.rmtree(replaced, ignore_errors=True)
        os.rename(place, replaced)
    os.rename(temporary, place)
    _sync(folder)
    for path in (temporary.parent, replaced):
        shutil.rmtree(path, ignore_errors=True)


def recover(folder: Path) -> None:
    """Delete what killed runs left half written; a complete checkpoint in the temporary folder moves to its place.

    Raises:
        OSError: the folder is not writable.
    """
    (folder / WRITING).mkdir(parents=True, exist_ok=True)
    for path in (folder / WRITING).glob("*"):
        with suppress(TornCheckpoint):
            check_files(path)
            if not (folder / path.name).exists():
                os.rename(path, folder / path.name)
                _sync(folder)
    for path in [folder / WRITING, *folder.glob(f"{DELETING}*")]:
        shutil.rmtree(path, ignore_errors=True)


def read_manifest(checkpoint: Path) -> dict[str, Any]:
    """The contents of a checkpoint's manifest. Raises TornCheckpoint where it is missing or altered."""
    try:
        stored = json.loads((checkpoint / MANIFEST).read_text(encoding="utf-8"))
        contents, written = stored["contents"], stored["sha256"]
    except FileNotFoundError:
        raise TornCheckpoint(
            f"{checkpoint}: {MANIFEST} is missing, so this is not a checkpoint of SafeCheckpointsMixin or a torn one"
        ) from None
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise TornCheckpoint(f"{checkpoint}: {MANIFEST} cannot be read ({error})") from None
    if (digest := _digest(contents)) != written:
        raise TornCheckpoint(f"{checkpoint}: {MANIFEST} has SHA-256 {digest[:16]}, {written[:16]} was written")
    return contents


def check_files(checkpoint: Path, rank: int = 0, ranks: int = 1) -> None:
    """Compare the files of a checkpoint with its manifest, each rank a share of them. Raises TornCheckpoint."""
    for name, written in sorted(read_manifest(checkpoint)["files"].items())[rank::ranks]:
        path = checkpoint / name
        if not path.is_file():
            found = f"is missing, {written['bytes']:,} bytes were written"
        elif (size := path.stat().st_size) != written["bytes"]:
            found = f"has {size:,} bytes, {written['bytes']:,} were written"
        elif (digest := _sha256(path)) != written["sha256"]:
            found = f"has SHA-256 {digest[:16]}, {written['sha256'][:16]} was written"
        else:
            continue
        raise TornCheckpoint(f"{checkpoint}: {name} {found}")


def newest_first(folder: Path) -> dict[Path, float]:
    """The checkpoints of a folder and the order in which they were written, as resuming tries them.

    The newest is the last one written, which is not always that of the highest step: a run that resumes from an older
    checkpoint, or starts again in the same folder, writes lower steps later. Those without a readable manifest come
    first, as of order infinity, so that resuming warns about them.
    """
    orders: dict[Path, float] = {}
    for path in folder.glob("checkpoint-*"):
        orders[path] = math.inf
        with suppress(TornCheckpoint):
            orders[path] = read_manifest(path)["order"]
    return dict(sorted(orders.items(), key=lambda found: (found[1], found[0].name), reverse=True))


def rotate(folder: Path, limit: int | None, best: str | None) -> None:
    """Delete the oldest checkpoints beyond `limit`, but never the newest one nor the best one.

    Folders without a readable manifest are left alone: they may be anything.
    """
    newest = [path for path, order in newest_first(folder).items() if order < math.inf]
    if not limit or limit < 1 or not newest:
        return
    kept = {newest[0].resolve(), *([Path(best).resolve()] if best else [])}
    others = [path for path in newest if path.resolve() not in kept]
    for path in others[max(0, limit - len(kept)) :]:
        # Renamed first: a kill during the deletion leaves nothing that looks like a checkpoint.
        doomed = path.with_name(f"{DELETING}{path.name}")
        os.rename(path, doomed)
        shutil.rmtree(doomed, ignore_errors=True)


def _sync(path: Path) -> None:
    """Wait until a file, or the entries of a folder, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # file systems that cannot sync folders
            raise
    finally:
        os.close(handle)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _digest(contents: Any) -> str:
    return hashlib.sha256(json.dumps(contents, sort_keys=True).encode()).hexdigest()


# ---- The mixin


class SafeCheckpointsMixin(Trainer if TYPE_CHECKING else object):
    """Makes the checkpoints of a `transformers.Trainer` survive kills, full disks and altered files.

    ```python
    class SafeTrainer(SafeCheckpointsMixin, Trainer):  # or any of TRL's trainers; the mixin stands first
        pass

    SafeTrainer(...).train(resume_from_checkpoint=True)
    ```

    A checkpoint gets its name only when it is complete, with the SHA-256 of every file in a manifest. `True` resumes
    the newest complete one, or starts at step 0 if there is none yet. Older ones are deleted (`save_total_limit`)
    only when a new one is complete. Ctrl-C and SIGTERM on any rank stop all ranks after the step, with a checkpoint. A
    resumed run is bit-identical on the same number of ranks, and equal within rounding on another. Callbacks get their
    state back if they are `ExportableState` or have `state_dict` and `load_state_dict`. Sharded models (FSDP2) are
    saved in shards. All ranks must share `output_dir`; two runs must not.

    Raises:
        TypeError: the mixin comes after the Trainer in the list of bases.
        RuntimeError: an untested version of transformers is installed.
        ValueError: a setting that cannot be made safe (DeepSpeed, `save_on_each_node`).
    """

    how_to_resume = "trainer.train(resume_from_checkpoint=True)"
    """The command for resuming that messages show."""
    also_saved: tuple[str, ...] = ("_metrics", "_total_train_tokens", "_step", "_buffered_inputs")
    """Attributes that every rank saves, and restores on the same number of ranks. In TRL's trainers: the metrics since
    the last log and the completions that are not trained on yet."""

    model: Any
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
        super().__init__(*args, **kwargs)
        if self.is_deepspeed_enabled:
            raise ValueError("SafeCheckpointsMixin does not know DeepSpeed's checkpoints: use DDP or FSDP2")
        if self.args.save_on_each_node:
            raise ValueError("save_on_each_node=True: SafeCheckpointsMixin needs one output_dir that all nodes share")

    def step_size(self) -> str:
        """The data of an optimiser step over all ranks, in words. A trainer that counts otherwise overrides it."""
        return f"{self._train_batch_size * self.args.gradient_accumulation_steps * self.args.world_size} samples"

    # ---- Training: what is resumed, signals

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Train as `Trainer.train` does.

        Args:
            resume_from_checkpoint: True resumes the newest complete checkpoint of `output_dir`, or starts the run if
                there is none yet; a folder resumes that one.

        Raises:
            TornCheckpoint: the named folder, or every one in `output_dir`, differs from what was written.
            CheckpointNotWritten: a checkpoint could not be written; the message names the last good one.
            ValueError: a step takes more or less data than those of the checkpoint.
            Interrupted: Ctrl-C or SIGTERM; a checkpoint of the last step is written.
        """
        folder, callback = Path(self.args.output_dir or "."), _StepCallback(self)
        self.add_callback(callback)
        try:
            with _catch_signals() as self._signals, replaced(self.args, restore_callback_states_from_checkpoint=True):
                self._on_first(lambda: recover(folder))
                path = self._last_good = self._choose(resume_from_checkpoint, folder)
                self._resumed = self._read(path) if path else None
                self._stop, self._save_postponed, self._epoch_ending = 0, False, False
                return super().train(str(path) if path else None, *args, **kwargs)
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
        for path in self._together(lambda: list(newest_first(folder)))[0]:
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
        try:
            self._together(lambda: check_files(path, self.args.process_index, self.args.world_size))
        except RanksDisagree as error:
            raise TornCheckpoint(str(error)) from None

    def _read(self, path: Path) -> dict[str, Any]:
        """The manifest. Raises ValueError for another step size, or without optimiser state."""
        manifest = read_manifest(path)
        then, now = manifest["step_size"], self.step_size()
        if then != now and not (self.args.ignore_data_skip or self.args.auto_find_batch_size):
            why = (
                f"a step took {then} (on {manifest['ranks']} ranks) and now takes {now} (on {self.args.world_size}, "
                f"with gradient_accumulation_steps={self.args.gradient_accumulation_steps}). Make it the same, or set "
                "ignore_data_skip=True"
            )
        elif manifest["save_only_model"]:
            why = "with save_only_model=True it holds no optimiser state"
        else:
            return manifest | {"path": path}
        raise ValueError(f"cannot go on from {path}: {why}")

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
            f"{SIGNALS[signal.Signals(self._stop)]}: stopped after step {step} of {self.state.max_steps}; all of it is "
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
        with replaced(self.args, save_total_limit=None):
            return super()._finalize_training(*args, **kwargs)

    # ---- Saving

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Write a checkpoint to a temporary folder, move it to its place when complete, then delete older ones."""
        state, step, rank, ranks = self.state, self.state.global_step, self.args.process_index, self.args.world_size
        folder = Path(super()._get_output_dir(trial))
        temporary = folder / WRITING / f"checkpoint-{step}"
        place, best = folder / temporary.name, state.best_global_step
        callbacks = {name: callback.state_dict() for name, callback in self._callbacks().items()}

        def write() -> float:
            # transformers would look for the best checkpoint beside the temporary folder.
            with replaced(state, best_global_step=None), replaced(self, _writing=True):
                super(SafeCheckpointsMixin, self)._save_checkpoint(model, trial)
            if best and (best == step or (folder / f"checkpoint-{best}").is_dir()):
                state.best_model_checkpoint = str(folder / f"checkpoint-{best}")
            saved = {name: _plain(getattr(self, name)) for name in self.also_saved if hasattr(self, name)}
            torch.save(saved, temporary / f"trainer_{rank}.pt")
            if self._is_first:
                if not self._is_sharded:
                    torch.save(callbacks, temporary / f"{CALLBACKS}.pt")
                state.save_to_json(str(temporary / "trainer_state.json"))
            return float(self._tr_loss)

        try:
            self._on_first(lambda: shutil.rmtree(temporary.parent, ignore_errors=True))
            self._on_first(lambda: temporary.mkdir(parents=True))
            if self._is_sharded:  # before anything that can fail on one rank alone: this is a collective call
                distributed_save(callbacks, checkpoint_id=temporary / CALLBACKS)
            losses = self._together(write)
            described = self._together(lambda: describe(temporary, rank, ranks))
            facts = {"step": step, "ranks": ranks, "step_size": self.step_size()}
            facts |= {"loss_since_log": losses, "last_logged": self._globalstep_last_logged}
            facts |= {"save_only_model": self.args.save_only_model}
            written = {name: entry for each in described for name, entry in each.items()}
            self._on_first(lambda: commit(temporary, written, facts))
        except Exception as error:
            if self._is_first:
                shutil.rmtree(temporary.parent, ignore_errors=True)
            room = f"{shutil.disk_usage(folder).free / 1e6:,.1f} MB are free there" if folder.is_dir() else "no folder"
            good = f"the last good checkpoint is {self._last_good}" if self._last_good else "there is no checkpoint yet"
            raise CheckpointNotWritten(
                f"{place} could not be written ({error}; {room}); {good}. Make room or make the folder writable, and "
                f"go on with {self.how_to_resume}"
            ) from error
        self._last_good = place
        if self._is_first:
            try:
                rotate(folder, self.args.save_total_limit, state.best_model_checkpoint)
            except OSError as error:
                self._warn(f"older checkpoints in {folder} could not be deleted: {error}")
        if self.args.push_to_hub:
            self._push_from_checkpoint(str(place))

    def _get_output_dir(self, trial: Any) -> str:
        folder = super()._get_output_dir(trial)
        return os.path.join(folder, WRITING) if self._writing else folder

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        if not self._writing:  # only once it is in its place
            super()._push_from_checkpoint(checkpoint_folder)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model for `from_pretrained`; shards in a checkpoint are written with the optimiser instead."""
        folder = output_dir or self.args.output_dir or "."
        if not self._is_sharded:
            super().save_model(output_dir, _internal_call)
        elif not self._writing:
            save_whole(self.model, folder, self.processing_class, write=self.args.should_save)
        elif self._is_first:
            self.model.config.save_pretrained(folder)
            if self.processing_class is not None:
                self.processing_class.save_pretrained(folder)

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """See `Trainer`. In a checkpoint it is left out where it cannot be written.

        TRL's first rank writes it before the shards; after an error there the others would wait for it.
        """
        with suppress(OSError) if self._writing else nullcontext():
            super().create_model_card(*args, **kwargs)

    @contextmanager
    def _in_shards(self, wanted: bool) -> Iterator[None]:
        """Make transformers write and read shards by torch.distributed.checkpoint inside the block, if wanted.

        Every rank writes and reads its own shards, and the number of ranks may differ between writing and reading. This
        serves models that accelerate wrapped, models given to `fully_shard`, and reading shards into a whole model.
        """
        plugin: dict[str, Any] = {}
        if wanted:
            plugin["fsdp_plugin"] = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type="SHARDED_STATE_DICT")
        with (
            replaced(self.accelerator.state, **plugin),
            replaced(self, is_fsdp_enabled=wanted or self.is_fsdp_enabled),
        ):
            yield

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        with self._in_shards(self._is_sharded):
            super()._save_optimizer_and_scheduler(output_dir)

    # ---- Loading

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        in_shards = _has_shards(resume_from_checkpoint)
        if self._is_sharded and not in_shards:
            raise ValueError(
                f"{resume_from_checkpoint} is of a model that was not sharded, and this one is: go on without FSDP, or "
                "begin a new run with its weights by from_pretrained"
            )
        with self._in_shards(in_shards):
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        with self._in_shards(checkpoint is not None and _has_shards(checkpoint)):
            super()._load_optimizer_and_scheduler(checkpoint)

    def _load_best_model(self) -> None:
        best = Path(self.state.best_model_checkpoint or "")
        self._check_whole(best)
        with self._in_shards(_has_shards(best)):
            super()._load_best_model()

    def _restore_progress(self) -> None:
        """Restore what transformers forgets: the loss since the last log, `also_saved`, callbacks with tensors."""
        if self._resumed is None:
            return
        losses, path, rank = self._resumed["loss_since_log"], self._resumed["path"], self.args.process_index
        own = losses[rank] if len(losses) == self.args.world_size else sum(losses) / len(losses)
        self._tr_loss += own
        self._total_loss_scalar -= own  # train() returns the mean over the steps of this call
        self._globalstep_last_logged = self._resumed["last_logged"]
        if len(losses) == self.args.world_size:
            saved = torch.load(path / f"trainer_{rank}.pt", map_location=self.args.device, weights_only=True)
            for name, value in saved.items():
                setattr(self, name, _filled(getattr(self, name, None), value))
        callbacks = self._callbacks()
        if (path / CALLBACKS).is_dir():
            states = {name: callback.state_dict() for name, callback in callbacks.items()}
            planner = DefaultLoadPlanner(allow_partial_load=True)
            distributed_load(states, checkpoint_id=path / CALLBACKS, planner=planner)
        else:
            states = torch.load(path / f"{CALLBACKS}.pt", map_location="cpu", weights_only=True)
        for name in callbacks.keys() & states.keys():
            callbacks[name].load_state_dict(states[name])

    # ---- Helpers

    @cached_property
    def _ranks(self) -> Ranks:
        return Ranks(dist.group.WORLD if self.args.world_size > 1 else None)

    @property
    def _is_first(self) -> bool:
        return self.args.process_index == 0

    @property
    def _is_sharded(self) -> bool:
        return _is_sharded(self.model)

    def _callbacks(self) -> dict[str, Any]:
        """Callbacks with `load_state_dict`, by number and class name."""
        stateful = [each for each in self.callback_handler.callbacks if hasattr(each, "load_state_dict")]
        return {f"{number}.{type(each).__name__}": each for number, each in enumerate(stateful)}

    def _warn(self, message: str) -> None:
        if self._is_first:
            warnings.warn(message, RuntimeWarning, stacklevel=4)

    def _together(self, work: Callable[[], T]) -> list[T]:
        """Run `work` on every rank and return the results by rank. Where it fails on one rank, all raise.

        It must not use collectives that a failure would skip.
        """
        return self._ranks.agree("the checkpoint", lambda: (None, work()))[1]

    def _on_first(self, work: Callable[[], Any]) -> None:
        self._together(work if self._is_first else lambda: None)


class _StepCallback(TrainerCallback):
    """Tells the mixin when steps and epochs end; added last, so that it sees what other callbacks have decided."""

    def __init__(self, trainer: SafeCheckpointsMixin) -> None:
        self.trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.trainer._restore_progress()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        trainer = self.trainer
        trainer._stop = max(trainer._ranks.gather([*trainer._signals, 0][0]))
        control.should_training_stop |= trainer._stop > 0
        # An evaluation may follow the last step of an epoch. A checkpoint before it would lack its result, so it waits.
        trainer._epoch_ending = float(state.epoch or 0.5).is_integer()
        if trainer._epoch_ending:
            trainer._save_postponed, control.should_save = control.should_save, False

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_save |= self.trainer._save_postponed
        self.trainer._save_postponed = self.trainer._epoch_ending = False


@contextmanager
def _catch_signals() -> Iterator[list[int]]:
    """Put the first Ctrl-C or SIGTERM into the yielded list instead of exiting. A second Ctrl-C exits at once.

    If no step follows that could handle it, the signal is raised again at the end. One that the process ignores stays
    ignored. Outside the main thread Python cannot catch signals.
    """
    received: list[int] = []
    since = 0.0

    def note(number: int, frame: Any) -> None:
        nonlocal since
        if not received:
            received.append(number)
            since = time.monotonic()
            text = f"\n{SIGNALS[signal.Signals(number)]}: stopping after this step (Ctrl-C again: at once)\n"
            os.write(2, text.encode())  # not print, which may be in the middle of a line
        elif number == signal.SIGINT and time.monotonic() - since > SAME_PRESS_SECONDS:
            raise KeyboardInterrupt

    on_main = threading.current_thread() is threading.main_thread()
    handlers = {number: signal.getsignal(number) for number in SIGNALS if on_main}
    handlers = {number: handler for number, handler in handlers.items() if handler not in (signal.SIG_IGN, None)}
    for number in handlers:
        signal.signal(number, note)
    try:
        yield received
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    if received:
        signal.raise_signal(received[0])


@contextmanager
def replaced(target: Any, **values: Any) -> Iterator[None]:
    """Set attributes of an object inside the block."""
    before = {name: vars(target)[name] for name in values if name in vars(target)}
    for name, value in values.items():
        setattr(target, name, value)
    try:
        yield
    finally:
        for name in values:
            if name in before:
                setattr(target, name, before[name])
            else:
                delattr(target, name)


def _has_shards(checkpoint: str | Path) -> bool:
    return Path(checkpoint, f"{FSDP_MODEL_NAME}_0").is_dir()


def _is_sharded(model: nn.Module) -> bool:
    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


def save_whole(model: Any, folder: str | Path, processing_class: Any = None, *, write: bool) -> None:
    """Save a model, or its adapter, as a folder for `from_pretrained`; a collective call if it is sharded.

    Args:
        processing_class: saved beside it if given.
        write: whether this process writes the files; of several, one must.
    """
    options = {"state_dict": whole_state(model)} if _is_sharded(model) else {}
    if write:
        model.save_pretrained(folder, **options)
        if processing_class is not None:
            processing_class.save_pretrained(folder)


def whole_state(model: nn.Module) -> dict[str, Tensor]:
    """All weights by name in CPU memory on the first rank, nothing on the others; a collective call.

    With an adapter, frozen weights are left out.
    """
    adapter = hasattr(model, "peft_config")
    options = StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=adapter)
    state: dict[str, Any] = dict(get_model_state_dict(model, options=options))
    # Tied weights have several names, of which the first is gathered whole.
    first: dict[nn.Parameter, str] = {}
    same = {name: first.setdefault(p, name) for name, p in model.named_parameters(remove_duplicate=False)}
    return {name: state.get(same.get(name, name), tensor) for name, tensor in state.items()}


def _plain(value: Any) -> Any:
    """The value with plain dictionaries and lists, so that its file can be loaded with `weights_only=True`."""
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, list | tuple) else value


def _filled(old: Any, new: Any) -> Any:
    """The new value; a dictionary is filled in place, so that a `defaultdict` stays one."""
    if not isinstance(old, dict) or not isinstance(new, dict):
        return new
    merged = {key: _filled(old.get(key), each) for key, each in new.items()}
    old.clear()
    old.update(merged)
    return old
