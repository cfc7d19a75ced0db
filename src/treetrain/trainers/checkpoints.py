"""Checkpoints that survive: a mixin for any transformers.Trainer.

transformers writes a checkpoint in place, file by file, and resumes from the folder with the highest number, whatever
is in it (its issues 35525 and 35782). Here transformers and torch.distributed.checkpoint still write the files, but
into a temporary folder. When every file is on the disk, a manifest with the SHA-256 of all files (and of itself) is
added, and one rename gives the folder its name. So a kill at any moment leaves a complete checkpoint or none. Loading
detects later changes by a disk, a copy or an editor.
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
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
import transformers
from accelerate.utils import FullyShardedDataParallelPlugin
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
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
SHARDS = "pytorch_model_fsdp_0"
"""The folder of a checkpoint in which accelerate writes the shards of a model."""
WRITING = ".writing"
"""The folder, beside the checkpoints, in which they are written and deleted."""


class TornCheckpoint(ValueError):
    """A checkpoint that differs from what was written. The message names the file and what differs."""


class CheckpointNotWritten(OSError):
    """A checkpoint that could not be written. No part of it is left, and older ones are unchanged."""


def hashes(folder: Path, rank: int = 0, ranks: int = 1) -> dict[str, str]:
    """Sync the files of a folder to the disk and return their SHA-256; each rank does a share of them."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())[rank::ranks]
    return {path.relative_to(folder).as_posix(): _sha256(path) for path in paths}


def commit(temporary: Path, contents: Mapping[str, Any]) -> None:
    """Write the manifest of a checkpoint and move the folder from `<folder>/.writing/<name>` to `<folder>/<name>`."""
    writing, folder = temporary.parents[:2]
    order = 1 + max((order for order in newest_first(folder).values() if order < math.inf), default=0)
    contents = {"order": order, **contents}
    text = json.dumps({"contents": contents, "sha256": _digest(contents)}, indent=1)
    (temporary / MANIFEST).write_text(text + "\n", encoding="utf-8")
    for path in [temporary / MANIFEST, *temporary.rglob("*/"), temporary, writing]:
        _sync(path)
    place, before = folder / temporary.name, folder / f"{temporary.name}-before-{order}"
    if replaces := place.exists():  # torn, or of an abandoned run; a kill between the renames leaves `before`
        os.rename(place, before)
    os.rename(temporary, place)
    _sync(folder)
    delete([before] if replaces else [], writing)


def delete(checkpoints: Sequence[Path], writing: Path) -> None:
    """Delete checkpoints and the temporary folder. Raises OSError if the folder is not writable."""
    writing.mkdir(parents=True, exist_ok=True)
    for path in checkpoints:  # renamed first: a kill during the deletion leaves nothing that looks like a checkpoint
        os.rename(path, writing / path.name)
    shutil.rmtree(writing, ignore_errors=True)


def read_manifest(checkpoint: Path) -> dict[str, Any]:
    """The contents of a checkpoint's manifest. Raises TornCheckpoint where it is missing or altered."""
    try:
        stored = json.loads((checkpoint / MANIFEST).read_text(encoding="utf-8"))
        if stored["sha256"] == _digest(stored["contents"]):
            return stored["contents"]
        error: Any = "its SHA-256 is another"
    except (OSError, ValueError, KeyError, TypeError) as found:
        error = found
    raise TornCheckpoint(f"{checkpoint}: {MANIFEST} is missing or altered ({error}); plain transformers writes none")


def check_files(checkpoint: Path, rank: int = 0, ranks: int = 1) -> None:
    """Compare the files of a checkpoint with its manifest, each rank a share of them. Raises TornCheckpoint."""
    for name, written in sorted(read_manifest(checkpoint)["files"].items())[rank::ranks]:
        try:
            found = _sha256(checkpoint / name)
        except OSError as error:  # missing or unreadable
            found = f"of no file ({error})"
        if found != written:
            raise TornCheckpoint(f"{checkpoint}: {name} has SHA-256 {found}, {written} was written")


def newest_first(folder: Path) -> dict[Path, float]:
    """The checkpoints of a folder with their order of writing, in the order in which resuming tries them.

    The newest is the last one written. It may not have the highest step: a run that resumes from an older checkpoint,
    or starts again in the same folder, writes lower steps later. Checkpoints without a readable manifest come first,
    with order infinity, so that resuming warns about them.
    """
    orders: dict[Path, float] = {}
    for path in folder.glob("checkpoint-*"):
        orders[path] = math.inf
        with suppress(TornCheckpoint):
            orders[path] = read_manifest(path)["order"]
    return dict(sorted(orders.items(), key=lambda found: found[1], reverse=True))


def rotate(folder: Path, limit: int | None, best: str | None) -> None:
    """Delete the oldest checkpoints beyond `limit`, but never the newest, the best, or one of unknown order."""
    if not limit or limit < 1:
        return
    newest = [path for path, order in newest_first(folder).items() if order < math.inf]
    older = [path for path in newest[1:] if path.name != Path(best or "").name]
    delete(older[max(0, limit - (len(newest) - len(older))) :], folder / WRITING)


def _sync(path: Path) -> None:
    """Wait until a file, or the entries of a folder, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems cannot sync folders
            raise
    finally:
        os.close(handle)


def _sha256(path: Path) -> str:
    _sync(path)
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _digest(contents: Any) -> str:
    return hashlib.sha256(json.dumps(contents, sort_keys=True).encode()).hexdigest()


class SafeCheckpointsMixin(Trainer if TYPE_CHECKING else object):
    """Makes the checkpoints of a `transformers.Trainer` survive kills, full disks and altered files.

    ```python
    class SafeTrainer(SafeCheckpointsMixin, Trainer):  # or any of TRL's trainers; the mixin stands first
        pass

    SafeTrainer(...).train(resume_from_checkpoint=True)
    ```

    A checkpoint gets its name only when it is complete, with the SHA-256 of every file in a manifest. Older ones are
    deleted (`save_total_limit`) only after that. Ctrl-C and SIGTERM on any rank stop all ranks after the step, with a
    checkpoint. A resumed run is bit-identical on the same number of ranks, and equal within rounding on another.
    Callbacks get their state back if they are `ExportableState` or have `state_dict` and `load_state_dict`. Sharded
    models (FSDP2) are saved in shards. All ranks must share `output_dir`; two runs must not.

    Raises:
        TypeError: the mixin comes after the Trainer in the list of bases.
        ValueError: an untested version of transformers, DeepSpeed, `save_on_each_node`, or checkpoints on the hub.
    """

    how_to_resume = "trainer.train(resume_from_checkpoint=True)"
    """The command for resuming, shown in messages."""
    also_saved: tuple[str, ...] = ("_metrics", "_total_train_tokens", "_step", "_buffered_inputs")
    """Attributes that every rank saves, and restores on the same number of ranks. In TRL's trainers: the metrics since
    the last log and the completions that are not trained on yet."""

    model: Any
    _last_good: Path | None = None
    _resumed: Path | None = None
    _writing = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if Trainer in cls.__mro__ and cls.__mro__.index(Trainer) < cls.__mro__.index(SafeCheckpointsMixin):
            raise TypeError(f"{cls.__name__}: SafeCheckpointsMixin must stand before the Trainer in the list of bases")

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        version, own = transformers.__version__, self.args
        for wrong, why in (
            (not version.startswith(TESTED), f"transformers {version} is not tested: install {TESTED[-1]}*"),
            (self.is_deepspeed_enabled, "DeepSpeed's checkpoints are not known: use DDP or FSDP2"),
            (own.save_on_each_node, "save_on_each_node=True: set it to False, and share one output_dir"),
            (own.push_to_hub and own.hub_strategy != "end", "checkpoints are not pushed: set hub_strategy='end'"),
        ):
            if wrong:
                raise ValueError(f"SafeCheckpointsMixin: {why}")

    def step_size(self) -> str:
        """The data of an optimiser step over all ranks, as text. Override it in a trainer that counts differently."""
        return f"{self._train_batch_size * self.args.gradient_accumulation_steps * self.args.world_size} samples"

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Train as `Trainer.train` does.

        Args:
            resume_from_checkpoint: True resumes the newest complete checkpoint of `output_dir`, or starts the run if
                there is none yet; a folder resumes that one.

        Raises:
            TornCheckpoint: the named checkpoint, or every one in `output_dir`, is not as it was written.
            CheckpointNotWritten: a checkpoint could not be written; the message names the last good one.
            ValueError: a step has another amount of data than before; the checkpoint has no optimiser state.
            SystemExit: Ctrl-C or SIGTERM, with its exit code; a checkpoint of the last step is written.
        """
        folder, callback = Path(self.args.output_dir or "."), _StepCallback(self)
        self.add_callback(callback)
        try:
            restoring = replaced(self.args, restore_callback_states_from_checkpoint=True)
            with restoring, _catch_signals() as callback.signals:
                self._on_first(lambda: delete([], folder / WRITING))  # left by a killed run
                self._resumed = self._last_good = self._choose(resume_from_checkpoint, folder)
                return super().train(str(self._resumed) if self._resumed else None, *args, **kwargs)
        finally:
            self.remove_callback(callback)
            self._resumed = None

    def _choose(self, wanted: str | bool | None, folder: Path) -> Path | None:
        """The checkpoint to resume; None to start anew. Raises TornCheckpoint, and ValueError if it does not fit."""
        if not wanted:
            return None
        torn: list[str] = []
        for path in self._together(lambda: list(newest_first(folder)) if wanted is True else [Path(wanted)])[0]:
            try:
                self._check_whole(path)
            except (TornCheckpoint, RanksDisagree) as error:  # found by this rank or by another
                torn.append(str(error))
                warnings.warn(f"not resumed, since it is not whole: {error}", RuntimeWarning, stacklevel=3)
                continue
            manifest, now = read_manifest(path), self.step_size()
            if manifest["step_size"] != now and not (self.args.ignore_data_skip or self.args.auto_find_batch_size):
                raise ValueError(
                    f"cannot go on from {path}: a step took {manifest['step_size']} (on {manifest['ranks']} ranks) and "
                    f"now takes {now} (on {self.args.world_size}, with gradient_accumulation_steps="
                    f"{self.args.gradient_accumulation_steps}). Make it the same, or set ignore_data_skip=True"
                )
            if not any(name.startswith("optimizer") for name in manifest["files"]):
                raise ValueError(f"cannot go on from {path}: with save_only_model=True it holds no optimiser state")
            return path
        if torn:
            raise TornCheckpoint(f"no checkpoint is whole: {'; '.join(torn)}")
        warnings.warn(f"no checkpoint in {folder} yet: the run begins at step 0", RuntimeWarning, stacklevel=3)
        return None

    def _check_whole(self, path: Path) -> None:
        """Read every byte of a checkpoint, each rank a part of it. All ranks raise if one finds it torn."""
        self._together(lambda: check_files(path, self.args.process_index, self.args.world_size))

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        if self.state.global_step >= self.state.max_steps:  # transformers would do one more step of a complete run
            self.control.should_training_stop = True
        else:
            super()._run_epoch(*args, **kwargs)

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        if self._resumed and self.state.global_step == self._initial_global_step:  # there was nothing left to do
            self._load_rng_state(str(self._resumed))
        # With save_total_limit=1 transformers would delete the newest checkpoint here and leave the best one.
        with replaced(self.args, save_total_limit=None):
            return super()._finalize_training(*args, **kwargs)

    # ---- Saving

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Write a checkpoint to a temporary folder, move it to its place when complete, then delete older ones."""
        state, rank, ranks = self.state, self.args.process_index, self.args.world_size
        folder, sharded = Path(super()._get_output_dir(trial)), _is_sharded(self.model)
        place, best = folder / f"checkpoint-{state.global_step}", folder / f"checkpoint-{state.best_global_step}"
        temporary = folder / WRITING / place.name
        callbacks = {name: callback.state_dict() for name, callback in self._callbacks().items()}

        def write() -> None:
            # transformers would look for the best checkpoint beside the temporary folder.
            with replaced(state, best_global_step=None), replaced(self, _writing=True), self._in_shards(sharded):
                super(SafeCheckpointsMixin, self)._save_checkpoint(model, trial)
            if best == place or best.is_dir():
                state.best_model_checkpoint = str(best)
            own = ("_tr_loss", "_globalstep_last_logged", *self.also_saved)
            saved = {name: _plain(getattr(self, name)) for name in own if hasattr(self, name)}
            torch.save(saved, temporary / f"trainer_{rank}.pt")
            if rank == 0:
                state.save_to_json(str(temporary / "trainer_state.json"))
                if not sharded:
                    torch.save(callbacks, temporary / f"{CALLBACKS}.pt")

        try:
            self._on_first(lambda: (delete([], folder / WRITING), temporary.mkdir(parents=True)))
            if sharded:  # before anything that can fail on one rank alone: this is a collective call
                distributed_save(callbacks, checkpoint_id=temporary / CALLBACKS)
            self._together(write)
            files = {}
            for found in self._together(lambda: hashes(temporary, rank, ranks)):
                files |= found
            contents = {"step": state.global_step, "ranks": ranks, "step_size": self.step_size(), "files": files}
            self._on_first(lambda: commit(temporary, contents))
        except (Exception, CheckpointException) as error:
            if rank == 0:
                shutil.rmtree(folder / WRITING, ignore_errors=True)
            room = f"{shutil.disk_usage(folder).free / 1e6:,.1f} MB are free there" if folder.is_dir() else "no folder"
            good = f"the last good checkpoint is {self._last_good}" if self._last_good else "there is no checkpoint yet"
            raise CheckpointNotWritten(
                f"{place} could not be written ({error}; {room}); {good}. Make room or make the folder writable, and "
                f"go on with {self.how_to_resume}"
            ) from error
        self._last_good = place
        if rank == 0:
            with suppress(OSError):  # the new checkpoint is good; a full disk fails at the next one
                rotate(folder, self.args.save_total_limit, state.best_model_checkpoint)

    def _get_output_dir(self, trial: Any) -> str:
        folder = super()._get_output_dir(trial)
        return os.path.join(folder, WRITING) if self._writing else folder

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model for `from_pretrained`; shards in a checkpoint are written with the optimiser instead."""
        if self._writing or not _is_sharded(self.model):
            super().save_model(output_dir, _internal_call)
        else:
            folder = output_dir or self.args.output_dir or "."
            save_whole(self.model, folder, self.processing_class, write=self.args.should_save)

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """See `Trainer`. Inside a checkpoint, a card that cannot be written is left out: TRL's first rank writes it
        before the shards, and after an error there the other ranks would wait."""
        with suppress(OSError) if self._writing else nullcontext():
            super().create_model_card(*args, **kwargs)

    @contextmanager
    def _in_shards(self, wanted: bool) -> Iterator[None]:
        """Inside the block, if wanted, transformers writes and reads shards by torch.distributed.checkpoint.

        Every rank writes and reads its own shards, and the number of ranks may differ between writing and reading. This
        serves models that accelerate wrapped, models given to `fully_shard`, and reading shards into a whole model.
        """
        if not wanted:
            yield
            return
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type="SHARDED_STATE_DICT")
        with replaced(self.accelerator.state, fsdp_plugin=plugin), replaced(self, is_fsdp_enabled=True):
            yield

    # ---- Loading

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        with self._in_shards(Path(resume_from_checkpoint, SHARDS).is_dir()):
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        with self._in_shards(checkpoint is not None and Path(checkpoint, SHARDS).is_dir()):
            super()._load_optimizer_and_scheduler(checkpoint)

    def _load_best_model(self) -> None:
        best = Path(self.state.best_model_checkpoint or "")
        self._check_whole(best)
        with self._in_shards((best / SHARDS).is_dir()):
            super()._load_best_model()

    def _restore_progress(self) -> None:
        """Restore state that transformers does not: the loss since the last log, `also_saved`, stateful callbacks."""
        if (path := self._resumed) is None:
            return
        if read_manifest(path)["ranks"] == self.args.world_size:
            own = path / f"trainer_{self.args.process_index}.pt"
            # The device's type, since torch cannot load to cpu:0.
            saved = torch.load(own, map_location=self.args.device.type, weights_only=True)
            for name, value in saved.items():
                setattr(self, name, _filled(getattr(self, name, None), value))
            self._total_loss_scalar -= float(self._tr_loss)  # train() returns the mean over the steps of this call
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

    def _callbacks(self) -> dict[str, Any]:
        """Callbacks with `load_state_dict`, by number and class name."""
        stateful = [each for each in self.callback_handler.callbacks if hasattr(each, "load_state_dict")]
        return {f"{number}.{type(each).__name__}": each for number, each in enumerate(stateful)}

    def _together(self, work: Callable[[], T]) -> list[T]:
        """Run `work` on every rank and return the results by rank. If it fails on one rank, all raise.

        It must not use collectives that a failure would skip.
        """
        return self._ranks.agree("the checkpoint", lambda: (None, work()))[1]

    def _on_first(self, work: Callable[[], Any]) -> None:
        self._together(work if self.args.process_index == 0 else lambda: None)


class _StepCallback(TrainerCallback):
    """Stops all ranks at the same step and times checkpoints. Added last, so that it sees what others have decided."""

    def __init__(self, trainer: SafeCheckpointsMixin) -> None:
        self.trainer, self.signals = trainer, list[int]()
        self.stop = 0  # a signal that any rank got; the same on all ranks
        self.postponed = False

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.trainer._restore_progress()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.stop = max(self.trainer._ranks.gather([*self.signals, 0][0]))
        control.should_save |= self.stop > 0
        # An evaluation may follow the last step of an epoch. The checkpoint waits, to include its result.
        self.postponed = control.should_save and state.epoch.is_integer()
        control.should_save &= not self.postponed

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_save |= self.postponed

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.stop:
            trainer = self.trainer
            trainer.callback_handler.on_train_end(args, state, control)  # trackers close their files
            if args.process_index == 0:
                print(
                    f"{signal.Signals(self.stop).name}: stopped after step {state.global_step} of {state.max_steps}; "
                    f"all of it is saved in {trainer._last_good}. Go on with {trainer.how_to_resume}",
                    file=sys.stderr,
                )
            raise SystemExit(128 + self.stop)  # what shells expect: 130 after Ctrl-C, 143 after SIGTERM


@contextmanager
def _catch_signals() -> Iterator[list[int]]:
    """Put Ctrl-C and SIGTERM into the yielded list instead of exiting; ignored ones stay ignored.

    A signal that no later step handles is raised again at the end. Outside the main thread Python cannot catch signals.
    """
    received: list[int] = []

    def note(number: int, frame: Any) -> None:
        received.append(number)
        os.write(2, b"\nstopping after this step, with a checkpoint\n")  # print may be in the middle of a line

    main = threading.current_thread() is threading.main_thread()
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM) if main}
    before = {number: handler for number, handler in before.items() if handler not in (signal.SIG_IGN, None)}
    for number in before:
        signal.signal(number, note)
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if received:
        signal.raise_signal(received[0])


@contextmanager
def replaced(target: Any, **values: Any) -> Iterator[None]:
    """Set attributes of an object inside the block."""
    before = {name: vars(target)[name] for name in values if name in vars(target)}
    vars(target).update(values)
    try:
        yield
    finally:
        for name in values:
            del vars(target)[name]
        vars(target).update(before)


def _plain(value: Any) -> Any:
    """The value with plain dictionaries: `torch.load(weights_only=True)` fills no `defaultdict`."""
    return {key: _plain(each) for key, each in value.items()} if isinstance(value, dict) else value


def _filled(old: Any, new: Any) -> Any:
    """The new value; a dictionary is filled in place, so that a `defaultdict` stays one."""
    if not (isinstance(old, dict) and isinstance(new, dict)):
        return new
    filled = {key: _filled(old.get(key), each) for key, each in new.items()}
    old.clear()
    old.update(filled)
    return old


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
    """All weights by name (without frozen ones under an adapter) in CPU memory on the first rank; a collective call."""
    adapter = hasattr(model, "peft_config")
    options = StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=adapter)
    state: dict[str, Any] = dict(get_model_state_dict(model, options=options))
    # Tied weights have several names, of which the first is gathered whole.
    first: dict[nn.Parameter, str] = {}
    same = {name: first.setdefault(p, name) for name, p in model.named_parameters(remove_duplicate=False)}
    return {name: state.get(same.get(name, name), tensor) for name, tensor in state.items()}
